// The conversation on the screen, and the responses being generated in any conversation.

import { ApiError } from "./api.js";
import { announce } from "./dom.js";
import { generate } from "./generation.js";
import { errorTitle } from "./message.js";
import { requestBody } from "./settings.js";
import { addMessage, find, historyBefore, merge, newConversation, select } from "./tree.js";

// How often an unfinished response is saved. If the browser crashes, at most this much is lost.
const KEEP_EVERY_MS = 2000;
const MAX_SPOKEN = 2000;

export class Chat {
  // Maps a conversation's id to {node, abort}.
  #running = new Map();

  /** onShow is called after every change of what the page must show; askForKey(message) asks the user for an API key. */
  constructor({ library, models, settings, onShow, onGrow, askForKey }) {
    Object.assign(this, { library, models, settings, onShow, onGrow, askForKey });
    this.conversation = null;
    library.isBusy = (id) => this.#running.has(id);
    library.addEventListener("change", ({ detail: id }) => this.#follow(id));
  }

  /** The response being generated in the conversation on the screen, or null. */
  get writing() {
    return this.#running.get(this.conversation?.id)?.node ?? null;
  }

  /** Show another conversation. null or an unknown id starts a new one. */
  open(id) {
    this.conversation = this.library.get(id);
    this.onShow();
  }

  /** Add a question to the end of the conversation and request a response. Returns whether the question was accepted. */
  send(text, parentId = this.#end()) {
    if (this.writing) return false;
    this.conversation ??= newConversation();
    const { conversation } = this;
    const question = addMessage(conversation, parentId, { role: "user", content: text });
    this.#answer(conversation, question.id);
    return true;
  }

  #end() {
    let node = null;
    const { conversation } = this;
    for (let id = conversation?.selectedRoot; id; id = node.selectedChild) node = find(conversation, id);
    return node?.id ?? null;
  }

  /** Ask an edited question, in a new branch beside the old one. */
  edit(node, text) {
    this.send(text, node.parentId);
  }

  regenerate(node) {
    if (!this.writing) this.#answer(this.conversation, node.parentId);
  }

  /** Try again after an error. A response that was partly received stays as another version. */
  retry(node) {
    if (this.writing) return;
    if (!node.content && !node.reasoning) this.#answer(this.conversation, node.parentId, node);
    else this.regenerate(node);
  }

  select(node) {
    select(this.conversation, node);
    this.library.save(this.conversation);
    this.onShow();
  }

  stop(id = this.conversation?.id) {
    this.#running.get(id)?.abort.abort();
  }

  async #answer(conversation, parentId, node = null) {
    const fresh = { content: "", reasoning: "", model: "", finishReason: null, isStopped: false, stats: null, error: null };
    if (node) Object.assign(node, fresh);
    else node = addMessage(conversation, parentId, { role: "assistant", ...fresh });
    const abort = new AbortController();
    this.#running.set(conversation.id, { node, abort });
    this.library.save(conversation);
    this.onShow();
    await this.#generate(conversation, node, abort.signal);
    this.#running.delete(conversation.id);
    // The user may have deleted the conversation meanwhile.
    if (!this.library.get(conversation.id)) return;
    await this.library.save(conversation);
    if (conversation === this.conversation) this.onShow();
    if (node.error?.status === 401 && (await this.askForKey(node.error.message))) {
      if (conversation === this.conversation) this.retry(node);
    } else {
      announce(this.#spoken(conversation, node));
    }
  }

  async #generate(conversation, node, signal) {
    try {
      if (!this.models.chosen) await this.models.load();
      if (!this.models.chosen) throw new ApiError("The server has no model.", { status: 503 });
    } catch (error) {
      node.error = { message: error.message, status: error.status ?? 0, retryAt: null };
      return;
    }
    const { id, maxModelLen } = this.models.chosen;
    node.model = id;
    let keepAt = Date.now() + KEEP_EVERY_MS;
    const onDelta = () => {
      this.onGrow(node);
      if (Date.now() < keepAt) return;
      keepAt = Date.now() + KEEP_EVERY_MS;
      if (this.library.get(conversation.id)) this.library.keep(conversation);
    };
    const body = requestBody(id, historyBefore(conversation, node), this.settings);
    await generate(node, body, { maxModelLen, signal, onDelta });
  }

  #spoken(conversation, node) {
    if (conversation !== this.conversation) return `An answer in ${conversation.title} is finished.`;
    if (node.error) return `${errorTitle(node.error.status)}. ${node.error.message}`;
    if (node.isStopped) return "The answer is stopped.";
    const { content } = node;
    return `Answer: ${content.length > MAX_SPOKEN ? `${content.slice(0, MAX_SPOKEN)} … and more` : content}`;
  }

  /** Update the screen after another tab has changed or removed this conversation. */
  #follow(id) {
    if (id !== this.conversation?.id) return;
    const stored = this.library.get(id);
    if (stored === this.conversation) return;
    if (this.#running.has(id) && stored) merge(this.conversation, stored);
    else this.conversation = stored;
    this.onShow();
  }
}
