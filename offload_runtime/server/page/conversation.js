// A conversation is a tree of messages: an edited message and a regenerated answer are branches beside the first ones,
// of which nothing is lost. `leaf` is the last message of the branch that is shown.
//
// A message has a `role`, a `text` and the place of its `parent` (-1: none). An answer also has what was thought
// (`thinking`), runs of tokens with who proposed them (`runs`: [[text, source], …], and `counts` of tokens by
// source), its `model` and `seed`, and once it has ended how (`ended`), with what the server measured (`stats`, and
// `tokens` of the context that were used).

const TITLE_LENGTH = 60;

// A new one, with the settings and the model of another.
export function made({ settings, model }) {
  const random = crypto.getRandomValues(new Uint32Array(1))[0].toString(36);
  const changed = Date.now();
  const id = `${changed.toString(36)}-${random}`;
  return { id, title: "", changed, settings: { ...settings }, model, messages: [], leaf: -1 };
}

// The shown branch, as places of messages.
export function branch(conversation, leaf = conversation.leaf) {
  const places = [];
  for (let at = leaf; at >= 0; at = conversation.messages[at].parent) places.unshift(at);
  return places;
}

// Puts a message behind another one and shows it; returns its place.
export function add(conversation, parent, message) {
  conversation.messages.push({ ...message, parent });
  conversation.leaf = conversation.messages.length - 1;
  if (!conversation.title) conversation.title = titleOf(message.text);
  return conversation.leaf;
}

function titleOf(text) {
  const line = text.trim().split("\n", 1)[0];
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH - 1)}…` : line;
}

// A message and those in its place, in the order in which they came.
export function siblings(conversation, place) {
  const { parent } = conversation.messages[place];
  return [...conversation.messages.keys()].filter((at) => conversation.messages[at].parent === parent);
}

// Shows the branch of a message, to the newest one behind it.
export function show(conversation, place) {
  conversation.leaf = place;
  for (;;) {
    const next = conversation.messages.findLastIndex((message) => message.parent === conversation.leaf);
    if (next < 0) return;
    conversation.leaf = next;
  }
}

// The messages of a request, to that of a place. Questions that nothing was said to are one with the next.
export function messagesTo(conversation, place) {
  const { system } = conversation.settings;
  const found = system ? [{ role: "system", content: system }] : [];
  for (const { role, text, thinking } of branch(conversation, place).map((at) => conversation.messages[at])) {
    const last = found.at(-1);
    const thought = thinking ? { reasoning_content: thinking } : {};
    if (role === "user" && last?.role === "user") last.content += `\n\n${text}`;
    else if (text || thinking) found.push({ role, content: text, ...thought });
  }
  return found;
}

// The shown branch as a text to keep, with what it takes to get the same answers again.
export function exported(conversation) {
  const { system, ...options } = conversation.settings;
  const about = Object.entries(options).map(([name, value]) => `${name} ${value}`).join(" · ");
  const parts = [`# ${conversation.title}`, ...(about ? [about] : []), ...(system ? ["## System", system] : [])];
  for (const { role, text, thinking, model, seed } of branch(conversation).map((at) => conversation.messages[at])) {
    parts.push(role === "user" ? "## You" : `## Answer (${model}, seed ${seed})`);
    if (thinking) parts.push(`<details><summary>Thinking</summary>\n\n${thinking.trim()}\n\n</details>`);
    parts.push(text.trim());
  }
  return `${parts.join("\n\n")}\n`;
}
