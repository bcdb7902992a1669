// The view of an answer: its text, its notes and errors, its statistics and its buttons.

import { copy, element, icon, iconButton } from "./dom.js";
import { startEditing } from "./editor.js";
import { MarkdownView } from "./markdown.js";
import { branchButtons } from "./message.js";
import { statNodes } from "./statistics.js";
import { canContinue, canHelp, isContextFull } from "./tree.js";

// Titles for HTTP statuses. The server's own message is shown below.
const WORDS = {
  0: "No connection", 400: "The server refused this", 401: "The server asks for a key", 403: "Not allowed", 404: "Not found",
  408: "The request took too long", 413: "The request is too large", 429: "The server is busy", 500: "The server failed",
  502: "The server is not reachable", 503: "The server is not ready", 504: "The answer took too long",
};

/** An answer. actions: {regenerate(node), continue(node), edit(node, text), select(node)}. */
export class AnswerView {
  #timer = null;

  constructor(node, actions) {
    this.node = node;
    this.actions = actions;
    this.summary = element("summary", {}, "Thinking…");
    this.thoughts = element("div", { class: "prose" });
    this.thinking = element("details", { class: "thinking", hidden: true, toggle: () => this.#showThoughts() }, this.summary, this.thoughts);
    this.body = element("div", { class: "prose" });
    this.waiting = element("p", { class: "waiting", hidden: true }, element("span", { class: "visually-hidden" }, "Waiting for the answer"));
    this.notes = element("div", { class: "notes" });
    this.foot = element("div", { class: "actions" });
    this.stats = element("p", { class: "stats" });
    this.heading = element("h2", { class: "visually-hidden" });
    this.element = element("article", { class: "message answer" }, this.heading,
      this.thinking, this.body, this.waiting, this.notes, element("div", { class: "foot" }, this.foot, this.stats));
    this.bodyText = new MarkdownView(this.body);
    this.thoughtText = new MarkdownView(this.thoughts);
  }

  /** Update only the text and its speed. This is called often while the response is generated. */
  updateText(isWriting) {
    const { content, reasoning, stats } = this.node;
    this.bodyText.update(content, !isWriting);
    this.thinking.hidden = !reasoning;
    if (reasoning) {
      this.isThinkingComplete = !isWriting;
      this.#showThoughts();
      this.summary.textContent = isWriting && !content ? "Thinking…" : thoughtTitle(stats);
    }
    this.waiting.hidden = !isWriting || Boolean(content || reasoning);
    this.stats.replaceChildren(...statNodes(stats, isWriting));
  }

  /** Render the thoughts, but only while they are unfolded. */
  #showThoughts() {
    if (this.thinking.open) this.thoughtText.update(this.node.reasoning, this.isThinkingComplete);
  }

  update({ siblings, isWriting, isBusy }) {
    clearInterval(this.#timer);
    this.updateText(isWriting);
    this.heading.textContent = this.node.model ? `Answer of ${this.node.model}` : "Answer";
    this.element.setAttribute("aria-busy", String(isWriting));
    this.notes.replaceChildren(...(isWriting ? [] : this.#noteNodes(isBusy)));
    this.foot.replaceChildren(...(isWriting ? [] : this.#buttons(siblings, isBusy)));
  }

  #buttons(siblings, isBusy) {
    const { node, actions } = this;
    const copyButton = iconButton("copy", "Copy the answer", () => copy(node.content, copyButton));
    const editButton = iconButton("pencil", "Edit the answer", () => this.#startEditing(), { class: "icon-button edit", disabled: isBusy });
    return [
      ...branchButtons(node, siblings, actions.select),
      ...(node.content ? [copyButton, editButton] : []),
      iconButton("again", "Answer again", () => actions.regenerate(node), { class: "icon-button again", disabled: isBusy }),
      ...(node.stats ? [this.#detailsButton()] : []),
    ];
  }

  /** On a narrow screen, only the speed stands beside the buttons, and this one shows the other numbers. */
  #detailsButton() {
    const button = iconButton("info", "More numbers", () => {
      button.setAttribute("aria-expanded", String(this.element.classList.toggle("with-details")));
    }, { class: "icon-button details", "aria-expanded": String(this.element.classList.contains("with-details")) });
    return button;
  }

  #startEditing() {
    startEditing(this, {
      label: "Edit the answer", doneLabel: "Save as a version", isShort: false, onDone: (text) => this.actions.edit(this.node, text),
    });
  }

  #noteNodes(isBusy) {
    const { error, finishReason, content } = this.node;
    const continueButton = canContinue(this.node) && element("button", {
      type: "button", class: "button continue", disabled: isBusy, click: () => this.actions.continue(this.node) }, "Continue");
    if (error) return [this.#errorNode(error, isBusy, continueButton)];
    const text = noteOf(this.node) ?? (finishReason && !content ? "The answer is empty." : null);
    return text ? [element("div", { class: "note" }, element("p", {}, text), ...(continueButton ? [continueButton] : []))] : [];
  }

  #errorNode({ message, status, retryAt }, isBusy, continueButton) {
    const button = element("button", { type: "button", class: "button", click: () => this.actions.regenerate(this.node) }, "Try again");
    const buttons = canHelp(status) ? [...(continueButton ? [continueButton] : []), button] : [];
    this.#countDown(buttons, retryAt, isBusy);
    return element("div", { class: "error" }, icon("warning"),
      element("div", {}, element("p", { class: "error-title" }, errorTitle(status)), element("p", {}, message)), ...buttons);
  }

  /** Disable the buttons until the time that the server named. The last one, "Try again", shows the seconds until then. */
  #countDown(buttons, retryAt, isBusy) {
    const show = () => {
      const seconds = Math.ceil(((retryAt ?? 0) - Date.now()) / 1000);
      for (const button of buttons) button.disabled = isBusy || seconds > 0;
      buttons.at(-1).textContent = seconds > 0 ? `Try again in ${seconds} s` : "Try again";
      if (seconds <= 0) clearInterval(this.#timer);
    };
    if (!buttons.length) return;
    if (retryAt !== null && retryAt > Date.now()) this.#timer = setInterval(show, 250);
    show();
  }
}

export function errorTitle(status) {
  return WORDS[status] ?? (status >= 500 ? WORDS[500] : WORDS[400]);
}

/** Return what to say about the end of a response, or null. */
function noteOf({ content, finishReason, isStopped, isCut, stats }) {
  if (isStopped) return content ? "Stopped." : "Stopped before the first word.";
  if (isCut) return content ? "Cut: the page was closed or reloaded before the answer was complete." : "Cut: the page was closed or reloaded before the first word.";
  if (finishReason === "length" && isContextFull(stats)) {
    return "The answer ended because the model's context is full. Begin a new chat, or edit a message to make this one shorter.";
  }
  return {
    length: "The answer ended at the limit of its length.", tool_calls: "The model called a tool; this page has none.", edited: "Written by you.",
  }[finishReason] ?? null;
}

function thoughtTitle(stats) {
  return stats?.thinkingS >= 1 ? `Thought for ${Math.round(stats.thinkingS)} s` : "Thoughts";
}
