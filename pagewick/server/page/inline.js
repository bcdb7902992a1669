// Subscripts and superscripts in Markdown: <sub>, <sup>, and between ~ or ^ directly after a letter, as in H~2~O and x^2^.

const TAG = /^<(sub|sup)>((?:(?!<\/?\1>)[^\n])+)<\/\1>/i;
// "~" also means "about" or "to", and "^" stands in formulas: so the texts are short, and no letter or digit may follow "^".
const SUBSCRIPT = /^~([\w+\-−().]{1,10})~(?!~)/;
const SUPERSCRIPT = /^\^([\w+\-−().]{1,10})\^(?![\w^])/;
const AFTER = { "~": /[a-z)\]]/i, "^": /[\w)\]]/ };

/** Extensions of marked: each becomes an element sub or sup. marked stops at "<" and "~" anyway, so that only "^" needs a start. */
export const inlineExtensions = [
  {
    name: "scriptTag",
    level: "inline",
    tokenizer(text) {
      const found = TAG.exec(text);
      return found ? { type: "scriptTag", raw: found[0], tag: found[1].toLowerCase(), tokens: this.lexer.inlineTokens(found[2], []) } : undefined;
    },
    renderer({ tag, tokens }) {
      return `<${tag}>${this.parser.parseInline(tokens)}</${tag}>`;
    },
  },
  {
    name: "script",
    level: "inline",
    start: (text) => text.indexOf("^"),
    tokenizer(text, tokens) {
      const before = tokens.at(-1)?.raw.at(-1) ?? "";
      if (!AFTER[text[0]]?.test(before)) return undefined;
      const found = (text[0] === "~" ? SUBSCRIPT : SUPERSCRIPT).exec(text);
      return found ? { type: "script", raw: found[0], tag: text[0] === "~" ? "sub" : "sup", tokens: this.lexer.inlineTokens(found[1], []) } : undefined;
    },
    renderer({ tag, tokens }) {
      return `<${tag}>${this.parser.parseInline(tokens)}</${tag}>`;
    },
  },
];
