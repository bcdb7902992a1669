// Keys that work everywhere on the page.

/** actions: {create, search, toggleSidebar, escape}. In an open dialog the keys are the dialog's. */
export function listenToKeys({ create, search, toggleSidebar, escape }) {
  const shortcuts = { "shift+o": create, k: search, b: toggleSidebar };
  document.addEventListener("keydown", (event) => {
    if (event.isComposing || event.defaultPrevented || document.querySelector("dialog[open]")) return;
    if (event.key === "Escape") {
      escape();
      return;
    }
    // On a Mac it is the command key.
    if (!(event.ctrlKey || event.metaKey) || event.altKey) return;
    const action = shortcuts[`${event.shiftKey ? "shift+" : ""}${event.key.toLowerCase()}`];
    if (!action) return;
    event.preventDefault();
    action();
  });
}
