// The view of an answer: its parts, its notes and errors, its statistics and its buttons.

import { AnswerParts } from "./answerparts.js";
import { copy, element, icon, iconButton } from "./dom.js";
import { startEditing } from "./editor.js";
import { branchButtons } from "./message.js";
import { Results } from "./results.js";
import { statNodes } from "./statistics.js";
import { answerText } from "./text.js";
import { canContinue, canHelp, isContextFull } from "./tree.js";

// Titles for HTTP statuses. The server's own message is shown below.
const WORDS = {
  0: "No connection", 400: "The server refused this", 401: "The server asks for a key", 403: "Not allowed", 404: "Not found",
  408: "The request took too long", 413: "The request is too large", 429: "The server is busy", 500: "The server failed",
  502: "The server is not reachable", 503: "The server is not ready", 504: "The answer took too long",
};

/** An answer. actions: {regenerate(node), continue(node), edit(node, text), select(node), sendResults(node, texts)}. */
export class AnswerView {
  #timer = null;

  constructor(node, actions) {
    this.node = node;
    this.actions = actions;
    this.parts = new AnswerParts();
    this.body = this.parts.element;
    this.results = new Results(node, actions);
    this.waiting = element("p", { class: "waiting", hidden: true }, element("span", { class: "visually-hidden" }, "Waiting for the answer"));
    this.notes = element("div", { class: "notes" });
    this.foot = element("div", { class: "actions" });
    this.stats = element("p", { class: "stats" });
    this.heading = element("h2", { class: "visually-hidden" });
    this.element = element("article", { class: "message answer" }, this.heading,
      this.body, this.results.element, this.waiting, this.notes, element("div", { class: "foot" }, this.foot, this.stats));
  }

  /** Show another copy of the answer. */
  adopt(node) {
    this.node = node;
    this.results.node = node;
  }

  /** Update only the parts and their speed. This is called often while the response is generated. */
  updateText(isWriting) {
    const hasParts = this.parts.update(this.node, isWriting);
    this.waiting.hidden = !isWriting || hasParts;
    this.stats.replaceChildren(...statNodes(this.node.stats, isWriting));
  }

  /** next: the message below this answer, or null; nextSiblings: its versions. */
  update({ siblings, next, nextSiblings, isWriting, isBusy }) {
    clearInterval(this.#timer);
    this.next = next;
    this.updateText(isWriting);
    this.results.update({ views: this.parts.calls, next, nextSiblings, isWriting, isBusy });
    this.heading.textContent = this.node.model ? `Answer of ${this.node.model}` : "Answer";
    this.element.setAttribute("aria-busy", String(isWriting));
    this.notes.replaceChildren(...(isWriting ? [] : this.#noteNodes(isBusy)));
    this.foot.replaceChildren(...(isWriting ? [] : this.#buttons(siblings, isBusy)));
  }

  #buttons(siblings, isBusy) {
    const { node, actions } = this;
    const copyButton = iconButton("copy", "Copy the answer", () => copy(answerText(node, this.next), copyButton));
    const editButton = iconButton("pencil", "Edit the answer", () => this.#startEditing(), { class: "icon-button edit", disabled: isBusy });
    return [
      ...branchButtons(node, siblings, actions.select),
      ...(node.content || node.calls ? [copyButton] : []),
      ...(node.content ? [editButton] : []),
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
    const { error, finishReason, content, calls } = this.node;
    const continueButton = canContinue(this.node) && element("button", {
      type: "button", class: "button continue", disabled: isBusy, click: () => this.actions.continue(this.node) }, "Continue");
    if (error) return [this.#errorNode(error, isBusy, continueButton)];
    const text = noteOf(this.node) ?? (finishReason && !content && !calls ? "The answer is empty." : null);
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
function noteOf({ content, calls, finishReason, isStopped, isCut, stats }) {
  const hasBegun = Boolean(content || calls);
  if (isStopped) return hasBegun ? "Stopped." : "Stopped before the first word.";
  if (isCut) return hasBegun ? "Cut: the page was closed or reloaded before the answer was complete." : "Cut: the page was closed or reloaded before the first word.";
  if (finishReason === "length" && isContextFull(stats)) {
    return "The answer ended because the model's context is full. Begin a new chat, or edit a message to make this one shorter.";
  }
  return {
    length: "The answer ended at the limit of its length.", edited: "Written by you.",
  }[finishReason] ?? null;
}
