// Shared by the scripts in JavaScript: the server's address, requests over plain HTTP, and checks.
import { isDeepStrictEqual } from "node:util";

export const API = `${process.env.PAGEWICK_URL}/v1`;
export const KEY = process.env.PAGEWICK_KEY;
export const MODEL = "pagewick-demo";

export const PROMPT = "Pagewick is";
export const QUESTION = "How do I change the port?";
export const SYSTEM = "You are a helpful assistant.";
// A conversation whose last question makes sense only after what comes before it.
export const TURNS = [
  { role: "user", content: "What is Pagewick?" },
  { role: "assistant", content: "Pagewick is an LLM inference and serving engine." },
  { role: "user", content: QUESTION },
];
// Longer than the built-in model's context of 2048 tokens.
export const TOO_LONG = "word ".repeat(3000);
export const WEATHER = "what is the weather in Rome?";
// Questions that the built-in model answers with a call of `add`, and its arguments.
export const SUMS = [
  ["what is 2 plus 3?", { a: 2, b: 3 }],
  ["sum of 7 and 8", { a: 7, b: 8 }],
  ["how much is 2 plus 3?", { a: 2, b: 3 }],
  ["add 12 and 30", { a: 12, b: 30 }],
  ["12 + 30", { a: 12, b: 30 }],
  ["calculate 4 + 5", { a: 4, b: 5 }],
];
// More tokens than a call has. The response cannot end before, so that it has two calls.
export const TWO_CALLS = { min_tokens: 30 };

export const asked = (text) => [{ role: "user", content: text }];

/** Return the likeliest response over plain HTTP, which a client's result is compared with. */
export async function post(path, body) {
  const response = await fetch(API + path, {
    method: "POST",
    headers: { "content-type": "application/json", authorization: `Bearer ${KEY}` },
    body: JSON.stringify({ model: MODEL, temperature: 0, ...body }),
  });
  return response.json();
}

export const plainly = (messages, fields = {}) => post("/chat/completions", { messages, ...fields });
export const textOf = (response) => response.choices[0].message.content;

/** Print whether a check passed; the script goes on either way, and a failed check makes its exit status 1. */
export function check(what, isSo, seen) {
  console.log(isSo ? `  ${what}` : `  FAILED: ${what}: ${String(seen?.stack ?? JSON.stringify(seen))}`);
  if (!isSo) process.exitCode = 1;
}

export function checkEqual(what, seen, wanted) {
  check(what, isDeepStrictEqual(seen, wanted), { seen, wanted });
}

/** Check that `call` fails with an error that `isRight` accepts. */
export async function checkFails(what, call, isRight) {
  let seen;
  try {
    seen = await call();
  } catch (error) {
    check(`${what}: ${error.constructor.name}`, isRight(error), error);
    return;
  }
  check(`${what}: an error`, false, seen);
}
