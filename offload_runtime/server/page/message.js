// One message as it is shown: what was said, what was thought, how it was made, and what can be done with it.

import { SOURCES } from "./constants.js";
import { add, addButton, sends } from "./elements.js";
import { addCounts } from "./legend.js";
import { addCopy, render } from "./markdown.js";

const ENDED = {
  length: "cut: the longest answer, or the context, was reached",
  interrupted: "cut by the server, which stops or had no more time",
  stopped: "stopped", edited: "edited", lost: "cut, unless it still comes in another tab",
};

// What is done with a message is up to `actions`: edit(message, text), regenerate(message), goOn(message),
// turn(message, by).
export class MessageView {
  constructor(parent, message, actions) {
    this.message = message;
    this.actions = actions;
    this.box = add(parent, "article", `message ${message.role}`);
    add(this.box, "h2", "unseen", message.role === "user" ? "You" : "Answer");
    if (message.role === "assistant") {
      this.thinking = add(this.box, "details", "thinking");
      this.summary = add(this.thinking, "summary");
      this.thought = add(this.thinking, "div", "prose");
      this.thinking.addEventListener("toggle", () => this.#showText(this.thought, message.thinking));
    }
    this.said = add(this.box, "div", message.role === "user" ? "said" : "said prose");
    if (message.role === "assistant") {
      this.waiting = add(this.box, "p", "hint");
      this.error = add(this.box, "p", "error");
      this.figures = add(this.box, "p", "figures");
    }
    this.buttons = add(this.box, "div", "actions");
  }

  // Shows the message as it is now. `about`: `isRunning`, `isLast`, what is shown of sources and models, the
  // `place` among the `count` messages beside it, and for what and how long the answer has waited.
  update(about) {
    this.about = about;
    const { message } = this;
    if (message.role === "user") {
      if (!this.editor) this.said.textContent = message.text;
    } else {
      this.#updateAnswer();
    }
    this.box.setAttribute("aria-busy", about.isRunning); // read out once it is whole
    if (!this.editor) this.#showButtons();
  }

  #updateAnswer() {
    const { message, about } = this;
    const isThinking = about.isRunning && !message.text;
    const thought = message.thoughtS ? `Thought for ${seconds(message.thoughtS)}` : "Thought";
    this.thinking.hidden = !message.thinking;
    this.summary.textContent = isThinking ? "Thinking …" : thought;
    if (this.thinking.open) this.#showText(this.thought, message.thinking);
    if (!this.editor) this.#showText(this.said, message.text);
    const isWaiting = about.isRunning && !message.runs.length;
    this.waiting.textContent = isWaiting ? `${about.waitsFor}, ${seconds(about.waitedS)}` : "";
    this.error.textContent = message.error ?? "";
    this.#showFigures();
  }

  // A part of the answer as markdown, or as it was said, token by token.
  #showText(box, text) {
    const isPlain = this.about.showsSources && this.message.runs.length > 0;
    if (isPlain !== box.classList.contains("tokens")) box.replaceChildren();
    box.classList.toggle("tokens", isPlain);
    if (!isPlain) {
      render(box, text);
      return;
    }
    const runs = part(this.message.runs, text);
    runs.forEach(([piece, source], at) => {
      let shown = box.children[at];
      if (!shown || shown.className !== source) {
        const made = document.createElement("span");
        made.className = source;
        made.title = SOURCES[source];
        if (shown) shown.replaceWith(made);
        else box.append(made);
        shown = made;
      }
      if (shown.textContent !== piece) shown.textContent = piece;
    });
    while (box.children.length > runs.length) box.lastElementChild.remove();
  }

  #showFigures() {
    const { message, about } = this;
    this.figures.replaceChildren();
    if (about.showsSources) addCounts(this.figures, message.counts);
    const { stats } = message;
    const parts = about.showsModel ? [message.model] : [];
    if (stats) {
      if (stats.tok_per_s) parts.push(`${stats.tok_per_s.toFixed(1)} tokens/s`);
      parts.push(`${stats.tokens_per_pass.toFixed(1)} tokens a pass`);
      if (stats.link_share !== null) parts.push(`link ${Math.round(100 * stats.link_share)} %`);
      parts.push(seconds(stats.seconds), `seed ${message.seed}`);
    }
    if (about.isRunning && message.runs.length) {
      parts.push(`${Object.values(message.counts).reduce((sum, count) => sum + count, 0)} tokens so far`);
    } else if (message.ended in ENDED) {
      parts.push(ENDED[message.ended]);
    }
    this.figures.append(parts.join(" · "));
  }

  #showButtons() {
    const { message, about, actions } = this;
    const key = JSON.stringify([about.isRunning, about.isBusy, about.isLast, about.place, about.count, message.ended]);
    if (this.shownButtons === key) return; // one of them may have the focus
    this.shownButtons = key;
    this.buttons.replaceChildren();
    if (about.isRunning) return;
    if (message.text) addCopy(this.buttons, () => message.text);
    if (about.count > 1) this.#addTurns();
    if (about.isBusy) return;
    const isAnswer = message.role === "assistant";
    const hasSaid = Boolean(message.text || message.thinking);
    if (isAnswer) addButton(this.buttons, hasSaid ? "Regenerate" : "Try again", () => actions.regenerate(message));
    else if (about.isLast) addButton(this.buttons, "Answer", () => actions.regenerate(message));
    if (message.text) addButton(this.buttons, "Edit", () => this.#edit());
    const canGoOn = isAnswer && hasSaid && about.isLast && message.ended !== "stop";
    if (canGoOn) addButton(this.buttons, "Continue", () => actions.goOn(message));
  }

  #addTurns() {
    const { place, count } = this.about;
    const turns = add(this.buttons, "span", "turns");
    const turn = (label, text, by) => {
      const button = addButton(turns, text, () => this.actions.turn(this.message, by));
      button.setAttribute("aria-label", label);
      button.disabled = place + by < 0 || place + by >= count;
    };
    turn("The one before", "‹", -1);
    add(turns, "span", "", `${place + 1} / ${count}`);
    turn("The next one", "›", 1);
  }

  #edit() {
    this.said.hidden = true;
    this.buttons.hidden = true;
    this.editor = document.createElement("div");
    this.editor.className = "editor";
    this.said.after(this.editor);
    const field = add(this.editor, "textarea");
    field.value = this.message.text;
    field.setAttribute("aria-label", "Edit the message");
    const isQuestion = this.message.role === "user";
    const end = (text) => {
      this.editor.remove();
      this.editor = null;
      this.said.hidden = this.buttons.hidden = false;
      if (text !== null && text.trim() && text !== this.message.text) this.actions.edit(this.message, text);
    };
    const row = add(this.editor, "div", "row");
    addButton(row, "Cancel", () => end(null), "");
    addButton(row, isQuestion ? "Send" : "Save", () => end(field.value), "main");
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") end(null);
      else if (isQuestion && sends(event)) end(field.value);
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    field.focus();
  }
}

// The runs of tokens that a part of an answer is made of: the tokens have marks and blanks around it.
function part(runs, text) {
  const begin = runs.map(([piece]) => piece).join("").lastIndexOf(text.trim());
  const end = begin + text.trim().length;
  const found = [];
  let at = 0;
  for (const [piece, source] of begin < 0 ? [] : runs) {
    const own = piece.slice(Math.max(0, begin - at), Math.max(0, end - at));
    if (own) found.push([own, source]);
    at += piece.length;
  }
  return begin < 0 ? [[text, "target"]] : found;
}

function seconds(count) {
  if (count < 10) return `${count.toFixed(1)} s`;
  return count < 120 ? `${Math.round(count)} s` : `${Math.floor(count / 60)} min ${Math.round(count % 60)} s`;
}
