// A folded block of JSON or text: its title and its beginning in one line, which unfold to all of it.

import { CodeBlock } from "./code.js";
import { element, icon } from "./dom.js";
import { oneLine, prettyJson } from "./json.js";

export class FoldedCode {
  #hidden = element("span", { class: "visually-hidden" });
  #title = element("span", { class: "folded-title" });
  #line = element("span", { class: "folded-line" });
  #block = null;
  // What the unfolded block shows: {text, isGrowing}.
  #shown = null;

  constructor(iconName, kind) {
    const summary = element("summary", {}, icon(iconName), this.#hidden, this.#title, this.#line);
    this.element = element("details", { class: `folded ${kind}`, toggle: () => this.#show() }, summary);
  }

  /** hiddenTitle is read by screen readers only, before the title. isGrowing means that more text may come. */
  update({ title, hiddenTitle = "", text, isGrowing = false }) {
    this.#hidden.textContent = hiddenTitle;
    this.#title.textContent = title;
    this.#line.textContent = oneLine(text);
    this.#shown = { text, isGrowing };
    this.#show();
  }

  /** Render the block, but only while it is unfolded. */
  #show() {
    if (!this.element.open) return;
    const { text, isGrowing } = this.#shown;
    const pretty = isGrowing ? null : prettyJson(text);
    const language = isGrowing || pretty !== null ? "json" : "text";
    if (this.#block?.language !== language) {
      this.#block?.element.remove();
      this.#block = new CodeBlock(language);
      this.element.append(this.#block.element);
    }
    this.#block.update(pretty ?? text, !isGrowing);
  }
}
