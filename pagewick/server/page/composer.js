// The message box.

import { byId, setIcon } from "./dom.js";

const MAX_SHARE_OF_WINDOW = 0.4;

export class Composer {
  #isBusy = false;

  /** actions: {send(text), stop(), editLast()}. send returns whether it accepted the text. */
  constructor(actions) {
    this.actions = actions;
    this.form = byId("composer");
    this.box = byId("composer-text");
    this.button = byId("send");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    this.box.addEventListener("keydown", (event) => this.#key(event));
    this.box.addEventListener("input", () => this.#refresh());
    window.addEventListener("resize", () => this.#fit());
    this.setBusy(false);
  }

  /** While a response is being generated, the button stops it. */
  setBusy(isBusy) {
    this.#isBusy = isBusy;
    setIcon(this.button, isBusy ? "stop" : "send", isBusy ? "Stop the answer (Esc)" : "Send");
    this.button.classList.toggle("stop", isBusy);
    this.#refresh();
  }

  /** Focus the box, except on touch screens, where the keyboard would cover half of the page. */
  focus() {
    if (!matchMedia("(pointer: coarse)").matches) this.box.focus();
  }

  #submit() {
    if (this.#isBusy) {
      this.actions.stop();
      return;
    }
    const text = this.box.value.trim();
    if (!text || !this.actions.send(text)) return;
    this.box.value = "";
    this.#refresh();
  }

  #key(event) {
    if (event.isComposing) return;
    const isPlain = !event.shiftKey && !event.ctrlKey && !event.metaKey && !event.altKey;
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      // Enter never stops a response: a user may be typing the next message meanwhile.
      if (!this.#isBusy) this.#submit();
    } else if (event.key === "ArrowUp" && isPlain && this.box.value === "" && this.actions.editLast()) {
      event.preventDefault();
    }
  }

  #refresh() {
    this.button.disabled = !this.#isBusy && this.box.value.trim() === "";
    this.#fit();
  }

  #fit() {
    this.box.style.height = "auto";
    this.box.style.height = `${Math.min(this.box.scrollHeight, innerHeight * MAX_SHARE_OF_WINDOW)}px`;
  }
}
