// Images that are attached to a message: {name, image}, where image is a data: address. They are scaled down before they are kept.

import { element, iconButton } from "./dom.js";

// Models scale larger images down themselves.
const MAX_SIDE = 2048;
const MAX_BYTES = 50 * 1024 ** 2;
// Above this, an image without loss becomes a JPEG: conversations are kept whole, and sent whole with each message.
const MAX_LOSSLESS_BYTES = 1024 ** 2;
const QUALITY = 0.9;
const MAX_IMAGES = 16;
// The browser decodes every other kind of image into pixels. SVG is a text.
const IMAGE = /^image\/(?!svg)/;
const ADDRESS = /^data:image\/(?:png|jpeg|webp|gif|bmp);base64,[A-Za-z0-9+/]+={0,2}$/;

export function isImage({ type }) {
  return IMAGE.test(type);
}

/** Whether a value of a file that is imported is the address of an image. */
export function isImageAddress(value) {
  return typeof value === "string" && ADDRESS.test(value);
}

/** Throws an Error whose message is shown to the user if a message would have too many images. */
export function checkCount(files) {
  const count = files.filter(({ image }) => image).length;
  if (count > MAX_IMAGES) throw new Error(`A message may have ${MAX_IMAGES} images; these are ${count}.`);
}

/** Read an image as {name, image}, scaled down. Throws an Error whose message is shown to the user. */
export async function readImage(file, name) {
  if (file.size > MAX_BYTES) throw new Error(`${name} is too large; an image may have up to ${MAX_BYTES / 1024 ** 2} MiB.`);
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error(`${name} could not be read as an image. The browser knows no such format, or the file is damaged.`);
  }
  const canvas = drawn(bitmap);
  bitmap.close();
  const lossless = file.type === "image/jpeg" ? null : await encoded(canvas, "image/png");
  const isSmall = lossless !== null && lossless.size <= MAX_LOSSLESS_BYTES;
  return { name, image: await addressOf(isSmall ? lossless : await encoded(onWhite(canvas), "image/jpeg")) };
}

function drawn(bitmap) {
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = canvasOf(Math.max(1, Math.round(bitmap.width * scale)), Math.max(1, Math.round(bitmap.height * scale)));
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas;
}

/** A JPEG has no transparency, which would become black. */
function onWhite(canvas) {
  const made = canvasOf(canvas.width, canvas.height);
  const context = made.getContext("2d");
  context.fillStyle = "white";
  context.fillRect(0, 0, made.width, made.height);
  context.drawImage(canvas, 0, 0);
  return made;
}

function canvasOf(width, height) {
  return Object.assign(document.createElement("canvas"), { width, height });
}

function encoded(canvas, type) {
  return new Promise((resolve, reject) => {
    canvas.toBlob((blob) => (blob ? resolve(blob) : reject(new Error("The browser could not encode this image."))), type, QUALITY);
  });
}

function addressOf(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("The browser could not read this image."));
    reader.readAsDataURL(blob);
  });
}

/** Return the view of an attached image. With onRemove it is small and has a button that calls it. */
export function imageView({ name, image }, onRemove = null) {
  const picture = element("img", { class: "picture", src: image, alt: name, title: name });
  if (!onRemove) return picture;
  return element("div", { class: "draft-file" }, picture, iconButton("close", `Remove ${name}`, onRemove, { class: "icon-button small" }));
}
