// The results of an answer's calls: the fields in which the user types them, and the folded results that were sent.

import { completeCalls, NO_RESULT, resultOf } from "./calls.js";
import { element } from "./dom.js";
import { readResults, writeResults } from "./drafts.js";
import { FoldedCode } from "./folded.js";
import { branchButtons } from "./message.js";

const EMPTY = "Type the result of this call. For a tool that returns nothing, type null.";

export class Results {
  element = element("div", { class: "results-foot" });
  // The fields by the ids of their calls, while results are typed.
  #fields = null;
  #isEditing = false;
  #shown = "";

  /** actions: {sendResults(node, texts), select(node)}. sendResults returns whether it accepted the results. */
  constructor(node, actions) {
    Object.assign(this, { node, actions, views: [] });
  }

  /** Show what belongs to the calls. next: the message below the answer, or null; nextSiblings: its versions. */
  update({ views, next, nextSiblings, isWriting, isBusy }) {
    const complete = completeCalls(this.node);
    const before = this.views;
    Object.assign(this, { views: views.filter(({ call }) => complete.includes(call)), next, nextSiblings, isBusy });
    const state = !this.views.length || isWriting ? "none" : !next || this.#isEditing ? "fields" : `sent ${next.id}`;
    const isNew = state !== this.#shown || this.views.some((view, index) => view !== before[index]);
    this.#shown = state;
    if (state === "fields") this.#showFields(isNew);
    else this.#showSent(state === "none", isNew);
  }

  /** Focus the first field that is empty, or else the first one. Returns whether there is one. */
  focus() {
    const fields = [...(this.#fields?.values() ?? [])];
    const field = fields.find(({ box }) => !box.value.trim()) ?? fields[0];
    field?.box.focus();
    return Boolean(field);
  }

  #showFields(isNew) {
    if (isNew) {
      const texts = this.next ? Object.fromEntries(this.views.map(({ call }) => [call.id, resultOf(call, this.next) ?? ""])) : readResults(this.node.id);
      this.#fields = new Map(this.views.map((view, index) => [view.call.id, this.#field(view, index, texts[view.call.id] ?? "")]));
    }
    const label = this.views.length === 1 ? "Send the result" : "Send the results";
    const button = element("button", { type: "button", class: "button primary", disabled: this.isBusy, click: () => this.#send() }, label);
    this.element.replaceChildren(...(this.#isEditing
      ? [element("button", { type: "button", class: "button", click: () => this.#leave() }, "Cancel"), button]
      : [button, element("p", { class: "hint" }, "Or send a message: calls without a result are then answered with “No result was given.”")]));
  }

  #field(view, index, text) {
    const { id, name } = view.call;
    const label = this.views.length === 1 ? `Result of ${name}` : `Result of call ${index + 1}, ${name}`;
    const [boxId, errorId] = [`result-${this.node.id}-${index}`, `result-error-${this.node.id}-${index}`];
    const box = element("textarea", {
      id: boxId, rows: "1", spellcheck: "false", autocomplete: "off", placeholder: "JSON or text", "aria-describedby": errorId,
      input: () => this.#keep(),
      keydown: (event) => this.#key(event),
    });
    box.value = text;
    const error = element("p", { id: errorId, class: "field-error", role: "alert" });
    view.result.replaceChildren(element("div", { class: "field" }, element("label", { for: boxId }, label), box, error));
    return { id, box, error };
  }

  get #texts() {
    return Object.fromEntries([...this.#fields].map(([id, { box }]) => [id, box.value]));
  }

  #keep() {
    if (!this.#isEditing) writeResults(this.node.id, this.#texts);
    for (const { box, error } of this.#fields.values()) if (box.value.trim()) mark(box, error, "");
  }

  #key(event) {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.#send();
    else if (event.key === "Escape" && this.#isEditing) this.#leave();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /** Send the results if each call has one; else show where one is missing. */
  #send() {
    if (this.isBusy) return;
    const missing = [...this.#fields.values()].filter(({ box }) => !box.value.trim());
    for (const { box, error } of missing) mark(box, error, EMPTY);
    if (missing.length) {
      missing[0].box.focus();
      return;
    }
    const texts = this.#texts;
    const wasEditing = this.#isEditing;
    if (wasEditing && this.views.every(({ call }) => texts[call.id] === resultOf(call, this.next))) {
      this.#leave();
      return;
    }
    // This comes first, because sending shows the answer again.
    this.#isEditing = false;
    if (!this.actions.sendResults(this.node, texts)) this.#isEditing = wasEditing;
  }

  #leave() {
    this.#isEditing = false;
    this.#refresh();
    this.element.querySelector(".edit")?.focus();
  }

  #edit() {
    this.#isEditing = true;
    this.#refresh();
    this.focus();
  }

  #refresh() {
    this.update({ ...this, isWriting: false });
  }

  #showSent(isNone, isNew) {
    this.#fields = null;
    if (isNew) for (const { result, call } of this.views) result.replaceChildren(...(isNone ? [] : [sentNode(resultOf(call, this.next))]));
    const label = this.next?.role === "tool" ? "Edit the results" : "Give results";
    this.element.replaceChildren(...(isNone ? [] : [
      ...(this.next.role === "tool" ? branchButtons(this.next, this.nextSiblings, this.actions.select) : []),
      element("button", { type: "button", class: "text-button edit", disabled: this.isBusy, click: () => this.#edit() }, label),
    ]));
  }
}

function sentNode(content) {
  if (content === null) return element("p", { class: "hint" }, NO_RESULT);
  const folded = new FoldedCode("reply", "returned");
  folded.update({ title: "Result", text: content });
  return folded.element;
}

function mark(box, error, message) {
  error.textContent = message;
  if (message) box.setAttribute("aria-invalid", "true");
  else box.removeAttribute("aria-invalid");
}
