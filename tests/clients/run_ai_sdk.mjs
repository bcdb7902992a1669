#!/usr/bin/env -S bash -c 'exec "${0%/*}/run_all.sh" ai_sdk'
// Vercel's AI SDK: generateText and streamText over its provider for APIs that are compatible with OpenAI's.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, streamText } from "ai";
import {
  API, KEY, MODEL, PROMPT, QUESTION, SYSTEM, TOO_LONG, TURNS, asked, check, checkEqual, checkFails, plainly, post, textOf,
} from "./checks.mjs";

// Otherwise it warns on stderr that text completions choose no tools. Other warnings are checked below.
globalThis.AI_SDK_LOG_WARNINGS = false;
const settings = { name: "pagewick", baseURL: API, apiKey: KEY, includeUsage: true };
const pagewick = createOpenAICompatible(settings);

const generate = (options) =>
  generateText({ model: pagewick(MODEL), prompt: options.messages ? undefined : QUESTION, temperature: 0, maxRetries: 0, ...options });
const tokens = (usage) => [usage.inputTokens, usage.outputTokens];
const tokensOf = (response) => [response.usage.prompt_tokens, response.usage.completion_tokens];

async function checkResponses() {
  const wanted = await plainly(asked(QUESTION));
  const response = await generate({});
  check("the response knows its port", response.text.includes("8000"), response.text);
  checkEqual("chat", response.text, textOf(wanted));
  checkEqual("finish reason", response.finishReason, "stop");
  checkEqual("model name", response.response.modelId, MODEL);
  checkEqual("usage", tokens(response.usage), tokensOf(wanted));
  checkEqual("no warnings", response.warnings ?? [], []);

  const withSystem = await plainly([{ role: "system", content: SYSTEM }, ...asked(QUESTION)]);
  const instructed = await generate({ instructions: SYSTEM });
  checkEqual("system message", [instructed.text, ...tokens(instructed.usage)], [textOf(withSystem), ...tokensOf(withSystem)]);
  const turns = await plainly(TURNS);
  const later = await generate({ messages: TURNS });
  checkEqual("several turns", [later.text, ...tokens(later.usage)], [textOf(turns), ...tokensOf(turns)]);
  const history = [...asked("What is Pagewick?"), ...(await generate({ prompt: "What is Pagewick?" })).response.messages, ...asked(QUESTION)];
  check("its own response as a part of the next question", (await generate({ messages: history })).text !== "");

  checkEqual("stop", (await generate({ stopSequences: ["8000"] })).text, response.text.split("8000")[0]);
  const short = await generate({ maxOutputTokens: 3 });
  checkEqual("maxOutputTokens", [short.usage.outputTokens, short.finishReason], [3, "length"]);
  const drawn = await Promise.all([5, 5].map((seed) => generate({ temperature: 1, seed })));
  checkEqual("seed", drawn[0].text, drawn[1].text);
  const one = await generate({ temperature: 1, providerOptions: { pagewick: { top_k: 1 } } });
  checkEqual("top_k through providerOptions", one.text, response.text);
}

async function checkStreams() {
  const wanted = await plainly(asked(QUESTION));
  const stream = streamText({ model: pagewick(MODEL), prompt: QUESTION, temperature: 0 });
  const pieces = [];
  for await (const piece of stream.textStream) pieces.push(piece);
  check("a stream comes in pieces", pieces.length > 5, pieces);
  checkEqual("stream", pieces.join(""), textOf(wanted));
  checkEqual("usage of a stream", tokens(await stream.usage), tokensOf(wanted));
  checkEqual("finish reason of a stream", await stream.finishReason, "stop");

  const leaving = new AbortController();
  const left = streamText({ model: pagewick(MODEL), prompt: QUESTION, abortSignal: leaving.signal, onError() {} });
  let seen = 0;
  for await (const part of left.fullStream) {
    if (part.type === "text-delta" && (seen += 1) === 2) leaving.abort();
  }
  check("a stream that is left", seen < pieces.length, seen);
}

async function checkErrors() {
  const answered = (status, words) => (error) =>
    APICallError.isInstance(error) && error.statusCode === status && error.message.includes(words);
  await checkFails("an unknown model", () => generate({ model: pagewick("none") }), answered(404, "does not exist"));
  const stranger = createOpenAICompatible({ ...settings, apiKey: "another-key" });
  await checkFails("a wrong key", () => generate({ model: stranger(MODEL) }), answered(401, "key"));
  await checkFails("a prompt too long", () => generate({ prompt: TOO_LONG }), answered(400, "2048 tokens"));
  await checkFails("a response too long", () => generate({ maxOutputTokens: 5000 }), answered(400, "max_tokens"));
  await checkFails("a value out of range", () => generate({ temperature: -1 }), answered(400, "temperature"));
  const errors = [];
  const stream = streamText({ model: pagewick(MODEL), prompt: TOO_LONG, maxRetries: 0, onError: ({ error }) => errors.push(error) });
  await stream.consumeStream({ onError() {} });
  check("a prompt too long, streamed", errors.some(answered(400, "2048 tokens")), errors);
}

async function checkTextCompletion() {
  // How the SDK writes a question down for a model that completes text.
  const wanted = await post("/completions", { prompt: `user:\n${PROMPT}\n\nassistant:\n`, max_tokens: 6, stop: ["\nuser:"] });
  const options = { model: pagewick.completionModel(MODEL), prompt: PROMPT, maxOutputTokens: 6 };
  const response = await generate(options);
  checkEqual("text completion", [response.text, ...tokens(response.usage)], [wanted.choices[0].text, ...tokensOf(wanted)]);
  const stream = streamText({ ...options, temperature: 0 });
  checkEqual("text completion, streamed", await stream.text, response.text);
}

await checkResponses();
await checkStreams();
await checkErrors();
await checkTextCompletion();
