// Settings of a conversation: the system prompt, options of sampling and of the chat template. Those that are not the
// model's own are fields of `settings`, by the names that requests have for them.

import { SAMPLING } from "./constants.js";
import { add, element } from "./elements.js";

export const MOST_SEED = 2 ** 53;
let done = () => {};

const OF_MODELS = {
  enable_thinking: { label: "Thinking", help: "Whether the model thinks before it answers.", choices: ["on", "off"] },
  reasoning_effort: {
    label: "Reasoning effort", help: "How long the model thinks.", choices: ["low", "medium", "high"],
  },
};

// Makes the fields of what a model can be asked for, with what it does by itself where they are empty.
function makeOptions(model) {
  const box = element("options");
  box.replaceChildren();
  for (const name of model.x_template_options) addChoice(box, name, OF_MODELS[name]);
  for (const option of SAMPLING) addNumber(box, option, model.x_defaults[option.name]);
  addNumber(box, { name: "max_tokens", label: "Longest answer", help: "In tokens.", least: 1, step: 1 }, "what fits");
  addNumber(box, {
    name: "seed", label: "Seed", least: 0, most: MOST_SEED - 1, step: 1,
    help: "The same seed gives the same tokens. Regenerating takes the next one.",
  }, "random");
}

function addLabel(box, label) {
  const line = add(box, "label");
  add(line, "span", "", label);
  return line;
}

function addNumber(box, { name, label, help, least, most, step }, usual) {
  const line = addLabel(box, label);
  const field = add(line, "input");
  Object.assign(field, { name, type: "number", placeholder: usual, step: step ?? "any", inputMode: "decimal" });
  if (least !== undefined && least !== null) field.min = least;
  if (most !== undefined && most !== null) field.max = most;
  add(line, "small", "hint", help);
}

function addChoice(box, name, { label, help, choices }) {
  const line = addLabel(box, label);
  const field = add(line, "select");
  field.name = name;
  add(field, "option", "", "by itself").value = "";
  for (const choice of choices) add(field, "option", "", choice).value = choice;
  add(line, "small", "hint", help);
}

function fields() {
  return [...element("settings-form").elements].filter(({ name }) => name);
}

// Lets the settings of a conversation with a model be changed; calls back with them.
export function openSettings(model, settings, onDone) {
  makeOptions(model);
  for (const field of fields()) field.value = settings[field.name] ?? "";
  done = onDone;
  element("settings").showModal();
}

function take() {
  const settings = {};
  for (const { name, type, value } of fields()) {
    if (value.trim() !== "") settings[name] = type === "number" ? Number(value) : value;
  }
  done(settings);
}

export function showNumChanged(settings) {
  const count = Object.keys(settings).length;
  element("num-changed").hidden = count === 0;
  element("num-changed").textContent = count;
  element("num-changed").title = `${count} changed`;
}

element("settings-form").addEventListener("submit", take);
element("settings").addEventListener("cancel", (event) => { // Escape keeps what may be kept
  if (element("settings-form").reportValidity()) take();
  else event.preventDefault();
});
element("reset").addEventListener("click", () => {
  for (const field of fields()) field.value = "";
});
