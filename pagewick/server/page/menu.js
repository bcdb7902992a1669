// The menu of the conversation on the screen: its link, and exports.

import { announce, byId, copyText, element, icon, setIcon } from "./dom.js";
import { toast } from "./toast.js";
import { exportText, markdownOf } from "./transfer.js";

/** Prepare the menu. conversation() returns the one on the screen, or null. */
export function prepareMenu(conversation) {
  const menu = byId("menu");
  setIcon(byId("open-menu"), "more", "Link and export");
  const item = (name, label, action) => element("button", {
    type: "button", class: "menu-item", click: () => {
      menu.hidePopover();
      action(conversation());
    },
  }, icon(name), label);
  menu.append(
    item("link", "Copy the link", copyLink),
    item("export", "Export as Markdown", (one) => download(`${fileName(one)}.md`, markdownOf(one), "text/markdown")),
    item("export", "Export as JSON", (one) => download(`${fileName(one)}.json`, exportText([one]), "application/json")),
  );
  menu.addEventListener("toggle", ({ newState }) => {
    byId("open-menu").setAttribute("aria-expanded", String(newState === "open"));
    if (newState === "open") menu.querySelector("button").focus();
  });
}

async function copyLink({ id }) {
  const link = new URL(`#${id}`, location.href).href;
  if (await copyText(link)) {
    toast("The link is copied. It leads to this conversation in this browser only, because only this browser stores it.");
  } else {
    announce("The browser did not let the page copy this.");
    toast(`The browser did not let the page copy the link: ${link}`);
  }
}

function fileName({ title }) {
  return `pagewick-${title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 60) || "chat"}`;
}

/** Let the browser save a text as a file. */
export function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
