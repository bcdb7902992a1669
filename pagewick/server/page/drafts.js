// Messages and results of calls that are being written. They stay when the page is reloaded.

import { readPreference, writePreference } from "./preferences.js";

// Images are larger than what a browser keeps of such texts: they stay until the page is closed.
const images = new Map();

const nameOf = (id) => `draft.${id ?? "new"}`;

/** Return the draft of a conversation (null: of a new one): {text, files}. */
export function readDraft(id) {
  try {
    const { text, files } = JSON.parse(readPreference(nameOf(id)) ?? "{}");
    return { text: String(text ?? ""), files: [...(Array.isArray(files) ? files : []), ...(images.get(id) ?? [])] };
  } catch {
    return { text: "", files: images.get(id) ?? [] };
  }
}

/** Keep a draft; an empty one is removed. */
export function writeDraft(id, { text, files }) {
  images.set(id, files.filter(({ image }) => image));
  const texts = files.filter(({ image }) => !image);
  const isEmpty = !text.trim() && !texts.length;
  writePreference(nameOf(id), isEmpty ? null : JSON.stringify({ text, files: texts }));
}

/** Return the results that the user has typed for the calls of an answer and not sent: {id of the call: text}. */
export function readResults(nodeId) {
  try {
    return JSON.parse(readPreference(nameOf(nodeId)) ?? "{}");
  } catch {
    return {};
  }
}

export function writeResults(nodeId, texts) {
  const typed = Object.entries(texts).filter(([, text]) => text.trim());
  writePreference(nameOf(nodeId), typed.length ? JSON.stringify(Object.fromEntries(typed)) : null);
}
