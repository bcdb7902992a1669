// Small preferences, in localStorage if the browser allows it. Secrets are never stored here; see api.js.

const PREFIX = "pagewick.";
// What could not be stored: it is kept until the page is closed.
const inMemory = new Map();

export function readPreference(name) {
  if (inMemory.has(name)) return inMemory.get(name);
  try {
    return localStorage.getItem(PREFIX + name);
  } catch {
    return null;
  }
}

/** Store a preference; null removes it. */
export function writePreference(name, value) {
  try {
    inMemory.delete(name);
    localStorage.removeItem(PREFIX + name);
    if (value !== null) localStorage.setItem(PREFIX + name, value);
  } catch {
    // The browser forbids storage, or it is full.
    inMemory.set(name, value);
  }
}

/** Return the names of the stored preferences that begin with a prefix. */
export function namesOfPreferences(prefix) {
  try {
    return Object.keys(localStorage).filter((name) => name.startsWith(PREFIX + prefix)).map((name) => name.slice(PREFIX.length));
  } catch {
    return [];
  }
}

/** Call back with the name of each preference that another tab stores, once this tab can read it. */
export function watchPreferences(callback) {
  addEventListener("storage", ({ key, newValue }) => {
    if (newValue !== null && key?.startsWith(PREFIX)) callback(key.slice(PREFIX.length));
  });
}
