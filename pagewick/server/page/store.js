// Stores conversations in the browser: in IndexedDB, or in memory if that is not available.

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

/** All conversations, in memory and written through to the database. Emits "change" when the list or a conversation changes. */
export class Library extends EventTarget {
  #conversations = new Map();
  #database = null;
  #channel = "BroadcastChannel" in globalThis ? new BroadcastChannel(DATABASE) : null;
  /** Whether this tab is generating a response in the conversation with this id. */
  isBusy = () => false;

  /** False if conversations are lost when the page is closed. */
  get isLasting() {
    return this.#database !== null;
  }

  async open() {
    try {
      this.#database = await openDatabase();
      for (const conversation of await this.#database.all()) this.#conversations.set(conversation.id, conversation);
    } catch {
      // Private windows and strict settings forbid databases; main.js tells the user (isLasting).
      this.#database = null;
    }
    this.#channel?.addEventListener("message", ({ data }) => this.#followOtherTab(data));
  }

  get(id) {
    return this.#conversations.get(id) ?? null;
  }

  /** Return all conversations, the latest first. */
  list() {
    return [...this.#conversations.values()].sort((a, b) => b.updatedAt - a.updatedAt);
  }

  async save(conversation) {
    this.#conversations.set(conversation.id, conversation);
    this.#changed(conversation.id);
    await this.keep(conversation);
  }

  /** Save without an event in this tab, for use during a response. */
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

  /** Continue in memory, and report it, after the disk is full or the browser has closed the database. */
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
