// A conversation is a tree of messages. Editing a question or requesting another response adds a branch.
//
// conversation: {id, title, isNamed, createdAt, updatedAt, selectedRoot, nodes}, times in milliseconds, and perhaps
//               {settings}: those that differ from the settings of all conversations
// node: {id, parentId, selectedChild, role, content, createdAt}, for a question perhaps {files: [{name, text} or {name, image}]}, and for an answer
//       {reasoning, model, stats, finishReason, isStopped, isCut, error} and perhaps {calls, order, numRequests}; see calls.js, also
//       for the results of calls, and parts.js. finishReason is the server's, or "edited" for a version that the user wrote.
//       numRequests counts the requests that have written it. nodes stand in order of creation, so parents come before children.

import { sizeOf } from "./parts.js";

const MAX_TITLE = 60;

export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function newConversation() {
  const now = Date.now();
  return { id: newId(), title: "New chat", isNamed: false, createdAt: now, updatedAt: now, selectedRoot: null, nodes: [] };
}

/** Add a message below another one (null: at the root) and select it. */
export function addMessage(conversation, parentId, fields) {
  const node = { id: newId(), parentId, selectedChild: null, createdAt: Date.now(), ...fields };
  conversation.nodes.push(node);
  conversation.updatedAt = node.createdAt;
  select(conversation, node);
  if (!conversation.isNamed && node.role === "user" && parentId === null) conversation.title = titleOf(node.content || node.files[0].name);
  return node;
}

export function find(conversation, id) {
  return conversation.nodes.find((node) => node.id === id) ?? null;
}

/** Return all versions of a message, including itself, in order of creation. */
export function versions(conversation, node) {
  return conversation.nodes.filter((other) => other.parentId === node.parentId);
}

/** Select a version of a message. The selection below it stays as it was. */
export function select(conversation, node) {
  const parent = find(conversation, node.parentId);
  if (parent) parent.selectedChild = node.id;
  else conversation.selectedRoot = node.id;
}

/** Return the selected message below another one, or null. */
export function nextOf(conversation, node) {
  return find(conversation, node.selectedChild);
}

/** Return the selected messages, from first to last. */
export function shownPath(conversation) {
  const byId = new Map(conversation.nodes.map((node) => [node.id, node]));
  const path = [];
  for (let node = byId.get(conversation.selectedRoot); node; node = byId.get(node.selectedChild)) path.push(node);
  return path;
}

/** Whether nothing says how a response ended: it is being written, or was cut. */
export function isUnfinished(node) {
  return node.role === "assistant" && !node.finishReason && !node.isStopped && !node.isCut && !node.error;
}

/** Whether the model can go on where this response ended early. It cannot begin in its thoughts or calls, nor in a full context. */
export function canContinue(node) {
  const { stats, finishReason, isStopped, isCut, error } = node;
  if (node.selectedChild || !node.content || node.calls?.length || isContextFull(stats)) return false;
  if (error) return canHelp(error.status);
  return isStopped || isCut || finishReason === "length" || finishReason === "edited";
}

export function isContextFull(stats) {
  return Boolean(stats?.maxModelLen) && stats.promptTokens + stats.completionTokens >= stats.maxModelLen;
}

// With these HTTP statuses the server refuses the request itself, so that it would refuse the same request again.
const FINAL = new Set([400, 403, 404, 405, 413, 415, 422, 501]);

/** Whether the same request can succeed later, after an error with this HTTP status (0: no response). */
export function canHelp(status) {
  return !FINAL.has(status);
}

/** Take what another tab has changed in the same conversation. This tab writes the response `writing`. */
export function merge(mine, theirs, writing) {
  takeMessages(mine, theirs, writing);
  if (theirs.isNamed) Object.assign(mine, { title: theirs.title, isNamed: true });
  if (theirs.settings) mine.settings = theirs.settings;
}

/**
 * Take the messages that another copy of the same conversation has more of. Each tab stores its whole copy, so that an older one can
 * replace a newer one. The response `writing` stays as it is. Returns whether anything changed.
 */
export function takeMessages(into, from, writing = null) {
  const known = new Map(into.nodes.map((node) => [node.id, node]));
  const added = from.nodes.filter(({ id }) => !known.has(id));
  into.nodes.push(...added);
  into.selectedRoot ??= from.selectedRoot;
  let hasChanged = added.length > 0;
  for (const other of from.nodes) {
    const node = known.get(other.id);
    if (!node) continue;
    // Without a selected child, nothing would lead to the messages that were added below.
    node.selectedChild ??= other.selectedChild;
    if (node === writing || node.role !== "assistant" || !isFurther(other, node)) continue;
    Object.assign(node, other, { selectedChild: node.selectedChild });
    hasChanged = true;
  }
  return hasChanged;
}

/** Whether a copy of an answer is a later state of it than another copy. */
export function isFurther(one, other) {
  const [state, otherState] = [one, other].map(stateOf);
  const at = state.findIndex((value, index) => value !== otherState[index]);
  return at >= 0 && state[at] > otherState[at];
}

/**
 * Return numbers that order the states of an answer: the first that differs decides. A request writes and then ends. Being cut is no
 * such end, because a page without locks shows an answer as cut that another tab goes on writing.
 */
function stateOf(node) {
  const hasEnded = !isUnfinished(node) && !node.isCut;
  return [node.numRequests ?? 0, hasEnded ? 1 : 0, sizeOf(node), node.isCut ? 1 : 0];
}

function titleOf(text) {
  const line = text.trim().split("\n", 1)[0].replace(/\s+/g, " ").replace(/^[#>*\s]+/, "");
  const letters = Array.from(line);
  return letters.length <= MAX_TITLE ? line || "New chat" : `${letters.slice(0, MAX_TITLE - 1).join("").trimEnd()}…`;
}
