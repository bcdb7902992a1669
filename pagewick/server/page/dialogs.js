// The dialogs for settings and for the API key.

import { apiKey } from "./api.js";
import { byId, element, setIcon } from "./dom.js";
import { exampleButton, inputFor, showPlaceholder, showToolNames } from "./fields.js";
import { FIELDS, parseField, problemsIn, textsOf } from "./settings.js";

const SHORTCUTS = [
  ["Enter", "Send"], ["Shift+Enter", "New line"], ["Ctrl+Enter", "Save an edited answer, send results"], ["Esc", "Stop the answer"], ["↑ in an empty box", "Edit the last message"],
  ["Ctrl+Shift+O", "New chat"], ["Ctrl+K", "Search"], ["Ctrl+B", "List of conversations"],
];

const HINTS = {
  all: "For all conversations. Where a conversation has its own, those apply.",
  own: "For this conversation only. What is empty here is as in all conversations.",
};

/**
 * The settings dialog: those of all conversations, and those of the conversation on the screen. It saves each text as it is
 * typed. A wrong one stays, with the error at its field, until it is right; nothing is sent with it.
 */
export class SettingsDialog {
  #scope = "all";
  #texts = {};

  /** stores: {all, own}, each with get() and set(texts) of {name: text}. onChange() is called when the dialog closes. */
  constructor(stores, { onKeyChange, onChange }) {
    Object.assign(this, { stores, onKeyChange, onChange });
    this.dialog = byId("settings");
    this.key = byId("settings-key");
    this.inputs = new Map();
    byId("settings-fields").append(...FIELDS.map((field) => this.#fieldNode(field)));
    byId("shortcuts").append(...SHORTCUTS.flatMap(([keys, what]) => [
      element("dt", {}, ...keysOf(keys)), element("dd", {}, what)]));
    for (const scope of Object.keys(stores)) byId(`scope-${scope}`).addEventListener("change", () => this.#showScope(scope));
    setIcon(byId("close-settings"), "close", "Close the settings");
    byId("close-settings").addEventListener("click", () => this.dialog.close());
    byId("settings-done").addEventListener("click", () => this.#finish());
    byId("reset-settings").addEventListener("click", () => this.#reset());
    byId("settings-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#finish();
    });
    this.dialog.addEventListener("close", () => {
      this.stores[this.#scope].set(this.#texts);
      this.#takeKey();
      this.onChange();
    });
  }

  /** Without a scope, open the conversation's own settings if it has any. With a field, go to it. */
  open(scope = null, field = null) {
    this.key.value = apiKey.get();
    this.#scope = scope ?? (Object.keys(this.stores.own.get()).length ? "own" : "all");
    this.#texts = { ...this.stores[this.#scope].get() };
    this.#show();
    this.dialog.showModal();
    if (field) this.inputs.get(field.name).input.focus();
  }

  #showScope(scope) {
    this.stores[this.#scope].set(this.#texts);
    this.#scope = scope;
    this.#texts = { ...this.stores[scope].get() };
    this.#show();
  }

  #show() {
    byId(`scope-${this.#scope}`).checked = true;
    byId("scope-hint").textContent = HINTS[this.#scope];
    for (const field of FIELDS) {
      const { input } = this.inputs.get(field.name);
      showPlaceholder(field, input, this.#inherited[field.name]);
      input.value = this.#texts[field.name] ?? "";
    }
    this.#checkAll();
  }

  get #inherited() {
    return this.#scope === "own" ? this.stores.all.get() : {};
  }

  #fieldNode(field) {
    const id = `setting-${field.name}`;
    const input = inputFor(field, { id, "aria-describedby": `${id}-hint ${id}-error` });
    const error = element("p", { id: `${id}-error`, class: "field-error", role: "alert" });
    this.inputs.set(field.name, { input, error });
    input.addEventListener("input", () => {
      this.#texts = textsOf({ ...this.#texts, [field.name]: input.value });
      if (this.#scope === "all") this.stores.all.set(this.#texts);
      this.#checkAll();
    });
    // The whole conversation is written: not at every letter.
    input.addEventListener("change", () => this.stores[this.#scope].set(this.#texts));
    return element("div", { class: `field kind-${field.kind}` },
      element("label", { for: id }, field.label), input,
      element("p", { id: `${id}-hint`, class: "hint" }, field.hint), error, field.kind === "tools" ? exampleButton(input) : null);
  }

  /** Check all fields, as the choice of a tool depends on the tools. */
  #checkAll() {
    const texts = { ...this.#inherited, ...this.#texts };
    showToolNames(this.inputs.get("tool_choice").input, texts.tools, this.#texts.tool_choice);
    for (const field of FIELDS) this.#check(field, texts);
  }

  #check(field, texts) {
    const { input, error } = this.inputs.get(field.name);
    try {
      parseField(field, texts);
      if (error.textContent) error.textContent = "";
      input.removeAttribute("aria-invalid");
    } catch ({ message }) {
      // A text that stays the same is not announced again.
      if (error.textContent !== message) error.textContent = message;
      input.setAttribute("aria-invalid", "true");
    }
  }

  /** Close the dialog, or go to the first wrong setting. */
  #finish() {
    const [wrong] = problemsIn({ ...this.#inherited, ...this.#texts });
    if (wrong) this.inputs.get(wrong.field.name).input.focus();
    else this.dialog.close();
  }

  #reset() {
    this.#texts = {};
    this.stores[this.#scope].set({});
    this.#show();
    this.inputs.get(FIELDS[0].name).input.focus();
  }

  #takeKey() {
    const key = this.key.value.trim();
    if (key === apiKey.get()) return;
    apiKey.set(key);
    this.onKeyChange();
  }
}

function keysOf(keys) {
  const [combination, ...rest] = keys.split(" ");
  const nodes = combination.split("+").flatMap((key) => ["+", element("kbd", {}, key)]).slice(1);
  return rest.length ? [...nodes, ` ${rest.join(" ")}`] : nodes;
}

/** Ask the user for the API key. Resolves to whether the user entered one. */
export function askForKey(message) {
  const dialog = byId("key-dialog");
  if (dialog.open) return Promise.resolve(false);
  const box = byId("key");
  box.value = "";
  byId("key-error").textContent = apiKey.get() ? message : "";
  dialog.showModal();
  return new Promise((resolve) => {
    let isGiven = false;
    const listening = new AbortController();
    const { signal } = listening;
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      apiKey.set(box.value.trim());
      isGiven = box.value.trim() !== "";
      dialog.close();
    }, { signal });
    byId("key-cancel").addEventListener("click", () => dialog.close(), { signal });
    dialog.addEventListener("close", () => {
      box.value = "";
      listening.abort();
      resolve(isGiven);
    }, { signal });
  });
}
