// Formulas in TeX: where they stand in Markdown, and what they look like (MathML by Temml).

import { element } from "./dom.js";
import { escapeHtml } from "./html.js";
import temml from "./vendor/temml.js";

const MAX_LENGTH = 4_000;
const MAX_KEPT = 500;
const CLOSING = { "$$": "$$", "\\[": "\\]", "\\(": "\\)" };
const DOLLAR = /^\$(?![\s$])((?:\\[^\n]|[^\\$\n])*[^\\$\s])\$(?![\p{L}\p{N}$])/u;
const LETTER_OR_DIGIT = /[\p{L}\p{N}$\\]/u;
const COMMAND = /\\[a-z]+(?:\{[^{}]*\})?/gi;
const OPTIONS = { throwOnError: true, trust: false, strict: false, maxExpand: 500, maxSize: [40, 40] };
const SIDES = ["top", "right", "bottom", "left"];

/** The source of the formula at the beginning of a text, with its marks, or null; `before` is the character before it. */
export function formulaAt(text, before = "") {
  const closing = CLOSING[text.slice(0, 2)];
  if (!closing) return dollarFormulaAt(text, before);
  const end = text.slice(0, MAX_LENGTH).indexOf(closing, 2);
  const body = text.slice(2, Math.max(2, end));
  return !body.trim() || /\n[ \t]*\n/.test(body) ? null : text.slice(0, end + 2);
}

/** "$5 and $10" are prices: a formula touches its dollars, stands apart from words, and is no number followed by words. */
function dollarFormulaAt(text, before) {
  const found = text[0] === "$" && !LETTER_OR_DIGIT.test(before) ? DOLLAR.exec(text) : null;
  if (!found || found[0].length > MAX_LENGTH) return null;
  const isPrice = /^\d/.test(found[1]) && /\p{L}{2}/u.test(found[1].replace(COMMAND, ""));
  return isPrice ? null : found[0];
}

/** The block formula at the beginning of a text: {raw, text}, or null. Nothing else stands in its lines. */
function blockFormulaAt(text) {
  const indent = /^ {0,3}(?=\$\$|\\\[)/.exec(text)?.[0];
  const formula = indent === undefined ? null : formulaAt(text.slice(indent.length));
  const ending = formula && /^[ \t]*(?:\n|$)/.exec(text.slice(indent.length + formula.length));
  return ending && { raw: indent + formula + ending[0], text: formula };
}

/** Where a formula block begins in a text, at the line break before it. */
function nextBlockFormula(text) {
  for (const { index } of text.matchAll(/\n {0,3}(?=\$\$|\\\[)/g)) if (blockFormulaAt(text.slice(index + 1))) return index;
  return undefined;
}

/** Where a formula block begins that is not closed yet: what follows may become part of it. The text's length if there is none. */
export function openFormula(text) {
  const found = /(?:^|\n) {0,3}(?:\$\$|\\\[)(?:(?!\$\$|\\\]|\n[ \t]*\n)[^])*$/.exec(text);
  return found ? found.index : text.length;
}

/** Marked's extensions for formulas. They become elements of class "formula" that contain their source. */
export const formulaExtensions = [
  {
    name: "formulaBlock",
    level: "block",
    start: nextBlockFormula,
    tokenizer: (text) => typed("formulaBlock", blockFormulaAt(text)),
    renderer: ({ text }) => `<p class="formula">${escapeHtml(text)}</p>`,
  },
  {
    name: "formula",
    level: "inline",
    start: (text) => /\$|\\[([]/.exec(text)?.index,
    tokenizer: (text, tokens) => {
      const raw = formulaAt(text, tokens.at(-1)?.raw.at(-1));
      return typed("formula", raw && { raw, text: raw });
    },
    renderer: ({ text }) => `<span class="formula">${escapeHtml(text)}</span>`,
  },
];

function typed(type, token) {
  return token ? { type, ...token } : undefined;
}

/** `masked`, a text as long as `text`, with letters where formulas are: emphasis neither begins nor ends in them. */
export function maskFormulas(masked, text) {
  let end = 0;
  for (const { index } of text.matchAll(/\\[^]|\$/g)) {
    const formula = index < end ? null : formulaAt(text.slice(index), text[index - 1]);
    if (!formula) continue;
    end = index + formula.length;
    masked = masked.slice(0, index) + "a".repeat(formula.length) + masked.slice(end);
  }
  return masked;
}

// A paragraph that grows is rendered often, with the same formulas each time.
const kept = new Map();

/** Put MathML in the place of a formula's source. If TeX finds a mistake in it, the source stays, as text. */
export function showFormula(place) {
  const source = place.textContent;
  if (!kept.has(source)) {
    if (kept.size >= MAX_KEPT) kept.clear();
    kept.set(source, mathOf(source));
  }
  const math = kept.get(source);
  if (!math) return;
  if (math.getAttribute("display") === "block") {
    // It scrolls by itself, with the keyboard too.
    for (const [name, value] of Object.entries({ tabindex: "0", role: "group", "aria-label": "Formula" })) place.setAttribute(name, value);
    place.classList.add("display");
  }
  place.replaceChildren(math.cloneNode(true));
}

function mathOf(source) {
  const length = CLOSING[source.slice(0, 2)] ? 2 : 1;
  const displayMode = source.startsWith("$$") || source.startsWith("\\[");
  const box = element("span");
  try {
    temml.render(source.slice(length, -length).trim(), box, { ...OPTIONS, displayMode });
  } catch {
    return null;
  }
  for (const node of box.querySelectorAll("*")) withoutStyle(node);
  return box.querySelector("math");
}

/** The page allows no inline styles: colours become attributes, lines classes, and the rest is left to the style sheet. */
function withoutStyle(node) {
  // Chromium writes the attribute when it is read; removed before that, it would come back empty.
  if (node.getAttribute("style")) {
    if (node.style.color) node.setAttribute("mathcolor", node.style.color);
    for (const side of SIDES) if (node.style.getPropertyValue(`border-${side}-style`)) node.classList.add(`line-${side}`);
  }
  for (const name of ["style", "href", "id"]) node.removeAttribute(name);
}
