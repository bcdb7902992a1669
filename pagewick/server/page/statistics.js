// The line of numbers below a response.

import { element } from "./dom.js";

/** Return the nodes of a response's statistics. While it is being written, these are its tokens and their speed only. */
export function statNodes(stats, isWriting) {
  if (!stats || stats.completionTokens === null) return [];
  const { completionTokens, tokensPerSecond } = stats;
  const tokens = `${grouped(completionTokens)} ${completionTokens === 1 ? "token" : "tokens"}`;
  const speed = tokensPerSecond && `${tokensPerSecond < 10 ? tokensPerSecond.toFixed(1) : grouped(Math.round(tokensPerSecond))} tokens/s`;
  const main = [tokens, speed].filter(Boolean).map((text) => element("span", {}, text));
  return isWriting ? main : [...main, ...detailNodes(stats)];
}

function detailNodes({ promptTokens, completionTokens, cachedTokens, firstTokenS, maxModelLen }) {
  const used = promptTokens + completionTokens;
  const parts = [
    firstTokenS !== null && `${firstTokenS < 10 ? firstTokenS.toFixed(2) : Math.round(firstTokenS)} s to the first`,
    cachedTokens !== null && `${grouped(cachedTokens)} of ${grouped(promptTokens)} cached`,
  ].filter(Boolean);
  const nodes = parts.map((text) => element("span", { class: "detail" }, text));
  if (maxModelLen) {
    const meter = element("meter", { min: "0", max: String(maxModelLen), value: String(used), "aria-label": "Context in use" });
    nodes.push(element("span", { class: "detail" }, meter, ` context ${grouped(used)} / ${grouped(maxModelLen)}`));
  }
  return nodes;
}

function grouped(number) {
  return Number(number).toLocaleString("en");
}
