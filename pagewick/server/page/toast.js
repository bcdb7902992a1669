// A short message at the lower edge of the page.

import { byId, element } from "./dom.js";

const SHOWN_MS = 8000;

let timer = null;

/** Show a message, with a button if there is a label. It replaces the previous message. */
export function toast(text, label = null, action = null) {
  const button = label && element("button", { type: "button", class: "text-button", click: () => (hide(), action()) }, label);
  show(element("span", {}, text), button);
  timer = setTimeout(hide, SHOWN_MS);
}

/** Show how far a task is. Returns a function to call with the number of parts that are done; toast() ends this. */
export function showProgress(text, total) {
  const bar = element("progress", { max: String(total), value: "0", "aria-label": text });
  const count = element("span", { "aria-hidden": "true" });
  show(element("span", {}, text), bar, count);
  return (done) => {
    bar.value = done;
    count.textContent = `${done.toLocaleString("en")} of ${total.toLocaleString("en")}`;
  };
}

function show(...nodes) {
  clearTimeout(timer);
  byId("toast").replaceChildren(...nodes.filter(Boolean));
  byId("toast").hidden = false;
}

function hide() {
  byId("toast").hidden = true;
}
