// The page: which conversation is shown, the answers that come, settings, and what is kept.

import { begun, request, take } from "./answer.js";
import { chunks, hasKey, send, setKey } from "./api.js";
import * as conversations from "./conversation.js";
import { add, element, sends } from "./elements.js";
import { showLegend } from "./legend.js";
import { showList } from "./list.js";
import { MessageView } from "./message.js";
import { openSettings, showNumChanged } from "./settings.js";
import * as store from "./store.js";

const WRITE_MS = 2000; // while an answer comes
const LOOK_MS = 2000; // whether a model is there now

let models = []; // as /v1/models has them
let keeps = false; // conversations, in this browser
let shown = conversations.made({ settings: {} });
let heads = new Map(); // of all conversations, by id
const opened = new Map(); // conversations that were shown, by id; they may have an answer that comes
const running = new Map(); // the answer that comes and what ends it, by conversation
let views = new Map(); // of the messages that are shown
let showsSources = false;

// --- showing

// Changes the conversation with its end in sight, unless the reader has scrolled away from there.
function following(change) {
  const view = element("messages");
  const isAtEnd = view.scrollHeight - view.scrollTop - view.clientHeight < 60;
  change();
  if (isAtEnd) view.scrollTop = view.scrollHeight;
}

// The model that a conversation is with, the first unless another one was chosen; null while none is known.
function modelOf(conversation) {
  return models.find(({ id }) => id === conversation.model) ?? models[0] ?? null;
}

function showModel() {
  const model = modelOf(shown);
  if (!model) return;
  document.title = model.id;
  element("model").hidden = models.length > 1;
  element("model").textContent = model.id;
  const choice = element("model-choice");
  choice.hidden = models.length === 1;
  choice.replaceChildren();
  for (const { id, x_status: status } of models) {
    add(choice, "option", "", status === "unloaded" ? id : `${id} (${status})`).value = id;
  }
  choice.value = model.id;
}

function showConversation() {
  views = new Map();
  const box = element("messages");
  box.replaceChildren();
  const model = modelOf(shown);
  if (shown.leaf < 0) add(box, "p", "hello", model ? `Ask ${model.id} something` : "");
  for (const place of conversations.branch(shown)) {
    const message = shown.messages[place];
    views.set(message, new MessageView(box, message, ACTIONS));
  }
  updateAll();
  box.scrollTop = box.scrollHeight;
}

function updateAll() {
  for (const message of views.keys()) updateMessage(message);
  const run = running.get(shown);
  if (run === undefined && document.activeElement === element("stop")) element("text").focus();
  element("send").hidden = run !== undefined;
  element("stop").hidden = run === undefined;
  element("send").disabled = element("open-settings").disabled = models.length === 0;
  showModel();
  showContext();
  showLegend(shownAnswers(), showsSources);
  showNumChanged(shown.settings);
}

function updateMessage(message) {
  const view = views.get(message);
  if (!view) return;
  const at = shown.messages.indexOf(message);
  const beside = conversations.siblings(shown, at);
  const run = running.get(shown);
  view.update({
    isRunning: run?.message === message, isBusy: run !== undefined || models.length === 0, isLast: at === shown.leaf,
    showsSources, showsModel: models.length > 1, place: beside.indexOf(at), count: beside.length,
    waitsFor: run?.waitsFor ?? "waiting for the first token", waitedS: run ? (Date.now() - run.beganMs) / 1000 : 0,
  });
}

function shownAnswers() {
  return [...views.keys()].filter(({ role }) => role === "assistant");
}

function showContext() {
  const used = shownAnswers().findLast(({ tokens }) => tokens)?.tokens;
  const model = modelOf(shown);
  element("context").hidden = !used || !model;
  if (element("context").hidden) return;
  const most = model.max_model_len;
  const meter = element("context-meter");
  [meter.max, meter.high, meter.value] = [most, 0.9 * most, used];
  meter.nextElementSibling.textContent = `${used.toLocaleString("en")} of ${most.toLocaleString("en")} tokens`;
  element("context").title = "Tokens of the context that the conversation has used";
}

// --- the list, and what is kept

async function keep(conversation) {
  conversation.changed = Date.now();
  heads.set(conversation.id, { id: conversation.id, title: conversation.title, changed: conversation.changed });
  updateList();
  await write(conversation);
}

async function write(conversation) {
  if (!keeps || !heads.has(conversation.id)) return; // it was deleted
  const { settings, model, messages, leaf } = conversation;
  await kept(store.write(heads.get(conversation.id), { settings, model, messages, leaf }));
}

// Waits for the store; what goes wrong there is said, and what is shown stays.
async function kept(work) {
  try {
    return await work;
  } catch (error) {
    element("notice").textContent = `this browser does not keep the conversation: ${error.message}`;
    return undefined;
  }
}

const OF_LIST = {
  isRunning: (id) => running.has(opened.get(id)),
  rename(head, title) {
    opened.get(head.id).title = title;
    heads.set(head.id, { ...head, title });
    write(opened.get(head.id));
    updateList();
  },
  download, remove,
};

function updateList() {
  if (element("conversations").querySelector("input:focus")) return; // a name is being typed
  showList([...heads.values()], { ...OF_LIST, shown: shown.id });
}

async function remove(id) {
  running.get(opened.get(id))?.controller.abort();
  heads.delete(id);
  opened.delete(id);
  if (keeps) await kept(store.remove(id));
  if (shown.id === id) location.hash = "";
  updateList();
}

function download() {
  const text = conversations.exported(shown);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/markdown" }));
  link.download = `${shown.title.replace(/[^\p{L}\p{N} _-]/gu, "").trim().slice(0, 60) || "conversation"}.md`;
  link.click();
  URL.revokeObjectURL(link.href);
}

// Shows the conversation that the address names, or a new one with the settings of that before.
async function goToAddress() {
  const id = location.hash.slice(1);
  if (id === shown.id) return;
  if (!heads.has(id)) {
    shown = conversations.made(shown);
  } else if (opened.has(id)) {
    shown = opened.get(id);
  } else {
    const body = await kept(store.body(id));
    if (!body || location.hash.slice(1) !== id) return;
    shown = { ...heads.get(id), ...body };
    for (const message of shown.messages) {
      if (message.role === "assistant" && !message.ended) message.ended = "lost";
    }
    opened.set(id, shown);
  }
  element("notice").textContent = "";
  element("sidebar").hidePopover();
  showConversation();
  updateList();
  if (!matchMedia("(pointer: coarse)").matches) element("text").focus();
}

async function readList() {
  const found = await kept(store.heads());
  if (!found) return;
  heads = new Map(found.map((head) => [head.id, head]));
  updateList();
}

// Another tab has changed a conversation, or deleted it.
async function hear({ data: id }) {
  await readList();
  if (running.has(opened.get(id))) return;
  opened.delete(id);
  if (id === shown.id) {
    shown = conversations.made(shown);
    await goToAddress();
  }
}

// --- answers

// Lets an answer come, or go on, into a message of a conversation.
async function answer(conversation, message) {
  const controller = new AbortController();
  const run = { message, controller, beganMs: Date.now() };
  running.set(conversation, run);
  opened.set(conversation.id, conversation);
  Object.assign(message, { error: "", ended: "", stats: null, model: modelOf(conversation).id });
  if (conversation === shown) (views.has(message) ? updateAll : showConversation)();
  keep(conversation);
  let isDue = false;
  const soon = () => { // once a frame, however many chunks come
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      if (conversation === shown) following(() => updateMessage(message));
    });
  };
  const waiting = setInterval(soon, 500);
  const writing = setInterval(() => write(conversation), WRITE_MS);
  try {
    for await (const chunk of chunks(request(conversation, message), controller.signal)) {
      run.waitsFor = chunk.waitsFor;
      take(message, chunk);
      if (message.thinking && !message.text) run.thinksSinceMs ??= Date.now();
      else if (run.thinksSinceMs) message.thoughtS ??= (Date.now() - run.thinksSinceMs) / 1000;
      soon();
    }
    if (!message.text && !message.thinking) message.error = "the model has said nothing";
  } catch (error) {
    message.ended = "stopped";
    if (error.name !== "AbortError") {
      message.error = error.message;
      message.ended = "failed";
      if (error.status === 401) askForKey();
    }
  } finally {
    clearInterval(waiting);
    clearInterval(writing);
    running.delete(conversation);
    if (conversation === shown) following(updateAll);
    if (heads.has(conversation.id)) keep(conversation);
    if (models.length > 1) listModels().then(showModel, () => {}); // which one is loaded: without it the names stay
  }
}

function answerTo(place) {
  answer(shown, begun(shown, place));
}

function say(text) {
  if (shown.messages.length === 0) history.pushState(null, "", `#${shown.id}`);
  answerTo(conversations.add(shown, shown.leaf, { role: "user", text }));
}

const ACTIONS = {
  edit(message, text) {
    const about = message.role === "user" ? {} : {
      thinking: message.thinking, runs: [], counts: {}, seed: message.seed, ended: "edited",
    };
    const at = conversations.add(shown, message.parent, { role: message.role, text, ...about });
    if (message.role === "user") {
      answerTo(at);
    } else {
      showConversation();
      keep(shown);
    }
  },
  regenerate(message) {
    if (message.role === "assistant" && !message.text && !message.thinking) answer(shown, message);
    else answerTo(message.role === "user" ? shown.messages.indexOf(message) : message.parent);
  },
  goOn(message) {
    answer(shown, message);
  },
  turn(message, by) {
    const beside = conversations.siblings(shown, shown.messages.indexOf(message));
    conversations.show(shown, beside[beside.indexOf(shown.messages.indexOf(message)) + by]);
    showConversation();
    write(shown);
  },
};

// --- the server

function askForKey() {
  element("asks-key").hidden = false;
  element("key").focus();
}

async function listModels() {
  models = (await (await send("/v1/models")).json()).data;
}

async function findModel() {
  try {
    await listModels();
  } catch (error) {
    if (error.status === 401) {
      element("notice").textContent = error.message;
      askForKey();
      return;
    }
    element("status").textContent = error.message;
    if (error.status === 503) { // no model yet, or no more; no key but the one that it was given
      const { status } = await fetch("/health").then((health) => health.json()).catch(() => ({ status: "gone" }));
      element("status").textContent = `the server is ${status}`;
      await begin();
    }
    setTimeout(findModel, LOOK_MS);
    return;
  }
  element("status").textContent = element("notice").textContent = "";
  element("asks-key").hidden = true;
  await begin();
  updateAll();
}

let hasBegun = false;

// Shows what is kept, or says that nothing is: who uses a server with a key may not be the only one at this browser.
async function begin() {
  if (hasBegun) return;
  hasBegun = true;
  keeps = !hasKey();
  const where = "this server has an API key, so conversations are gone when this page is closed";
  element("kept").textContent = keeps ? "kept in this browser alone" : where;
  if (keeps) {
    store.onChange(hear);
    await readList();
    const newest = [...heads.values()].reduce((one, other) => (one?.changed > other.changed ? one : other), null);
    const said = newest && await kept(store.body(newest.id));
    if (said) shown = conversations.made(said);
  }
  await goToAddress();
  showConversation();
  element("text").focus();
}

element("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = element("text").value.trimEnd();
  if (!text.trim() || running.has(shown) || !models.length) return;
  element("text").value = "";
  element("notice").textContent = "";
  say(text);
});
element("text").addEventListener("keydown", (event) => {
  if (!sends(event)) return;
  event.preventDefault();
  element("form").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  const isFree = !element("settings").open && !element("sidebar").matches(":popover-open");
  if (event.key === "Escape" && isFree) running.get(shown)?.controller.abort();
});
element("stop").addEventListener("click", () => running.get(shown)?.controller.abort());
element("new").addEventListener("click", () => {
  location.hash = "";
  element("sidebar").hidePopover();
  element("text").focus();
});
element("sources").addEventListener("click", () => {
  showsSources = !showsSources;
  element("sources").setAttribute("aria-pressed", showsSources);
  updateAll();
});
element("model-choice").addEventListener("change", () => {
  shown.model = element("model-choice").value;
  if (heads.has(shown.id)) write(shown);
  if (shown.leaf < 0) showConversation();
  else updateAll();
});
element("open-settings").addEventListener("click", () => openSettings(modelOf(shown), shown.settings, (settings) => {
  shown.settings = settings;
  if (heads.has(shown.id)) write(shown);
  showNumChanged(settings);
}));
element("key").addEventListener("change", () => {
  setKey(element("key").value);
  findModel();
});
window.addEventListener("hashchange", goToAddress);
findModel();
