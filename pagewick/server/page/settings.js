// The system prompt and the sampling parameters. Those of a conversation come before those of all conversations; the server's
// defaults apply to what is empty in both.

import { readPreference, writePreference } from "./preferences.js";
import { parseToolChoice, parseTools, toolNames } from "./tools.js";

const NAME = "settings";
const MAX_STOP_STRINGS = 16;
const MAX_INTEGER = 2 ** 31;

/** kind: text, number, integer, lines (a list of strings), choice (on, off), tools or tool_choice. Names and limits are the API's. */
export const FIELDS = [
  { name: "system_prompt", label: "System prompt", kind: "text", hint: "Stands before the first message." },
  { name: "temperature", label: "Temperature", kind: "number", min: 0, max: 2, hint: "0 always takes the likeliest token." },
  { name: "top_p", label: "Top p", kind: "number", min: 0.01, max: 1, hint: "Tokens that together have this probability." },
  { name: "top_k", label: "Top k", kind: "integer", min: 1, max: MAX_INTEGER, hint: "Only the k likeliest tokens." },
  { name: "min_p", label: "Min p", kind: "number", min: 0, max: 1, hint: "Relative to the likeliest token." },
  { name: "repetition_penalty", label: "Repetition penalty", kind: "number", min: 0.01, max: 10, hint: "Above 1 avoids repetition." },
  { name: "max_tokens", label: "Max tokens", kind: "integer", min: 1, max: MAX_INTEGER, hint: "The longest answer." },
  { name: "seed", label: "Seed", kind: "integer", min: 0, max: Number.MAX_SAFE_INTEGER, hint: "Makes a sample repeatable." },
  { name: "thinking", label: "Thinking", kind: "choice", hint: "For models that can think before they answer." },
  { name: "stop", label: "Stop strings", kind: "lines", hint: "One per line; \\n is a line break. The answer ends before the first that appears." },
  { name: "tools", label: "Tools (JSON)", kind: "tools", hint: "A list of functions with name, description and parameters, a JSON schema; or OpenAI's list. You type the results of their calls. [] means none." },
  { name: "tool_choice", label: "Tool choice", kind: "tool_choice", hint: "Required, and a single function, hold for the answer to a message. After results, the model is free." },
];

/** Parse a field's text among the texts of all fields; null if it is empty. Throws an Error whose message is shown to the user. */
export function parseField(field, texts) {
  const text = texts[field.name] ?? "";
  const trimmed = text.trim();
  if (trimmed === "") return null;
  switch (field.kind) {
    case "text": return text;
    case "choice": return trimmed === "on" || trimmed === "off" ? trimmed : null;
    case "lines": return parseLines(field, text);
    case "tools": return parseTools(text);
    case "tool_choice": return parseToolChoice(trimmed, toolNames(texts.tools ?? ""));
    default: return parseNumber(field, trimmed);
  }
}

function parseLines({ label }, text) {
  const lines = text.split("\n").filter((line) => line !== "");
  if (lines.length > MAX_STOP_STRINGS) throw new Error(`${label} must be at most ${MAX_STOP_STRINGS}; these are ${lines.length}.`);
  return lines.join("\n");
}

function parseNumber({ label, kind, min, max }, text) {
  const value = Number(text);
  if (!Number.isFinite(value)) throw new Error(`${label} must be a number.`);
  if (kind === "integer" && !Number.isSafeInteger(value)) throw new Error(`${label} must be a whole number.`);
  if (value >= min && value <= max) return value;
  throw new Error(max < MAX_INTEGER ? `${label} must be ${min} to ${max}.` : `${label} must be ${min} or more.`);
}

/** Return what is wrong with the texts of the fields: [{field, message}]. */
export function problemsIn(texts) {
  return FIELDS.flatMap((field) => {
    try {
      parseField(field, texts);
      return [];
    } catch ({ message }) {
      return [{ field, message }];
    }
  });
}

/** Return the texts of all known fields that are not empty. They may be wrong, which the page shows at the field. */
export function textsOf(given) {
  return Object.fromEntries(FIELDS.map(({ name }) => [name, String(given?.[name] ?? "")]).filter(([, text]) => text.trim()));
}

/** Load the settings of all conversations: {name: text}. */
export function loadSettings() {
  try {
    return textsOf(JSON.parse(readPreference(NAME) ?? "{}"));
  } catch {
    return {};
  }
}

export function saveSettings(texts) {
  writePreference(NAME, Object.keys(texts).length ? JSON.stringify(texts) : null);
}

/** Return the body of a chat completion request. `continued` is the message that the model continues, or null. */
export function requestBody(model, messages, texts, continued = null) {
  const values = FIELDS.map((field) => [field.name, parseField(field, texts)]).filter(([, value]) => value !== null);
  const { system_prompt: systemPrompt, thinking, stop, tools, tool_choice: choice, ...sampling } = Object.fromEntries(values);
  return {
    model,
    messages: [...(systemPrompt ? [{ role: "system", content: systemPrompt }] : []), ...messages, ...(continued ? [continued] : [])],
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    ...sampling,
    ...(stop && { stop: stop.split("\n").map(unescape) }),
    ...(thinking && { chat_template_kwargs: { enable_thinking: thinking === "on" } }),
    ...(tools?.length && { tools, ...(choice && { tool_choice: isForced(choice) && messages.at(-1)?.role === "tool" ? "auto" : choice }) }),
    ...(continued && { continue_final_message: true }),
  };
}

/** A forced call after each result would never end. */
function isForced(choice) {
  return choice !== "auto" && choice !== "none";
}

function unescape(line) {
  return line.replace(/\\([nt\\])/g, (_, letter) => ({ n: "\n", t: "\t", "\\": "\\" })[letter]);
}
