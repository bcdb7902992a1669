// TeX formulas in Markdown, shown as MathML by Temml.

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

/** Return the formula that starts `text`, with its delimiters, or null. `before` is the character before the text. */
export function formulaAt(text, before = "") {
  const closing = CLOSING[text.slice(0, 2)];
  if (!closing) return dollarFormulaAt(text, before);
  const end = text.slice(0, MAX_LENGTH).indexOf(closing, 2);
  const body = text.slice(2, Math.max(2, end));
  return !body.trim() || /\n[ \t]*\n/.test(body) ? null : text.slice(0, end + 2);
}

/**
 * Return the $...$ formula that starts `text`, or null. "$5 and $10" are prices: there is no space inside the dollar signs of a
 * formula, no letter or digit outside of them, and a number with words after it is no formula.
 */
function dollarFormulaAt(text, before) {
  const found = text[0] === "$" && !LETTER_OR_DIGIT.test(before) ? DOLLAR.exec(text) : null;
  if (!found || found[0].length > MAX_LENGTH) return null;
  const isPrice = /^\d/.test(found[1]) && /\p{L}{2}/u.test(found[1].replace(COMMAND, ""));
  return isPrice ? null : found[0];
}

/** Return the formula that starts `text` and has its lines to itself, as {raw, text}, or null. */
function blockFormulaAt(text) {
  const indent = /^ {0,3}(?=\$\$|\\\[)/.exec(text)?.[0];
  const formula = indent === undefined ? null : formulaAt(text.slice(indent.length));
  const ending = formula && /^[ \t]*(?:\n|$)/.exec(text.slice(indent.length + formula.length));
  return ending && { raw: indent + formula + ending[0], text: formula };
}

/** Return the index of the line break before the first formula that has its lines to itself, or undefined. */
function nextBlockFormula(text) {
  for (const { index } of text.matchAll(/\n {0,3}(?=\$\$|\\\[)/g)) if (blockFormulaAt(text.slice(index + 1))) return index;
  return undefined;
}

/** Return where a formula begins that is not closed yet, so that the text after it may become part of it; without one, the text's length. */
export function openFormula(text) {
  const found = /(?:^|\n) {0,3}(?:\$\$|\\\[)(?:(?!\$\$|\\\]|\n[ \t]*\n)[^])*$/.exec(text);
  return found ? found.index : text.length;
}

/** Extensions of marked: each formula becomes an element of class "formula" with the TeX source, which showFormula replaces. */
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

/** Overwrite the formulas of `text` with letters in `masked`, its copy of the same length, so that no emphasis begins or ends in them. */
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

// A growing paragraph is rendered often, each time with the same formulas: they are converted once.
const kept = new Map();

/** Replace the TeX source in an element by MathML. Malformed TeX stays as text. */
export function showFormula(place) {
  const source = place.textContent;
  if (!kept.has(source)) {
    if (kept.size >= MAX_KEPT) kept.clear();
    kept.set(source, mathOf(source));
  }
  const math = kept.get(source);
  if (!math) return;
  if (math.getAttribute("display") === "block") {
    // A wide formula scrolls on its own, also with the keyboard.
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

/** Remove Temml's inline styles, which the page does not use: colours become attributes, borders become classes. */
function withoutStyle(node) {
  // Read the attribute first: Chromium creates it lazily, and a copy of the node would have it again.
  if (node.getAttribute("style")) {
    if (node.style.color) node.setAttribute("mathcolor", node.style.color);
    for (const side of SIDES) if (node.style.getPropertyValue(`border-${side}-style`)) node.classList.add(`line-${side}`);
  }
  for (const name of ["style", "href", "id"]) node.removeAttribute(name);
}
