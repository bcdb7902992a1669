// Creates the parts of the page and connects them.

import { errorTitle } from "./answer.js";
import { ApiError } from "./api.js";
import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import { askForKey, SettingsDialog } from "./dialogs.js";
import { announce, byId, element, icon, setIcon } from "./dom.js";
import { writeDraft, writeResults } from "./drafts.js";
import { listenToKeys } from "./keyboard.js";
import { download, prepareMenu } from "./menu.js";
import { Models } from "./models.js";
import { loadSettings, problemsIn, saveSettings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { Library } from "./store.js";
import { prepareTheme } from "./themes.js";
import { Thread } from "./thread.js";
import { showProgress, toast } from "./toast.js";
import { exportText, importText } from "./transfer.js";
import { canHelp } from "./tree.js";

const library = new Library();
const models = new Models(() => showModel());
const thread = new Thread({
  edit: (node, text) => {
    const isAccepted = chat.edit(node, text);
    if (isAccepted && node.role === "user") goOn();
    return isAccepted;
  },
  regenerate: (node) => {
    chat.regenerate(node);
    composer.focus();
  },
  continue: (node) => {
    chat.continue(node);
    goOn();
  },
  select: (node) => {
    chat.select(node);
    thread.focusOn(node);
  },
  sendResults: (node, texts) => {
    const isAccepted = chat.sendResults(node, texts);
    if (isAccepted) goOn();
    return isAccepted;
  },
});
const composer = new Composer({
  send: (text, files) => {
    thread.follow();
    return chat.send(text, files);
  },
  stop: () => chat.stop(),
  editLast: () => {
    const question = chat.writing ? null : thread.lastQuestion();
    question?.startEditing();
    return Boolean(question);
  },
});
const chat = new Chat({
  library, models, settings: loadSettings(), onShow: show, onGrow: (node) => thread.grow(node), onEnd: askForResults, askForKey,
  onWrongSetting: (scope, field) => settingsDialog.open(scope, field),
});
const sidebar = new Sidebar(library, { open, create: () => open(null), rename, remove });
const stores = {
  all: {
    get: () => chat.settings,
    set: (texts) => {
      chat.settings = texts;
      saveSettings(texts);
    },
  },
  own: { get: () => chat.ownSettings, set: (texts) => chat.setOwnSettings(texts) },
};
const settingsDialog = new SettingsDialog(stores, { onKeyChange: () => connect(), onChange: () => showSettingsState() });

let shownId = null;

function goOn() {
  thread.follow();
  composer.focus();
}

/** Go to the first field for a result, unless the user is writing or looking elsewhere. */
function askForResults(node) {
  const { activeElement } = document;
  const isFree = activeElement === document.body || composer.isFocusedAndEmpty || byId("thread").contains(activeElement);
  if (isFree && !matchMedia("(pointer: coarse)").matches) thread.focusOnResults(node);
}

function open(id) {
  sidebar.closeDrawer();
  chat.open(id);
  goOn();
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
  composer.open(conversation?.id ?? null);
  composer.setBusy(chat.writing !== null);
  byId("open-menu").hidden = conversation === null;
  showSettingsState();
  sidebar.show(conversation?.id ?? null);
  if ((conversation?.id ?? null) !== shownId) remember(conversation?.id ?? null);
}

/** Show at the button whether settings are wrong, and whether this conversation has its own. */
function showSettingsState() {
  const numWrong = problemsIn({ ...chat.settings, ...chat.ownSettings }).length;
  const hasOwn = Object.keys(chat.ownSettings).length > 0;
  const state = numWrong ? ` (${numWrong} ${numWrong === 1 ? "is" : "are"} wrong)` : hasOwn ? " (this conversation has its own)" : "";
  const button = byId("open-settings");
  setIcon(button, "sliders", `Settings${state}`);
  button.classList.toggle("is-wrong", numWrong > 0);
  button.classList.toggle("is-own", hasOwn);
}

/** Put the conversation's id into the address, so that reload and the back button work. */
function remember(id) {
  shownId = id;
  const present = location.hash.slice(1);
  if (present === (id ?? "")) return;
  const address = id ? `#${id}` : location.pathname + location.search;
  // The back button does not lead to a conversation that is not there.
  if (present && !library.get(present)) history.replaceState(null, "", address);
  else history.pushState(null, "", address);
}

/** Open the conversation that the address names. */
function openLink() {
  const id = location.hash.slice(1) || null;
  shownId = id;
  open(id);
  if (id && !chat.conversation) {
    toast("This browser has no such conversation. A link leads to a conversation only in the browser that stores it.");
  }
}

/** Show what depends on the chosen model. */
function showModel() {
  composer.readsImages = models.chosen?.readsImages ?? false;
  byId("empty-model").textContent = models.introduction;
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
    const button = element("button", { type: "button", class: "button", click: connect }, "Try again");
    notice.replaceChildren(icon("warning"), element("p", {}, element("strong", {}, `${errorTitle(error.status)}. `), error.message),
      ...(canHelp(error.status) ? [button] : []));
    notice.hidden = false;
  }
  return showModel();
}

function rename(id, title) {
  // Other tabs may have changed or deleted it since the list was shown.
  const conversation = library.get(id);
  if (!conversation) return;
  Object.assign(conversation, { title, isNamed: true });
  library.save(conversation);
  show();
}

async function remove(id) {
  const conversation = library.get(id);
  if (!conversation) return;
  const isShown = conversation === chat.conversation;
  chat.stop(conversation.id);
  await library.remove(conversation.id);
  writeDraft(conversation.id, { text: "", files: [] });
  for (const { id } of conversation.nodes.filter(({ calls }) => calls)) writeResults(id, {});
  if (isShown) open(null);
  toast(`Deleted “${conversation.title}”.`, "Undo", async () => {
    await library.save(conversation);
    open(conversation.id);
  });
}

function exportAll() {
  const conversations = library.list();
  download(`pagewick-${new Date().toISOString().slice(0, 10)}.json`, exportText(conversations), "application/json");
  toast(`Exported ${counted(conversations.length)}.`);
}

async function importFrom(file) {
  toast("Reading the file…");
  try {
    const conversations = await importText(await file.text());
    await library.addAll(conversations, showProgress(`Importing ${counted(conversations.length)}…`, conversations.length));
    toast(`Imported ${counted(conversations.length)}.`);
  } catch (error) {
    toast(`Nothing was imported. ${error.message}`);
  }
}

function counted(number) {
  return `${number.toLocaleString("en")} ${number === 1 ? "conversation" : "conversations"}`;
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
  byId("open-settings").addEventListener("click", () => settingsDialog.open());
  setIcon(byId("to-end"), "down", "Go to the end");
  prepareTransfer();
  prepareMenu(() => chat.conversation);
  listenToKeys({
    create: () => open(null), search: () => sidebar.startSearch(), toggleSidebar: () => sidebar.toggle(),
    escape: () => (sidebar.isDrawerOpen ? sidebar.closeDrawer() : chat.stop()),
  });
  addEventListener("popstate", openLink);
  await library.open();
  library.addEventListener("failure", tellThatNothingLasts);
  if (!library.isLasting) tellThatNothingLasts();
  openLink();
  await connect();
}

function tellThatNothingLasts() {
  byId("keeping").textContent = "This browser stores nothing: conversations end with this tab.";
  announce(byId("keeping").textContent);
}

start();
