// The view of one message: its text, its statistics and its buttons.

import { copy, element, icon, iconButton } from "./dom.js";
import { MarkdownView } from "./markdown.js";

// Titles for HTTP statuses. The server's own message is shown below.
const WORDS = {
  0: "No connection", 400: "The server refused this", 401: "The server asks for a key", 403: "Not allowed", 404: "Not found",
  408: "The request took too long", 413: "The request is too large", 429: "The server is busy", 500: "The server failed",
  502: "The server is not reachable", 503: "The server is not ready", 504: "The answer took too long",
};

/** A question. actions: {edit(node, text), select(node)}. */
export class QuestionView {
  constructor(node, actions) {
    this.node = node;
    this.actions = actions;
    this.body = element("div", { class: "bubble" }, node.content);
    this.foot = element("div", { class: "actions" });
    this.element = element("article", { class: "message question" },
      element("h2", { class: "visually-hidden" }, "You"), this.body, this.foot);
  }

  update({ siblings, isBusy }) {
    const button = iconButton("copy", "Copy the message", () => copy(this.node.content, button));
    this.foot.replaceChildren(
      ...branchButtons(this.node, siblings, this.actions.select),
      button,
      iconButton("pencil", "Edit the message", () => this.startEditing(), { class: "icon-button edit", disabled: isBusy }),
    );
  }

  startEditing() {
    if (this.editor) return;
    const box = element("textarea", { class: "editor", "aria-label": "Edit the message", rows: "3" });
    box.value = this.node.content;
    const leave = () => {
      this.editor.replaceWith(this.body);
      this.editor = null;
      this.foot.hidden = false;
      this.foot.querySelector(".edit")?.focus();
    };
    const send = () => {
      const text = box.value.trim();
      leave();
      if (text) this.actions.edit(this.node, text);
    };
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") leave();
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    this.editor = element("div", { class: "editing" }, box, element("div", { class: "editing-foot" },
      element("button", { type: "button", class: "button", click: leave }, "Cancel"),
      element("button", { type: "button", class: "button primary", click: send }, "Send")));
    this.body.replaceWith(this.editor);
    this.foot.hidden = true;
    box.focus();
    box.setSelectionRange(box.value.length, box.value.length);
  }
}

/** An answer. actions: {regenerate(node), retry(node), select(node)}. */
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

  /** Update only the text. This is called often while the response is generated. */
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
    this.stats.replaceChildren(...(isWriting ? [] : statNodes(this.node.stats)));
  }

  #buttons(siblings, isBusy) {
    const button = iconButton("copy", "Copy the answer", () => copy(this.node.content, button));
    return [
      ...branchButtons(this.node, siblings, this.actions.select),
      ...(this.node.content ? [button] : []),
      iconButton("again", "Answer again", () => this.actions.regenerate(this.node), { class: "icon-button again", disabled: isBusy }),
    ];
  }

  #noteNodes(isBusy) {
    const { error, isStopped, finishReason, content } = this.node;
    if (error) return [this.#errorNode(error, isBusy)];
    if (isStopped) return [note(content ? "Stopped." : "Stopped before the first word.")];
    if (finishReason === "length") return [note("The answer ended at the limit of its length.")];
    if (finishReason === "tool_calls") return [note("The model called a tool; this page has none.")];
    if (finishReason && !content) return [note("The answer is empty.")];
    return [];
  }

  #errorNode({ message, status, retryAt }, isBusy) {
    const button = element("button", { type: "button", class: "button", disabled: isBusy, click: () => this.actions.retry(this.node) }, "Try again");
    const title = errorTitle(status);
    this.#countDown(button, retryAt, isBusy);
    return element("div", { class: "error" }, icon("warning"),
      element("div", {}, element("p", { class: "error-title" }, title), element("p", {}, message)), button);
  }

  /** Disable the button until the time that the server named. */
  #countDown(button, retryAt, isBusy) {
    const show = () => {
      const seconds = Math.ceil(((retryAt ?? 0) - Date.now()) / 1000);
      button.disabled = isBusy || seconds > 0;
      button.textContent = seconds > 0 ? `Try again in ${seconds} s` : "Try again";
      if (seconds <= 0) clearInterval(this.#timer);
    };
    if (retryAt !== null && retryAt > Date.now()) this.#timer = setInterval(show, 250);
    show();
  }
}

export function errorTitle(status) {
  return WORDS[status] ?? (status >= 500 ? WORDS[500] : WORDS[400]);
}

function note(text) {
  return element("p", { class: "note" }, text);
}

function thoughtTitle(stats) {
  return stats?.thinkingS >= 1 ? `Thought for ${Math.round(stats.thinkingS)} s` : "Thoughts";
}

/** Return the buttons "‹ 2/3 ›" if a message has several versions. */
function branchButtons(node, siblings, select) {
  if (siblings.length < 2) return [];
  const at = siblings.indexOf(node);
  const step = (name, label, target) =>
    iconButton(name, label, () => select(target), { disabled: !target, class: `icon-button ${name}` });
  const count = element("span", { class: "branch-count" },
    element("span", { "aria-hidden": "true" }, `${at + 1}/${siblings.length}`),
    element("span", { class: "visually-hidden" }, `Version ${at + 1} of ${siblings.length}`));
  return [step("left", "Previous version", siblings[at - 1]), count, step("right", "Next version", siblings[at + 1])];
}

function statNodes(stats) {
  if (!stats || stats.completionTokens === null) return [];
  const { promptTokens, completionTokens, cachedTokens, firstTokenS, tokensPerSecond, maxModelLen } = stats;
  const used = promptTokens + completionTokens;
  const parts = [
    `${grouped(completionTokens)} ${completionTokens === 1 ? "token" : "tokens"}`,
    tokensPerSecond && `${tokensPerSecond < 10 ? tokensPerSecond.toFixed(1) : grouped(Math.round(tokensPerSecond))} tokens/s`,
    firstTokenS !== null && `${firstTokenS < 10 ? firstTokenS.toFixed(2) : Math.round(firstTokenS)} s to the first`,
    cachedTokens !== null && `${grouped(cachedTokens)} of ${grouped(promptTokens)} cached`,
  ].filter(Boolean);
  const nodes = parts.map((text) => element("span", {}, text));
  if (maxModelLen) {
    const meter = element("meter", { min: "0", max: String(maxModelLen), value: String(used), "aria-label": "Context in use" });
    nodes.push(element("span", {}, meter, ` context ${grouped(used)} / ${grouped(maxModelLen)}`));
  }
  return nodes;
}

function grouped(number) {
  return Number(number).toLocaleString("en");
}
