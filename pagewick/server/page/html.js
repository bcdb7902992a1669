// The only place where text is parsed as HTML. The HTML comes from marked and highlight.js; DOMPurify removes all but the tags below.

import DOMPurify from "./vendor/purify.js";

const POLICY = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "input", "li", "ol", "p", "pre", "span",
    "strong", "sub", "sup", "table", "tbody", "td", "th", "thead", "tr", "ul", "#text",
  ],
  // None of these attributes loads or runs anything. markdown.js checks the targets of links and pictures and sets them.
  ALLOWED_ATTR: ["aria-label", "checked", "class", "disabled", "scope", "start", "title", "type"],
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

/** Parse HTML and return its nodes, without any tag or attribute that is not listed above. */
export function sanitized(html) {
  return DOMPurify.sanitize(html, POLICY);
}

/** Escape a text for HTML. With `keepsEntities`, entities in the text are kept. */
export function escapeHtml(text, keepsEntities = false) {
  const special = keepsEntities ? /[<>"']|&(?!(?:#\d{1,7}|#x[\da-f]{1,6}|\w+);)/gi : /[&<>"']/g;
  return text.replace(special, (character) => `&#${character.charCodeAt(0)};`);
}
