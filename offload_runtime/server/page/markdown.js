// Markdown as elements of the page, block by block, so that what is there already stays as it is while more comes.
//
// HTML in it is text, pictures are links (nothing is loaded from elsewhere), and what marked makes of it goes through
// DOMPurify, which lets through the elements and attributes below alone.

import { add, addButton } from "./elements.js";

const ALLOWED = {
  ALLOWED_TAGS: (
    "a blockquote br code del em h3 h4 h5 h6 hr input li ol p pre strong table tbody td th thead tr ul"
  ).split(" "),
  ALLOWED_ATTR: ["align", "checked", "class", "disabled", "href", "start", "title", "type"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i, ADD_URI_SAFE_ATTR: ["align", "start", "type"],
  ALLOW_ARIA_ATTR: false, ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const COPIED_MS = 1500;

marked.use({
  gfm: true,
  breaks: true,
  tokenizer: { html() {}, tag() {} },
  renderer: {
    heading({ tokens, depth }) {
      const level = Math.min(6, depth + 2); // below the page's own
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>`;
    },
    image({ href, title, text }) {
      return this.link({ href, title, tokens: [{ type: "text", raw: text, text: text || href }] });
    },
  },
});
const htmlOf = new WeakMap(); // by the element of a block

// Makes `box` show a text, which may be longer than the last time.
export function render(box, text) {
  const blocks = marked.lexer(text).filter(({ type }) => type !== "space" && type !== "def");
  blocks.forEach((block, at) => {
    const html = marked.parser([block]);
    const shown = box.children[at];
    if (shown && htmlOf.get(shown) === html) return;
    const element = document.createElement("div");
    element.append(decorated(DOMPurify.sanitize(html, ALLOWED)));
    htmlOf.set(element, html);
    if (shown) shown.replaceWith(element);
    else box.append(element);
  });
  while (box.children.length > blocks.length) box.lastElementChild.remove();
}

function decorated(fragment) {
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const table of fragment.querySelectorAll("table")) {
    const box = document.createElement("div");
    box.className = "table";
    box.tabIndex = 0; // it may be wider than the page, and is scrolled by keys
    table.replaceWith(box);
    box.append(table);
  }
  for (const code of fragment.querySelectorAll("pre > code")) {
    const pre = code.parentElement;
    const box = document.createElement("div");
    box.className = "code";
    const bar = add(box, "div", "bar");
    add(bar, "span", "", (code.className.match(/language-(\S+)/) ?? ["", "code"])[1]);
    addCopy(bar, () => code.textContent.replace(/\n$/, ""));
    pre.replaceWith(box);
    pre.tabIndex = 0;
    box.append(pre);
  }
  return fragment;
}

// Adds a button that copies what `textOf` gives, and says whether it has.
export function addCopy(parent, textOf) {
  const button = addButton(parent, "Copy", async () => {
    button.textContent = await copied(textOf()) ? "Copied" : "Not copied: the browser refused";
    setTimeout(() => { button.textContent = "Copy"; }, COPIED_MS);
  });
}

async function copied(text) {
  // Only pages of this machine or over HTTPS have a clipboard; elsewhere what is selected is copied.
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  const field = add(document.body, "textarea", "unseen");
  field.value = text;
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  return isCopied;
}
