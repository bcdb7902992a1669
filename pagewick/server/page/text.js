// Messages as Markdown: what the model reads of a question, and what the clipboard and an export get.

import { resultOf } from "./calls.js";
import { prettyJson } from "./json.js";
import { partsOf } from "./parts.js";

/** Return the Markdown of a question: its files as code blocks, then its text. A model reads it in this form. imageText(file) stands for an image. */
export function fullText({ content, files = [] }, imageText = ({ name }) => `[Image: ${name}]`) {
  return [...files.map((file) => (file.image ? imageText(file) : fileText(file))), content].filter(Boolean).join("\n\n");
}

function fileText({ name, text }) {
  return `${name}:\n${fenced(text, /\.(\w{1,12})$/.exec(name)?.[1] ?? "")}`;
}

/** Return the Markdown of an answer without its thoughts, with its calls and their results, which `next` may hold. */
export function answerText(node, next) {
  if (!node.calls?.length) return node.content;
  const parts = partsOf(node).filter(({ kind }) => kind !== "reasoning");
  return parts.map(({ text, call }) => (call ? callText(call, next) : text.trim())).filter(Boolean).join("\n\n");
}

function callText(call, next) {
  const result = resultOf(call, next);
  return [`Call of ${call.name}:`, jsonBlock(call.arguments), ...(result === null ? [] : ["Result:", jsonBlock(result)])].join("\n\n");
}

function jsonBlock(text) {
  const pretty = prettyJson(text);
  return fenced(pretty ?? text, pretty === null ? "" : "json");
}

/** Return a code block whose fence is longer than any in the text. */
function fenced(text, language) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${language}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
}
