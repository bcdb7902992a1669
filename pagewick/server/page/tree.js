// A conversation is a tree of messages. Editing a question or requesting another response adds a branch.
//
// conversation: {id, title, isNamed, createdAt, updatedAt, selectedRoot, nodes}, times in milliseconds, and perhaps
//               {settings}: those that differ from the settings of all conversations
// node: {id, parentId, selectedChild, role, content, createdAt}, for a question perhaps {files: [{name, text}]}, and for an answer
//       {reasoning, model, stats, finishReason, isStopped, isCut, error} and perhaps {calls, order}; see calls.js, also for the
//       results of calls, and parts.js. finishReason is the server's, or "edited" for a version that the user wrote. nodes stand
//       in order of creation, so parents come before children.

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

/** Add the messages that another tab has added to the same conversation. */
export function merge(mine, theirs) {
  const known = new Set(mine.nodes.map((node) => node.id));
  mine.nodes.push(...theirs.nodes.filter((node) => !known.has(node.id)));
  if (theirs.isNamed) Object.assign(mine, { title: theirs.title, isNamed: true });
  if (theirs.settings) mine.settings = theirs.settings;
}

function titleOf(text) {
  const line = text.trim().split("\n", 1)[0].replace(/\s+/g, " ").replace(/^[#>*\s]+/, "");
  const letters = Array.from(line);
  return letters.length <= MAX_TITLE ? line || "New chat" : `${letters.slice(0, MAX_TITLE - 1).join("").trimEnd()}…`;
}
