// Files that are attached to a message, texts and images: reading them, and their view.

import { element, iconButton } from "./dom.js";
import { checkCount, imageView, isImage, readImage } from "./images.js";

const MAX_BYTES = 512 * 1024;
const MAX_TOTAL_BYTES = 1024 * 1024;
const MAX_NAME = 120;

/**
 * Read files as [{name, text} or {name, image}]. `present` are those that the message has already. Throws an Error whose message is
 * shown to the user.
 */
export async function readFiles(files, present, { readsImages }) {
  const read = [];
  for (const file of files) read.push(await contentOf(file, readsImages));
  checkCount([...present, ...read]);
  const total = [...present, ...read].reduce((sum, { text = "" }) => sum + bytesOf(text), 0);
  if (total > MAX_TOTAL_BYTES) {
    throw new Error(`Together, the files of a message may have ${sizeOf(MAX_TOTAL_BYTES)}; these have ${sizeOf(total)}.`);
  }
  return read;
}

async function contentOf(file, readsImages) {
  const name = file.name.slice(-MAX_NAME);
  if (!isImage(file)) return { name: name || "pasted.txt", text: await textIn(file) };
  if (!readsImages) throw new Error(`${name || "This"} is an image, and the model reads text only.`);
  return readImage(file, name || "pasted image");
}

async function textIn(file) {
  const name = file.name || "This file";
  if (file.size > MAX_BYTES) throw new Error(`${name} has ${sizeOf(file.size)}; a file may have up to ${sizeOf(MAX_BYTES)}.`);
  let bytes;
  try {
    bytes = new Uint8Array(await file.arrayBuffer());
  } catch {
    throw new Error(`${name} could not be read. Folders cannot be attached.`);
  }
  const text = decoded(bytes);
  if (text === null) throw new Error(`${name} is not a text file (UTF-8 or UTF-16). Only text can be attached.`);
  if (!text.trim()) throw new Error(`${name} is empty.`);
  return text;
}

/** Decode UTF-8, or UTF-16 with a byte order mark. Returns null for anything else. */
function decoded(bytes) {
  const encoding = { "255,254": "utf-16le", "254,255": "utf-16be" }[bytes.slice(0, 2).join()] ?? "utf-8";
  try {
    const text = new TextDecoder(encoding, { fatal: true }).decode(bytes);
    // Text has no control characters besides white space and the escape of terminal colours.
    return /[\0-\x08\x0e-\x1a\x1c-\x1f]/.test(text) ? null : text;
  } catch {
    return null;
  }
}

function bytesOf(text) {
  return new Blob([text]).size;
}

export function sizeOf(bytes) {
  if (bytes < 1024) return `${bytes} bytes`;
  const [size, unit] = bytes < 1024 ** 2 ? [bytes / 1024, "KiB"] : [bytes / 1024 ** 2, "MiB"];
  return `${size < 10 && !Number.isInteger(size) ? size.toFixed(1) : Math.round(size)} ${unit}`;
}

/** Return the view of an attached file: an image, or a text that can be unfolded. With onRemove it has a button that calls it. */
export function fileView(file, onRemove = null) {
  if (file.image) return imageView(file, onRemove);
  const { name, text } = file;
  const content = element("pre", { tabindex: "0", role: "group", "aria-label": name });
  const fill = ({ target }) => {
    if (target.open && !content.firstChild) content.append(text);
  };
  const summary = element("summary", {}, element("span", { class: "file-name" }, name), element("span", { class: "quiet" }, ` ${sizeOf(bytesOf(text))}`));
  const details = element("details", { class: "file", toggle: fill }, summary, content);
  if (!onRemove) return details;
  return element("div", { class: "draft-file" }, details, iconButton("close", `Remove ${name}`, onRemove, { class: "icon-button small" }));
}
