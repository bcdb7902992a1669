// Conversations stay in the browser: in IndexedDB, or in memory where there is none.

import { merge } from "./tree.js";

const DATABASE = "pagewick";
const CONVERSATIONS = "conversations";

function promised(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

async function openDatabase() {
  const request = indexedDB.open(DATABASE, 1);
  request.onupgradeneeded = () => request.result.createObjectStore(CONVERSATIONS, { keyPath: "id" });
  const database = await promised(request);
  const transaction = (mode) => database.transaction(CONVERSATIONS, mode).objectStore(CONVERSATIONS);
  return {
    all: () => promised(transaction("readonly").getAll()),
    get: (id) => promised(transaction("readonly").get(id)),
    put: (conversation) => promised(transaction("readwrite").put(conversation)),
    remove: (id) => promised(transaction("readwrite").delete(id)),
  };
}

/** All conversations, kept in memory and written through. Emits "change" when the list or a conversation changes. */
export class Library extends EventTarget {
  #conversations = new Map();
  #database = null;
  #channel = "BroadcastChannel" in globalThis ? new BroadcastChannel(DATABASE) : null;
  /** Whether this tab is writing an answer into the conversation of this id. */
  isBusy = () => false;

  /** False if what is written now will not be there after the page is closed. */
  get isLasting() {
    return this.#database !== null;
  }

  async open() {
    try {
      this.#database = await openDatabase();
      for (const conversation of await this.#database.all()) this.#conversations.set(conversation.id, conversation);
    } catch {
      // Private windows and strict settings forbid databases; the caller says so (isLasting).
      this.#database = null;
    }
    this.#channel?.addEventListener("message", ({ data }) => this.#followOtherTab(data));
  }

  get(id) {
    return this.#conversations.get(id) ?? null;
  }

  /** The latest first. */
  list() {
    return [...this.#conversations.values()].sort((a, b) => b.updatedAt - a.updatedAt);
  }

  async save(conversation) {
    this.#conversations.set(conversation.id, conversation);
    this.#changed(conversation.id);
    await this.keep(conversation);
  }

  /** Write it down without a word to this page: for the middle of an answer. */
  async keep(conversation) {
    await this.#write((database) => database.put(conversation));
    this.#channel?.postMessage(conversation.id);
  }

  async remove(id) {
    this.#conversations.delete(id);
    this.#changed(id);
    await this.#write((database) => database.remove(id));
    this.#channel?.postMessage(id);
  }

  /** A disk that is full or a database that the browser has closed: say it, and go on in memory. */
  async #write(change) {
    if (!this.#database) return;
    try {
      await change(this.#database);
    } catch (error) {
      this.#database = null;
      this.dispatchEvent(new CustomEvent("failure", { detail: error }));
    }
  }

  async #followOtherTab(id) {
    const theirs = await this.#database?.get(id);
    const mine = this.get(id);
    if (theirs && mine && this.isBusy(id)) merge(mine, theirs);
    else if (theirs) this.#conversations.set(id, theirs);
    else if (!this.isBusy(id)) this.#conversations.delete(id);
    this.#changed(id);
  }

  #changed(id) {
    this.dispatchEvent(new CustomEvent("change", { detail: id }));
  }
}
