// Responses that end because their page is closed or reloaded: what came stays, and they are marked as cut.

import { namesOfPreferences, readPreference, watchPreferences, writePreference } from "./preferences.js";
import { find, isFurther, isUnfinished } from "./tree.js";

// Followed by the ids of a conversation and of a response in it.
const PREFIX = "unfinished.";
const nameOf = (conversationId, id) => `${PREFIX}${conversationId}.${id}`;
// Ids of responses for whose locks this tab waits.
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
  const ending = { finishReason: null, isStopped: false, isCut: true, error: null };
  writePreference(nameOf(conversation.id, id), JSON.stringify({ ...kept, ...ending }));
}

function keptOf(conversationId, id) {
  try {
    return JSON.parse(readPreference(nameOf(conversationId, id)));
  } catch {
    return null;
  }
}

/** Return [id of the conversation, id of the response] for all that is kept. */
function allKept() {
  return namesOfPreferences(PREFIX).map((name) => name.slice(PREFIX.length).split("."));
}

/** Call back with the id of a conversation when another tab has kept a response in it. */
export function whenKept(callback) {
  watchPreferences((name) => name.startsWith(PREFIX) && callback(name.slice(PREFIX.length).split(".")[0]));
}

/** Forget what is kept of a response. */
export function forget(conversationId, id) {
  writePreference(nameOf(conversationId, id), null);
}

/** Forget what is kept in conversations for which isGone(id of the conversation) holds. */
export function forgetAll(isGone) {
  for (const [conversationId, id] of allKept()) if (isGone(conversationId)) forget(conversationId, id);
}

/**
 * Mark the responses of a stored conversation that nobody writes any more as cut, with what their tabs have kept. For those that
 * another tab is writing, wait until it is done. read() returns the stored conversation; save(conversation) is called after a
 * change.
 *
 * What a closing tab has kept may be seen only after its lock is free, and then belongs to a response that is marked already.
 */
export function settle(conversation, { read, save }) {
  const kept = allKept().filter(([conversationId]) => conversationId === conversation.id).map(([, id]) => id);
  const nodes = conversation.nodes.filter((node) => isUnfinished(node) || kept.includes(node.id));
  for (const { id, numRequests } of nodes) {
    if (queued.has(id)) continue;
    queued.add(id);
    whileWriting({ id }, async () => {
      queued.delete(id);
      const stored = await read();
      const node = stored && find(stored, id);
      // With another number of requests, another tab has begun to write it again, and waits for this lock.
      if (!node || node.numRequests !== numRequests) return;
      const keptHere = keptOf(conversation.id, id);
      if (settleNode(node, keptHere)) await save(stored);
      if (keptHere !== null) forget(conversation.id, id);
    });
  }
}

/** Returns whether the response has changed. */
function settleNode(node, kept) {
  if (kept !== null && isFurther(kept, node)) {
    Object.assign(node, kept);
    return true;
  }
  if (!isUnfinished(node)) return false;
  node.isCut = true;
  return true;
}
