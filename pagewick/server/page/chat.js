// The conversation on the screen, and the responses being generated in any conversation.

import { errorTitle } from "./answer.js";
import { ApiError } from "./api.js";
import { completeCalls, spokenCalls } from "./calls.js";
import { announce } from "./dom.js";
import { readResults, writeResults } from "./drafts.js";
import { generate } from "./generation.js";
import { historyBefore, messageToContinue } from "./history.js";
import { problemsIn, requestBody } from "./settings.js";
import { addMessage, canContinue, find, merge, newConversation, select } from "./tree.js";
import { forget, keepNow, whileWriting } from "./unfinished.js";

// How often an unfinished response is saved. If the browser crashes, at most this much is lost.
const KEEP_EVERY_MS = 2000;
const MAX_SPOKEN = 2000;
// The browser breaks the connections of a page this long, and usually much less, before it tells the page that it ends.
const LEAVING_MS = 50;
const NEW_ANSWER = {
  content: "", reasoning: "", model: "", finishReason: null, isStopped: false, isCut: false, stats: null, error: null,
};

export class Chat {
  // Maps a conversation's id to {conversation, node, abort}.
  #running = new Map();
  // Whether the page is being closed or reloaded with a response in progress: its connection breaks, which is no error to tell.
  #isLeaving = false;

  /**
   * onShow is called after every change of what the page must show; onGrow(node) and onEnd(node) while a response is written and
   * after it; askForKey(message) asks the user for an API key; onWrongSetting(scope, field) shows the user a setting that prevents
   * a request ("all" or "own").
   */
  constructor({ library, models, settings, onShow, onGrow, onEnd, askForKey, onWrongSetting }) {
    Object.assign(this, { library, models, settings, onShow, onGrow, onEnd, askForKey, onWrongSetting });
    this.conversation = null;
    // The settings of a conversation that has no messages yet.
    this.newSettings = {};
    library.writingIn = (id) => this.#running.get(id)?.node ?? null;
    library.addEventListener("change", ({ detail: id }) => this.#follow(id));
    addEventListener("pagehide", () => {
      this.#isLeaving = this.#running.size > 0;
      if (!library.isLasting) return;
      for (const { conversation, node } of this.#running.values()) keepNow(conversation, node);
    });
    // The browser has kept the page as it was when the user left it, but not its connections.
    addEventListener("pageshow", () => this.#isLeaving && location.reload());
  }

  /** The response being generated in the conversation on the screen, or null. */
  get writing() {
    return this.#running.get(this.conversation?.id)?.node ?? null;
  }

  /** The settings of this conversation that differ from those of all conversations: {name: text}. */
  get ownSettings() {
    return this.conversation ? this.conversation.settings ?? {} : this.newSettings;
  }

  /** Set these for the conversation on the screen, without moving it to the top of the list. */
  setOwnSettings(texts) {
    if (JSON.stringify(texts) === JSON.stringify(this.ownSettings)) return;
    if (!this.conversation) {
      this.newSettings = texts;
      return;
    }
    this.conversation.settings = texts;
    this.library.save(this.conversation);
  }

  /** Show another conversation. null or an unknown id starts a new one. */
  open(id) {
    this.conversation = this.library.get(id);
    this.newSettings = {};
    this.onShow();
  }

  /** Add a question to the end of the conversation and request a response. Returns whether the question was accepted. */
  send(text, files = []) {
    if (!this.#mayAsk()) return false;
    this.conversation ??= { ...newConversation(), settings: this.newSettings };
    return this.#ask(text, files, this.#idAfterTypedResults(this.#end()));
  }

  #ask(text, files, parentId) {
    const { conversation } = this;
    const question = addMessage(conversation, parentId, { role: "user", content: text, ...(files.length && { files }) });
    this.#answer(conversation, question.id);
    return true;
  }

  /** Send the results of an answer's calls, {id of the call: text}, and request a response. Returns whether they were accepted. */
  sendResults(node, texts) {
    if (!this.#mayAsk()) return false;
    this.#answer(this.conversation, this.#addResults(node, texts).id);
    return true;
  }

  #addResults(node, texts) {
    writeResults(node.id, {});
    const given = completeCalls(node).filter(({ id }) => texts[id]?.trim());
    return addMessage(this.conversation, node.id, { role: "tool", content: "", results: given.map(({ id }) => ({ id, content: texts[id] })) });
  }

  /** A message instead of results: those that the user has typed by then come before it. */
  #idAfterTypedResults(node) {
    const typed = node?.calls ? readResults(node.id) : {};
    return Object.keys(typed).length ? this.#addResults(node, typed).id : node?.id ?? null;
  }

  /** Nothing is asked while a response is written, nor with a wrong setting, which is shown instead. */
  #mayAsk() {
    if (this.writing) return false;
    const [wrong] = problemsIn({ ...this.settings, ...this.ownSettings });
    if (wrong) this.onWrongSetting(this.ownSettings[wrong.field.name] ? "own" : "all", wrong.field);
    return !wrong;
  }

  #end() {
    let node = null;
    const { conversation } = this;
    for (let id = conversation?.selectedRoot; id; id = node.selectedChild) node = find(conversation, id);
    return node;
  }

  /** Ask an edited question, in a new branch beside the old one; or add an edited response as another version. */
  edit(node, text) {
    if (node.role === "user") return this.#mayAsk() && this.#ask(text, node.files ?? [], node.parentId);
    if (this.writing) return false;
    const { reasoning, calls, model } = node;
    const fields = { ...NEW_ANSWER, content: text, reasoning, ...(calls && { calls }), model, finishReason: "edited" };
    addMessage(this.conversation, node.parentId, { role: "assistant", ...fields });
    this.library.save(this.conversation);
    this.onShow();
    return true;
  }

  /** Request another version of a response. A failed one without any text is replaced. */
  regenerate(node) {
    if (!this.#mayAsk()) return;
    const isEmpty = node.error && !node.content && !node.reasoning && !node.calls?.length;
    this.#answer(this.conversation, node.parentId, isEmpty ? node : null);
  }

  /** Let the model go on where a response has ended. */
  continue(node) {
    if (canContinue(node) && this.#mayAsk()) this.#write(this.conversation, node, true);
  }

  select(node) {
    select(this.conversation, node);
    this.library.save(this.conversation);
    this.onShow();
  }

  stop(id = this.conversation?.id) {
    this.#running.get(id)?.abort.abort();
  }

  #answer(conversation, parentId, node = null) {
    if (node) Object.assign(node, NEW_ANSWER);
    else node = addMessage(conversation, parentId, { role: "assistant", ...NEW_ANSWER });
    return this.#write(conversation, node, false);
  }

  /** Write into a response: all of it, or what comes after its present text. */
  async #write(conversation, node, isContinued) {
    const { finishReason, isStopped, isCut, error } = NEW_ANSWER;
    const continued = isContinued ? messageToContinue(node) : null;
    Object.assign(node, { finishReason, isStopped, isCut, error, numRequests: (node.numRequests ?? 0) + 1 });
    const abort = new AbortController();
    this.#running.set(conversation.id, { conversation, node, abort });
    const isSaved = this.library.saveUntold(conversation);
    const isDone = whileWriting(node, async () => {
      // Not before: another tab that has this lock first takes the response for one whose tab is closed, and marks it as cut.
      isSaved.then(() => this.library.tell(conversation));
      await this.#generate(conversation, node, { signal: abort.signal, continued });
      // When a page is left, its connections break first.
      if (node.error) await new Promise((resolve) => setTimeout(resolve, LEAVING_MS));
      if (this.#isLeaving) return;
      this.#running.delete(conversation.id);
      forget(conversation.id, node.id);
      // The user may have deleted the conversation meanwhile.
      if (this.library.get(conversation.id)) await this.library.save(conversation);
    });
    this.onShow();
    await isDone;
    if (this.#isLeaving || !this.library.get(conversation.id)) return;
    if (conversation === this.conversation) {
      this.onShow();
      this.onEnd(node);
    }
    if (node.error?.status === 401 && (await this.askForKey(node.error.message))) {
      if (conversation !== this.conversation) return;
      if (isContinued) this.continue(node);
      else this.regenerate(node);
    } else {
      announce(this.#spoken(conversation, node));
    }
  }

  async #generate(conversation, node, { signal, continued }) {
    try {
      if (!this.models.chosen) await this.models.load();
      if (!this.models.chosen) throw new ApiError("The server has no model.", { status: 503 });
    } catch (error) {
      node.error = { message: error.message, status: error.status ?? 0, retryAt: null };
      return;
    }
    const { id, maxModelLen, readsImages } = this.models.chosen;
    node.model = id;
    let keepAt = Date.now() + KEEP_EVERY_MS;
    const onDelta = () => {
      this.onGrow(node);
      if (Date.now() < keepAt) return;
      keepAt = Date.now() + KEEP_EVERY_MS;
      if (this.library.get(conversation.id)) this.library.keep(conversation);
    };
    const texts = { ...this.settings, ...conversation.settings };
    const body = requestBody(id, historyBefore(conversation, node, readsImages), texts, continued);
    await generate(node, body, { maxModelLen, signal, onDelta });
    // The server of several models has loaded this one meanwhile, and knows its sizes now.
    if (!maxModelLen) await this.models.load().catch(() => {});
  }

  #spoken(conversation, node) {
    if (conversation !== this.conversation) return `An answer in ${conversation.title} is finished.`;
    if (node.error) return `${errorTitle(node.error.status)}. ${node.error.message}`;
    if (node.isStopped) return "The answer is stopped.";
    const { content } = node;
    const text = content.length > MAX_SPOKEN ? `${content.slice(0, MAX_SPOKEN)} … and more` : content;
    return [content || !node.calls ? `Answer: ${text}` : "", spokenCalls(node)].filter(Boolean).join(" ");
  }

  /** Update the screen after another tab has changed or removed this conversation (null: perhaps this one). */
  #follow(id) {
    if (id !== null && !this.library.get(id)) this.stop(id);
    if (!this.conversation || (id !== null && id !== this.conversation.id)) return;
    const stored = this.library.get(this.conversation.id);
    if (stored === this.conversation) return;
    const running = this.#running.get(this.conversation.id);
    if (running && stored) merge(this.conversation, stored, running.node);
    else this.conversation = stored;
    this.onShow();
  }
}
