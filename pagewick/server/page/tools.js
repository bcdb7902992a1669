// The tools that a user offers to the model: reading and checking their JSON, and the choice among them.

import { parseJson } from "./json.js";

const MAX_TOOLS = 128;
const NAME = /^[\w.-]{1,128}$/;
const FUNCTION_FIELDS = ["name", "description", "parameters", "strict"];
const TYPES = ["array", "boolean", "integer", "null", "number", "object", "string"];
const NAMED = "function:";

/** The values of tool_choice that name no function. */
export const CHOICES = ["auto", "none", "required"];

export const EXAMPLE = `[
  {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
  },
  {
    "name": "get_time",
    "description": "Get the local time of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
  },
  {
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
  }
]`;

/**
 * Parse a list of functions, or OpenAI's list of tools. Returns OpenAI's. Throws an Error whose message is shown to the user; the
 * server checks the rest of the schemas.
 */
export function parseTools(text) {
  let list;
  try {
    list = parseJson(text);
  } catch ({ message }) {
    throw new Error(`Tools must be JSON. ${message}`);
  }
  if (!Array.isArray(list)) throw new Error("Tools must be a list: put [ and ] around it.");
  if (list.length > MAX_TOOLS) throw new Error(`Tools must be at most ${MAX_TOOLS}; these are ${list.length}.`);
  const tools = list.map((given, index) => toolOf(given, `Tool ${index + 1}`));
  const names = tools.map((tool) => tool.function.name);
  const double = names.findIndex((name, index) => names.indexOf(name) < index);
  if (double >= 0) throw new Error(`Tool ${double + 1} has the name of another one, ${names[double]}.`);
  return tools;
}

function toolOf(given, where) {
  if (!isObject(given)) throw new Error(`${where} must be an object with a name.`);
  const { type = "function", ...rest } = given;
  if (type !== "function") throw new Error(`${where} has the type ${JSON.stringify(type)}; only "function" can be used.`);
  const isWrapped = "function" in rest;
  if (isWrapped) checkFields(rest, ["function"], `${where}, which has the field function,`);
  return { type: "function", function: functionOf(isWrapped ? rest.function : rest, where) };
}

function functionOf(given, where) {
  if (!isObject(given)) throw new Error(`${where}: function must be an object with a name.`);
  const { name, description, parameters, strict } = given;
  if (typeof name !== "string") throw new Error(`${where} has no name; it must be a string.`);
  if (!NAME.test(name)) throw new Error(`${where}: the name ${JSON.stringify(name)} must be 1 to 128 letters, digits or any of _ - .`);
  const named = `${where} (${name})`;
  checkFields(given, FUNCTION_FIELDS, named);
  if (!isTextOrNothing(description)) throw new Error(`${named}: description must be a string.`);
  if (![undefined, null, true, false].includes(strict)) throw new Error(`${named}: strict must be true or false.`);
  if (parameters !== undefined && parameters !== null) checkParameters(parameters, named);
  return given;
}

function checkFields(given, known, where) {
  const other = Object.keys(given).find((name) => !known.includes(name));
  if (other !== undefined) throw new Error(`${where} has a field that is not known, ${JSON.stringify(other)}; known: ${known.join(", ")}.`);
}

function checkParameters(schema, where) {
  if (!isObject(schema)) throw new Error(`${where}: parameters must be a JSON schema, an object.`);
  const { type = "object", properties = {}, required = [] } = schema;
  if (type !== "object") throw new Error(`${where}: parameters must have the type "object", since arguments have names.`);
  if (!isObject(properties)) throw new Error(`${where}: parameters.properties must be an object with a schema for each name.`);
  for (const [name, one] of Object.entries(properties)) checkProperty(one, `${where}: the parameter ${JSON.stringify(name)}`);
  if (!Array.isArray(required) || !required.every((name) => typeof name === "string")) {
    throw new Error(`${where}: parameters.required must be a list of names.`);
  }
}

function checkProperty(schema, where) {
  if (typeof schema === "boolean") return;
  if (!isObject(schema)) throw new Error(`${where} must be a JSON schema, an object.`);
  const unknown = [schema.type ?? []].flat().find((type) => !TYPES.includes(type));
  if (unknown !== undefined) throw new Error(`${where} has the type ${JSON.stringify(unknown)}; it must be one of ${TYPES.join(", ")}.`);
}

/** Return the names of the functions in a text of tools, or null if the text is wrong. */
export function toolNames(text) {
  try {
    return text.trim() ? parseTools(text).map((tool) => tool.function.name) : [];
  } catch {
    return null;
  }
}

export function choiceOfName(name) {
  return NAMED + name;
}

/** Parse the text of a choice, where a function has a prefix, to the API's tool_choice. names: those of the tools, or null. */
export function parseToolChoice(text, names) {
  const name = text.startsWith(NAMED) ? text.slice(NAMED.length) : null;
  if (name === null && !CHOICES.includes(text)) throw new Error(`Tool choice must be one of ${CHOICES.join(", ")} or a function.`);
  if (name === null && text !== "required") return text;
  if (names?.length === 0) throw new Error("Tool choice needs tools: add some, or choose auto or none.");
  if (name !== null && names && !names.includes(name)) throw new Error(`Tool choice names ${name}, which is not one of the tools.`);
  return name === null ? text : { type: "function", function: { name } };
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function isTextOrNothing(value) {
  return value === undefined || value === null || typeof value === "string";
}
