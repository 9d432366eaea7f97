// Elements of the page. Texts go in as texts, never as HTML.

export const element = (id) => document.getElementById(id);

export function add(parent, tag, className = "", text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  parent.append(made);
  return made;
}

export function addButton(parent, text, onClick, className = "quiet") {
  const button = add(parent, "button", className, text);
  button.type = "button";
  button.addEventListener("click", onClick);
  return button;
}

// Whether a key is the one that sends a text: on a keyboard that one types on with both hands.
export function sends(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing && !matchMedia("(pointer: coarse)").matches;
}
