#!/usr/bin/env -S bash -c 'exec "${0%/*}/run_all.sh" openai_node'
// OpenAI's own client for Node.
import OpenAI from "openai";
import {
  API, KEY, MODEL, PROMPT, QUESTION, SYSTEM, TOO_LONG, TURNS, asked, check, checkEqual, checkFails, plainly, post, textOf,
} from "./checks.mjs";

const settings = { baseURL: API, apiKey: KEY, maxRetries: 0 };
const client = new OpenAI(settings);

const ask = (fields = {}) => client.chat.completions.create({ model: MODEL, messages: asked(QUESTION), temperature: 0, ...fields });
const tokens = ({ usage }) => [usage.prompt_tokens, usage.completion_tokens, usage.total_tokens];

async function checkResponses() {
  const wanted = await plainly(asked(QUESTION));
  const response = await ask();
  check("the response knows its port", textOf(response).includes("8000"), response);
  checkEqual("chat", textOf(response), textOf(wanted));
  checkEqual("finish reason", response.choices[0].finish_reason, "stop");
  checkEqual("usage", tokens(response), tokens(wanted));
  check("request id", Boolean(response._request_id), response);

  for (const role of ["system", "developer"]) {
    const messages = [{ role, content: SYSTEM }, ...asked(QUESTION)];
    const [instructed, plain] = [await ask({ messages }), await plainly(messages)];
    checkEqual(`${role} message`, [textOf(instructed), ...tokens(instructed)], [textOf(plain), ...tokens(plain)]);
  }
  const [later, plain] = [await ask({ messages: TURNS }), await plainly(TURNS)];
  checkEqual("several turns", [textOf(later), ...tokens(later)], [textOf(plain), ...tokens(plain)]);
  const history = [...asked("What is Pagewick?"), response.choices[0].message, ...asked(QUESTION)];
  check("its own response as a part of the next question", textOf(await ask({ messages: history })) !== "");

  checkEqual("stop", textOf(await ask({ stop: "8000" })), textOf(response).split("8000")[0]);
  for (const name of ["max_tokens", "max_completion_tokens"]) {
    const short = await ask({ [name]: 3 });
    checkEqual(name, [short.usage.completion_tokens, short.choices[0].finish_reason], [3, "length"]);
  }
  const drawn = await Promise.all([5, 5].map((seed) => ask({ temperature: 1, seed })));
  checkEqual("seed", textOf(drawn[0]), textOf(drawn[1]));
  const two = await ask({ n: 2, temperature: 1 });
  checkEqual("n", two.choices.map(({ index }) => index), [0, 1]);
  checkEqual("top_k, which is not OpenAI's", textOf(await ask({ temperature: 1, top_k: 1 })), textOf(response));
}

async function checkLogprobs() {
  const fields = { logprobs: true, top_logprobs: 2, max_tokens: 5 };
  const seen = (await ask(fields)).choices[0].logprobs.content;
  const wanted = (await plainly(asked(QUESTION), fields)).choices[0].logprobs.content;
  checkEqual("logprobs", seen.map(({ token, bytes }) => [token, bytes]), wanted.map(({ token, bytes }) => [token, bytes]));
  const gaps = seen.map(({ logprob }, position) => Math.abs(logprob - wanted[position].logprob));
  check("log-probabilities are the same", Math.max(...gaps) < 1e-4, gaps);
  check("the likeliest was taken", seen.every(({ token, top_logprobs }) => token === top_logprobs[0].token), seen);
}

async function checkStreams() {
  const wanted = await plainly(asked(QUESTION));
  const chunks = [];
  for await (const chunk of await ask({ stream: true, stream_options: { include_usage: true } })) chunks.push(chunk);
  check("a stream comes in pieces", chunks.length > 5, chunks);
  checkEqual("stream", chunks.map(({ choices }) => choices[0]?.delta.content ?? "").join(""), textOf(wanted));
  checkEqual("usage of a stream", tokens(chunks.at(-1)), tokens(wanted));

  // The client's own reading of a stream, which is strict about the order of chunks.
  const stream = client.chat.completions.stream({ model: MODEL, messages: asked(QUESTION), temperature: 0 });
  checkEqual("a stream put together again", textOf(await stream.finalChatCompletion()), textOf(wanted));

  const left = await ask({ stream: true });
  let seen = 0;
  for await (const chunk of left) {
    if (chunk.choices[0].delta.content && (seen += 1) === 2) break;
  }
  checkEqual("a stream that is left", [seen, left.controller.signal.aborted], [2, true]);
}

async function checkErrors() {
  const answered = (kind, code) => (error) => error.constructor === kind && error.code === code;
  const exceeded = answered(OpenAI.BadRequestError, "context_length_exceeded");
  const stranger = new OpenAI({ ...settings, apiKey: "another-key" });
  await checkFails("an unknown model", () => ask({ model: "none" }), answered(OpenAI.NotFoundError, "model_not_found"));
  await checkFails("a wrong key", () => stranger.models.list(), answered(OpenAI.AuthenticationError, "invalid_api_key"));
  await checkFails("a prompt too long", () => ask({ messages: asked(TOO_LONG) }), exceeded);
  await checkFails("a prompt too long, streamed", () => ask({ messages: asked(TOO_LONG), stream: true }), exceeded);
  await checkFails("a response too long", () => ask({ max_tokens: 5000 }), exceeded);
  const outOfRange = (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature";
  await checkFails("a value out of range", () => ask({ temperature: -1 }), outOfRange);
}

async function checkOtherRoutes() {
  const complete = (fields) => client.completions.create({ model: MODEL, prompt: PROMPT, temperature: 0, max_tokens: 6, ...fields });
  const wanted = await post("/completions", { prompt: PROMPT, max_tokens: 6 });
  const response = await complete();
  checkEqual("text completion", [response.choices[0].text, ...tokens(response)], [wanted.choices[0].text, ...tokens(wanted)]);
  let text = "";
  for await (const chunk of await complete({ stream: true })) text += chunk.choices[0].text;
  checkEqual("text completion, streamed", text, response.choices[0].text);

  const names = [];
  for await (const { id } of client.models.list()) names.push(id);
  checkEqual("models", names, [MODEL]);
  checkEqual("a model", (await client.models.retrieve(MODEL)).id, MODEL);
}

await checkResponses();
await checkLogprobs();
await checkStreams();
await checkErrors();
await checkOtherRoutes();
