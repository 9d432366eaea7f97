"use strict";

// A chat with the model that this server has: the answer as it streams, coloured by who proposed each token.

const SOURCES = { ngram: "n-grams", draft: "draft", retrieval: "retrieval verifier", target: "target" };
const element = (id) => document.getElementById(id);
let messages = [];
let running = null; // an AbortController while an answer comes

function headers() {
  const key = element("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

function add(parent, tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text; // never as HTML: it is somebody's text
  parent.append(made);
  return made;
}

function addMessage(role, text) {
  const box = add(element("messages"), "div", `message ${role}`);
  add(box, "div", "who", role);
  const said = add(box, "div", "said", text);
  box.scrollIntoView({ block: "end" });
  return { box, said };
}

async function errorOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

// The JSON values of a stream of server-sent events.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const lines = held.split("\n");
    held = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      const data = line.slice(6);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function statsLine(stats) {
  const parts = [`${stats.tok_per_s.toFixed(1)} tokens/s`, `${stats.tokens_per_pass.toFixed(1)} tokens/pass`];
  if (stats.link_share !== null) parts.push(`link ${Math.round(100 * stats.link_share)} %`);
  const sources = Object.entries(stats.sources).filter(([, count]) => count > 0);
  parts.push(sources.map(([source, count]) => `${count} by ${SOURCES[source] || source}`).join(", "));
  parts.push(`${stats.seconds.toFixed(1)} s`, `seed ${stats.seed}`);
  return parts.join(" · ");
}

function request() {
  const number = (id) => (element(id).value === "" ? undefined : Number(element(id).value));
  return {
    messages, stream: true, x_sources: true, temperature: number("temperature"), max_tokens: number("tokens"),
    seed: number("seed"),
  };
}

async function answer() {
  const { box, said } = addMessage("assistant", "");
  const mine = messages; // "new chat" begins others meanwhile
  let text = "";
  running = new AbortController();
  element("send").disabled = true;
  element("stop").disabled = false;
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(request()), signal: running.signal,
    });
    if (!response.ok) throw new Error(await errorOf(response));
    const view = element("messages");
    for await (const chunk of events(response.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      for (const [piece, source] of chunk.x_tokens || []) {
        if (piece) add(said, "span", source in SOURCES ? source : "target", piece).title = SOURCES[source] || source;
        text += piece;
      }
      const choice = chunk.choices[0];
      if (choice && choice.x_stats) add(box, "div", "stats", statsLine(choice.x_stats));
      view.scrollTop = view.scrollHeight;
    }
  } catch (error) {
    add(box, "div", "stats error", error.name === "AbortError" ? "stopped" : error.message);
  } finally {
    if (text) mine.push({ role: "assistant", content: text });
    else mine.pop();
    running = null;
    element("send").disabled = false;
    element("stop").disabled = true;
  }
}

async function showModel() {
  const health = await fetch("/health").then((response) => response.json()).catch(() => ({ status: "not reached" }));
  element("status").textContent = health.status === "ready" ? "" : `the server is ${health.status}`;
  if (health.status !== "ready") {
    setTimeout(showModel, 2000);
    return;
  }
  const response = await fetch("/v1/models", { headers: headers() });
  if (response.ok) element("model").textContent = (await response.json()).data[0].id;
  else element("status").textContent = await errorOf(response);
}

element("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = element("text").value.trim();
  if (!text || running) return;
  element("text").value = "";
  messages.push({ role: "user", content: text });
  addMessage("user", text);
  answer();
});
element("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    element("form").requestSubmit();
  }
});
element("stop").addEventListener("click", () => running && running.abort());
element("new").addEventListener("click", () => {
  if (running) running.abort();
  messages = [];
  element("messages").replaceChildren();
});
element("key").addEventListener("change", showModel);
showModel();
