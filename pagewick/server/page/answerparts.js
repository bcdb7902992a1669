// The parts of an answer on the screen, in their order: folded thoughts, texts, and folded calls.

import { FoldedCode } from "./folded.js";
import { isComplete } from "./calls.js";
import { element } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { partsOf } from "./parts.js";

/** Parts that can grow. The views of earlier parts stay. */
export class AnswerParts {
  element = element("div", { class: "parts" });
  #views = [];

  /** The views of the calls, in their order. */
  get calls() {
    return this.#views.filter(({ kind }) => kind === "calls");
  }

  /** Show the parts. Returns whether there are any. */
  update(node, isWriting) {
    const parts = partsOf(node).filter(({ kind, text }) => kind === "calls" || text.trim());
    const numSame = parts.findIndex(({ kind }, index) => this.#views[index]?.kind !== kind);
    for (const view of this.#views.splice(numSame < 0 ? parts.length : numSame)) view.element.remove();
    parts.forEach((part, index) => {
      this.#views[index] ??= this.#added(part.kind);
      this.#views[index].update(part, { isGrowing: isWriting && index === parts.length - 1, isFirst: index === 0, stats: node.stats });
    });
    return parts.length > 0;
  }

  #added(kind) {
    const view = new VIEWS[kind]();
    view.kind = kind;
    this.element.append(view.element);
    return view;
  }
}

/** Thoughts. They are rendered only while they are unfolded. */
class ThoughtsView {
  #summary = element("summary");
  #prose = element("div", { class: "prose" });
  #text = new MarkdownView(this.#prose);
  element = element("details", { class: "thinking", toggle: () => this.#show() }, this.#summary, this.#prose);

  update({ text }, { isGrowing, isFirst, stats }) {
    Object.assign(this, { text, isGrowing });
    this.#summary.textContent = isGrowing ? "Thinking…" : isFirst ? thoughtTitle(stats) : "Thoughts";
    this.#show();
  }

  #show() {
    if (this.element.open) this.#text.update(this.text, !this.isGrowing);
  }
}

class TextView {
  element = element("div", { class: "prose" });
  #text = new MarkdownView(this.element);

  update({ text }, { isGrowing }) {
    this.#text.update(text, !isGrowing);
  }
}

/** A call. Below it is the place of its result, which results.js fills. */
class CallView {
  #folded = new FoldedCode("tool", "call");
  #note = element("p", { class: "hint", hidden: true }, "This call is incomplete. The model does not read it, and it needs no result.");
  result = element("div", { class: "result" });
  element = element("div", { class: "tool" }, this.#folded.element, this.#note, this.result);

  update({ call }, { isGrowing }) {
    this.call = call;
    this.#folded.update({ title: call.name, hiddenTitle: "Call of ", text: call.arguments, isGrowing });
    this.#note.hidden = isGrowing || isComplete(call);
  }
}

const VIEWS = { reasoning: ThoughtsView, content: TextView, calls: CallView };

function thoughtTitle(stats) {
  return stats?.thinkingS >= 1 ? `Thought for ${Math.round(stats.thinkingS)} s` : "Thoughts";
}
