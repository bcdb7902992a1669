// The only place where text is parsed as HTML: what libraries made of a response, and of that no more than the tags below.

import DOMPurify from "./vendor/purify.js";

const POLICY = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "input", "li", "ol", "p", "pre", "span",
    "strong", "table", "tbody", "td", "th", "thead", "tr", "ul", "#text",
  ],
  // None of them loads or runs anything: links and pictures get their targets from markdown.js.
  ALLOWED_ATTR: ["aria-label", "checked", "class", "disabled", "scope", "start", "title", "type"],
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

/** The nodes of an HTML text, without everything that the page does not allow. */
export function sanitized(html) {
  return DOMPurify.sanitize(html, POLICY);
}

/** HTML that shows this text; with `keepsEntities`, an entity in it stays one. */
export function escapeHtml(text, keepsEntities = false) {
  const special = keepsEntities ? /[<>"']|&(?!(?:#\d{1,7}|#x[\da-f]{1,6}|\w+);)/gi : /[&<>"']/g;
  return text.replace(special, (character) => `&#${character.charCodeAt(0)};`);
}
