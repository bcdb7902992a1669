// Small preferences, in localStorage if the browser allows it. Secrets are never stored here; see api.js.

const PREFIX = "pagewick.";
const inMemory = new Map();

export function readPreference(name) {
  try {
    return localStorage.getItem(PREFIX + name);
  } catch {
    return inMemory.get(name) ?? null;
  }
}

/** Store a preference; null removes it. */
export function writePreference(name, value) {
  inMemory.set(name, value);
  try {
    if (value === null) localStorage.removeItem(PREFIX + name);
    else localStorage.setItem(PREFIX + name, value);
  } catch {
    // The preference is kept in memory only.
  }
}
