// Markdown as DOM nodes, also while it is still being written. No text is ever parsed as HTML.

import { parseBlocks } from "./blocks.js";
import { copy, element, iconButton } from "./dom.js";
import { CodeText, languageName } from "./highlight.js";
import { parseInline } from "./inline.js";

const SAFE_LINK = /^(https?|mailto):$/;
const SAFE_IMAGE = /^data:image\/(png|jpeg|gif|webp|avif);base64,[a-z\d+/=]+$/i;
const MAX_INLINE_DEPTH = 64;

/** The target of a link, if the browser may go there: absolute, and http, https or mailto. Else null. */
export function safeUrl(text) {
  const url = URL.parse(text);
  return url !== null && SAFE_LINK.test(url.protocol) ? url.href : null;
}

/** A text that grows. Blocks before the last one are final: only the last one is rendered anew, or goes on as it is. */
export class MarkdownView {
  #text = "";
  // Where the blocks that are not final begin in the text, and what is shown of them: [{block, node, code}]
  #start = 0;
  #open = [];

  constructor(container) {
    this.element = container;
  }

  /** Show this text, of which nothing more comes if isComplete. */
  update(text, isComplete) {
    if (!text.startsWith(this.#text.slice(0, this.#start))) this.#startOver();
    this.#text = text;
    const tail = text.slice(this.#start);
    const blocks = parseBlocks(tail);
    const numKept = blocks.length && this.#goesOn(blocks[0]) ? 1 : 0;
    for (const { node } of this.#open.splice(numKept)) node.remove();
    for (const block of blocks.slice(numKept)) this.#append(block);
    if (!isComplete) this.#settle(tail);
  }

  #startOver() {
    this.element.replaceChildren();
    this.#start = 0;
    this.#open = [];
  }

  #append(block) {
    const made = block.type === "code" ? codeFigure(block) : { node: blockNode(block) };
    this.#open.push({ block, ...made });
    this.element.append(made.node);
  }

  /** Long code and long lists are added to, not made anew with every token. False if the block has become another one. */
  #goesOn(block) {
    const [first] = this.#open;
    if (first?.block.type !== block.type) return false;
    const { block: before, node, code } = first;
    if (block.type === "code" && block.language === before.language) code.update(block.text);
    else if (block.type === "list" && isSameList(block, before)) growList(node, before, block);
    else return false;
    first.block = block;
    return true;
  }

  /** The last block whose first line is complete can no longer become part of the one before it. */
  #settle(tail) {
    const lineStarts = [0];
    for (let at = tail.indexOf("\n"); at >= 0; at = tail.indexOf("\n", at + 1)) lineStarts.push(at + 1);
    const settled = this.#open.findLastIndex(({ block }) => block.line < lineStarts.length - 1);
    if (settled <= 0) return;
    this.#start += lineStarts[this.#open[settled].block.line];
    this.#open.splice(0, settled);
  }
}

/** The nodes of a text that is complete. */
export function renderMarkdown(text) {
  const view = new MarkdownView(document.createDocumentFragment());
  view.update(text, true);
  return view.element;
}

function blockNode(block) {
  switch (block.type) {
    // The page's own headings are of levels 1 and 2.
    case "heading": return element(`h${Math.min(6, block.level + 2)}`, { class: `level-${block.level}` }, ...inlineNodes(block.text));
    case "paragraph": return element("p", {}, ...inlineNodes(block.text));
    case "rule": return element("hr");
    case "code": return codeFigure(block).node;
    case "quote": return element("blockquote", {}, ...block.blocks.map(blockNode));
    case "list": return listNode(block);
    case "table": return tableNode(block);
  }
  throw new Error(`there is no block of type ${block.type}`);
}

function listNode({ isOrdered, start, isLoose, items }) {
  const first = isOrdered && start !== 1 ? String(start) : null;
  return element(isOrdered ? "ol" : "ul", { start: first }, ...items.map((item) => itemNode(item, isLoose)));
}

function isSameList(one, other) {
  return one.isOrdered === other.isOrdered && one.start === other.start && one.isLoose === other.isLoose;
}

/** A line that is not complete may still belong to the item before it; all items before that one are final. */
function growList(node, before, list) {
  const numKept = Math.max(0, Math.min(before.items.length, list.items.length) - 2);
  while (node.childNodes.length > numKept) node.lastChild.remove();
  node.append(...list.items.slice(numKept).map((item) => itemNode(item, list.isLoose)));
}

function itemNode({ blocks, task }, isLoose) {
  const nodes = blocks.flatMap((block, index) => {
    if (block.type !== "paragraph" || isLoose) return [blockNode(block)];
    return [...(index > 0 ? ["\n"] : []), ...inlineNodes(block.text)];
  });
  if (task === null) return element("li", {}, ...nodes);
  const box = element("input", { type: "checkbox", disabled: true, checked: task, "aria-label": task ? "Done" : "To do" });
  if (nodes[0]?.nodeName === "P") nodes[0].prepend(box, " ");
  else nodes.unshift(box, " ");
  return element("li", { class: "task" }, ...nodes);
}

function tableNode({ align, head, rows }) {
  const cell = (tag) => (text, column) =>
    element(tag, { class: align[column] && `align-${align[column]}`, scope: tag === "th" ? "col" : null }, ...inlineNodes(text));
  const table = element("table", {}, element("thead", {}, element("tr", {}, ...head.map(cell("th")))));
  if (rows.length) table.append(element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map(cell("td"))))));
  // It scrolls by itself, with the keyboard too.
  return element("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Table" }, table);
}

/** The element of a code block, and its text, which can go on. */
function codeFigure({ language, text }) {
  const content = element("code");
  const code = new CodeText(content, language);
  code.update(text);
  const button = iconButton("copy", "Copy the code", () => copy(content.textContent, button));
  const caption = element("figcaption", {}, element("span", {}, languageName(language)), button);
  const pre = element("pre", { tabindex: "0", role: "group", "aria-label": "Code" }, content);
  return { node: element("figure", { class: "code" }, caption, pre), code };
}

function inlineNodes(text) {
  return parseInline(text).map((node) => inlineNode(node, 0));
}

function inlineNode(node, depth) {
  if (node.type === "text") return document.createTextNode(node.value);
  if (node.type === "break") return element("br");
  if (node.type === "code") return element("code", {}, node.value);
  if (node.type === "math") return element("code", { class: "math" }, node.value);
  // Nobody nests so deeply on purpose.
  if (depth > MAX_INLINE_DEPTH) return document.createTextNode(textOf(node));
  const children = node.children.map((child) => inlineNode(child, depth + 1));
  if (node.type === "image") return imageNode(node);
  if (node.type === "link") return linkNode(node.url, children);
  return element(node.type, {}, ...children);
}

/** A target that is not allowed stands there as text, so that nobody wonders where it went. */
function linkNode(target, children) {
  const url = safeUrl(target);
  if (url === null) return element("span", {}, ...children, target && ` (${target})`);
  // Links do not nest; GitHub's autolinks may stand in the text of a link.
  const texts = children.flatMap((child) => (child.nodeName === "A" ? [...child.childNodes] : [child]));
  return element("a", { href: url, target: "_blank", rel: "noopener noreferrer nofollow" }, ...texts);
}

/** Only pictures that the text brings along: to load one would tell its host who reads this. Others become links. */
function imageNode(node) {
  const alternative = textOf(node);
  if (SAFE_IMAGE.test(node.url)) return element("img", { src: node.url, alt: alternative });
  return linkNode(node.url, [alternative || node.url]);
}

function textOf(node) {
  return node.value ?? (node.children ?? []).map(textOf).join("");
}
