// The server's models and the one that the user has chosen.

import { listModels } from "./api.js";
import { byId, element } from "./dom.js";
import { readPreference, writePreference } from "./preferences.js";

const BUILT_IN = "pagewick-demo";
const EXAMPLES = [
  "Explain how a hash table works to someone who knows only lists.",
  "Write a Python function that finds the longest common prefix of a list of strings.",
  "Compare TCP and UDP in a table.",
  "Give me three ideas for a rainy Sunday.",
];
const BUILT_IN_EXAMPLES = [
  "What is Pagewick?", "How do I change the port?", "What is PagedAttention?", "How do I load a model from Hugging Face?",
];

export class Models {
  #models = [];

  constructor(onChange) {
    this.select = byId("model");
    this.select.addEventListener("change", () => {
      writePreference("model", this.select.value);
      onChange();
    });
  }

  /** Fetch the list. Throws ApiError and keeps the previous list then. */
  async load() {
    this.#models = await listModels();
    const wanted = this.#models.some(({ id }) => id === readPreference("model")) ? readPreference("model") : this.#models[0]?.id;
    this.select.replaceChildren(...this.#models.map(({ id }) => element("option", { value: id, selected: id === wanted }, id)));
    this.select.disabled = this.#models.length === 0;
  }

  setUnknown(text) {
    if (this.#models.length) return;
    this.select.replaceChildren(element("option", {}, text));
    this.select.disabled = true;
  }

  /** The chosen model, {id, maxModelLen, readsImages}, or null until the list is loaded. */
  get chosen() {
    return this.#models.find(({ id }) => id === this.select.value) ?? null;
  }

  /** What an empty conversation says about the chosen model. */
  get introduction() {
    if (!this.chosen) return "";
    const { id } = this.chosen;
    return id === BUILT_IN ? `${id} is a 5-million-parameter model that knows only Pagewick. It runs on this server.` : `${id} answers, on this server.`;
  }

  get examples() {
    return this.chosen?.id === BUILT_IN ? BUILT_IN_EXAMPLES : EXAMPLES;
  }
}
