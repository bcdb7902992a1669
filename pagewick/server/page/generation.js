// One response, from the request to its last token. It continues while the user looks at another conversation.

import { ApiError, streamChat } from "./api.js";
import { noteGrowth } from "./parts.js";
import { newId } from "./tree.js";

// The network delivers tokens in bursts, so that over a shorter time the speed would be meaningless.
const MIN_TIMED_S = 0.1;

/**
 * Request a response and add it to a node of a conversation: content, reasoning, calls, finishReason and stats, which are those so
 * far until the end; isStopped after `signal`; error ({message, status, retryAt}) if it failed. Calls onDelta after each chunk. Never
 * throws.
 */
export async function generate(node, body, { maxModelLen, signal, onDelta }) {
  const clock = new Clock();
  // Not null if this continues a response.
  const before = node.stats;
  try {
    for await (const { usage, choices } of streamChat(body, signal)) {
      const choice = choices?.[0];
      if (choice) take(node, choice, clock);
      if (usage) node.stats = statsOf(usage, clock, { before, maxModelLen });
      if (choice) onDelta();
    }
  } catch (error) {
    if (signal.aborted) node.isStopped = true;
    else node.error = errorFields(error);
  }
}

function take(node, { delta = {}, finish_reason: finishReason }, clock) {
  const content = delta.content ?? "";
  const reasoning = delta.reasoning_content ?? "";
  const calls = delta.tool_calls ?? [];
  if (content || reasoning || calls.length) clock.tick(Boolean(reasoning));
  noteGrowth(node, "reasoning", reasoning.length);
  node.reasoning += reasoning;
  noteGrowth(node, "content", content.length);
  node.content += content;
  for (const piece of calls) takeCall(node, piece);
  if (finishReason) node.finishReason = finishReason;
}

/** Add a piece of a call. Only its first piece has the id and the name. */
function takeCall(node, { index, id, function: { name = "", arguments: text = "" } = {} }) {
  node.calls ??= [];
  if (!node.calls[index]) {
    noteGrowth(node, "calls", 1);
    node.calls.push({ id: id ?? `call_${newId()}`, name: "", arguments: "" });
  }
  const call = node.calls[index] ?? node.calls.at(-1);
  call.name += name;
  call.arguments += text;
}

function errorFields(error) {
  // Any other error comes from a malformed chunk.
  const { message, status = 0, retryAfterS = null } =
    error instanceof ApiError ? error : new ApiError("The server's answer could not be read.");
  return { message, status, retryAt: retryAfterS === null ? null : Date.now() + retryAfterS * 1000 };
}

/** Times of a response as seen in the browser, in seconds since the request. */
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

/** Return the statistics of a response. If it continues an earlier part, that part's tokens are counted, and its times are kept. */
function statsOf(usage, { first, last, thinkingEnd }, { before, maxModelLen }) {
  const { prompt_tokens: prompt = null, completion_tokens: completion = null } = usage;
  const earlier = before?.completionTokens ?? 0;
  const writingS = first === null ? 0 : last - first;
  // The first token includes the time for the prompt, so the speed is that of the other tokens. A single burst has no speed.
  const isTimed = completion > 1 && writingS >= MIN_TIMED_S;
  return {
    // The prompt of a continuation contains the earlier part.
    promptTokens: prompt === null ? null : prompt - earlier,
    completionTokens: completion === null ? null : completion + earlier,
    cachedTokens: before ? before.cachedTokens : usage.prompt_tokens_details?.cached_tokens ?? null,
    firstTokenS: before ? before.firstTokenS : first,
    tokensPerSecond: isTimed ? (completion - 1) / writingS : before?.tokensPerSecond ?? null,
    thinkingS: before ? before.thinkingS : thinkingEnd === null ? null : thinkingEnd - first,
    maxModelLen,
  };
}
