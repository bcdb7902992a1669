// Inline Markdown (CommonMark 0.31 with GitHub's strikethrough and autolinks) to a tree.
//
// nodes: {type: "text", value} | {type: "code" | "math", value} | {type: "break"} | {type: "image", url, children}
//        | {type: "link", url, children} | {type: "em" | "strong" | "del", children}
// HTML is text, except <br>, which models write in tables. Every loop is linear or bounded, whatever the text.

import { ESCAPABLE, entityAt, unescape } from "./entities.js";

const PLAIN = /(?:[^\\`*_~[\]!<&\nhw$]|h(?!ttps?:\/\/)|w(?!ww\.))+/iy;
const BARE_URL = /(?:https?:\/\/|www\.)[^\s<\u0000-\u001f]{1,2000}/iy;
const ANGLE_URL = /<((?:https?|mailto|ftp):[^\s<>\u0000-\u001f]{0,2000})>/iy;
const ANGLE_EMAIL = /<([\w.!#$%&'*+/=?^`{|}~-]{1,64}@[a-z\d-]{1,63}(?:\.[a-z\d-]{1,63}){1,8})>/iy;
const LINE_BREAK_TAG = /<br\s?\/?>/iy;
const BRACKETED_TARGET = /<((?:\\.|[^<>\\\n]){0,2000})>/y;
const LINK_END = /(?:\s{1,99}(?:"(?:\\.|[^"\\]){0,999}"|'(?:\\.|[^'\\]){0,999}'|\((?:\\.|[^()\\]){0,999}\)))?[ \t\n]{0,99}\)/y;
const MAX_TARGET = 2000;
const WHITESPACE = /[\s\u00a0]/;
const PUNCTUATION = /[\p{P}\p{S}]/u;

export function parseInline(text) {
  return new Inline(text).parse();
}

class Inline {
  constructor(text) {
    this.text = text;
    this.at = 0;
    // A flat list; `opens` and `closes` of its entries say where other nodes begin and end. build() makes the tree.
    this.parts = [];
    this.lastDelimiter = null;
    this.brackets = [];
    this.searchedInVain = new Set();
  }

  parse() {
    while (this.at < this.text.length) this.step();
    this.matchDelimiters(null);
    return build(this.parts);
  }

  step() {
    const character = this.text[this.at];
    switch (character) {
      case "\\": return this.escape();
      case "`": return this.codeSpan();
      case "*": case "_": case "~": return this.delimiterRun(character);
      case "[": return this.openBracket(false);
      case "!": return this.text[this.at + 1] === "[" ? this.openBracket(true) : this.literal(1);
      case "]": return this.closeBracket();
      case "<": return this.angle();
      case "&": return this.entity();
      case "\n": return this.lineEnd();
      case "$": return this.text[this.at + 1] === "$" ? this.math(2, "$$") : this.literal(1);
      default: return this.plain();
    }
  }

  match(pattern) {
    pattern.lastIndex = this.at;
    return pattern.exec(this.text);
  }

  add(part, length) {
    this.parts.push(part);
    this.at += length;
    return part;
  }

  literal(length) {
    this.add({ type: "text", value: this.text.slice(this.at, this.at + length) }, length);
  }

  plain() {
    const before = this.at === 0 ? " " : this.text[this.at - 1];
    const url = /[\s*_~("'[>]/.test(before) ? this.match(BARE_URL) : null;
    if (url) {
      this.bareUrl(url[0]);
      return;
    }
    const run = this.match(PLAIN);
    this.literal(run ? run[0].length : 1);
  }

  /** As GitHub does it: without punctuation at the end, and without a bracket that was not opened in it. */
  bareUrl(found) {
    let url = this.brackets.length ? found.split(/[[\]]/, 1)[0] : found;
    let shown;
    do {
      shown = url;
      url = url.replace(/[?!.,:*_~'"`;]+$/, "");
      if (url.endsWith(")") && url.split(")").length > url.split("(").length) url = url.slice(0, -1);
    } while (url !== shown);
    const target = /^www\./i.test(url) ? `http://${url}` : url;
    if (/^(https?:\/\/|www\.)$/i.test(url)) this.literal(url.length);
    else this.add({ type: "link", url: target, children: [{ type: "text", value: url }] }, url.length);
  }

  escape() {
    const next = this.text[this.at + 1];
    if (next === "(" || next === "[") return this.math(2, next === "(" ? "\\)" : "\\]");
    if (next === "\n") return this.add({ type: "break" }, 2);
    if (next && ESCAPABLE.test(next)) return this.add({ type: "text", value: next }, 2);
    return this.literal(1);
  }

  /** Formulas keep their source: what Markdown would make of their backslashes and underscores is wrong. */
  math(length, closing) {
    const end = this.find(closing, this.at + length);
    if (end >= 0) {
      this.add({ type: "math", value: this.text.slice(this.at + length, end).trim() }, end + 2 - this.at);
    } else if (this.text[this.at] === "\\") {
      this.add({ type: "text", value: this.text[this.at + 1] }, 2);
    } else {
      this.literal(length);
    }
  }

  /** indexOf, which asks for the same missing thing only once. */
  find(wanted, from) {
    if (this.searchedInVain.has(wanted)) return -1;
    const found = this.text.indexOf(wanted, from);
    if (found < 0) this.searchedInVain.add(wanted);
    return found;
  }

  codeSpan() {
    const length = runLength(this.text, this.at);
    const end = this.closingTicks(length, this.at + length);
    if (end < 0) return this.literal(length);
    let value = this.text.slice(this.at + length, end).replaceAll("\n", " ");
    if (value.startsWith(" ") && value.endsWith(" ") && value.trim()) value = value.slice(1, -1);
    return this.add({ type: "code", value }, end + length - this.at);
  }

  closingTicks(length, from) {
    const wanted = `code ${length}`;
    if (this.searchedInVain.has(wanted)) return -1;
    for (let at = this.text.indexOf("`", from); at >= 0; ) {
      const found = runLength(this.text, at);
      if (found === length) return at;
      at = this.text.indexOf("`", at + found);
    }
    this.searchedInVain.add(wanted);
    return -1;
  }

  lineEnd() {
    const last = this.parts.at(-1);
    const isHard = last?.type === "text" && last.value.endsWith("  ");
    if (last?.type === "text") last.value = last.value.replace(/ {1,99}$/, "");
    this.add(isHard ? { type: "break" } : { type: "text", value: "\n" }, 1);
  }

  angle() {
    const url = this.match(ANGLE_URL);
    const email = url ? null : this.match(ANGLE_EMAIL);
    if (url || email) {
      const [whole, shown] = url ?? email;
      const target = email ? `mailto:${shown}` : shown;
      this.add({ type: "link", url: target, children: [{ type: "text", value: shown }] }, whole.length);
      return;
    }
    const tag = this.match(LINE_BREAK_TAG);
    if (tag) this.add({ type: "break" }, tag[0].length);
    else this.literal(1);
  }

  entity() {
    const found = entityAt(this.text, this.at);
    if (found) this.add({ type: "text", value: found.value }, found.length);
    else this.literal(1);
  }

  delimiterRun(character) {
    const length = runLength(this.text, this.at);
    const part = { type: "text", value: character.repeat(length), opens: [], closes: [] };
    const before = codePointBefore(this.text, this.at);
    const after = String.fromCodePoint(this.text.codePointAt(this.at + length) ?? 32);
    const isLeft = !WHITESPACE.test(after) && (!PUNCTUATION.test(after) || isBorder(before));
    const isRight = !WHITESPACE.test(before) && (!PUNCTUATION.test(before) || isBorder(after));
    const isUnderscore = character === "_";
    this.add(part, length);
    if (character === "~" && length !== 2) return;
    this.lastDelimiter = {
      part, character, length, left: length, previous: this.lastDelimiter, next: null,
      canOpen: isLeft && (!isUnderscore || !isRight || PUNCTUATION.test(before)),
      canClose: isRight && (!isUnderscore || !isLeft || PUNCTUATION.test(after)),
    };
    const { previous } = this.lastDelimiter;
    if (previous) previous.next = this.lastDelimiter;
  }

  openBracket(isImage) {
    const part = { type: "text", value: isImage ? "![" : "[", opens: [], closes: [] };
    this.add(part, part.value.length);
    this.brackets.push({ part, isImage, isActive: true, delimiterBefore: this.lastDelimiter });
  }

  closeBracket() {
    const bracket = this.brackets.pop();
    const found = bracket?.isActive ? linkTarget(this.text, this.at + 1) : null;
    if (!found) return this.literal(1);
    this.matchDelimiters(bracket.delimiterBefore);
    bracket.part.value = "";
    bracket.part.opens.push({ type: bracket.isImage ? "image" : "link", url: unescape(found.target) });
    this.add({ type: "text", value: "", opens: [], closes: [bracket.isImage ? "image" : "link"] }, found.end - this.at);
    // There are no links in links.
    if (!bracket.isImage) for (const other of this.brackets) if (!other.isImage) other.isActive = false;
    return undefined;
  }

  /** CommonMark's "process emphasis", for the delimiters after `bottom`, which are then done with. */
  matchDelimiters(bottom) {
    const floors = new Map();
    let closer = this.lastDelimiter;
    while (closer && closer.previous !== bottom) closer = closer.previous;
    while (closer) {
      if (!closer.canClose) {
        closer = closer.next;
        continue;
      }
      const kind = `${closer.character}${closer.canOpen}${closer.length % 3}`;
      const floor = floors.get(kind) ?? bottom;
      const opener = openerFor(closer, floor, bottom);
      if (opener) {
        pair(opener, closer);
        if (!opener.left) unlink(opener, this);
        if (closer.left) continue;
      } else {
        floors.set(kind, closer.previous ?? bottom);
      }
      const { next } = closer;
      if (opener || !closer.canOpen) unlink(closer, this);
      closer = next;
    }
    this.lastDelimiter = bottom;
    if (bottom) bottom.next = null;
  }
}

function openerFor(closer, floor, bottom) {
  for (let one = closer.previous; one && one !== floor && one !== bottom; one = one.previous) {
    if (one.character !== closer.character || !one.canOpen) continue;
    const isOdd = (one.canClose || closer.canOpen) && (one.length + closer.length) % 3 === 0;
    if (closer.character === "~" || !isOdd || (one.length % 3 === 0 && closer.length % 3 === 0)) return one;
  }
  return null;
}

/** One pair of markers; everything between them that found no partner is text. */
function pair(opener, closer) {
  const used = opener.left >= 2 && closer.left >= 2 ? 2 : 1;
  const type = closer.character === "~" ? "del" : used === 2 ? "strong" : "em";
  for (const delimiter of [opener, closer]) {
    delimiter.left -= used;
    delimiter.part.value = delimiter.part.value.slice(used);
  }
  opener.part.opens.unshift({ type });
  closer.part.closes.push(type);
  opener.next = closer;
  closer.previous = opener;
}

function unlink(delimiter, inline) {
  if (delimiter.previous) delimiter.previous.next = delimiter.next;
  if (delimiter.next) delimiter.next.previous = delimiter.previous;
  else inline.lastDelimiter = delimiter.previous;
}

/** The tree: each part first closes, then stands there itself, then opens. Adjacent texts become one. */
function build(parts) {
  const root = { children: [] };
  const open = [root];
  const add = (node) => {
    const { children } = open.at(-1);
    if (node.type === "text" && children.at(-1)?.type === "text") children.at(-1).value += node.value;
    else if (node.type !== "text" || node.value) children.push(node);
  };
  for (const { opens = [], closes = [], ...node } of parts) {
    for (let count = closes.length; count > 0 && open.length > 1; count -= 1) open.pop();
    add(node);
    for (const opened of opens) {
      const made = { ...opened, children: [] };
      add(made);
      open.push(made);
    }
  }
  return root.children;
}

/** "(target "title")" at this place: {target, end}, or null. The title is not shown. */
function linkTarget(text, from) {
  if (text[from] !== "(") return null;
  let at = from + 1;
  while (/[ \t\n]/.test(text[at] ?? "") && at < from + 99) at += 1;
  BRACKETED_TARGET.lastIndex = at;
  const bracketed = BRACKETED_TARGET.exec(text);
  const end = bracketed ? BRACKETED_TARGET.lastIndex : endOfTarget(text, at);
  LINK_END.lastIndex = end;
  const closing = end < 0 ? null : LINK_END.exec(text);
  return closing && { target: bracketed ? bracketed[1] : text.slice(at, end), end: end + closing[0].length };
}

/** Parentheses in a target come in pairs. */
function endOfTarget(text, from) {
  if (text[from] === "<") return -1;
  let depth = 0;
  for (let at = from; at < text.length && at < from + MAX_TARGET; at += 1) {
    const character = text[at];
    if (character === "\\" && ESCAPABLE.test(text[at + 1] ?? "")) at += 1;
    else if (character === "(") depth += 1;
    else if (character === ")" && depth > 0) depth -= 1;
    else if (character === ")" || character <= " ") return depth === 0 ? at : -1;
  }
  return -1;
}

function isBorder(character) {
  return WHITESPACE.test(character) || PUNCTUATION.test(character);
}

function runLength(text, from) {
  let end = from + 1;
  while (text[end] === text[from]) end += 1;
  return end - from;
}

function codePointBefore(text, at) {
  if (at === 0) return " ";
  const isPair = at > 1 && /[\udc00-\udfff]/.test(text[at - 1]);
  return text.slice(isPair ? at - 2 : at - 1, at);
}
