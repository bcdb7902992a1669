// Small choices that outlive the page, in localStorage if the browser allows it. Never secrets: those are in api.js.

const PREFIX = "pagewick.";
const inMemory = new Map();

export function readPreference(name) {
  try {
    return localStorage.getItem(PREFIX + name);
  } catch {
    return inMemory.get(name) ?? null;
  }
}

/** null forgets it. */
export function writePreference(name, value) {
  inMemory.set(name, value);
  try {
    if (value === null) localStorage.removeItem(PREFIX + name);
    else localStorage.setItem(PREFIX + name, value);
  } catch {
    // Kept in memory.
  }
}
