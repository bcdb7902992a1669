// The messages that the model reads before it answers, in the form of the API.

import { completeCalls, NO_RESULT, resultOf } from "./calls.js";
import { fullText } from "./text.js";
import { find } from "./tree.js";

/**
 * Return the messages above `answer`, without failed and empty responses. Each call in them has a result. A model that reads text
 * only gets the names of images.
 */
export function historyBefore(conversation, answer, readsImages) {
  const path = [];
  for (let node = find(conversation, answer.parentId); node; node = find(conversation, node.parentId)) path.unshift(node);
  const lastQuestion = path.findLastIndex(({ role }) => role === "user");
  return path.flatMap((node, index) => messagesOf(node, path[index + 1], { isInTurn: index > lastQuestion, readsImages }));
}

/** Return an answer as the message that the model is to continue. */
export function messageToContinue({ content, reasoning }) {
  return { role: "assistant", content, ...thoughts(reasoning) };
}

/** Results stand behind their calls. A model that goes on after results reads the thoughts that led to its calls. */
function messagesOf(node, next, { isInTurn, readsImages }) {
  if (node.role === "tool") return [];
  if (node.role === "user") return [{ role: "user", content: readsImages ? contentOf(node) : fullText(node) }];
  const calls = completeCalls(node);
  if (!calls.length) return node.content ? [{ role: "assistant", content: node.content }] : [];
  const toolCalls = calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text || "{}" } }));
  return [
    { role: "assistant", content: node.content || null, ...(isInTurn && thoughts(node.reasoning)), tool_calls: toolCalls },
    ...calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: resultOf(call, next) ?? NO_RESULT })),
  ];
}

/** Images come before the text, as the models were trained. */
function contentOf(node) {
  const images = (node.files ?? []).filter(({ image }) => image);
  const text = fullText(node, () => "");
  if (!images.length) return text;
  const parts = images.map(({ image }) => ({ type: "image_url", image_url: { url: image } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

function thoughts(reasoning) {
  return reasoning && { reasoning_content: reasoning };
}
