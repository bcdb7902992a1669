// Responses that end because their page is closed or reloaded: what came stays, and they are marked as cut.

import { sizeOf } from "./parts.js";
import { readPreference, writePreference } from "./preferences.js";
import { find, isUnfinished } from "./tree.js";

const nameOf = (conversationId) => `unfinished.${conversationId}`;
// In a queue for the lock of a response that another tab is writing.
const queued = new Set();

/**
 * Run the task that writes a response, under a lock that tells other tabs about it. The browser releases the lock if the tab ends.
 * Pages without HTTPS, except on localhost, have no locks, and strict settings forbid them: another tab then shows the response as
 * cut until it is finished.
 */
export async function whileWriting({ id }, task) {
  let hasBegun = false;
  const begin = () => {
    hasBegun = true;
    return task();
  };
  try {
    await navigator.locks.request(`pagewick.${id}`, begin);
  } catch (error) {
    if (hasBegun) throw error;
    await begin();
  }
}

/** Keep what came so far. A closing page may not get to finish a write to the database, but it does to localStorage. */
export function keepNow(conversation, { id, content, reasoning, calls, order, model, stats }) {
  writePreference(nameOf(conversation.id), JSON.stringify({ id, content, reasoning, calls, order, model, stats }));
}

export function forget(conversationId) {
  writePreference(nameOf(conversationId), null);
}

/** Write what keepNow has kept into the conversation. */
function restore(conversation) {
  const text = readPreference(nameOf(conversation.id));
  if (text === null) return;
  forget(conversation.id);
  const { id, ...fields } = JSON.parse(text);
  const node = find(conversation, id);
  if (node && isUnfinished(node) && sizeOf(fields) >= sizeOf(node)) Object.assign(node, fields);
}

/**
 * Mark the responses of a stored conversation that nobody writes any more as cut. For those that another tab is writing, wait
 * until it is done. read() returns the stored conversation; save(conversation) is called after a change.
 */
export function settle(conversation, { read, save }) {
  for (const { id } of conversation.nodes.filter(isUnfinished)) {
    if (queued.has(id)) continue;
    queued.add(id);
    whileWriting({ id }, async () => {
      queued.delete(id);
      const stored = await read();
      if (!stored) return;
      restore(stored);
      const node = find(stored, id);
      if (!node || !isUnfinished(node)) return;
      node.isCut = true;
      await save(stored);
    });
  }
}
