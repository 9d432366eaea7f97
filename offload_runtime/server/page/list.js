// The list of conversations: the one that is shown can be renamed, exported and deleted.

import { add, addButton, element } from "./elements.js";

// Shows the `heads` of conversations. `about`: the id that is `shown`, whether an answer `isRunning(id)`, and what is
// done: rename(head, title), download(), remove(id). The one with the id `renamed` has a field, `deleted` is asked for.
export function showList(heads, about, { renamed, deleted } = {}) {
  const list = element("conversations");
  list.replaceChildren();
  const newestFirst = [...heads].sort((one, other) => other.changed - one.changed);
  for (const head of newestFirst) {
    const item = add(list, "li");
    const isShown = head.id === about.shown;
    if (renamed === head.id) {
      addNameField(item, head, (title) => about.rename(head, title));
      continue;
    }
    const link = add(item, "a", "", head.title);
    link.href = `#${head.id}`;
    link.title = head.title;
    if (about.isRunning(head.id)) link.classList.add("running");
    if (!isShown) continue;
    link.setAttribute("aria-current", "page");
    const row = add(item, "div", "actions");
    if (deleted === head.id) {
      add(row, "span", "", "Delete it?");
      addButton(row, "Delete", () => about.remove(head.id), "quiet danger");
      addButton(row, "Keep", () => showList(heads, about)).focus();
      continue;
    }
    addButton(row, "Rename", () => showList(heads, about, { renamed: head.id }));
    addButton(row, "Export", about.download);
    addButton(row, "Delete", () => showList(heads, about, { deleted: head.id }));
  }
}

function addNameField(item, head, onDone) {
  const field = add(item, "input");
  field.value = head.title;
  field.setAttribute("aria-label", "Name of the conversation");
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") field.value = head.title;
    if (event.key !== "Enter" && event.key !== "Escape") return;
    event.preventDefault();
    event.stopPropagation();
    field.blur();
  });
  field.addEventListener("blur", () => onDone(field.value.trim() || head.title));
  field.focus();
  field.select();
}
