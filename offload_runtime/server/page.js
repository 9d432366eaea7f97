"use strict";

// A chat with the model that this server has: the answer as it streams, coloured by who proposed each token. What
// these are called, SOURCES, the server puts behind this file.

const CUT = { length: "token limit reached", interrupted: "ended by the server, which stops or had no more time" };
const element = (id) => document.getElementById(id);
let messages = []; // those of the conversation that have an answer, and the one that gets it now
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
  const box = add(element("messages"), "article", `message ${role}`);
  add(box, "h2", "", role === "user" ? "You" : "Answer");
  return { box, said: add(box, "div", "said", text) };
}

// Changes the conversation with its end in sight, unless the reader has scrolled away from there.
function following(change) {
  const view = element("messages");
  const isAtEnd = view.scrollHeight - view.scrollTop - view.clientHeight < 40;
  change();
  if (isAtEnd) view.scrollTop = view.scrollHeight;
}

async function errorOf(response) {
  if (response.status === 401) {
    const isWrong = element("key").value !== "";
    element("asks-key").hidden = false;
    element("key").focus();
    return isWrong ? "this is not the API key of this server" : "this server needs its API key";
  }
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
    if (done) throw new Error("the answer broke off");
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

// Tokens by who proposed them; once the answer is whole what the server measured of it.
function showFigures(line, counts, stats) {
  line.replaceChildren();
  for (const source of Object.keys(SOURCES).filter((one) => counts[one])) {
    add(line, "span", source, `${SOURCES[source]} ${counts[source]}`);
    line.append(" ");
  }
  if (!stats) return;
  const link = stats.link_share === null ? "link not used" : `link ${Math.round(100 * stats.link_share)} % used`;
  const parts = [
    `${stats.tokens_per_pass.toFixed(1)} tokens a pass`, link, `${stats.tok_per_s.toFixed(1)} tokens/s`,
    `${stats.seconds.toFixed(1)} s`, `seed ${stats.seed}`,
  ];
  if (stats.finish_reason in CUT) parts.push(CUT[stats.finish_reason]);
  line.append(parts.join(" · "));
}

function request() {
  const number = (id) => (element(id).value === "" ? undefined : Number(element(id).value));
  return {
    messages, stream: true, x_sources: true, temperature: number("temperature"), max_tokens: number("tokens"),
    seed: number("seed"),
  };
}

function setRunning(controller) {
  running = controller;
  if (!running && document.activeElement === element("stop")) element("text").focus();
  element("send").disabled = running !== null;
  element("stop").disabled = running === null;
}

async function ask(text) {
  const mine = messages; // "new chat" begins others meanwhile
  mine.push({ role: "user", content: text });
  const asked = addMessage("user", text).box;
  const { box, said } = addMessage("assistant", "");
  const figures = add(box, "p", "figures", "waiting for the first token …");
  const counts = {};
  let answer = "";
  element("notice").textContent = "";
  element("messages").scrollTop = element("messages").scrollHeight;
  box.setAttribute("aria-busy", "true"); // read out once it is whole
  setRunning(new AbortController());
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(request()), signal: running.signal,
    });
    if (!response.ok) throw new Error(await errorOf(response));
    for await (const chunk of events(response.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      following(() => {
        for (const [piece, source] of chunk.x_tokens || []) {
          if (piece) add(said, "span", source, piece).title = SOURCES[source];
          counts[source] = (counts[source] || 0) + 1;
          answer += piece;
        }
        if (answer) showFigures(figures, counts, chunk.choices[0].x_stats);
      });
    }
    if (!answer) throw new Error("the model has said nothing");
  } catch (error) {
    const isStopped = error.name === "AbortError";
    const why = isStopped ? "stopped" : error instanceof TypeError ? "the server cannot be reached" : error.message;
    if (answer) {
      following(() => add(figures, "strong", isStopped ? "" : "error", why));
    } else if (mine === messages) {
      // As if it had not been sent: it can be changed and sent again.
      mine.pop();
      asked.remove();
      box.remove();
      element("text").value = [text, element("text").value].filter(Boolean).join("\n");
      element("notice").textContent = why;
    }
  } finally {
    if (answer) mine.push({ role: "assistant", content: answer });
    box.removeAttribute("aria-busy");
    setRunning(null);
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
  element("notice").textContent = response.ok ? "" : await errorOf(response);
  if (!response.ok) return;
  document.title = element("model").textContent = (await response.json()).data[0].id;
  element("asks-key").hidden = true;
  element("text").focus();
}

element("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = element("text").value.trimEnd();
  if (!text.trim() || running) return;
  element("text").value = "";
  element("text").focus();
  ask(text);
});
element("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    element("form").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});
element("stop").addEventListener("click", () => running && running.abort());
element("new").addEventListener("click", () => {
  if (running) running.abort();
  messages = [];
  element("messages").replaceChildren();
  element("notice").textContent = "";
  element("text").focus();
});
element("key").addEventListener("change", showModel);
showModel();
