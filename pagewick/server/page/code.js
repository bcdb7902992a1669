// Code blocks: a caption, a button that copies the code, and colours by highlight.js.

import { copy, element, iconButton, patch } from "./dom.js";
import { sanitized } from "./html.js";
import hljs from "./vendor/highlight.js";

// Code that is still being written is coloured anew with each finished line, up to this length; the rest when it is complete.
const MAX_GROWING_LENGTH = 4_000;
// Longer code stays plain: nobody reads it here, and colouring it would take too long.
const MAX_LENGTH = 100_000;

// Names that models write after a fence and that highlight.js does not know.
const ALIASES = {
  bash: ["terminal", "shell-session"],
  cpp: ["cu", "cuda"],
  ini: ["cfg", "conf", "dotenv", "env", "properties"],
  java: ["dart", "scala"],
  json: ["json5", "jsonl"],
  sql: ["mysql", "plsql", "postgres", "postgresql", "psql", "sqlite"],
  xml: ["vue", "svelte"],
};
for (const [languageName, aliases] of Object.entries(ALIASES)) hljs.registerAliases(aliases, { languageName });

/** The caption of a code block; an unknown language keeps its own name. */
function captionOf(language) {
  return hljs.getLanguage(language)?.name.split(",", 1)[0] ?? (language.slice(0, 40) || "text");
}

/** A code block whose text can grow. */
export class CodeBlock {
  language;
  // The beginning of the text that has its colours; the rest of it is in the last node.
  #coloured = "";
  #code = element("code");
  #rest = document.createTextNode("");

  constructor(language) {
    this.language = language;
    this.#code.append(this.#rest);
    const button = iconButton("copy", "Copy the code", () => copy(this.#code.textContent, button));
    this.element = element("figure", { class: "code" },
      element("figcaption", {}, element("span", {}, captionOf(language)), button),
      element("pre", { tabindex: "0", role: "group", "aria-label": "Code" }, this.#code));
  }

  /** Show this text. Finished lines keep their nodes if the text goes on from the last one. */
  update(text, isComplete) {
    if (!text.startsWith(this.#coloured)) this.#colour("");
    const end = isComplete ? text.length : text.lastIndexOf("\n") + 1;
    if (end > this.#coloured.length && end <= (isComplete ? MAX_LENGTH : MAX_GROWING_LENGTH)) this.#colour(text.slice(0, end));
    this.#rest.data = text.slice(this.#coloured.length);
  }

  #colour(text) {
    const fresh = element("code");
    if (hljs.getLanguage(this.language)) {
      fresh.append(sanitized(hljs.highlight(text, { language: this.language, ignoreIllegals: true }).value));
    } else {
      fresh.append(text);
    }
    this.#rest.remove();
    patch(this.#code, fresh);
    this.#code.append(this.#rest);
    this.#coloured = text;
  }
}
