// Export and import of conversations as a JSON file. Imported fields are checked one by one, and ids are replaced.

import { newId } from "./tree.js";

const FORMAT = "pagewick-conversations";
const VERSION = 1;
const MAX_NODES = 100_000;

/** Return the text of an export file. */
export function exportText(conversations) {
  return JSON.stringify({ format: FORMAT, version: VERSION, conversations }, null, 1);
}

/** Parse an export file. Throws an Error whose message is shown to the user. */
export function importText(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON.");
  }
  if (file?.format !== FORMAT || !Array.isArray(file.conversations)) {
    throw new Error("This file holds no conversations of Pagewick.");
  }
  if (file.version !== VERSION) throw new Error(`This file has version ${Number(file.version)}; this page reads ${VERSION}.`);
  return file.conversations.map(conversationOf);
}

function conversationOf(given, index) {
  const where = `Conversation ${index + 1}`;
  if (!Array.isArray(given?.nodes) || given.nodes.length > MAX_NODES) throw new Error(`${where} has no list of messages.`);
  const ids = new Map();
  const nodes = given.nodes.map((node, position) => nodeOf(node, ids, `${where}, message ${position + 1}`));
  const children = Map.groupBy(nodes, (node) => node.parentId);
  nodes.forEach((node, position) => {
    node.selectedChild = chosenOf(children.get(node.id), ids.get(given.nodes[position].selectedChild));
  });
  return {
    id: newId(),
    title: textOr(given.title, "Imported chat").slice(0, 200),
    isNamed: given.isNamed === true,
    createdAt: numberOr(given.createdAt, Date.now()),
    updatedAt: numberOr(given.updatedAt, Date.now()),
    selectedRoot: chosenOf(children.get(null), ids.get(given.selectedRoot)),
    nodes,
  };
}

/** Return the selected child if it exists, else the last one, so that every message can be reached. */
function chosenOf(children = [], id) {
  return (children.find((node) => node.id === id) ?? children.at(-1))?.id ?? null;
}

/** Parents come before their children, which rules out cycles. */
function nodeOf(given, ids, where) {
  if (given?.role !== "user" && given?.role !== "assistant") throw new Error(`${where} has an unknown role.`);
  if (typeof given.content !== "string") throw new Error(`${where} has no text.`);
  if (given.parentId !== null && !ids.has(given.parentId)) throw new Error(`${where} follows a message that is not there.`);
  const node = {
    id: newId(),
    parentId: given.parentId === null ? null : ids.get(given.parentId),
    selectedChild: null,
    role: given.role,
    content: given.content,
    createdAt: numberOr(given.createdAt, Date.now()),
  };
  ids.set(given.id, node.id);
  return given.role === "user" ? node : { ...node, ...answerFieldsOf(given) };
}

const STATS = [
  "promptTokens", "completionTokens", "cachedTokens", "firstTokenS", "tokensPerSecond", "maxModelLen", "thinkingS",
];

function answerFieldsOf(given) {
  const stats = given.stats && Object.fromEntries(STATS.map((name) => [name, numberOr(given.stats[name], null)]));
  const error = given.error && {
    message: textOr(given.error.message, ""), status: numberOr(given.error.status, 0), retryAt: null,
  };
  return {
    reasoning: textOr(given.reasoning, ""),
    model: textOr(given.model, ""),
    finishReason: textOr(given.finishReason, null),
    isStopped: given.isStopped === true,
    stats: stats ?? null,
    error: error ?? null,
  };
}

function textOr(value, otherwise) {
  return typeof value === "string" ? value : otherwise;
}

function numberOr(value, otherwise) {
  return Number.isFinite(value) ? value : otherwise;
}
