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

/** A text that grows. Blocks before the last one are final: only the last one is rendered anew. */
export class MarkdownView {
  #text = "";
  // Where the last block begins, in the text and in the element.
  #start = 0;
  #rendered = 0;
  #openCode = null;

  constructor(container) {
    this.element = container;
  }

  /** Show this text, of which nothing more comes if isComplete. */
  update(text, isComplete) {
    if (!text.startsWith(this.#text.slice(0, this.#start))) this.#startOver();
    this.#text = text;
    const tail = text.slice(this.#start);
    const blocks = parseBlocks(tail);
    if (this.#continuesCode(blocks, isComplete)) return;
    while (this.element.childNodes.length > this.#rendered) this.element.lastChild.remove();
    this.#openCode = null;
    const last = blocks.length - 1;
    blocks.forEach((block, index) => this.#append(block, isComplete || index < last));
    this.#settle(tail, blocks);
  }

  #startOver() {
    this.element.replaceChildren();
    this.#start = 0;
    this.#rendered = 0;
    this.#openCode = null;
  }

  #append(block, isFinal) {
    if (block.type === "code") {
      const { figure, code } = codeFigure(block);
      const isDone = block.isClosed || isFinal;
      code.update(block.text, isDone);
      this.#openCode = isDone ? null : code;
      this.element.append(figure);
    } else {
      this.element.append(blockNode(block));
    }
  }

  /** Long code is appended to, not made anew with every token. */
  #continuesCode(blocks, isComplete) {
    const [block] = blocks;
    if (!this.#openCode || blocks.length !== 1 || block.type !== "code" || block.isClosed || isComplete) return false;
    if (block.language !== this.#openCode.language) return false;
    this.#openCode.update(block.text, false);
    return true;
  }

  /** The last block whose first line is complete can no longer become part of the one before it. */
  #settle(tail, blocks) {
    const lineStarts = [0];
    for (let at = tail.indexOf("\n"); at >= 0; at = tail.indexOf("\n", at + 1)) lineStarts.push(at + 1);
    const isCertain = (block) => block.line < lineStarts.length - 1;
    const settled = blocks.findLastIndex(isCertain);
    if (settled <= 0) return;
    this.#start += lineStarts[blocks[settled].line];
    this.#rendered += settled;
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
    case "code": return finishedCode(block);
    case "quote": return element("blockquote", {}, ...block.blocks.map(blockNode));
    case "list": return listNode(block);
    case "table": return tableNode(block);
  }
  throw new Error(`there is no block of type ${block.type}`);
}

function listNode({ isOrdered, start, isLoose, items }) {
  const start_ = isOrdered && start !== 1 ? String(start) : null;
  return element(isOrdered ? "ol" : "ul", { start: start_ }, ...items.map((item) => itemNode(item, isLoose)));
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

function finishedCode(block) {
  const { figure, code } = codeFigure(block);
  code.update(block.text, true);
  return figure;
}

function codeFigure({ language }) {
  const text = element("code");
  const code = new CodeText(text, language);
  const button = iconButton("copy", "Copy the code", () => copy(text.textContent, button));
  const caption = element("figcaption", {}, element("span", {}, languageName(language)), button);
  const pre = element("pre", { tabindex: "0", role: "group", "aria-label": "Code" }, text);
  return { figure: element("figure", { class: "code" }, caption, pre), code };
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
