// The parts of an answer in the order in which they came. An answer holds its thoughts, its text and its calls apart, and beside them
// order: [[kind, length]], where kind is "reasoning", "content" or "calls", and length counts letters or calls.

const KINDS = ["reasoning", "content", "calls"];

/** Return the parts in their order: [{kind, text} or {kind, call}]. */
export function partsOf(node) {
  const at = { reasoning: 0, content: 0, calls: 0 };
  return orderOf(node).flatMap(([kind, length]) => {
    const from = at[kind];
    at[kind] += length;
    const part = node[kind].slice(from, at[kind]);
    return kind === "calls" ? part.map((call) => ({ kind, call })) : [{ kind, text: part }];
  });
}

/** Note that a part of this kind grows by this length. This is called before it grows. */
export function noteGrowth(node, kind, length) {
  if (!length) return;
  node.order = orderOf(node);
  const last = node.order.at(-1);
  if (last?.[0] === kind) last[1] += length;
  else node.order.push([kind, length]);
}

/** Whether an order holds all parts of an answer. */
export function isOrderOf(node, order) {
  const isList = Array.isArray(order) && order.every((run) => Array.isArray(run) && KINDS.includes(run[0]) && run[1] > 0);
  return isList && KINDS.every((kind) => order.reduce((sum, [one, length]) => sum + (one === kind ? length : 0), 0) === lengthOf(node, kind));
}

/** Without an order, as in edited answers, thoughts come first and calls last. */
function orderOf(node) {
  if (isOrderOf(node, node.order)) return node.order;
  return KINDS.map((kind) => [kind, lengthOf(node, kind)]).filter(([, length]) => length);
}

function lengthOf(node, kind) {
  return node[kind]?.length ?? 0;
}

/** Return the number of letters that a model wrote. */
export function sizeOf({ content, reasoning, calls = [] }) {
  return calls.reduce((sum, call) => sum + call.name.length + call.arguments.length, content.length + reasoning.length);
}
