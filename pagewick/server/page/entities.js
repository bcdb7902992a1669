// HTML's entities and Markdown's escapes.

export const ESCAPABLE = /[!-/:-@[-`{-~]/;
const ENTITY = /&(?:#(\d{1,7})|#x([\da-f]{1,6})|([a-z][a-z\d]{1,31}));/iy;

// Those that models write. Others stay as they are written.
const NAMED = {
  amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", copy: "©", reg: "®", trade: "™", hellip: "…",
  mdash: "—", ndash: "–", lsquo: "‘", rsquo: "’", ldquo: "“", rdquo: "”", laquo: "«", raquo: "»", bull: "•",
  middot: "·", larr: "←", uarr: "↑", rarr: "→", darr: "↓", times: "×", divide: "÷", deg: "°", plusmn: "±", le: "≤",
  ge: "≥", ne: "≠", euro: "€", pound: "£", yen: "¥", sect: "§", para: "¶", micro: "µ", infin: "∞", sum: "∑", radic: "√",
  alpha: "α", beta: "β", gamma: "γ", delta: "δ", lambda: "λ", mu: "μ", pi: "π", sigma: "σ", omega: "ω",
};

/** The entity that begins at this place: {value, length}, or null. */
export function entityAt(text, at) {
  ENTITY.lastIndex = at;
  const found = ENTITY.exec(text);
  const value = found && entityText(found);
  return value ? { value, length: found[0].length } : null;
}

function entityText([, decimal, hexadecimal, name]) {
  if (name) return Object.hasOwn(NAMED, name) ? NAMED[name] : null;
  const code = decimal ? Number(decimal) : Number.parseInt(hexadecimal, 16);
  return code === 0 || code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff) ? "\ufffd" : String.fromCodePoint(code);
}

/** A link's target, with its escapes and entities resolved. */
export function unescape(url) {
  return url
    .replace(/\\([!-/:-@[-`{-~])/g, "$1")
    .replace(new RegExp(ENTITY.source, "gi"), (whole, ...groups) => entityText([whole, ...groups]) ?? whole);
}
