// The theme button: light, dark, or as the system.

import { setIcon } from "./dom.js";
import { readPreference, writePreference } from "./preferences.js";

const THEMES = { system: "Theme: as the system", light: "Theme: light", dark: "Theme: dark" };

export function prepareTheme(button) {
  const order = Object.keys(THEMES);
  let chosen = Object.hasOwn(THEMES, readPreference("theme") ?? "") ? readPreference("theme") : "system";
  const show = () => {
    if (chosen === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = chosen;
    setIcon(button, chosen, THEMES[chosen]);
  };
  button.addEventListener("click", () => {
    chosen = order[(order.indexOf(chosen) + 1) % order.length];
    writePreference("theme", chosen === "system" ? null : chosen);
    show();
  });
  show();
}
