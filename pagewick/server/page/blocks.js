// Block Markdown (CommonMark 0.31 with GitHub's tables and task lists) to a list of blocks. HTML blocks are paragraphs.
//
// block: {type, line, ...}, where line is the index of its first line:
//   heading {level, text}   paragraph {text}   rule {}   code {text, language, isClosed}   quote {blocks}
//   list {isOrdered, start, isLoose, items: [{blocks, task}]}, task: true, false or null
//   table {align: ["left" | "right" | "center" | null], head: [text], rows: [[text]]}

const FENCE = /^( {0,3})(`{3,}(?=[^`]*$)|~{3,})[ \t]*(.*)$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t](.*))?$/;
const UNDERLINE = /^ {0,3}(?:(=+)|-+)[ \t]*$/;
const QUOTE = /^ {0,3}>/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:([ \t]+)(.*)|)$/;
const TASK = /^\[([ xX])\][ \t\n]+/;
const DELIMITER_CELL = /^:?-+:?$/;

// Deeper containers are shown as paragraphs: nobody means them, and recursion must end.
const MAX_DEPTH = 24;

// Before a line that belongs to a paragraph though its container's mark is missing: it begins no block in there.
const LAZY = "\0";

export function parseBlocks(text) {
  return parseLines(text.replaceAll("\0", "\ufffd").split(/\r?\n/), 0);
}

/** The width of the white space at the beginning; tabs reach to the next column of four. */
function indentOf(line, column = 0) {
  let columns = column;
  for (let at = 0; line[at] === " " || line[at] === "\t"; at += 1) columns += line[at] === "\t" ? 4 - (columns % 4) : 1;
  return columns - column;
}

/** A line without its first columns of white space, which begin at a column of the text: part of a tab becomes spaces. */
function withoutIndent(line, width, column = 0) {
  const rest = line.trimStart();
  if (width === 0) return line;
  if (!line.slice(0, line.length - rest.length).includes("\t")) return line.slice(Math.min(width, line.length - rest.length));
  return " ".repeat(Math.max(0, indentOf(line, column) - width)) + rest;
}

function parseLines(lines, depth) {
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const [block, next] = parseBlock(lines, at, depth);
    blocks.push({ ...block, line: at });
    at = next;
  }
  return blocks;
}

/** The block that begins at this line, and the line after it. */
function parseBlock(lines, at, depth) {
  const line = lines[at];
  if (indentOf(line) >= 4) return indentedCode(lines, at);
  const fence = FENCE.exec(line);
  if (fence) return fencedCode(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return [{ type: "heading", level: heading[1].length, text: withoutClosing(heading[2] ?? "") }, at + 1];
  if (RULE.test(line)) return [{ type: "rule" }, at + 1];
  if (depth < MAX_DEPTH && QUOTE.test(line)) return quote(lines, at, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return list(lines, at, depth);
  return isTableAt(lines, at) ? table(lines, at) : paragraph(lines, at);
}

function isBlank(line) {
  return /^[ \t]*$/.test(line);
}

/** Whether a line ends a paragraph before it. An ordered list does so only with 1, as numbers begin lines of prose. */
function interrupts(line) {
  if (isBlank(line) || FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)) return true;
  const item = ITEM.exec(line);
  return Boolean(item?.[4]) && (!/\d/.test(item[2]) || Number.parseInt(item[2], 10) === 1);
}

function paragraph(lines, at) {
  const text = [proseOf(lines[at])];
  let next = at + 1;
  for (; next < lines.length; next += 1) {
    const underline = UNDERLINE.exec(lines[next]);
    if (underline) return [{ type: "heading", level: underline[1] ? 1 : 2, text: text.join("\n").trimEnd() }, next + 1];
    if (interrupts(lines[next]) || isTableAt(lines, next)) break;
    text.push(proseOf(lines[next]));
  }
  return [{ type: "paragraph", text: text.join("\n").trimEnd() }, next];
}

function proseOf(line) {
  return line.replace(LAZY, "").trimStart();
}

function withoutClosing(text) {
  const content = text.trim();
  let end = content.length;
  while (content[end - 1] === "#") end -= 1;
  const isClosing = end < content.length && (end === 0 || /[ \t]/.test(content[end - 1]));
  return isClosing ? content.slice(0, end).trimEnd() : content;
}

function indentedCode(lines, at) {
  let end = at;
  for (let next = at; next < lines.length && (isBlank(lines[next]) || indentOf(lines[next]) >= 4); next += 1) {
    if (!isBlank(lines[next])) end = next;
  }
  const text = lines.slice(at, end + 1).map((line) => withoutIndent(line, 4));
  return [{ type: "code", text: text.join("\n"), language: "", isClosed: true }, end + 1];
}

function fencedCode(lines, at, [, indent, marks, info]) {
  const closing = new RegExp(`^ {0,3}${marks[0]}{${marks.length},}[ \\t]*$`);
  let end = at + 1;
  while (end < lines.length && !closing.test(lines[end])) end += 1;
  const isClosed = end < lines.length;
  const text = lines.slice(at + 1, end).map((line) => withoutIndent(line, indent.length)).join("\n");
  const language = info.trim().split(/\s/, 1)[0];
  return [{ type: "code", text, language, isClosed }, isClosed ? end + 1 : end];
}

function quote(lines, at, depth) {
  const inner = [];
  let state = OUTSIDE;
  let next = at;
  for (; next < lines.length; next += 1) {
    const isMarked = QUOTE.test(lines[next]);
    if (!isMarked && !continuesLazily(lines[next], state)) break;
    const content = isMarked ? quoted(lines[next]) : LAZY + proseOf(lines[next]);
    state = stateAfter(state, content);
    inner.push(content);
  }
  return [{ type: "quote", blocks: parseLines(inner, depth + 1) }, next];
}

/** The line without its mark and one column of white space. */
function quoted(line) {
  const [mark] = QUOTE.exec(line);
  return withoutIndent(line.slice(mark.length), 1, mark.length);
}

// Where a container's text stands: in a code fence with these marks, in a paragraph, or elsewhere.
const OUTSIDE = { fence: null, isProse: false };

function stateAfter({ fence, isProse }, line) {
  const found = FENCE.exec(line);
  if (fence) return found?.[2].startsWith(fence) && !found[3] ? OUTSIDE : { fence, isProse: false };
  return found ? { fence: found[2], isProse: false } : { fence: null, isProse: endsInProse(line, isProse) };
}

/** Whether a line may be followed by one without the container's mark that still belongs to its paragraph. */
function endsInProse(line, wasProse) {
  let inner = line;
  let isProse = wasProse;
  for (let depth = 0; depth <= MAX_DEPTH; depth += 1) {
    if (isBlank(inner) || HEADING.test(inner) || RULE.test(inner) || FENCE.test(inner)) return false;
    if (indentOf(inner) >= 4) return isProse;
    const item = ITEM.exec(inner);
    if (!item && !QUOTE.test(inner)) return true;
    inner = item ? (item[4] ?? "") : quoted(inner);
    isProse = false;
  }
  return true;
}

/** Whether a line without the container's mark goes on with its paragraph. Any list item would be a new one. */
function continuesLazily(line, { isProse }) {
  return isProse && !interrupts(line) && !ITEM.test(line);
}

function list(lines, at, depth) {
  const kind = ITEM.exec(lines[at])[2];
  const isOrdered = /\d/.test(kind);
  const items = [];
  let isLoose = false;
  let next = at;
  while (next < lines.length) {
    const found = ITEM.exec(lines[next]);
    if (!found || found[2].at(-1) !== kind.at(-1) || /\d/.test(found[2]) !== isOrdered || RULE.test(lines[next])) break;
    const [inner, end] = itemLines(lines, next, found);
    const blocks = parseLines(inner, depth + 1);
    const isTorn = blocks.some((block, index) => index > 0 && isBlank(inner[block.line - 1]));
    let following = end;
    while (following < lines.length && isBlank(lines[following])) following += 1;
    const goesOn = following < lines.length && isSibling(lines[following], kind);
    isLoose ||= isTorn || (goesOn && following > end);
    items.push(withTask(blocks));
    next = goesOn ? following : end;
    if (!goesOn) break;
  }
  return [{ type: "list", isOrdered, start: isOrdered ? Number.parseInt(kind, 10) : 1, isLoose, items }, next];
}

function isSibling(line, kind) {
  const found = ITEM.exec(line);
  return found !== null && found[2].at(-1) === kind.at(-1) && /\d/.test(found[2]) === /\d/.test(kind) && !RULE.test(line);
}

/** An item's own lines, without their indent and without blank ones at the end, and the line after them. */
function itemLines(lines, at, [, indent, mark, white = " ", first = ""]) {
  const column = indent.length + mark.length;
  const spaces = indentOf(white, column);
  const isCode = spaces > 4 && first !== "";
  const width = column + (first === "" || isCode ? 1 : spaces);
  const inner = [isCode ? " ".repeat(spaces - 1) + first : first];
  let state = stateAfter(OUTSIDE, inner[0]);
  let end = at + 1;
  for (let next = at + 1; next < lines.length; next += 1) {
    const line = lines[next];
    if (isBlank(line)) {
      // An item may begin with one blank line at most.
      if (inner.length === 1 && first === "") break;
      inner.push(withoutIndent(line, width));
      state = stateAfter(state, "");
      continue;
    }
    const isInside = indentOf(line) >= width;
    if (!isInside && !continuesLazily(lines[next], state)) break;
    const content = isInside ? withoutIndent(line, width) : LAZY + proseOf(line);
    state = stateAfter(state, content);
    inner.push(content);
    end = next + 1;
  }
  return [inner.slice(0, end - at), end];
}

function withTask(blocks) {
  const [first, ...rest] = blocks;
  const found = first?.type === "paragraph" ? TASK.exec(first.text) : null;
  if (!found) return { blocks, task: null };
  return { blocks: [{ ...first, text: first.text.slice(found[0].length) }, ...rest], task: found[1] !== " " };
}

function isTableAt(lines, at) {
  if (at + 1 >= lines.length || !lines[at].includes("|") || !/^ {0,3}[|:-]/.test(lines[at + 1])) return false;
  const delimiters = cellsOf(lines[at + 1]);
  return delimiters.every((cell) => DELIMITER_CELL.test(cell)) && cellsOf(lines[at]).length === delimiters.length;
}

function table(lines, at) {
  const head = cellsOf(lines[at]);
  const align = cellsOf(lines[at + 1]).map((cell) => {
    if (cell.endsWith(":")) return cell.startsWith(":") ? "center" : "right";
    return cell.startsWith(":") ? "left" : null;
  });
  const rows = [];
  let next = at + 2;
  for (; next < lines.length && !interrupts(lines[next]) && indentOf(lines[next]) < 4; next += 1) {
    const cells = cellsOf(lines[next]);
    rows.push(head.map((_, column) => cells[column] ?? ""));
  }
  return [{ type: "table", align, head, rows }, next];
}

/** The cells of a row: cut at bars that no backslash stands before. */
function cellsOf(line) {
  const row = line.trim().replace(/^\|/, "");
  const cells = [];
  let cell = "";
  for (let at = 0; at < row.length; at += 1) {
    if (row[at] === "\\" && row[at + 1] === "|") {
      cell += "|";
      at += 1;
    } else if (row[at] === "|") {
      cells.push(cell.trim());
      cell = "";
    } else {
      cell += row[at];
    }
  }
  if (cell.trim() || !row.endsWith("|")) cells.push(cell.trim());
  return cells;
}
