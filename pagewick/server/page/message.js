// The view of a question, and what questions and answers have in common.

import { copy, element, iconButton } from "./dom.js";
import { startEditing } from "./editor.js";
import { fileView } from "./files.js";

/** A question. actions: {edit(node, text), select(node)}. edit returns whether it accepted the text. */
export class QuestionView {
  constructor(node, actions) {
    this.node = node;
    this.actions = actions;
    this.body = element("div", { class: "bubble", hidden: !node.content }, node.content);
    this.foot = element("div", { class: "actions" });
    this.element = element("article", { class: "message question" },
      element("h2", { class: "visually-hidden" }, "You"), ...(node.files ?? []).map((file) => fileView(file)), this.body, this.foot);
  }

  /** Show another copy of the message. */
  adopt(node) {
    this.node = node;
  }

  update({ siblings, isBusy }) {
    const button = iconButton("copy", "Copy the message", () => copy(this.node.content, button));
    this.foot.replaceChildren(
      ...branchButtons(this.node, siblings, this.actions.select),
      button,
      iconButton("pencil", "Edit the message", () => this.startEditing(), { class: "icon-button edit", disabled: isBusy }),
    );
  }

  startEditing() {
    startEditing(this, {
      label: "Edit the message", doneLabel: "Send", isShort: true, onDone: (text) => this.actions.edit(this.node, text),
    });
  }
}

/** Return the buttons "‹ 2/3 ›" if a message has several versions. */
export function branchButtons(node, siblings, select) {
  if (siblings.length < 2) return [];
  const at = siblings.indexOf(node);
  const step = (name, label, target) =>
    iconButton(name, label, () => select(target), { disabled: !target, class: `icon-button ${name}` });
  const count = element("span", { class: "branch-count" },
    element("span", { "aria-hidden": "true" }, `${at + 1}/${siblings.length}`),
    element("span", { class: "visually-hidden" }, `Version ${at + 1} of ${siblings.length}`));
  return [step("left", "Previous version", siblings[at - 1]), count, step("right", "Next version", siblings[at + 1])];
}
