// Editing the text of a message in its place.

import { element } from "./dom.js";

/**
 * Replace view.body by a text box until the user is done. onDone(text) returns whether it accepted the text. Enter is done if
 * `isShort`; in long texts it begins a line, and Ctrl+Enter is done.
 */
export function startEditing(view, { label, doneLabel, isShort, onDone }) {
  if (view.editor) return;
  const box = element("textarea", { class: "editor", "aria-label": label, rows: isShort ? "3" : "8" });
  box.value = view.node.content;
  const leave = () => {
    view.editor.replaceWith(view.body);
    view.editor = null;
    view.foot.hidden = false;
    view.foot.querySelector(".edit")?.focus();
  };
  const finish = () => {
    const text = box.value.trim();
    if (!text || text === view.node.content.trim() || onDone(text)) leave();
  };
  box.addEventListener("keydown", (event) => {
    const isDone = event.key === "Enter" && !event.isComposing && (isShort ? !event.shiftKey : event.ctrlKey || event.metaKey);
    if (event.key === "Escape") leave();
    else if (isDone) finish();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  view.editor = element("div", { class: "editing" }, box, element("div", { class: "editing-foot" },
    element("button", { type: "button", class: "button", click: leave }, "Cancel"),
    element("button", { type: "button", class: "button primary", click: finish }, doneLabel)));
  view.body.replaceWith(view.editor);
  view.foot.hidden = true;
  box.focus();
  box.setSelectionRange(box.value.length, box.value.length);
  view.editor.scrollIntoView({ block: "nearest" });
}
