// The list of conversations: search, open, rename, delete. On narrow screens it is a drawer over the page.

import { searchedTexts } from "./calls.js";
import { announce, byId, element, icon, iconButton, setIcon } from "./dom.js";
import { readPreference, writePreference } from "./preferences.js";

const DAY_MS = 24 * 60 * 60 * 1000;
const SNIPPET_BEFORE = 20;
const SNIPPET_LENGTH = 90;
// Number of conversations in the list, and how many more its last button adds.
const PAGE = 100;

export class Sidebar {
  #current = null;
  #renaming = null;
  #limit = PAGE;

  /** actions: {open(id), create(), rename(id, title), remove(id)}. */
  constructor(library, actions) {
    this.library = library;
    this.actions = actions;
    this.element = byId("sidebar");
    this.list = byId("conversation-list");
    this.search = byId("search");
    this.narrow = matchMedia("(max-width: 760px)");
    this.#prepare();
    this.#setOpen(!this.narrow.matches && readPreference("sidebar") !== "closed");
  }

  #prepare() {
    const create = byId("new-chat");
    create.append(icon("plus"), "New chat");
    create.addEventListener("click", () => this.actions.create());
    setIcon(byId("toggle-sidebar"), "sidebar", "Conversations");
    setIcon(byId("close-sidebar"), "close", "Close the list of conversations");
    byId("toggle-sidebar").addEventListener("click", () => this.toggle());
    byId("close-sidebar").addEventListener("click", () => this.toggle());
    byId("backdrop").addEventListener("click", () => this.closeDrawer());
    this.search.addEventListener("input", () => {
      this.#limit = PAGE;
      this.show(this.#current);
    });
    this.search.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.search.value) {
        event.stopPropagation();
        this.search.value = "";
        this.show(this.#current);
      } else if (event.key === "ArrowDown" || event.key === "Enter") {
        event.preventDefault();
        const first = this.list.querySelector(".open");
        if (event.key === "Enter") first?.click();
        else first?.focus();
      }
    });
    this.narrow.addEventListener("change", () => this.#setOpen(!this.narrow.matches));
    this.library.addEventListener("change", () => this.show(this.#current));
  }

  get isDrawerOpen() {
    return this.narrow.matches && this.isOpen;
  }

  toggle() {
    this.#setOpen(!this.isOpen);
    if (!this.narrow.matches) writePreference("sidebar", this.isOpen ? "open" : "closed");
    (this.isOpen ? this.search : byId("toggle-sidebar")).focus();
  }

  startSearch() {
    if (!this.isOpen) this.toggle();
    this.search.focus();
    this.search.select();
  }

  closeDrawer() {
    if (!this.isDrawerOpen) return;
    this.#setOpen(false);
    byId("toggle-sidebar").focus();
  }

  #setOpen(isOpen) {
    this.isOpen = isOpen;
    document.body.classList.toggle("sidebar-open", isOpen);
    this.element.inert = !isOpen;
    byId("stage").inert = this.isDrawerOpen;
    byId("backdrop").hidden = !this.isDrawerOpen;
    byId("toggle-sidebar").setAttribute("aria-expanded", String(isOpen));
  }

  show(currentId) {
    this.#current = currentId;
    if (this.#renaming) return;
    const wanted = this.search.value.trim().toLowerCase();
    const found = this.library.list().map((conversation) => ({ conversation, hit: hitIn(conversation, wanted) }))
      .filter(({ hit }) => hit !== null);
    const focused = this.list.contains(document.activeElement) ? document.activeElement.closest("li")?.dataset.id : null;
    const groups = Map.groupBy(found.slice(0, this.#limit), ({ conversation }) => ageOf(conversation.updatedAt));
    this.list.replaceChildren(...[...groups].flatMap(([age, entries]) => this.#group(age, entries)));
    if (!found.length) this.list.append(element("p", { class: "quiet none" }, wanted ? "Nothing found." : "No conversations yet."));
    if (found.length > this.#limit) this.list.append(this.#moreButton(found.length));
    if (wanted) announce(`${found.length} ${found.length === 1 ? "conversation" : "conversations"} found`);
    if (focused) this.#itemOf(focused)?.querySelector(".open").focus();
  }

  #moreButton(count) {
    const label = `Show more (${(count - this.#limit).toLocaleString("en")})`;
    return element("button", { type: "button", class: "text-button", click: () => {
      const first = this.#limit;
      this.#limit += PAGE;
      this.show(this.#current);
      this.list.querySelectorAll(".open")[first]?.focus();
    } }, label);
  }

  #itemOf(id) {
    return [...this.list.querySelectorAll("li")].find((item) => item.dataset.id === id);
  }

  #group(age, entries) {
    const heading = element("h2", { class: "age" }, age);
    return [heading, element("ul", {}, ...entries.map((entry) => this.#item(entry)))];
  }

  #item({ conversation, hit }) {
    const { id, title } = conversation;
    const open = element("button", {
      type: "button", class: "open", title, "aria-current": id === this.#current ? "true" : null, click: () => this.actions.open(id),
    }, element("span", { class: "conversation-title" }, title), hit.length ? element("span", { class: "snippet" }, ...hit) : null);
    const item = element("li", { "data-id": id }, open);
    item.append(
      iconButton("pencil", `Rename ${title}`, () => this.#startRenaming(conversation, item), { class: "icon-button small" }),
      iconButton("trash", `Delete ${title}`, () => this.actions.remove(id), { class: "icon-button small" }),
    );
    return item;
  }

  #startRenaming(conversation, item) {
    const box = element("input", { type: "text", class: "rename", "aria-label": "Title", maxlength: "200" });
    box.value = conversation.title;
    this.#renaming = box;
    const leave = (isKept, isByKey) => {
      if (this.#renaming !== box) return;
      this.#renaming = null;
      const title = box.value.trim();
      if (isKept && title) this.actions.rename(conversation.id, title);
      this.show(this.#current);
      if (isByKey) this.#itemOf(conversation.id)?.querySelector(".open").focus();
    };
    box.addEventListener("keydown", (event) => {
      if (event.isComposing || (event.key !== "Enter" && event.key !== "Escape")) return;
      event.preventDefault();
      event.stopPropagation();
      leave(event.key === "Enter", true);
    });
    box.addEventListener("blur", () => leave(true, false));
    item.replaceChildren(box);
    box.focus();
    box.select();
  }
}

/** Search a conversation. Returns [] if the title matches, the nodes of a snippet if a message does, else null. */
function hitIn(conversation, wanted) {
  if (!wanted || conversation.title.toLowerCase().includes(wanted)) return [];
  for (const node of conversation.nodes) {
    for (const text of [node.content, ...(node.files ?? []).map(({ name }) => name), ...searchedTexts(node)]) {
      const at = text.toLowerCase().indexOf(wanted);
      if (at >= 0) return snippet(text, at, wanted.length);
    }
  }
  return null;
}

function snippet(text, at, length) {
  const from = Math.max(0, at - SNIPPET_BEFORE);
  return [
    (from > 0 ? "…" : "") + text.slice(from, at),
    element("mark", {}, text.slice(at, at + length)),
    text.slice(at + length, from + SNIPPET_LENGTH),
  ];
}

function ageOf(time) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (time >= midnight) return "Today";
  if (time >= midnight - DAY_MS) return "Yesterday";
  return time >= midnight - 7 * DAY_MS ? "Last seven days" : "Earlier";
}
