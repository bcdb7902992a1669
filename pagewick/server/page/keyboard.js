// Keyboard shortcuts of the whole page.

/** actions: {create, search, toggleSidebar, escape}. An open dialog or menu gets the keys itself. */
export function listenToKeys({ create, search, toggleSidebar, escape }) {
  const shortcuts = { "shift+o": create, k: search, b: toggleSidebar };
  document.addEventListener("keydown", (event) => {
    if (event.isComposing || event.defaultPrevented || document.querySelector("dialog[open], :popover-open")) return;
    if (event.key === "Escape") {
      escape();
      return;
    }
    // Macs use the command key.
    if (!(event.ctrlKey || event.metaKey) || event.altKey) return;
    const action = shortcuts[`${event.shiftKey ? "shift+" : ""}${event.key.toLowerCase()}`];
    if (!action) return;
    event.preventDefault();
    action();
  });
}
