// Responses that end because their page is closed or reloaded: what came stays, and they are marked as cut.

import { sizeOf } from "./parts.js";
import { readPreference, watchPreferences, writePreference } from "./preferences.js";
import { find, isFurther, isUnfinished } from "./tree.js";

const PREFIX = "unfinished.";
const nameOf = (conversationId) => PREFIX + conversationId;
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
export function keepNow(conversation, { id, content, reasoning, calls, order, model, stats, numRequests }) {
  const kept = { id, content, reasoning, calls, order, model, stats, numRequests };
  writePreference(nameOf(conversation.id), JSON.stringify({ ...kept, finishReason: null, isStopped: false, isCut: true, error: null }));
}

function keptIn(conversationId) {
  return JSON.parse(readPreference(nameOf(conversationId)));
}

/** Call back with the id of a conversation when another tab has kept a response in it. */
export function whenKept(callback) {
  watchPreferences((name) => name.startsWith(PREFIX) && callback(name.slice(PREFIX.length)));
}

export function forget(conversationId) {
  writePreference(nameOf(conversationId), null);
}

/** Write what keepNow has kept into the conversation. Returns whether it was more than the conversation had. */
function restore(conversation) {
  const kept = keptIn(conversation.id);
  if (kept === null) return false;
  forget(conversation.id);
  const node = find(conversation, kept.id);
  const isMore = node !== null && isFurther(kept, node);
  if (isMore) Object.assign(node, kept);
  return isMore;
}

/**
 * Mark the responses of a stored conversation that nobody writes any more as cut. For those that another tab is writing, wait
 * until it is done. read() returns the stored conversation; save(conversation) is called after a change.
 *
 * What a closing tab has kept may be seen only after its lock is free, and then belongs to a response that is marked already.
 */
export function settle(conversation, { read, save }) {
  const ids = new Set(conversation.nodes.filter(isUnfinished).map((node) => node.id));
  const kept = keptIn(conversation.id);
  if (kept !== null) ids.add(kept.id);
  for (const id of ids) {
    if (queued.has(id)) continue;
    queued.add(id);
    whileWriting({ id }, async () => {
      queued.delete(id);
      const stored = await read();
      if (!stored) return;
      let hasChanged = restore(stored);
      const node = find(stored, id);
      if (node && isUnfinished(node)) hasChanged = node.isCut = true;
      if (hasChanged) await save(stored);
    });
  }
}
