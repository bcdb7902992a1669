// The messages on the screen, and the scroll position.

import { AnswerView } from "./answer.js";
import { byId } from "./dom.js";
import { QuestionView } from "./message.js";
import { nextOf, shownPath, versions } from "./tree.js";

// Within this distance from the end, the page follows the growing text.
const FOLLOW_PX = 60;
// After each render the page pauses for this multiple of its duration, so that slow devices stay responsive.
const REST_PER_WORK = 1;

export class Thread {
  #views = new Map();
  #isFollowing = true;
  #isScheduled = false;
  #resumeAt = 0;

  /** actions: {edit, regenerate, continue, select, sendResults}. Each one gets the message. */
  constructor(actions) {
    this.actions = actions;
    this.element = byId("thread");
    this.scroller = byId("scroller");
    this.toEnd = byId("to-end");
    this.scroller.addEventListener("scroll", () => this.#noticeScroll(), { passive: true });
    this.toEnd.addEventListener("click", () => this.follow());
  }

  /** Show a conversation. `writing` is the response being generated in it, or null. */
  show(conversation, writing) {
    if (conversation.id !== this.conversation?.id) this.#views.clear();
    this.conversation = conversation;
    // Results are part of the view of the answer with their calls.
    const views = shownPath(conversation).filter(({ role }) => role !== "tool").map((node) => this.#viewOf(node));
    const elements = views.map((view) => view.element);
    for (const child of [...this.element.children]) if (!elements.includes(child)) child.remove();
    elements.forEach((element, index) => {
      if (this.element.children[index] !== element) this.element.insertBefore(element, this.element.children[index] ?? null);
    });
    for (const view of views) this.#update(view, writing);
    this.#afterLayout();
  }

  clear() {
    this.conversation = null;
    this.#views.clear();
    this.element.replaceChildren();
    this.toEnd.hidden = true;
  }

  #viewOf(node) {
    const found = this.#views.get(node.id);
    if (found?.node === node) return found;
    if (found?.editor) {
      // Another tab has saved the conversation. What the user has typed stays.
      found.adopt(node);
      return found;
    }
    const view = node.role === "user" ? new QuestionView(node, this.actions) : new AnswerView(node, this.actions);
    this.#views.set(node.id, view);
    return view;
  }

  #update(view, writing) {
    const next = nextOf(this.conversation, view.node);
    view.update({
      siblings: versions(this.conversation, view.node), next, nextSiblings: next ? versions(this.conversation, next) : [],
      isWriting: view.node === writing, isBusy: writing !== null,
    });
  }

  /** Schedule an update after a message has grown. It runs at most once per frame. */
  grow(node) {
    if (this.#isScheduled) return;
    this.#isScheduled = true;
    const wait = Math.max(0, this.#resumeAt - performance.now());
    setTimeout(() => requestAnimationFrame(() => this.#growNow(node)), wait);
  }

  #growNow(node) {
    this.#isScheduled = false;
    const view = this.#views.get(node.id);
    if (view?.node !== node || !view.element.isConnected || view.element.getAttribute("aria-busy") !== "true") return;
    const begun = performance.now();
    view.updateText(true);
    this.#afterLayout();
    const ended = performance.now();
    this.#resumeAt = ended + (ended - begun) * REST_PER_WORK;
  }

  /** Scroll to the end and follow the growing text. */
  follow() {
    this.#isFollowing = true;
    this.#afterLayout();
  }

  /** Return the view of the last question, for the arrow key that edits it. */
  lastQuestion() {
    const node = this.conversation && shownPath(this.conversation).findLast((one) => one.role === "user");
    return node ? this.#views.get(node.id) : null;
  }

  focusOn(node) {
    const isResult = node.role === "tool";
    const message = this.#views.get(isResult ? node.parentId : node.id)?.element;
    message?.querySelector(isResult ? ".results-foot button" : ".actions button")?.focus();
  }

  /** Focus the first field for a result of this answer's calls. Returns whether there is one. */
  focusOnResults(node) {
    return this.#views.get(node.id)?.results.focus() ?? false;
  }

  #afterLayout() {
    if (this.#isFollowing) this.scroller.scrollTop = this.scroller.scrollHeight;
    this.toEnd.hidden = this.#isFollowing;
  }

  #noticeScroll() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    this.#isFollowing = scrollHeight - scrollTop - clientHeight < FOLLOW_PX;
    this.toEnd.hidden = this.#isFollowing;
  }
}
