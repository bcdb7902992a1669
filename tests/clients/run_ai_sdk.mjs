#!/usr/bin/env -S bash -c 'exec "${0%/*}/run_all.sh" ai_sdk'
// Vercel's AI SDK: generateText and streamText over its provider for APIs that are compatible with OpenAI's.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, generateObject, generateText, jsonSchema, stepCountIs, streamObject, streamText, tool } from "ai";
import {
  API, KEY, MODEL, PROMPT, QUESTION, SUMS, SYSTEM, TOO_LONG, TURNS, TWO_CALLS, WEATHER, asked, check, checkEqual, checkFails, plainly, post,
  textOf,
} from "./checks.mjs";

// Otherwise it warns on stderr that text completions choose no tools. Other warnings are checked below.
globalThis.AI_SDK_LOG_WARNINGS = false;
const settings = { name: "pagewick", baseURL: API, apiKey: KEY, includeUsage: true, supportsStructuredOutputs: true };
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

const objectOf = (properties) => ({ type: "object", properties, required: Object.keys(properties) });
const [text, integer] = ["string", "integer"].map((type) => ({ type }));

// The tools that ran, with their arguments.
let ran = [];
const tools = {
  add: tool({
    description: "Add two numbers.",
    inputSchema: jsonSchema(objectOf({ a: integer, b: integer })),
    execute: async (input) => (ran.push(["add", input]), { sum: input.a + input.b }),
  }),
  get_weather: tool({
    description: "Get the weather of a city.",
    inputSchema: jsonSchema(objectOf({ city: text })),
    execute: async (input) => (ran.push(["get_weather", input]), { condition: "sunny", temperature: 21 }),
  }),
};

async function converse(prompt, isStreamed, more = {}) {
  ran = [];
  const options = { model: pagewick(MODEL), prompt, temperature: 0, maxRetries: 0, maxOutputTokens: 100, tools, stopWhen: stepCountIs(4), ...more };
  if (!isStreamed) return generateText(options);
  const stream = streamText(options);
  await stream.consumeStream();
  return { text: await stream.text, steps: await stream.steps, finishReason: await stream.finishReason };
}

async function checkTools() {
  for (const isStreamed of [false, true]) {
    const what = isStreamed ? "tools, streamed" : "tools";
    const one = await converse(WEATHER, isStreamed);
    checkEqual(`${what}: the call`, ran, [["get_weather", { city: "Rome" }]]);
    checkEqual(`${what}: the steps`, one.steps.map((step) => step.finishReason), ["tool-calls", "stop"]);
    check(`${what}: the response has the result`, one.text.includes("21"), one.text);
    let both;
    for (const [question, sum] of SUMS) {
      both = await converse(question, isStreamed, { providerOptions: { pagewick: TWO_CALLS } });
      if (new Set(ran.map(([name]) => name)).size === 2) {
        checkEqual(`${what}: the sum`, ran.filter(([name]) => name === "add"), [["add", sum]]);
        break;
      }
    }
    checkEqual(`${what}: both calls`, ran.map(([name]) => name).sort(), ["add", "get_weather"]);
    check(`${what}: the last response`, both.text.length > 5, both.text);
  }
  for (const toolChoice of ["required", { type: "tool", toolName: "add" }]) {
    const response = await converse("Hi", false, { toolChoice, stopWhen: stepCountIs(1), providerOptions: { pagewick: { parallel_tool_calls: false } } });
    const names = response.toolCalls.map((call) => call.toolName);
    check(`toolChoice ${JSON.stringify(toolChoice)}`, names.length === 1 && (toolChoice === "required" || names[0] === "add"), names);
  }
  const none = await converse(WEATHER, false, { toolChoice: "none" });
  check("toolChoice none", none.text !== "" && ran.length === 0, none.text);
}

async function checkStructuredOutput() {
  const schema = jsonSchema(objectOf({ port: integer, is_open: { type: "boolean" } }));
  const isRight = (seen) => Number.isInteger(seen.port) && typeof seen.is_open === "boolean";
  const options = { model: pagewick(MODEL), prompt: QUESTION, temperature: 0, maxRetries: 0, maxOutputTokens: 100 };
  const { object } = await generateObject({ ...options, schema });
  check("generateObject", isRight(object), object);
  const chosen = await generateObject({ ...options, output: "enum", enum: ["yes", "no"] });
  check("generateObject of an enum", ["yes", "no"].includes(chosen.object), chosen.object);
  const stream = streamObject({ ...options, schema });
  const partial = [];
  for await (const one of stream.partialObjectStream) partial.push(one);
  check("streamObject", partial.length > 1 && isRight(await stream.object), partial);
  // The tool is offered in the first step only.
  const prepareStep = ({ stepNumber }) => ({ activeTools: stepNumber === 0 ? ["get_weather"] : [] });
  const both = await converse(WEATHER, false, { output: Output.object({ schema }), prepareStep });
  checkEqual("a call before structured output", ran, [["get_weather", { city: "Rome" }]]);
  check("structured output behind a call", isRight(both.output), both.text);
}

await checkResponses();
await checkStreams();
await checkErrors();
await checkTextCompletion();
await checkTools();
await checkStructuredOutput();
