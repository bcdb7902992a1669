// Calls of tools and their results. An answer has calls: [{id, name, arguments}], where arguments is a text. Their results are a
// message of the role "tool" below the answer, {results: [{id, content}]}, so that other results are another branch.

/** The result of a call for which the user gave none: the model needs one for each call. */
export const NO_RESULT = "No result was given.";

/** Return the calls whose arguments are whole. A response that was cut may end within a call, which is never sent. */
export function completeCalls({ calls = [] }) {
  return calls.filter(isComplete);
}

export function isComplete(call) {
  try {
    const value = JSON.parse(call.arguments || "{}");
    return typeof value === "object" && value !== null && !Array.isArray(value);
  } catch {
    return false;
  }
}

/** Return the result of a call, or null. `next` is the message below the answer, which may have the results. */
export function resultOf(call, next) {
  return next?.results?.find(({ id }) => id === call.id)?.content ?? null;
}

/** Return what can be searched in a message besides its text. */
export function searchedTexts({ calls = [], results = [] }) {
  return [...calls.flatMap((call) => [call.name, call.arguments]), ...results.map(({ content }) => content)];
}

/** Tell which functions are called, for screen readers; an empty text without calls. */
export function spokenCalls(node) {
  const names = completeCalls(node).map(({ name }) => name);
  return names.length ? `The model calls ${names.join(", ")} and waits for ${names.length === 1 ? "the result" : "the results"}.` : "";
}
