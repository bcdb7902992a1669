// Code blocks: a caption, a copy button, and colours by highlight.js.

import { copy, element, iconButton, patch } from "./dom.js";
import { sanitized } from "./html.js";
import hljs from "./vendor/highlight.js";

// While code is being written, it is highlighted again after each line, up to this length. The rest is highlighted at the end.
const MAX_GROWING_LENGTH = 4_000;
// Longer code is not highlighted, because that would block the page for too long.
const MAX_LENGTH = 100_000;

// Language names that models write and highlight.js does not know.
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

/** Return the caption of a code block. An unknown language is shown under the name that the model wrote. */
function captionOf(language) {
  return hljs.getLanguage(language)?.name.split(",", 1)[0] ?? (language.slice(0, 40) || "text");
}

/** A code block whose text can grow. */
export class CodeBlock {
  language;
  // The part of the text that is highlighted. The rest is in the last node.
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

  /** Show this text. If it continues the previous text, the nodes of finished lines stay. */
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
