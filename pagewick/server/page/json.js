// JSON as a user or a model writes it: what is wrong and where, and its layout, which changes no number and no string.

const TOKEN = /[{}[\],:]|"(?:[^"\\\0-\x1f]|\\(?:["\\/bfnrt]|u[\da-fA-F]{4}))*"|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null/y;
const SPACE = /[ \t\n\r]*/y;
const CLOSING = { "[": "]", "{": "}" };
// What may come next, by the state of the scanner.
const EXPECTED = {
  value: "a value", item: "a value or ]", member: "a name in double quotes or }", name: "a name in double quotes", colon: "a colon",
};
const MAX_LINE = 200;
// Deeper levels are not indented further, as the layout of thousands of brackets would be too large for the page.
const MAX_INDENTED = 40;
const MAX_LENGTH = 1_000_000;

/** Parse JSON. Throws an Error whose message says what is expected at which line and column. */
export function parseJson(text) {
  try {
    return JSON.parse(text);
  } catch {
    const { at, expected } = problemIn(text);
    const lines = text.slice(0, at).split("\n");
    throw new Error(`Line ${lines.length}, column ${lines.at(-1).length + 1}: ${expected} is expected here.`);
  }
}

/** Return JSON on indented lines, or null if the text is not JSON, or too long to lay out. */
export function prettyJson(text) {
  if (text.length > MAX_LENGTH || !isJson(text)) return null;
  let written = "";
  let depth = 0;
  let before = "";
  for (const { token } of tokens(text)) {
    const isEnd = token === "]" || token === "}";
    if (isEnd) depth -= 1;
    if (isEnd ? !(before in CLOSING) : before in CLOSING || before === ",") written += `\n${"  ".repeat(Math.min(depth, MAX_INDENTED))}`;
    written += token === ":" ? ": " : token;
    if (token in CLOSING) depth += 1;
    before = token;
  }
  return written;
}

/** Return the beginning of a text on one line. */
export function oneLine(text) {
  return text.slice(0, 2 * MAX_LINE).replace(/\s+/g, " ").trim().slice(0, MAX_LINE);
}

function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

/** Yield the tokens with their places. The last one is empty: the end, or what is no token. */
function* tokens(text) {
  for (let at = 0, token = null; token !== ""; at += token.length) {
    SPACE.lastIndex = at;
    at += SPACE.exec(text)[0].length;
    TOKEN.lastIndex = at;
    token = TOKEN.exec(text)?.[0] ?? "";
    yield { token, at };
  }
}

function problemIn(text) {
  const open = [];
  let state = "value";
  for (const { token, at } of tokens(text)) {
    const next = nextState(state, token, open);
    if (next === null) return { at, expected: expectedIn(state, open, text[at]) };
    state = next;
  }
  throw new Error("This is JSON.");
}

function expectedIn(state, open, letter) {
  const mayBeString = state in EXPECTED && state !== "colon";
  if (letter === '"' && mayBeString) return "a string that ends on its line, with \\n for line breaks and \\\\ for \\,";
  return EXPECTED[state] ?? (open.length ? `a comma or ${CLOSING[open.at(-1)]}` : "the end");
}

/** Return the state after a token, or null if the token is wrong there. `open` holds the brackets that are open. */
function nextState(state, token, open) {
  const isValue = state === "value" || state === "item";
  if (isValue && token in CLOSING) {
    open.push(token);
    return token === "[" ? "item" : "member";
  }
  if (["item", "member", "after"].includes(state) && token && token === CLOSING[open.at(-1)]) {
    open.pop();
    return "after";
  }
  if (token.startsWith('"') && (state === "member" || state === "name")) return "colon";
  if (token === ":" && state === "colon") return "value";
  if (token === "," && state === "after" && open.length) return open.at(-1) === "[" ? "value" : "name";
  return isValue && /^["\w-]/.test(token) ? "after" : null;
}
