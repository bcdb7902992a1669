// Markdown as DOM nodes, also while it is still being written. Marked reads it; HTML in it is text.

import { CodeBlock } from "./code.js";
import { element, patch } from "./dom.js";
import { formulaExtensions, maskFormulas, openFormula, showFormula } from "./formulas.js";
import { escapeHtml, sanitized } from "./html.js";
import { Lexer, Marked } from "./vendor/marked.js";

const SAFE_LINK = /^(https?|mailto):$/;
const SAFE_IMAGE = /^data:image\/(png|jpeg|gif|webp|avif);base64,[a-z\d+/=]+$/i;

const MAY_MERGE = new Set(["paragraph", "table", "list"]);

const marked = new Marked({
  extensions: formulaExtensions,
  // A tokenizer that returns undefined leaves the text to those after it, in the end to plain paragraphs.
  tokenizer: {
    html: () => undefined,
    // A definition may come after its use, when the blocks before it are final.
    def: () => undefined,
    // Models write <br> in tables. Other tags are text.
    tag(text) {
      const raw = /^<br\s?\/?>/i.exec(text)?.[0];
      return raw && { type: "br", raw };
    },
    // "~5" means "about five": only two tildes strike out.
    del: (text) => (text.startsWith("~~") ? false : undefined),
  },
  // Targets of links and pictures travel as titles, which do nothing, until showLink and showPicture have checked them.
  renderer: {
    heading({ depth, tokens }) {
      // The page's own headings are of levels 1 and 2.
      const tag = `h${Math.min(6, depth + 2)}`;
      return `<${tag} class="level-${depth}">${this.parser.parseInline(tokens)}</${tag}>`;
    },
    listitem({ task, tokens }) {
      return `<li${task ? ' class="task"' : ""}>${this.parser.parse(tokens)}</li>`;
    },
    checkbox({ checked }) {
      return `<input type="checkbox" disabled aria-label="${checked ? 'Done" checked' : 'To do"'}> `;
    },
    tablecell({ align, header, tokens }) {
      const [open, close] = header ? ['th scope="col"', "th"] : ["td", "td"];
      return `<${open}${align ? ` class="align-${align}"` : ""}>${this.parser.parseInline(tokens)}</${close}>`;
    },
    link({ href, tokens, autolink }) {
      return `<a title="${escapeHtml(href, !autolink)}">${this.parser.parseInline(tokens)}</a>`;
    },
    image({ href, text, tokens }) {
      const alternative = tokens ? this.parser.parseInline(tokens, this.parser.textRenderer) : text;
      return `<span class="picture" title="${escapeHtml(href, true)}">${escapeHtml(alternative, true)}</span>`;
    },
  },
});

/** Marked's lexer, which here knows the text that it reads: formulas in it must not be taken for emphasis. */
class PageLexer extends Lexer {
  #texts = [];

  constructor() {
    super({ ...marked.defaults, hooks: { emStrongMask: (masked) => maskFormulas(masked, this.#texts.at(-1)) } });
  }

  inlineTokens(text, tokens) {
    this.#texts.push(text);
    try {
      return super.inlineTokens(text, tokens);
    } finally {
      this.#texts.pop();
    }
  }
}

/** A text that grows. Blocks before the last one are final; the last one is rendered anew, and keeps the nodes that stay the same. */
export class MarkdownView {
  // The text of the blocks that are final, and the blocks after it with their nodes: [{token, start, node, code}]
  #final = "";
  #open = [];

  constructor(container) {
    this.element = container;
  }

  /** Show this text, of which nothing more comes if isComplete. */
  update(text, isComplete) {
    const source = text.includes("\r") ? text.replace(/\r\n?/g, "\n") : text;
    if (!source.startsWith(this.#final)) this.#startOver();
    const tail = source.slice(this.#final.length);
    const blocks = blocksOf(tail);
    for (const { node } of this.#open.splice(blocks.length)) node.remove();
    blocks.forEach((block, index) => this.#show(block, this.#open[index], isComplete || index < blocks.length - 1));
    this.#open = blocks;
    if (!isComplete) this.#settle(tail);
  }

  #startOver() {
    this.element.replaceChildren();
    this.#final = "";
    this.#open = [];
  }

  /** Give a block its node, in the place of the block that was shown there before. */
  #show(block, shown, isComplete) {
    const { token } = block;
    if (token.type === "code") {
      const language = languageOf(token.lang);
      block.code = shown?.code?.language === language ? shown.code : new CodeBlock(language);
      block.code.update(token.text, isComplete);
      block.node = block.code.element;
      if (shown && shown.node !== block.node) shown.node.replaceWith(block.node);
    } else if (shown?.token.type === token.type && shown.token.raw === token.raw) {
      block.node = shown.node;
    } else {
      block.node = shown ? patch(shown.node, blockNode(token)) : blockNode(token);
    }
    if (!shown) this.element.append(block.node);
  }

  /** A block whose first line is complete can no longer become part of the one before it, so that all before it is final. */
  #settle(tail) {
    const limit = openFormula(tail);
    const index = this.#open.findLastIndex(({ start, mayMerge }) => !mayMerge && start <= limit && tail.indexOf("\n", start) >= 0);
    if (index <= 0) return;
    this.#final += tail.slice(0, this.#open[index].start);
    this.#open.splice(0, index);
  }
}

/** The nodes of a text that is complete. */
export function renderMarkdown(text) {
  const view = new MarkdownView(document.createDocumentFragment());
  view.update(text, true);
  return view.element;
}

/** The blocks of a text, each with the place where it begins, and whether it may still turn out to be part of the one before it. */
function blocksOf(text) {
  const blocks = [];
  let start = 0;
  let before = null;
  for (const token of lex(text)) {
    // A line that looks like the beginning of a table or a list splits a paragraph until the next one shows that it is none.
    const mayMerge = before === "paragraph" && MAY_MERGE.has(token.type);
    if (token.type !== "space") blocks.push({ token, start, mayMerge });
    start += token.raw.length;
    before = token.type;
  }
  return blocks;
}

function lex(text) {
  try {
    return new PageLexer().lex(text);
  } catch {
    // Thousands of nested quotes or lists exhaust the stack. Nobody means them: they are shown as they are.
    return [{ type: "plain", raw: text }];
  }
}

function languageOf(info = "") {
  return info.trim().split(/\s/, 1)[0];
}

/** The element of any block but code. */
function blockNode(token) {
  if (token.type === "plain") return element("p", {}, token.raw);
  const nodes = sanitized(marked.parser([token]));
  for (const one of nodes.querySelectorAll(".formula")) showFormula(one);
  for (const one of nodes.querySelectorAll("a")) showLink(one);
  for (const one of nodes.querySelectorAll(".picture")) showPicture(one);
  for (const one of nodes.querySelectorAll("pre")) showCode(one);
  for (const one of nodes.querySelectorAll("table")) {
    // It scrolls by itself, with the keyboard too.
    const box = element("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Table" });
    one.replaceWith(box);
    box.append(one);
  }
  return nodes.firstElementChild;
}

/** A link with its target, which is absolute, and http, https or mailto. Others stand there as text, so that nobody wonders. */
function showLink(link, target = link.title) {
  const url = URL.parse(target);
  const isSafe = url !== null && SAFE_LINK.test(url.protocol);
  const properties = isSafe ? { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow" } : {};
  link.replaceWith(element(isSafe ? "a" : "span", properties, ...link.childNodes, isSafe || !target ? null : ` (${target})`));
}

/** Only pictures that the text brings along: to load one would tell its host who reads this. Others become links. */
function showPicture(place) {
  const target = place.title;
  if (SAFE_IMAGE.test(target)) {
    place.replaceWith(element("img", { src: target, alt: place.textContent }));
  } else {
    if (!place.textContent) place.textContent = target;
    if (place.closest("a")) place.replaceWith(...place.childNodes);
    else showLink(place, target);
  }
}

function showCode(pre) {
  const block = new CodeBlock(pre.firstChild.className.slice("language-".length));
  block.update(pre.textContent.replace(/\n$/, ""), true);
  pre.replaceWith(block.element);
}
