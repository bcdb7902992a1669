// Code highlighting: a lexer of ordered patterns per language, which also follows code that is still being written.

import { languages, names } from "./languages.js";

/** What a code block is called; an unknown language keeps its own name. */
export function languageName(language) {
  const known = languages[names[language.toLowerCase()]];
  return known ? known.title : language.slice(0, 40) || "text";
}

/** [class or null, text] of each token, from an offset on. The texts together are the code. */
export function* tokens(code, language, from = 0) {
  const { pattern, classes, keywords, constants, isCaseless } = language;
  let plainFrom = from;
  pattern.lastIndex = from;
  for (let found = pattern.exec(code); found; found = pattern.exec(code)) {
    if (found[0] === "") {
      pattern.lastIndex += 1;
      continue;
    }
    const group = found.findIndex((text, index) => index > 0 && text !== undefined);
    const kind = classes[group - 1];
    const word = isCaseless ? found[0].toLowerCase() : found[0];
    const name = kind === "word" ? wordClass(word, code, pattern.lastIndex, keywords, constants) : kind;
    if (name === null) continue;
    // A loop that yields may be left and this pattern be used elsewhere before it goes on.
    const end = pattern.lastIndex;
    if (found.index > plainFrom) yield [null, code.slice(plainFrom, found.index)];
    yield [name, found[0]];
    plainFrom = end;
    pattern.lastIndex = end;
  }
  if (plainFrom < code.length) yield [null, code.slice(plainFrom)];
}

function wordClass(word, code, end, keywords, constants) {
  if (keywords.has(word)) return "keyword";
  if (constants.has(word)) return "constant";
  if (code[end] === "(") return "function";
  return /^[A-Z][A-Za-z\d]*[a-z]/.test(word) ? "type" : null;
}

/** The text of a code block. What stands before the last line is not lexed again when more comes. */
export class CodeText {
  #code = "";
  #settled = 0;
  #settledNodes = 0;

  constructor(container, language) {
    this.element = container;
    this.language = language;
    this.grammar = languages[names[language.toLowerCase()]] ?? null;
  }

  update(code) {
    if (!code.startsWith(this.#code.slice(0, this.#settled))) {
      this.#settled = 0;
      this.#settledNodes = 0;
    }
    this.#code = code;
    while (this.element.childNodes.length > this.#settledNodes) this.element.lastChild.remove();
    if (this.grammar) this.#lex(code);
    else this.element.append(code.slice(this.#settled));
  }

  #lex(code) {
    const lastLine = code.lastIndexOf("\n") + 1;
    let at = this.#settled;
    for (const [name, text] of tokens(code, this.grammar, at)) {
      at += text.length;
      this.element.append(name === null ? text : span(name, text));
      // A token that ends in a finished line stays as it is, unless it reaches to the end: it may go on.
      if (at < lastLine && at < code.length) {
        this.#settled = at;
        this.#settledNodes = this.element.childNodes.length;
      }
    }
  }
}

function span(name, text) {
  const made = document.createElement("span");
  made.className = `token-${name}`;
  made.textContent = text;
  return made;
}
