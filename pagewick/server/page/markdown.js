// Shows Markdown as DOM nodes while it is being written. marked parses it; HTML in it is shown as text.

import { CodeBlock } from "./code.js";
import { element, patch } from "./dom.js";
import { footnoteExtensions, Footnotes } from "./footnotes.js";
import { formulaExtensions, maskFormulas, openFormula, showFormula } from "./formulas.js";
import { escapeHtml, sanitized } from "./html.js";
import { inlineExtensions } from "./inline.js";
import { Lexer, Marked } from "./vendor/marked.js";

const SAFE_LINK = /^(https?|mailto):$/;
const SAFE_IMAGE = /^data:image\/(png|jpeg|gif|webp|avif);base64,[a-z\d+/=]+$/i;

const MAY_MERGE = new Set(["paragraph", "table", "list"]);

const marked = new Marked({
  extensions: [...formulaExtensions, ...footnoteExtensions, ...inlineExtensions],
  // When one of these returns undefined, marked tries its next tokenizers; the last one makes a paragraph.
  tokenizer: {
    html: () => undefined,
    // Link definitions are not supported: they usually follow their use, when those blocks are final.
    def: () => undefined,
    // Models write <br> in tables. Other tags are shown as text.
    tag(text) {
      const raw = /^<br\s?\/?>/i.exec(text)?.[0];
      return raw && { type: "br", raw };
    },
    // Two tildes strike out. A single one often means "about", as in "~5".
    del: (text) => (text.startsWith("~~") ? false : undefined),
  },
  // The targets of links and pictures are passed on as titles, which do nothing; showLink and showPicture check them.
  renderer: {
    heading({ depth, tokens }) {
      // The page itself uses the levels 1 and 2.
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

/** marked's lexer. It also keeps the text it is reading, so that emStrongMask can find the formulas in it, and how deep a block is. */
class PageLexer extends Lexer {
  #texts = [];
  #depth = 0;

  constructor() {
    super({ ...marked.defaults, hooks: { emStrongMask: (masked) => maskFormulas(masked, this.#texts.at(-1)) } });
  }

  /** Whether the present block is not part of a list, a quote or a footnote. */
  get isOutermost() {
    return this.#depth === 1;
  }

  blockTokens(...given) {
    this.#depth += 1;
    try {
      return super.blockTokens(...given);
    } finally {
      this.#depth -= 1;
    }
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

/** A growing text. Only the last block is rendered again when text is added, and its unchanged nodes stay. Earlier blocks are final. */
export class MarkdownView {
  // The text of the final blocks, and the blocks after it with their nodes: [{token, start, mayMerge, node, code}].
  #final = "";
  #open = [];
  // Created with the first footnote.
  #footnotes = null;

  constructor(container) {
    this.element = container;
  }

  /** Show this text. isComplete means that it will not grow any more. */
  update(text, isComplete) {
    const source = text.includes("\r") ? text.replace(/\r\n?/g, "\n") : text;
    if (!source.startsWith(this.#final)) this.#startOver();
    const tail = source.slice(this.#final.length);
    const blocks = blocksOf(tail);
    for (const { node } of this.#open.splice(blocks.length)) node.remove();
    blocks.forEach((block, index) => this.#show(block, this.#open[index], isComplete || index < blocks.length - 1));
    this.#open = blocks;
    this.#footnotes?.connect();
    if (!isComplete) this.#settle(tail);
  }

  #startOver() {
    this.element.replaceChildren();
    this.#final = "";
    this.#open = [];
    this.#footnotes = null;
  }

  /** Create or update the node of a block. `shown` is the block that has this position on the screen, if there is one. */
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
    // A line that begins like a footnote is one when its colon comes.
    if (shown && (shown.token.type === "footnote") !== (token.type === "footnote")) block.node.remove();
    if (!this.element.contains(block.node)) this.#place(block);
  }

  /** Add the node of a block at the end; footnotes stand below the other blocks. */
  #place({ token, node }) {
    if (token.type !== "footnote") {
      this.element.insertBefore(node, this.#footnotes?.element ?? null);
      return;
    }
    if (!this.#footnotes) {
      this.#footnotes = new Footnotes(this.element);
      this.element.append(this.#footnotes.element);
    }
    this.#footnotes.append(node);
  }

  /** Make blocks final: once the first line of a block is complete, the blocks before it cannot change any more. */
  #settle(tail) {
    const limit = openFormula(tail);
    const index = this.#open.findLastIndex(({ start, mayMerge }) => !mayMerge && start <= limit && tail.indexOf("\n", start) >= 0);
    if (index <= 0) return;
    this.#final += tail.slice(0, this.#open[index].start);
    this.#open.splice(0, index);
  }
}

/** Return the nodes of a complete text. */
export function renderMarkdown(text) {
  const view = new MarkdownView(document.createDocumentFragment());
  view.update(text, true);
  return view.element;
}

/** Split a text into blocks: [{token, start, mayMerge}]. mayMerge means that more text can make it part of the previous block. */
function blocksOf(text) {
  const blocks = [];
  let start = 0;
  let before = null;
  for (const token of lex(text)) {
    // A line can look like the start of a table or list, and the next line can show that it belongs to the paragraph.
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
    // Thousands of nested quotes or lists exhaust the stack. Such text is shown as it is.
    return [{ type: "plain", raw: text }];
  }
}

function languageOf(info = "") {
  return info.trim().split(/\s/, 1)[0];
}

/** Return the element of a block that is not code. */
function blockNode(token) {
  if (token.type === "plain") return element("p", {}, token.raw);
  const nodes = sanitized(marked.parser([token]));
  for (const one of nodes.querySelectorAll(".formula")) showFormula(one);
  for (const one of nodes.querySelectorAll("a")) showLink(one);
  for (const one of nodes.querySelectorAll(".picture")) showPicture(one);
  for (const one of nodes.querySelectorAll("pre")) showCode(one);
  for (const one of nodes.querySelectorAll("table")) {
    // A wide table scrolls on its own, also with the keyboard.
    const box = element("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Table" });
    one.replaceWith(box);
    box.append(one);
  }
  return nodes.firstElementChild;
}

/** Set the target of a link if it is an absolute http, https or mailto URL. Any other target is shown as text. */
function showLink(link, target = link.title) {
  const url = URL.parse(target);
  const isSafe = url !== null && SAFE_LINK.test(url.protocol);
  const properties = isSafe ? { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow" } : {};
  link.replaceWith(element(isSafe ? "a" : "span", properties, ...link.childNodes, isSafe || !target ? null : ` (${target})`));
}

/** Show a picture that is part of the text (data:). Others become links: loading them would tell their host who reads this. */
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
