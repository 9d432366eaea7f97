// An answer as it is asked for and as it comes.

import { add, messagesTo } from "./conversation.js";
import { MOST_SEED } from "./settings.js";

// Puts an answer that is to come behind a message; returns it.
export function begun(conversation, parent) {
  const count = conversation.messages.filter((message) => message.parent === parent).length;
  const [random] = crypto.getRandomValues(new Uint32Array(1));
  // A seed that was chosen gives every answer to one question another one, and the first one itself.
  const seed = "seed" in conversation.settings ? (conversation.settings.seed + count) % MOST_SEED : random;
  const message = { role: "assistant", text: "", thinking: "", runs: [], counts: {}, seed, ended: "" };
  return conversation.messages[add(conversation, parent, message)];
}

// The body of the request for an answer, or for what comes behind its beginning.
export function request(conversation, message) {
  const { system, enable_thinking: thinks, ...options } = conversation.settings;
  const isBegun = Boolean(message.text || message.thinking);
  const place = isBegun ? conversation.messages.indexOf(message) : message.parent;
  return {
    ...options, model: message.model, messages: messagesTo(conversation, place), seed: message.seed, stream: true,
    stream_options: { include_usage: true }, x_sources: true,
    ...(thinks === undefined ? {} : { chat_template_kwargs: { enable_thinking: thinks === "on" } }),
    ...(isBegun ? { continue_final_message: true, add_generation_prompt: false } : {}),
  };
}

// Takes a chunk of a stream into the answer.
export function take(message, chunk) {
  for (const [piece, source] of chunk.x_tokens ?? []) {
    const last = message.runs.at(-1);
    if (last && last[1] === source) last[0] += piece;
    else message.runs.push([piece, source]);
    message.counts[source] = (message.counts[source] ?? 0) + 1;
  }
  if (chunk.usage) message.tokens = chunk.usage.total_tokens;
  const choice = chunk.choices[0];
  if (!choice) return;
  message.thinking += choice.delta.reasoning_content ?? "";
  message.text += choice.delta.content ?? "";
  if (choice.x_stats) {
    message.stats = choice.x_stats;
    message.ended = choice.x_stats.finish_reason;
  }
}
