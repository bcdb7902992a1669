// The page at /docs: renders /openapi.json as routes and schemas. All text becomes text nodes, never markup.

const KEY = "pagewick.api-key"; // Shared with the chat page (api.js); both forget it with the tab.
const byId = (id) => document.getElementById(id);

/** Make an element. Properties are DOM properties; children are nodes and strings, and null is left out. */
function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children.flat().filter((child) => child !== null));
  return made;
}

function storedKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

function storeKey(key) {
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // The browser allows no storage: the key is used once.
  }
}

/** Show the description, or ask for an API key, or show why neither is possible. */
async function load(key) {
  byId("status").textContent = "Loading the description ...";
  byId("key-form").hidden = true;
  // Browsers send no such header: they would say only that the request failed.
  if (/[^!-~]/.test(key)) return askForKey("The API key has spaces or other characters that no key has.");
  let response;
  let document;
  try {
    const headers = key ? { authorization: `Bearer ${key}` } : {};
    response = await fetch("openapi.json", { headers, credentials: "same-origin", redirect: "error" });
    document = await response.json();
  } catch {
    return refuse("The server cannot be reached. Is it still running?");
  }
  if (response.status === 401) return askForKey(key ? "The server does not accept this API key." : "The server needs an API key.");
  if (!response.ok) return refuse(document?.error?.message ?? `The server answered with HTTP status ${response.status}.`);
  if (key) storeKey(key);
  byId("status").textContent = "";
  show(document);
  return openTarget();
}

function askForKey(message) {
  byId("key-form").hidden = false;
  byId("key").focus();
  refuse(message);
}

function refuse(message) {
  byId("status").textContent = message;
}

function show(document) {
  byId("version").textContent = document.info.version;
  byId("about").textContent = document.info.description;
  const routes = byId("routes");
  routes.replaceChildren();
  for (const { name } of document.tags) {
    const operations = [...operationsOf(document, name)].map((one) => operation(document, one));
    routes.append(element("section", {}, element("h2", {}, name), operations));
  }
  const schemas = Object.entries(document.components.schemas).map(([name, schema]) => schemaEntry(name, schema));
  byId("schemas").append(...schemas);
  byId("schemas").hidden = false;
}

function* operationsOf(document, tag) {
  for (const [path, methods] of Object.entries(document.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      if (operation.tags.includes(tag)) yield { path, method, operation };
    }
  }
}

function operation(document, { path, method, operation }) {
  const isOpen = document.security && operation.security?.length === 0;
  const summary = element("summary", {},
    element("span", { className: `method ${method}` }, method.toUpperCase()),
    element("code", { className: "path" }, path),
    element("span", {}, operation.summary),
    isOpen ? element("span", { className: "quiet" }, "needs no key") : null,
  );
  const parameters = operation.parameters ?? [];
  return element("details", { id: operation.operationId, className: "entry" }, summary,
    operation.description ? element("p", {}, operation.description) : null,
    parameters.map((one) => element("p", {}, element("code", {}, one.name), ` in the path: ${typeText(one.schema)}. ${one.description}`)),
    operation.requestBody ? body("Request", operation.requestBody) : null,
    body("Response", operation.responses["200"]),
    errors(document, operation.responses),
  );
}

/** A request's or response's content, and its description. */
function body(title, { description, content = {} }) {
  const rows = Object.entries(content).map(([type, { schema }]) =>
    element("li", {}, element("code", {}, type), schema ? [": ", ...typeNodes(schema)] : null));
  return element("div", {}, element("h3", {}, title), element("ul", {}, rows),
    description && description !== "Success" ? element("p", {}, description) : null);
}

function errors(document, responses) {
  const rows = Object.entries(responses).filter(([status]) => /^[45]/.test(status)).map(([status, response]) => {
    // Errors in the form of another API stand in place; the usual ones are references.
    const { description } = response.$ref ? document.components.responses[response.$ref.split("/").at(-1)] : response;
    return element("tr", {}, element("td", {}, status), element("td", {}, description));
  });
  return element("div", {}, element("h3", {}, "Errors"), table(["Status", "Meaning"], rows));
}

function schemaEntry(name, schema) {
  const isRequired = ([field]) => schema.required?.includes(field) ?? false;
  const sorted = Object.entries(schema.properties ?? {}).sort((one, other) => isRequired(other) - isRequired(one));
  const fields = sorted.map(([field, type]) => element("tr", {},
    element("td", {}, element("code", {}, field)),
    element("td", {}, typeNodes(type), range(type)),
    element("td", {}, isRequired([field]) ? "required" : ""),
    element("td", {}, type.description ?? ""),
  ));
  return element("details", { id: `schema-${name}`, className: "entry" },
    element("summary", {}, element("code", { className: "path" }, name)),
    schema.description ? element("p", {}, schema.description) : null,
    table(["Field", "Type", "Required", "Meaning"], fields),
  );
}

/** A table that scrolls by itself on a narrow screen. */
function table(titles, rows) {
  const head = element("thead", {}, element("tr", {}, titles.map((title) => element("th", { scope: "col" }, title))));
  const made = element("div", { className: "scroller", tabIndex: 0 }, element("table", {}, head, element("tbody", {}, rows)));
  made.setAttribute("role", "region");
  made.setAttribute("aria-label", titles.join(", "));
  return made;
}

function typeText(schema) {
  return typeNodes(schema).map((node) => node.textContent ?? node).join("");
}

/** The type of a JSON schema in words, with links to named schemas. Null is left out: it means that a field is not given. */
function typeNodes(schema) {
  if (schema.$ref) {
    const name = schema.$ref.split("/").at(-1);
    return [element("a", { href: `#schema-${name}` }, name)];
  }
  if (schema.anyOf) {
    const options = schema.anyOf.filter((one) => one.type !== "null").map(typeNodes);
    return options.flatMap((nodes, place) => (place ? [" or ", ...nodes] : nodes));
  }
  if (schema.enum) return [schema.enum.map((one) => JSON.stringify(one)).join(", ")];
  if (schema.type === "array") return ["list of ", ...(schema.items ? typeNodes(schema.items) : ["anything"])];
  if (schema.additionalProperties) return ["map to ", ...typeNodes(schema.additionalProperties)];
  return [schema.type ?? "anything"];
}

/** The range of a number. Bounds of integers that are only those of their size are left out. */
function range(schema) {
  const { minimum, maximum } = [schema, ...(schema.anyOf ?? [])].find((one) => one.minimum !== undefined) ?? {};
  if (minimum === undefined || minimum <= -(2 ** 31)) return null;
  return maximum >= 2 ** 31 ? `, at least ${minimum}` : `, ${minimum} to ${maximum}`;
}

/** Open what the address names: closed details have nothing to scroll to. */
function openTarget() {
  const target = location.hash && byId(decodeURIComponent(location.hash.slice(1)));
  if (!(target instanceof HTMLDetailsElement)) return;
  target.open = true;
  target.scrollIntoView();
}

addEventListener("hashchange", openTarget);
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  load(byId("key").value.trim());
});
load(storedKey());
