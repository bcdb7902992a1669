// The server's API: its models, and answers as they come.

import { eventData } from "./sse.js";

const KEY = "pagewick.api-key";

/** What went wrong, in words. status is 0 without an answer; retryAfterS is the server's wish, in seconds, or null. */
export class ApiError extends Error {
  constructor(message, { status = 0, retryAfterS = null } = {}) {
    super(message);
    this.status = status;
    this.retryAfterS = retryAfterS;
  }
}

/** The key that requests carry. It lives as long as the tab and is never written to disk by this page. */
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
      // A browser that keeps nothing: the key then lives as long as the page.
    }
  },
};

/** The served models: [{id, maxModelLen}]. Raises ApiError. */
export async function listModels() {
  const response = await request("v1/models", { method: "GET" });
  const answer = await response.json().catch(() => null);
  if (!Array.isArray(answer?.data)) throw new ApiError("This is not the answer of a Pagewick server.", response);
  return answer.data.map((card) => ({ id: String(card.id), maxModelLen: Number(card.max_model_len) || null }));
}

/** The chunks of a chat completion. Raises ApiError, also for an answer that breaks off; AbortError after signal. */
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

/** A Retry-After header, seconds or a date, in seconds from now. */
function secondsOf(header) {
  if (header === null) return null;
  const seconds = /^\d+$/.test(header.trim()) ? Number(header) : (Date.parse(header) - Date.now()) / 1000;
  return Number.isFinite(seconds) ? Math.max(0, Math.ceil(seconds)) : null;
}
