// Building and changing DOM nodes. No text is parsed as HTML here.

const SVG = "http://www.w3.org/2000/svg";

/**
 * Create an element. A function among the properties is an event listener (`click`, `input`), a boolean sets or omits an
 * attribute, null and undefined are ignored, and any other value is an attribute. Children are nodes or text.
 */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined) continue;
    if (typeof value === "function") made.addEventListener(name, value);
    else if (typeof value === "boolean") made.toggleAttribute(name, value);
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** Make `shown` equal to `fresh`, reusing every node that has not changed. Returns the resulting node: `shown`, or `fresh` in its place. */
export function patch(shown, fresh) {
  if (shown.isEqualNode(fresh)) return shown;
  if (!shown.cloneNode().isEqualNode(fresh.cloneNode())) {
    shown.replaceWith(fresh);
    return fresh;
  }
  const children = [...fresh.childNodes];
  while (shown.childNodes.length > children.length) shown.lastChild.remove();
  [...shown.childNodes].forEach((child, index) => patch(child, children[index]));
  shown.append(...children.slice(shown.childNodes.length));
  return shown;
}

export function byId(id) {
  return document.getElementById(id);
}

// Paths on a grid of 24 by 24, drawn as strokes.
const ICONS = {
  plus: "M12 5v14M5 12h14",
  search: "M11 4a7 7 0 1 0 0 14 7 7 0 0 0 0-14M16 16l4.5 4.5",
  pencil: "M4 20l.8-4L16 4.8a1.7 1.7 0 0 1 2.4 0l.8.8a1.7 1.7 0 0 1 0 2.4L8 19.2zM14 7l3 3",
  trash: "M4.5 7h15M9.5 7V4.5h5V7M6.5 7l.8 12.5h9.4L17.5 7M10 11v5M14 11v5",
  copy: "M9 9h10.5v10.5H9zM15 9V4.5H4.5V15H9",
  check: "M5 12.5l4.5 4.5L19 7.5",
  again: "M19.5 12a7.5 7.5 0 1 1-2.2-5.3L19.5 9M19.5 4v5h-5",
  attach: "M19.5 11.5l-7.3 7.3a4.6 4.6 0 0 1-6.5-6.5l7.6-7.6a3.1 3.1 0 0 1 4.4 4.4l-7.5 7.5a1.6 1.6 0 0 1-2.2-2.2l6.8-6.8",
  link: "M9.8 14.2l4.4-4.4M11 7.6l2.2-2.2a3.8 3.8 0 0 1 5.4 5.4L16.4 13M7.6 11l-2.2 2.2a3.8 3.8 0 0 0 5.4 5.4L13 16.4",
  export: "M12 4v11M7 10.5l5 5 5-5M5 19.5h14",
  more: "M5.5 11.3a.7.7 0 1 0 0 1.4.7.7 0 0 0 0-1.4M12 11.3a.7.7 0 1 0 0 1.4.7.7 0 0 0 0-1.4M18.5 11.3a.7.7 0 1 0 0 1.4.7.7 0 0 0 0-1.4",
  info: "M12 3.5a8.5 8.5 0 1 0 0 17 8.5 8.5 0 0 0 0-17M12 11v5.5M12 7.5v.2",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M8 8h8v8H8z",
  sidebar: "M4 5h16v14H4zM9.5 5v14",
  sliders: "M4 7h9M17 7h3M4 17h3M11 17h9M15 4.5v5M9 14.5v5",
  left: "M14.5 6l-6 6 6 6",
  right: "M9.5 6l6 6-6 6",
  down: "M12 5v14M6 13l6 6 6-6",
  tool: "M14.9 6.2a4.2 4.2 0 0 0-5.6 5.3L4.4 16.4a2.2 2.2 0 0 0 3.2 3.2l4.9-4.9a4.2 4.2 0 0 0 5.3-5.6l-2.7 2.7-2.4-.5-.5-2.4z",
  reply: "M9.5 7L4.5 12l5 5M4.5 12h9a6 6 0 0 1 6 6",
  close: "M6 6l12 12M18 6L6 18",
  light: "M12 8.2a3.8 3.8 0 1 0 0 7.6 3.8 3.8 0 0 0 0-7.6M12 3v1.5M12 19.5V21M3 12h1.5M19.5 12H21M5.6 5.6l1.1 1.1M17.3 17.3l1.1 1.1M18.4 5.6l-1.1 1.1M6.7 17.3l-1.1 1.1",
  dark: "M19.5 14.2A8 8 0 0 1 9.8 4.5a8 8 0 1 0 9.7 9.7z",
  system: "M4 5h16v11H4zM9 20h6M12 16v4",
  warning: "M12 4.5L3 19.5h18zM12 10.5v4M12 17v.2",
};

/** An icon. Screen readers skip it, as the text or the accessible name beside it says the same. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  for (const [key, value] of Object.entries({ viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true" })) {
    svg.setAttribute(key, value);
  }
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** A button that shows only an icon. The label is its accessible name and its tooltip. */
export function iconButton(name, label, onClick, properties = {}) {
  return element("button", {
    type: "button", class: "icon-button", "aria-label": label, title: label, click: onClick, ...properties,
  }, icon(name));
}

export function setIcon(button, name, label) {
  button.replaceChildren(icon(name));
  button.setAttribute("aria-label", label);
  button.title = label;
}

/** Let screen readers announce a text. It replaces the previous one. */
export function announce(text) {
  byId("announcer").textContent = text;
}

/** Copy a text to the clipboard and confirm it on the button. */
export async function copy(text, button) {
  const label = button.getAttribute("aria-label");
  if (!(await copyText(text))) {
    announce("The browser did not let the page copy this.");
    return;
  }
  setIcon(button, "check", label);
  announce("Copied.");
  setTimeout(() => setIcon(button, "copy", label), 1500);
}

/** Copy a text to the clipboard. Returns whether the browser allowed it. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Browsers offer navigator.clipboard only over HTTPS and on localhost.
    return copyBySelection(text);
  }
}

function copyBySelection(text) {
  const before = document.activeElement;
  const box = element("textarea", { class: "visually-hidden", "aria-hidden": "true" });
  box.value = text;
  document.body.append(box);
  box.select();
  const isDone = document.execCommand("copy");
  box.remove();
  before?.focus();
  return isDone;
}
