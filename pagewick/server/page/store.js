// Stores conversations in the browser: in IndexedDB, or in memory if that is not available.

import { merge, takeMessages } from "./tree.js";
import { forgetAll, settle, whenKept } from "./unfinished.js";

const DATABASE = "pagewick";
const CONVERSATIONS = "conversations";
// Number of imported conversations that are written at once.
const BATCH = 100;
// Other messages between tabs are the id of a conversation.
const ALL_CHANGED = "all";

function promised(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function committed(transaction) {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = () => reject(transaction.error);
  });
}

async function openDatabase() {
  const request = indexedDB.open(DATABASE, 1);
  request.onupgradeneeded = () => request.result.createObjectStore(CONVERSATIONS, { keyPath: "id" });
  const database = await promised(request);
  const read = (request) => promised(request(database.transaction(CONVERSATIONS).objectStore(CONVERSATIONS)));
  const write = async (request) => {
    const transaction = database.transaction(CONVERSATIONS, "readwrite");
    const done = committed(transaction);
    request(transaction.objectStore(CONVERSATIONS));
    // A browser aborts what is not committed when the page is left. By itself it commits only after this tab has seen the result.
    transaction.commit();
    await done;
  };
  return {
    all: () => read((store) => store.getAll()),
    get: (id) => read((store) => store.get(id)),
    put: (conversation) => write((store) => store.put(conversation)),
    putAll: (conversations) => write((store) => conversations.forEach((conversation) => store.put(conversation))),
    remove: (id) => write((store) => store.delete(id)),
  };
}

/** All conversations, in memory and written through to the database. Emits "change" with an id, or null if many have changed. */
export class Library extends EventTarget {
  #conversations = new Map();
  #database = null;
  #channel = "BroadcastChannel" in globalThis ? new BroadcastChannel(DATABASE) : null;
  /** The response that this tab is writing in the conversation with this id, or null. */
  writingIn = () => null;

  /** False if conversations are lost when the page is closed. */
  get isLasting() {
    return this.#database !== null;
  }

  async open() {
    try {
      this.#database = await openDatabase();
    } catch {
      // Private windows and strict settings forbid databases; main.js tells the user (isLasting).
    }
    // Before the conversations are read, so that nothing is missed of what other tabs save meanwhile.
    this.#channel?.addEventListener("message", ({ data }) => this.#followOtherTab(data));
    whenKept((id) => this.get(id) && this.#settle(this.get(id)));
    await this.#readAll();
    if (this.isLasting) forgetAll((id) => !this.get(id));
  }

  async #readAll() {
    const conversations = await this.#try((database) => database.all());
    for (const conversation of conversations ?? []) if (!this.writingIn(conversation.id)) this.#take(conversation);
  }

  /** Take a conversation from the database, and store again what another tab has replaced by an older copy of it. */
  #take(conversation) {
    const { id } = conversation;
    const mine = this.get(id);
    const isBehind = mine !== null && takeMessages(conversation, mine);
    this.#conversations.set(id, conversation);
    if (isBehind) this.keep(conversation);
    this.#settle(conversation);
  }

  #settle(conversation) {
    const { id } = conversation;
    settle(conversation, {
      read: () => this.#try((database) => database.get(id)),
      save: async (stored) => {
        const mine = this.get(id);
        // Deleted meanwhile.
        if (mine === null) return;
        const writing = this.writingIn(id);
        if (writing) takeMessages(mine, stored, writing);
        else takeMessages(stored, mine);
        const settled = writing ? mine : stored;
        this.#conversations.set(id, settled);
        await this.keep(settled);
        this.#changed(id);
      },
    });
  }

  get(id) {
    return this.#conversations.get(id) ?? null;
  }

  /** Return all conversations, the latest first. */
  list() {
    return [...this.#conversations.values()].sort((a, b) => b.updatedAt - a.updatedAt);
  }

  async save(conversation) {
    await this.saveUntold(conversation);
    this.tell(conversation);
  }

  /** Save without a message to other tabs. */
  async saveUntold(conversation) {
    this.#conversations.set(conversation.id, conversation);
    this.#changed(conversation.id);
    await this.#try((database) => database.put(conversation));
  }

  /** Save without an event in this tab, for use during a response. */
  async keep(conversation) {
    await this.#try((database) => database.put(conversation));
    this.tell(conversation);
  }

  /** Tell other tabs that a conversation has been saved. */
  tell({ id }) {
    this.#channel?.postMessage(id);
  }

  /** Add many conversations. onProgress(count) is called with the number of those that are saved. */
  async addAll(conversations, onProgress) {
    for (let at = 0; at < conversations.length; at += BATCH) {
      const batch = conversations.slice(at, at + BATCH);
      await this.#try((database) => database.putAll(batch));
      for (const conversation of batch) this.#conversations.set(conversation.id, conversation);
      onProgress(at + batch.length);
    }
    this.#changed(null);
    this.#channel?.postMessage(ALL_CHANGED);
  }

  async remove(id) {
    forgetAll((conversationId) => conversationId === id);
    this.#conversations.delete(id);
    this.#changed(id);
    await this.#try((database) => database.remove(id));
    this.#channel?.postMessage(id);
  }

  /**
   * Return the result of a request to the database. Without a database it is undefined. After a request that fails, since the disk is
   * full or the browser has closed the database, report it and continue in memory.
   */
  async #try(request) {
    if (!this.#database) return undefined;
    try {
      return await request(this.#database);
    } catch (error) {
      this.#database = null;
      this.dispatchEvent(new CustomEvent("failure", { detail: error }));
      return undefined;
    }
  }

  async #followOtherTab(id) {
    if (id === ALL_CHANGED) {
      await this.#readAll();
      return this.#changed(null);
    }
    const theirs = await this.#try((database) => database.get(id));
    // This tab's conversations live on in its memory; nothing says what the other tab has done.
    if (!this.#database) return;
    const mine = this.get(id);
    const writing = this.writingIn(id);
    if (theirs && mine && writing) {
      merge(mine, theirs, writing);
      this.#settle(mine);
    } else if (theirs) this.#take(theirs);
    else this.#conversations.delete(id);
    this.#changed(id);
  }

  #changed(id) {
    this.dispatchEvent(new CustomEvent("change", { detail: id }));
  }
}
