// One answer, from the request to its last token. It goes on when another conversation is shown.

import { ApiError, streamChat } from "./api.js";

// The network passes tokens on in bursts: over a shorter time their number says nothing about the model.
const MIN_TIMED_S = 0.1;

/**
 * Write the server's answer into a node of a conversation: content, reasoning, finishReason, stats; isStopped after
 * `signal`; error, {message, status, retryAt}, if it failed. onDelta is called after each piece. Throws nothing.
 */
export async function generate(node, body, { maxModelLen, signal, onDelta }) {
  const clock = new Clock();
  let usage = null;
  try {
    for await (const chunk of streamChat(body, signal)) {
      usage = chunk.usage ?? usage;
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      take(node, choice, clock);
      onDelta();
    }
  } catch (error) {
    if (signal.aborted) node.isStopped = true;
    else node.error = errorFields(error);
  }
  node.stats = statsOf(usage, clock, maxModelLen);
}

function take(node, { delta = {}, finish_reason: finishReason }, clock) {
  const content = delta.content ?? "";
  const reasoning = delta.reasoning_content ?? "";
  if (content || reasoning) clock.tick(Boolean(reasoning));
  node.content += content;
  node.reasoning += reasoning;
  if (finishReason) node.finishReason = finishReason;
}

function errorFields(error) {
  // What is no ApiError is ours: a chunk that is not what it should be.
  const { message, status = 0, retryAfterS = null } =
    error instanceof ApiError ? error : new ApiError("The server's answer could not be read.");
  return { message, status, retryAt: retryAfterS === null ? null : Date.now() + retryAfterS * 1000 };
}

/** Seconds of an answer, as the reader sees them. */
class Clock {
  #start = performance.now();
  first = null;
  last = null;
  thinkingEnd = null;

  tick(isReasoning) {
    const now = (performance.now() - this.#start) / 1000;
    this.first ??= now;
    this.last = now;
    if (isReasoning) this.thinkingEnd = now;
  }
}

function statsOf(usage, { first, last, thinkingEnd }, maxModelLen) {
  const completionTokens = usage?.completion_tokens ?? null;
  const writingS = first === null ? 0 : last - first;
  // The first token waits for the prompt; the speed of writing is that of the others. What comes in one burst has none.
  const isTimed = completionTokens > 1 && writingS >= MIN_TIMED_S;
  return {
    promptTokens: usage?.prompt_tokens ?? null,
    completionTokens,
    cachedTokens: usage?.prompt_tokens_details?.cached_tokens ?? null,
    firstTokenS: first,
    tokensPerSecond: isTimed ? (completionTokens - 1) / writingS : null,
    thinkingS: thinkingEnd === null ? null : thinkingEnd - first,
    maxModelLen,
  };
}
