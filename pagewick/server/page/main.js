// Creates the parts of the page and connects them.

import { ApiError } from "./api.js";
import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import { askForKey, SettingsDialog } from "./dialogs.js";
import { announce, byId, element, icon, setIcon } from "./dom.js";
import { errorTitle } from "./message.js";
import { Models } from "./models.js";
import { loadSettings } from "./settings.js";
import { listenToKeys } from "./keyboard.js";
import { Sidebar } from "./sidebar.js";
import { Library } from "./store.js";
import { prepareTheme } from "./themes.js";
import { Thread } from "./thread.js";
import { exportText, importText } from "./transfer.js";

const UNDO_MS = 8000;

const library = new Library();
const settings = loadSettings();
const models = new Models(() => showEmptyState());
const thread = new Thread({
  edit: (node, text) => {
    thread.follow();
    chat.edit(node, text);
    composer.focus();
  },
  regenerate: (node) => {
    chat.regenerate(node);
    composer.focus();
  },
  retry: (node) => {
    chat.retry(node);
    composer.focus();
  },
  select: (node) => {
    chat.select(node);
    thread.focusOn(node);
  },
});
const composer = new Composer({
  send: (text) => {
    thread.follow();
    return chat.send(text);
  },
  stop: () => chat.stop(),
  editLast: () => {
    const question = chat.writing ? null : thread.lastQuestion();
    question?.startEditing();
    return Boolean(question);
  },
});
const chat = new Chat({ library, models, settings, onShow: show, onGrow: (node) => thread.grow(node), askForKey });
const sidebar = new Sidebar(library, { open, create: () => open(null), rename, remove });
const settingsDialog = new SettingsDialog(settings, () => connect());

let shownId = null;

function open(id) {
  sidebar.closeDrawer();
  chat.open(id);
  thread.follow();
  composer.focus();
}

function show() {
  const { conversation } = chat;
  const title = conversation?.title ?? "New chat";
  document.title = conversation ? `${title} · Pagewick` : "Pagewick";
  byId("title").textContent = title;
  byId("empty").hidden = conversation !== null;
  byId("thread").hidden = conversation === null;
  if (conversation) thread.show(conversation, chat.writing);
  else thread.clear();
  composer.setBusy(chat.writing !== null);
  sidebar.show(conversation?.id ?? null);
  if ((conversation?.id ?? null) !== shownId) remember(conversation?.id ?? null);
}

/** Put the conversation's id into the address, so that reload and the back button work. */
function remember(id) {
  shownId = id;
  if (location.hash.slice(1) !== (id ?? "")) history.pushState(null, "", id ? `#${id}` : location.pathname + location.search);
}

function showEmptyState() {
  byId("empty-model").textContent = models.chosen ? `${models.chosen.id} answers, on this server.` : "";
  byId("examples").replaceChildren(...(models.chosen ? models.examples : []).map((text) =>
    element("li", {}, element("button", { type: "button", class: "example", click: () => ask(text) }, text))));
}

function ask(text) {
  chat.send(text);
  composer.focus();
}

async function connect() {
  const notice = byId("notice");
  notice.hidden = true;
  try {
    await models.load();
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status === 401 && (await askForKey(error.message))) return connect();
    models.setUnknown("No model");
    notice.replaceChildren(icon("warning"), element("p", {}, element("strong", {}, `${errorTitle(error.status)}. `), error.message),
      element("button", { type: "button", class: "button", click: connect }, "Try again"));
    notice.hidden = false;
  }
  return showEmptyState();
}

function rename(conversation, title) {
  Object.assign(conversation, { title, isNamed: true });
  library.save(conversation);
  show();
}

async function remove(conversation) {
  const isShown = conversation === chat.conversation;
  chat.stop(conversation.id);
  await library.remove(conversation.id);
  if (isShown) open(null);
  toast(`Deleted “${conversation.title}”.`, "Undo", async () => {
    await library.save(conversation);
    open(conversation.id);
  });
}

let toastTimer = null;

/** Show a short message, with a button if there is a label. */
function toast(text, label = null, action = null) {
  const box = byId("toast");
  const hide = () => {
    box.hidden = true;
  };
  const button = label && element("button", { type: "button", class: "text-button", click: () => (hide(), action()) }, label);
  box.replaceChildren(element("span", {}, text), ...(button ? [button] : []));
  box.hidden = false;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(hide, UNDO_MS);
}

function exportAll() {
  const conversations = library.list();
  const url = URL.createObjectURL(new Blob([exportText(conversations)], { type: "application/json" }));
  element("a", { href: url, download: `pagewick-${new Date().toISOString().slice(0, 10)}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
  toast(`Exported ${counted(conversations.length)}.`);
}

async function importFrom(file) {
  try {
    const conversations = importText(await file.text());
    for (const conversation of conversations) await library.save(conversation);
    toast(`Imported ${counted(conversations.length)}.`);
  } catch (error) {
    toast(`Nothing was imported. ${error.message}`);
  }
}

function counted(number) {
  return `${number} ${number === 1 ? "conversation" : "conversations"}`;
}

function prepareTransfer() {
  const picker = byId("import-file");
  byId("export").addEventListener("click", exportAll);
  byId("import").addEventListener("click", () => picker.click());
  picker.addEventListener("change", async () => {
    if (picker.files[0]) await importFrom(picker.files[0]);
    picker.value = "";
  });
}

async function start() {
  prepareTheme(byId("theme"));
  setIcon(byId("open-settings"), "sliders", "Settings");
  byId("open-settings").addEventListener("click", () => settingsDialog.open());
  setIcon(byId("to-end"), "down", "Go to the end");
  prepareTransfer();
  listenToKeys({
    create: () => open(null), search: () => sidebar.startSearch(), toggleSidebar: () => sidebar.toggle(),
    escape: () => (sidebar.isDrawerOpen ? sidebar.closeDrawer() : chat.stop()),
  });
  addEventListener("popstate", () => {
    shownId = location.hash.slice(1) || null;
    open(shownId);
  });
  await library.open();
  library.addEventListener("failure", tellThatNothingLasts);
  if (!library.isLasting) tellThatNothingLasts();
  chat.open(location.hash.slice(1));
  composer.focus();
  await connect();
}

function tellThatNothingLasts() {
  byId("keeping").textContent = "This browser stores nothing: conversations end with this tab.";
  announce(byId("keeping").textContent);
}

start();
