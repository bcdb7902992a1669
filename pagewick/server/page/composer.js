// The message box, with the files that are attached to the message. What is not sent yet is kept as a draft of its conversation.

import { announce, byId, setIcon } from "./dom.js";
import { readDraft, writeDraft } from "./drafts.js";
import { fileView, readFiles } from "./files.js";

const MAX_SHARE_OF_WINDOW = 0.4;
const KEEP_AFTER_MS = 300;

export class Composer {
  #isBusy = false;
  // undefined until open() is called for the first time.
  #id = undefined;
  #files = [];
  #readsImages = false;
  // Whether the draft differs from the one that is kept. Another tab may have kept a newer one.
  #isChanged = false;
  #keepTimer = null;

  /** actions: {send(text, files), stop(), editLast()}. send returns whether it accepted the message. */
  constructor(actions) {
    this.actions = actions;
    this.form = byId("composer");
    this.box = byId("composer-text");
    this.button = byId("send");
    this.error = byId("composer-error");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    this.box.addEventListener("keydown", (event) => this.#key(event));
    this.box.addEventListener("input", () => this.#changed());
    addEventListener("resize", () => this.#fit());
    addEventListener("pagehide", () => this.#keep());
    this.#acceptFiles();
    this.setBusy(false);
  }

  /** While a response is being generated, the button stops it. */
  setBusy(isBusy) {
    this.#isBusy = isBusy;
    setIcon(this.button, isBusy ? "stop" : "send", isBusy ? "Stop the answer (Esc)" : "Send");
    this.button.classList.toggle("stop", isBusy);
    this.#refresh();
  }

  /** Whether the model does: without, no images are attached. */
  set readsImages(value) {
    this.#readsImages = value;
    setIcon(byId("attach"), "attach", value ? "Attach images or text files" : "Attach text files");
  }

  /** Show the draft of another conversation (null: of a new one). */
  open(id) {
    if (id === this.#id) return;
    this.#keep();
    const isFirst = this.#id === undefined;
    this.#id = id;
    // What was typed while the page was loading stays.
    if (isFirst && !this.#isEmpty) return;
    const { text, files } = readDraft(id);
    this.#set(text, files);
  }

  /** Focus the box, except on touch screens, where the keyboard would cover half of the page. */
  focus() {
    if (!matchMedia("(pointer: coarse)").matches) this.box.focus();
  }

  get isFocusedAndEmpty() {
    return document.activeElement === this.box && this.#isEmpty;
  }

  #set(text, files) {
    this.box.value = text;
    this.#files = files;
    this.error.textContent = "";
    byId("draft-files").replaceChildren(...files.map((file) => fileView(file, () => this.#remove(file))));
    this.#refresh();
  }

  #remove(file) {
    this.#set(this.box.value, this.#files.filter((one) => one !== file));
    this.#changed();
    announce(`Removed ${file.name}.`);
    this.box.focus();
  }

  #changed() {
    this.#refresh();
    this.#isChanged = true;
    clearTimeout(this.#keepTimer);
    this.#keepTimer = setTimeout(() => this.#keep(), KEEP_AFTER_MS);
  }

  #keep() {
    clearTimeout(this.#keepTimer);
    if (!this.#isChanged || this.#id === undefined) return;
    this.#isChanged = false;
    writeDraft(this.#id, { text: this.box.value, files: this.#files });
  }

  #acceptFiles() {
    const picker = byId("attach-file");
    this.readsImages = false;
    byId("attach").addEventListener("click", () => picker.click());
    picker.addEventListener("change", async () => {
      await this.#attach([...picker.files]);
      picker.value = "";
    });
    this.box.addEventListener("paste", (event) => {
      // Some programs copy a text together with its picture.
      if (!event.clipboardData.files.length || event.clipboardData.types.includes("text/plain")) return;
      event.preventDefault();
      this.#attach([...event.clipboardData.files]);
    });
    this.#acceptDrops();
  }

  /** Accept files anywhere on the page: elsewhere, the browser would leave the page and show the file. */
  #acceptDrops() {
    const { body } = document;
    const follow = (event, isOver) => {
      if (!event.dataTransfer?.types.includes("Files")) return false;
      event.preventDefault();
      body.classList.toggle("dropping", isOver);
      return true;
    };
    body.addEventListener("dragover", (event) => follow(event, true));
    body.addEventListener("dragleave", (event) => body.contains(event.relatedTarget) || follow(event, false));
    body.addEventListener("drop", (event) => follow(event, false) && this.#attach([...event.dataTransfer.files]));
  }

  async #attach(files) {
    const id = this.#id;
    try {
      const read = await readFiles(files, this.#files, { readsImages: this.#readsImages });
      // The user may have opened another conversation meanwhile.
      if (id !== this.#id) return;
      this.#set(this.box.value, [...this.#files, ...read]);
      this.#changed();
      announce(`Attached ${read.map(({ name }) => name).join(", ")}.`);
    } catch (error) {
      this.error.textContent = `Nothing was attached. ${error.message}`;
    }
    this.focus();
  }

  #submit() {
    if (this.#isBusy) {
      this.actions.stop();
      return;
    }
    const [id, written, files] = [this.#id, this.box.value, this.#files];
    if (this.#isEmpty) return;
    // Emptied before it is sent, which opens a new conversation and would keep it as a draft.
    this.#set("", []);
    this.#isChanged = false;
    if (this.actions.send(written.trim(), files)) {
      writeDraft(id, { text: "", files: [] });
    } else {
      this.#set(written, files);
      this.#changed();
    }
  }

  get #isEmpty() {
    return this.box.value.trim() === "" && !this.#files.length;
  }

  #key(event) {
    if (event.isComposing) return;
    const isPlain = !event.shiftKey && !event.ctrlKey && !event.metaKey && !event.altKey;
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      // Enter never stops a response: a user may be typing the next message meanwhile.
      if (!this.#isBusy) this.#submit();
    } else if (event.key === "ArrowUp" && isPlain && this.#isEmpty && this.actions.editLast()) {
      event.preventDefault();
    }
  }

  #refresh() {
    this.button.disabled = !this.#isBusy && this.#isEmpty;
    this.#fit();
  }

  #fit() {
    this.box.style.height = "auto";
    this.box.style.height = `${Math.min(this.box.scrollHeight, innerHeight * MAX_SHARE_OF_WINDOW)}px`;
  }
}
