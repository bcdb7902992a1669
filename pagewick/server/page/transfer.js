// Export and import of conversations as a JSON file, and export as Markdown. Imported fields are checked one by one, and ids are
// replaced.

import { isImageAddress } from "./images.js";
import { isOrderOf } from "./parts.js";
import { textsOf } from "./settings.js";
import { answerText, fullText } from "./text.js";
import { newId, nextOf, shownPath } from "./tree.js";

const FORMAT = "pagewick-conversations";
const VERSION = 1;
const MAX_NODES = 100_000;
const MAX_FILES = 100;
const MAX_CALLS = 1000;
const ROLES = ["user", "assistant", "tool"];
// Number of conversations that are read before the page may draw again.
const BATCH = 100;

/** Return the text of an export file. */
export function exportText(conversations) {
  return JSON.stringify({ format: FORMAT, version: VERSION, conversations }, null, 1);
}

/** Return the messages on the screen as Markdown. */
export function markdownOf(conversation) {
  const prompt = conversation.settings?.system_prompt;
  const messages = shownPath(conversation).filter(({ role }) => role !== "tool");
  const parts = messages.flatMap((node) => (node.role === "user" ? ["## You", fullText(node, imageMarkdown)] : answerParts(node, nextOf(conversation, node))));
  return [`# ${conversation.title}`, ...(prompt ? ["## System prompt", prompt] : []), ...parts].filter(Boolean).join("\n\n") + "\n";
}

function imageMarkdown({ name, image }) {
  return `![${name.replace(/[[\]\\]/g, "\\$&")}](${image})`;
}

function answerParts(node, next) {
  const { model, reasoning, error } = node;
  return [
    `## ${model || "Answer"}`,
    reasoning && `<details><summary>Thoughts</summary>\n\n${reasoning.trim()}\n\n</details>`,
    answerText(node, next),
    error && `*${error.message}*`,
  ];
}

/** Parse an export file, letting the page draw now and then. Throws an Error whose message is shown to the user. */
export async function importText(text) {
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
  const conversations = [];
  for (const [index, given] of file.conversations.entries()) {
    conversations.push(conversationOf(given, index));
    if (index % BATCH === BATCH - 1) await new Promise((resolve) => setTimeout(resolve));
  }
  return conversations;
}

function conversationOf(given, index) {
  const where = `Conversation ${index + 1}`;
  if (!Array.isArray(given?.nodes) || given.nodes.length > MAX_NODES) throw new Error(`${where} has no list of messages.`);
  const ids = new Map();
  const nodes = given.nodes.map((node, position) => nodeOf(node, ids, `${where}, message ${position + 1}`));
  checkResults(nodes, where);
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
    ...(given.settings && { settings: textsOf(given.settings) }),
    nodes,
  };
}

/** Return the selected child if it exists, else the last one, so that every message can be reached. */
function chosenOf(children = [], id) {
  return (children.find((node) => node.id === id) ?? children.at(-1))?.id ?? null;
}

/** Parents come before their children, which rules out cycles. */
function nodeOf(given, ids, where) {
  if (!ROLES.includes(given?.role)) throw new Error(`${where} has an unknown role.`);
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
  if (given.role === "assistant") return withOrder({ ...node, ...answerFieldsOf(given), ...callFieldsOf(given, where) }, given.order);
  if (given.role === "tool") return { ...node, results: recordsOf(given.results, ["id", "content"], `${where} has results`) };
  return given.files === undefined ? node : { ...node, files: filesOf(given.files, where) };
}

function filesOf(given, where) {
  const isList = Array.isArray(given) && given.length <= MAX_FILES;
  const isFile = (file) => typeof file?.name === "string" && (file.image === undefined ? typeof file.text === "string" : isImageAddress(file.image));
  if (!isList || !given.every(isFile)) throw new Error(`${where} has files without a name, a text or an image.`);
  return given.map(({ name, text, image }) => ({ name: name.slice(0, 200), ...(image === undefined ? { text } : { image }) }));
}

const STATS = [
  "promptTokens", "completionTokens", "cachedTokens", "firstTokenS", "tokensPerSecond", "maxModelLen", "thinkingS",
];

function answerFieldsOf(given) {
  const stats = given.stats && Object.fromEntries(STATS.map((name) => [name, numberOr(given.stats[name], null)]));
  const error = given.error && {
    message: textOr(given.error.message, ""), status: numberOr(given.error.status, 0), retryAt: null,
  };
  const finishReason = textOr(given.finishReason, null);
  const isStopped = given.isStopped === true;
  return {
    reasoning: textOr(given.reasoning, ""),
    model: textOr(given.model, ""),
    finishReason,
    isStopped,
    // A response that was being written when it was exported.
    isCut: given.isCut === true || !(finishReason || isStopped || error),
    stats: stats ?? null,
    error: error ?? null,
    ...(Number.isInteger(given.numRequests) && { numRequests: given.numRequests }),
  };
}

function callFieldsOf({ calls }, where) {
  return calls === undefined || calls?.length === 0 ? {} : { calls: recordsOf(calls, ["id", "name", "arguments"], `${where} has calls`) };
}

/** Return a list of records, each with these texts and an id of its own. */
function recordsOf(given, fields, where) {
  const isList = Array.isArray(given) && given.length <= MAX_CALLS && given.every((one) => fields.every((field) => typeof one?.[field] === "string"));
  if (!isList) throw new Error(`${where} without ${fields.join(", ")}.`);
  if (new Set(given.map(({ id }) => id)).size < given.length) throw new Error(`${where} with the same id.`);
  return given.map((one) => Object.fromEntries(fields.map((field) => [field, one[field]])));
}

function withOrder(node, order) {
  return isOrderOf(node, order) ? { ...node, order: order.map(([kind, length]) => [kind, length]) } : node;
}

/** Results follow an answer and belong to its calls. */
function checkResults(nodes, where) {
  const byId = new Map(nodes.map((node) => [node.id, node]));
  nodes.forEach(({ role, parentId, results = [] }, position) => {
    const ids = (byId.get(parentId)?.calls ?? []).map(({ id }) => id);
    if (role === "tool" && !(ids.length && results.every(({ id }) => ids.includes(id)))) {
      throw new Error(`${where}, message ${position + 1} has results of calls that are not above it.`);
    }
  });
}

function textOr(value, otherwise) {
  return typeof value === "string" ? value : otherwise;
}

function numberOr(value, otherwise) {
  return Number.isFinite(value) ? value : otherwise;
}
