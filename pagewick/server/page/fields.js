// The inputs of the settings, one for each field.

import { element } from "./dom.js";
import { choiceOfName, CHOICES, EXAMPLE, toolNames } from "./tools.js";

const AREAS = { text: { rows: "3" }, lines: { rows: "2", spellcheck: "false" }, tools: { rows: "6", spellcheck: "false" } };
const OPTIONS = { choice: ["on", "off"], tool_choice: CHOICES };

/** Return the input of a field. */
export function inputFor({ kind, min }, properties) {
  if (AREAS[kind]) return element("textarea", { ...AREAS[kind], ...properties });
  if (OPTIONS[kind]) return element("select", properties, ...optionNodes(["", ...OPTIONS[kind]]));
  // Not type=number: the browser hides the text of such a box if it is not a number, and no error could name it.
  const inputmode = kind === "number" ? "decimal" : min < 0 ? "text" : "numeric";
  return element("input", { type: "text", inputmode, autocomplete: "off", ...properties });
}

/** Show what applies while a field is empty. */
export function showPlaceholder({ kind }, input, inherited) {
  const placeholder = inherited ?? (kind === "text" || kind === "tools" ? "none" : "server default");
  if (OPTIONS[kind]) input.options[0].textContent = labelOf(placeholder);
  else input.placeholder = placeholder;
}

/** Offer each tool in the list of choices. A chosen one that is no tool any more stays, and is wrong. */
export function showToolNames(select, tools, chosen) {
  const values = (toolNames(tools ?? "") ?? []).map(choiceOfName);
  const more = chosen && ![...CHOICES, ...values].includes(chosen) ? [chosen] : [];
  const [empty] = select.options;
  select.replaceChildren(empty, ...optionNodes([...CHOICES, ...values, ...more]));
  select.value = chosen ?? "";
}

/** Return a button that writes the example into the empty field of the tools. */
export function exampleButton(input) {
  const button = element("button", { type: "button", class: "button example-tools", click: () => {
    input.value = EXAMPLE;
    input.dispatchEvent(new Event("input", { bubbles: true }));
    input.dispatchEvent(new Event("change", { bubbles: true }));
    input.focus();
  } }, "Insert an example");
  return button;
}

function optionNodes(values) {
  return values.map((value) => element("option", { value }, labelOf(value)));
}

function labelOf(value) {
  return value.replace(/^function:/, "only ");
}
