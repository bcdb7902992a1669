// Client of the server's API: the models, and responses as a stream of chunks.

import { eventData } from "./sse.js";

const KEY = "pagewick.api-key";

/** A failed request. status is the HTTP status, or 0 if there was no response; retryAfterS is the Retry-After header in seconds, or null. */
export class ApiError extends Error {
  constructor(message, { status = 0, retryAfterS = null } = {}) {
    super(message);
    this.status = status;
    this.retryAfterS = retryAfterS;
  }
}

/** The API key. It is kept until the tab is closed, and this page never writes it to disk. */
export const apiKey = {
  get() {
    try {
      return sessionStorage.getItem(KEY) ?? "";
    } catch {
      return this.inMemory ?? "";
    }
  },
  set(key) {
    this.inMemory = key;
    try {
      if (key) sessionStorage.setItem(KEY, key);
      else sessionStorage.removeItem(KEY);
    } catch {
      // The browser allows no storage: the key is kept until the page is reloaded.
    }
  },
};

/** Fetch the list of models: [{id, maxModelLen, readsImages}]. What a model that is not loaded reads is unknown: perhaps images. Throws ApiError. */
export async function listModels() {
  const response = await request("v1/models", { method: "GET" });
  const answer = await response.json().catch(() => null);
  if (!Array.isArray(answer?.data)) throw new ApiError("This is not the answer of a Pagewick server.", response);
  return answer.data.map(({ id, max_model_len: maxModelLen, input_modalities: modalities }) => (
    { id: String(id), maxModelLen: Number(maxModelLen) || null, readsImages: !Array.isArray(modalities) || modalities.includes("image") }));
}

/** Yield the chunks of a chat completion. Throws ApiError, also if the stream ends early, and AbortError after `signal`. */
export async function* streamChat(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  try {
    for await (const data of eventData(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(String(chunk.error.message ?? "The server failed."), { status: 500 });
      yield chunk;
    }
  } catch (error) {
    if (error instanceof ApiError || signal.aborted) throw error;
    throw new ApiError("The connection broke before the answer was complete.");
  }
  throw new ApiError("The connection ended before the answer was complete.");
}

async function request(path, options) {
  const key = apiKey.get();
  // Browsers send no such header: they would say only that the request failed.
  if (/[^!-~]/.test(key)) throw new ApiError("The API key has spaces or other characters that no key has.", { status: 401 });
  const headers = { ...options.headers, ...(key && { authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers, credentials: "same-origin", redirect: "error" });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ApiError("The server cannot be reached. Is it still running?");
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? `The server answered with HTTP status ${response.status}.`;
  return new ApiError(String(message), {
    status: response.status,
    retryAfterS: secondsOf(response.headers.get("retry-after")),
  });
}

/** Convert a Retry-After header (seconds or a date) to seconds from now. */
function secondsOf(header) {
  if (header === null) return null;
  const seconds = /^\d+$/.test(header.trim()) ? Number(header) : (Date.parse(header) - Date.now()) / 1000;
  return Number.isFinite(seconds) ? Math.max(0, Math.ceil(seconds)) : null;
}
