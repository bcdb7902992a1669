// Footnotes in Markdown: references "[^1]", and texts "[^1]: ..." that are shown in a list at the end.

import { element } from "./dom.js";
import { escapeHtml } from "./html.js";

const REFERENCE = /^\[\^([^\s\]]{1,64})\](?!\()/;
// Further lines are indented.
const TEXT = /^ {0,3}\[\^([^\s\]]{1,64})\]:[ \t]*([^\n]*(?:\n+(?: {2,}|\t)[^\n]*)*)(?:\n|$)/;

/** Extensions of markdown.js's lexer: a text becomes an li, and a reference a span, both with the label as title, which Footnotes connects. */
export const footnoteExtensions = [
  {
    name: "footnote",
    level: "block",
    start: (text) => /\n {0,3}\[\^[^\s\]]{1,64}\]:/.exec(text)?.index,
    tokenizer(text) {
      const found = this.lexer.isOutermost ? TEXT.exec(text) : null;
      if (!found) return undefined;
      const tokens = this.lexer.blockTokens(found[2].replace(/\n(?: {1,4}|\t)/g, "\n"), []);
      return { type: "footnote", raw: found[0], label: found[1], tokens };
    },
    renderer({ label, tokens }) {
      return `<li class="footnote" title="${escapeHtml(label)}">${this.parser.parse(tokens)}</li>`;
    },
  },
  {
    name: "footnoteReference",
    level: "inline",
    tokenizer(text) {
      const found = REFERENCE.exec(text);
      return found ? { type: "footnoteReference", raw: found[0], label: found[1] } : undefined;
    },
    renderer: ({ raw, label }) => `<span class="reference" title="${escapeHtml(label)}">${escapeHtml(raw)}</span>`,
  },
];

/** The list of footnotes at the end of a text, and the references to them. */
export class Footnotes {
  #list = element("ol");

  constructor(container) {
    this.container = container;
    this.element = element("section", { class: "footnotes", "aria-label": "Footnotes" }, this.#list);
  }

  append(item) {
    this.#list.append(item);
  }

  /** Number the footnotes in the order of their first references, and connect both. A reference without a footnote stays text. */
  connect() {
    const items = [...this.#list.children];
    const byLabel = new Map(items.toReversed().map((item) => [labelOf(item), item]));
    const references = this.#references().filter((reference) => byLabel.has(labelOf(reference)));
    const numbers = new Map();
    for (const reference of references) {
      const item = byLabel.get(labelOf(reference));
      if (!numbers.has(item)) numbers.set(item, String(numbers.size + 1));
      this.#link(reference, numbers.get(item));
    }
    [...numbers.keys(), ...items.filter((item) => !numbers.has(item))].forEach((item, index) => {
      if (this.#list.children[index] !== item) this.#list.insertBefore(item, this.#list.children[index]);
      this.#linkBack(item, numbers.has(item));
    });
  }

  #references() {
    return [...this.container.querySelectorAll(".reference")];
  }

  #link(reference, number) {
    if (reference.dataset.number === number) return;
    reference.dataset.number = number;
    const find = () => [...this.#list.children].find((item) => labelOf(item) === labelOf(reference));
    reference.replaceChildren(element("sup", {}, element("button", {
      type: "button", "aria-label": `Footnote ${number}`, click: () => goTo(find()) }, number)));
  }

  #linkBack(item, isUsed) {
    const button = item.querySelector(":scope > .back");
    if (Boolean(button) === isUsed) return;
    if (button) {
      // A line that looked like a reference has become the beginning of a footnote.
      button.remove();
      item.removeAttribute("tabindex");
      return;
    }
    const find = () => this.#references().find((reference) => labelOf(reference) === labelOf(item));
    item.tabIndex = -1;
    item.append(element("button", {
      type: "button", class: "back", "aria-label": "Back to the text", click: () => goTo(find().querySelector("button")) }, "↩"));
  }
}

/** Return the label of a reference or a footnote. It is moved out of the title, which would be a tooltip. */
function labelOf(node) {
  if (node.title) {
    node.dataset.label = node.title;
    node.removeAttribute("title");
  }
  return node.dataset.label;
}

function goTo(node) {
  node.scrollIntoView({ block: "nearest" });
  node.focus();
}
