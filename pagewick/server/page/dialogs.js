// The dialogs for settings and for the API key.

import { apiKey } from "./api.js";
import { byId, element, setIcon } from "./dom.js";
import { FIELDS, parseField, saveSettings } from "./settings.js";

const SHORTCUTS = [
  ["Enter", "Send"], ["Shift+Enter", "New line"], ["Esc", "Stop the answer"], ["↑ in an empty box", "Edit the last message"],
  ["Ctrl+Shift+O", "New chat"], ["Ctrl+K", "Search"], ["Ctrl+B", "List of conversations"],
];

/** The settings dialog. It saves each value as it is typed, and shows an error instead of saving an invalid value. */
export class SettingsDialog {
  constructor(settings, onKeyChange) {
    this.settings = settings;
    this.onKeyChange = onKeyChange;
    this.dialog = byId("settings");
    this.key = byId("settings-key");
    this.inputs = new Map();
    byId("settings-fields").append(...FIELDS.map((field) => this.#fieldNode(field)));
    byId("shortcuts").append(...SHORTCUTS.flatMap(([keys, what]) => [
      element("dt", {}, ...keysOf(keys)), element("dd", {}, what)]));
    setIcon(byId("close-settings"), "close", "Close the settings");
    byId("close-settings").addEventListener("click", () => this.dialog.close());
    byId("settings-done").addEventListener("click", () => this.dialog.close());
    byId("reset-settings").addEventListener("click", () => this.#reset());
    byId("settings-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.dialog.close();
    });
    this.dialog.addEventListener("close", () => this.#takeKey());
  }

  open() {
    for (const field of FIELDS) this.#show(field);
    this.key.value = apiKey.get();
    this.dialog.showModal();
  }

  #fieldNode(field) {
    const id = `setting-${field.name}`;
    const input = inputFor(field, { id, "aria-describedby": `${id}-hint ${id}-error` });
    const error = element("p", { id: `${id}-error`, class: "field-error", role: "alert" });
    this.inputs.set(field.name, { input, error });
    input.addEventListener("input", () => this.#take(field));
    return element("div", { class: `field kind-${field.kind}` },
      element("label", { for: id }, field.label), input,
      element("p", { id: `${id}-hint`, class: "hint" }, field.hint), error);
  }

  #show(field) {
    const { input, error } = this.inputs.get(field.name);
    input.value = String(this.settings[field.name] ?? "");
    error.textContent = "";
    input.removeAttribute("aria-invalid");
  }

  #take(field) {
    const { input, error } = this.inputs.get(field.name);
    delete this.settings[field.name];
    error.textContent = "";
    input.removeAttribute("aria-invalid");
    try {
      const value = parseField(field, input.value);
      if (value !== null) this.settings[field.name] = value;
    } catch (problem) {
      error.textContent = problem.message;
      input.setAttribute("aria-invalid", "true");
    }
    saveSettings(this.settings);
  }

  #reset() {
    for (const field of FIELDS) {
      delete this.settings[field.name];
      this.#show(field);
    }
    saveSettings(this.settings);
    this.inputs.get(FIELDS[0].name).input.focus();
  }

  #takeKey() {
    const key = this.key.value.trim();
    if (key === apiKey.get()) return;
    apiKey.set(key);
    this.onKeyChange();
  }
}

function inputFor({ kind, min }, properties) {
  if (kind === "text") return element("textarea", { rows: "3", placeholder: "none", ...properties });
  if (kind === "lines") return element("textarea", { rows: "2", placeholder: "server default", spellcheck: "false", ...properties });
  if (kind === "choice") {
    return element("select", properties,
      element("option", { value: "" }, "server default"), element("option", { value: "on" }, "on"), element("option", { value: "off" }, "off"));
  }
  // Not type=number: the browser hides the text of such a box if it is not a number, and no error could name it.
  const inputmode = kind === "number" ? "decimal" : min < 0 ? "text" : "numeric";
  return element("input", { type: "text", inputmode, placeholder: "server default", autocomplete: "off", ...properties });
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
