// The system prompt and the sampling parameters. The server's defaults apply to empty ones.

import { readPreference, writePreference } from "./preferences.js";

const NAME = "settings";

/** kind: text, number, integer, lines (a list of strings) or choice (on, off). The names are those of the API. */
export const FIELDS = [
  { name: "system_prompt", label: "System prompt", kind: "text", hint: "Stands before every conversation." },
  { name: "temperature", label: "Temperature", kind: "number", min: 0, max: 2, step: 0.05, hint: "0 always takes the likeliest token." },
  { name: "top_p", label: "Top p", kind: "number", min: 0.01, max: 1, step: 0.01, hint: "Tokens that together have this probability." },
  { name: "top_k", label: "Top k", kind: "integer", min: 1, hint: "Only the k likeliest tokens." },
  { name: "min_p", label: "Min p", kind: "number", min: 0, max: 1, step: 0.01, hint: "Relative to the likeliest token." },
  { name: "repetition_penalty", label: "Repetition penalty", kind: "number", min: 0.01, max: 2, step: 0.01, hint: "Above 1 avoids repetition." },
  { name: "max_tokens", label: "Max tokens", kind: "integer", min: 1, hint: "The longest answer." },
  { name: "seed", label: "Seed", kind: "integer", min: 0, max: Number.MAX_SAFE_INTEGER, hint: "Makes a sample repeatable." },
  { name: "thinking", label: "Thinking", kind: "choice", hint: "For models that can think before they answer." },
  { name: "stop", label: "Stop strings", kind: "lines", hint: "One per line; \\n is a line break. The answer ends before the first that appears." },
];

/** Parse a field's text; null if it is empty. Throws an Error whose message is shown to the user. */
export function parseField(field, text) {
  const trimmed = text.trim();
  if (trimmed === "") return null;
  switch (field.kind) {
    case "text": return text;
    case "choice": return trimmed === "on" || trimmed === "off" ? trimmed : null;
    case "lines": return text.split("\n").filter((line) => line !== "").join("\n");
  }
  const value = Number(trimmed);
  if (!Number.isFinite(value)) throw new Error(`${field.label} must be a number.`);
  if (field.kind === "integer" && !Number.isSafeInteger(value)) throw new Error(`${field.label} must be a whole number.`);
  const { min = -Infinity, max = Infinity } = field;
  if (value < min || value > max) {
    throw new Error(max === Infinity || max === Number.MAX_SAFE_INTEGER
      ? `${field.label} must be ${min} or more.` : `${field.label} must be ${min} to ${max}.`);
  }
  return value;
}

/** Load the settings: {name: value}. Unknown names and invalid values, perhaps of an older version, are ignored. */
export function loadSettings() {
  let stored;
  try {
    stored = JSON.parse(readPreference(NAME) ?? "{}");
  } catch {
    stored = {};
  }
  const settings = {};
  for (const field of FIELDS) {
    try {
      const value = parseField(field, String(stored?.[field.name] ?? ""));
      if (value !== null) settings[field.name] = value;
    } catch {
      // Invalid: treated as empty.
    }
  }
  return settings;
}

export function saveSettings(settings) {
  writePreference(NAME, Object.keys(settings).length ? JSON.stringify(settings) : null);
}

/** Return the body of a chat completion request. */
export function requestBody(model, messages, settings) {
  const { system_prompt: systemPrompt, thinking, stop, ...sampling } = settings;
  return {
    model,
    messages: systemPrompt ? [{ role: "system", content: systemPrompt }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
    ...sampling,
    ...(stop && { stop: stop.split("\n").map(unescape) }),
    ...(thinking && { chat_template_kwargs: { enable_thinking: thinking === "on" } }),
  };
}

function unescape(line) {
  return line.replace(/\\([nt\\])/g, (_, letter) => ({ n: "\n", t: "\t", "\\": "\\" })[letter]);
}
