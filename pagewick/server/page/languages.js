// What the highlighter knows of each language: ordered [class, pattern] pairs, where "word" is looked up in the lists.
// Every pattern is linear: what it repeats cannot be matched in two ways. Unclosed strings and comments end with the text.

const words = (text) => new Set(text.split(/\s+/));
const raw = String.raw;

const DOUBLE = raw`"(?:\\[\s\S]|[^"\\\n])*"?`;
const SINGLE = raw`'(?:\\[\s\S]|[^'\\\n])*'?`;
const TEMPLATE = "`(?:\\\\[\\s\\S]|[^`\\\\])*(?:`|$)";
const TRIPLE = raw`"""(?:\\[\s\S]|(?!""")[^\\])*(?:"""|$)|'''(?:\\[\s\S]|(?!''')[^\\])*(?:'''|$)`;
const LINE_COMMENT = raw`\/\/[^\n]*`;
const BLOCK_COMMENT = raw`\/\*[\s\S]*?(?:\*\/|$)`;
const HASH_COMMENT = raw`#[^\n]*`;
const NUMBER = raw`\b(?:0[xX][\da-fA-F_]+|0[bB][01_]+|0[oO][0-7_]+|\d[\d_]*(?:\.\d[\d_]*)?(?:[eE][+-]?\d+)?)[a-zA-Z]{0,4}\b`;
const WORD = raw`[A-Za-z_$][\w$]*`;
const C_COMMENTS = ["comment", `${LINE_COMMENT}|${BLOCK_COMMENT}`];
const C_STRINGS = ["string", `${DOUBLE}|${SINGLE}`];

/** Names are what stands after the fence; the first is the key. */
function language(title, aliases, rules, { keywords = "", constants = "", isCaseless = false } = {}) {
  return {
    title,
    aliases: aliases.split(" "),
    classes: rules.map(([name]) => name),
    pattern: new RegExp(rules.map(([, pattern]) => `(${pattern})`).join("|"), "g"),
    keywords: words(keywords),
    constants: words(constants),
    isCaseless,
  };
}

const PYTHON = language("Python", "python py python3 pycon", [
  ["comment", HASH_COMMENT],
  ["string", raw`\b[rRbBfFuU]{1,2}(?=["'])(?:${TRIPLE}|${DOUBLE}|${SINGLE})|${TRIPLE}|${DOUBLE}|${SINGLE}`],
  ["meta", raw`@[A-Za-z_][\w.]*`],
  ["number", NUMBER],
  ["word", WORD],
], {
  keywords: "and as assert async await break case class continue def del elif else except finally for from global if import "
    + "in is lambda match nonlocal not or pass raise return try type while with yield",
  constants: "True False None self cls Ellipsis NotImplemented",
});

const JAVASCRIPT_RULES = [
  C_COMMENTS,
  ["string", `${DOUBLE}|${SINGLE}|${TEMPLATE}`],
  ["string", raw`(?<=[=(,:;!&|?{}[\n]\s{0,9})\/(?![*\/\s])(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^\/\\\[\n])+\/[a-z]*`],
  ["meta", raw`@[A-Za-z_]\w*`],
  ["number", NUMBER],
  ["word", WORD],
];
const JAVASCRIPT_KEYWORDS = "as async await break case catch class const continue debugger default delete do else export extends "
  + "finally for from function get if import in instanceof let new of return set static super switch throw try typeof var "
  + "void while with yield";
const JAVASCRIPT_CONSTANTS = "true false null undefined NaN Infinity this";
const JAVASCRIPT = language("JavaScript", "javascript js jsx mjs cjs node", JAVASCRIPT_RULES, {
  keywords: JAVASCRIPT_KEYWORDS, constants: JAVASCRIPT_CONSTANTS,
});
const TYPESCRIPT = language("TypeScript", "typescript ts tsx", JAVASCRIPT_RULES, {
  keywords: `${JAVASCRIPT_KEYWORDS} abstract any boolean declare enum implements interface is keyof namespace never number `
    + "object override private protected public readonly satisfies string symbol type unknown unique",
  constants: JAVASCRIPT_CONSTANTS,
});

const JSON_ = language("JSON", "json jsonc json5 jsonl", [
  C_COMMENTS,
  ["attribute", raw`"(?:\\.|[^"\\\n])*"(?=\s{0,20}:)`],
  ["string", DOUBLE],
  ["number", raw`-?\b\d+(?:\.\d+)?(?:[eE][+-]?\d+)?\b`],
  ["word", WORD],
], { constants: "true false null" });

const BASH = language("Shell", "bash sh shell zsh console shell-session terminal", [
  ["comment", raw`(?<![^\s;|&(])#[^\n]*`],
  ["string", raw`"(?:\\[\s\S]|[^"\\])*(?:"|$)|'[^']*(?:'|$)`],
  ["variable", raw`\$(?:\{[^}\n]*\}?|[A-Za-z_]\w*|[\d#?@*!$-])`],
  ["attribute", raw`(?<![\w-])--?[A-Za-z][\w-]*`],
  ["number", raw`(?<![\w.-])\d+\b(?![.-])`],
  ["word", raw`[A-Za-z_][\w.-]*`],
], {
  keywords: "if then else elif fi for while until do done case esac in function return exit break continue local export "
    + "readonly declare set unset source trap shift time sudo",
  constants: "echo cd curl pip npm git make python python3 docker pagewick cat grep sed awk ls mkdir rm cp mv apt apt-get true false",
});

const HTML = language("HTML", "html xml svg xhtml vue svelte", [
  ["comment", raw`<!--[\s\S]*?(?:-->|$)`],
  ["meta", raw`<[!?][^>]*>?`],
  ["keyword", raw`<\/?[A-Za-z][\w:.-]*|\/?>`],
  ["attribute", raw`[A-Za-z_:@][\w:.-]*(?==)`],
  ["string", raw`(?<==)(?:"[^"]*"?|'[^']*'?)`],
  ["constant", raw`&(?:#?\w{1,31});`],
]);

const CSS = language("CSS", "css scss sass less", [
  ["comment", `${BLOCK_COMMENT}|${LINE_COMMENT}(?=\\n)`],
  ["string", `${DOUBLE}|${SINGLE}`],
  ["keyword", raw`@[\w-]+`],
  ["variable", raw`--[\w-]+|\$[\w-]+`],
  ["attribute", raw`[A-Za-z-]+(?=\s{0,9}:\s)`],
  ["number", raw`#[\da-fA-F]{3,8}\b|-?(?:\b\d+(?:\.\d+)?|\.\d+)(?:%|[a-z]{1,5}\b)?`],
  ["function", raw`[A-Za-z-]+(?=\()`],
  ["type", raw`[.#][A-Za-z_][\w-]*`],
]);

const C_KEYWORDS = "auto break case const continue default do else enum extern for goto if inline register return sizeof static "
  + "struct switch typedef union volatile while";
const C_TYPES = " bool char double float int long short signed unsigned void size_t int8_t int16_t int32_t int64_t uint8_t "
  + "uint16_t uint32_t uint64_t";
const C_RULES = [
  C_COMMENTS,
  ["meta", raw`(?<=^|\n)[ \t]{0,40}#[ \t]{0,40}[a-z]+`],
  ["string", raw`\bR"\([\s\S]*?(?:\)"|$)|${DOUBLE}|'(?:\\.[^'\n]{0,8}|[^'\\\n])'`],
  ["number", NUMBER],
  ["word", WORD],
];
const C = language("C", "c h", C_RULES, { keywords: C_KEYWORDS + C_TYPES, constants: "NULL true false" });
const CPP = language("C++", "cpp c++ cc cxx hpp cuda cu objc", C_RULES, {
  keywords: `${C_KEYWORDS}${C_TYPES} alignas alignof and catch class co_await co_return co_yield concept consteval constexpr `
    + "constinit decltype delete explicit export final friend import module mutable namespace new noexcept not operator or override "
    + "private protected public requires static_assert static_cast template this throw try typename using virtual",
  constants: "nullptr true false NULL",
});

const RUST = language("Rust", "rust rs", [
  C_COMMENTS,
  ["meta", raw`#!?\[[^\]\n]*\]?`],
  ["string", raw`\bb?r#*"[\s\S]*?(?:"#*|$)|b?${DOUBLE}|b?'(?:\\[^\n']{1,10}|[^'\\\n])'`],
  ["variable", raw`'[a-z_]\w*`],
  ["number", NUMBER],
  ["function", raw`\b[a-z_]\w*!(?=[(\[{])`],
  ["word", WORD],
], {
  keywords: "as async await break const continue crate dyn else enum extern fn for if impl in let loop match mod move mut pub ref "
    + "return static struct super trait type union unsafe use where while bool char f32 f64 i8 i16 i32 i64 i128 isize str u8 u16 "
    + "u32 u64 u128 usize",
  constants: "true false self Self None Some Ok Err",
});

const GO = language("Go", "go golang", [
  C_COMMENTS, ["string", `${DOUBLE}|${SINGLE}|\`[^\`]*(?:\`|$)`], ["number", NUMBER], ["word", WORD],
], {
  keywords: "break case chan const continue default defer else fallthrough for func go goto if import interface map package range "
    + "return select struct switch type var any bool byte error float32 float64 int int8 int16 int32 int64 rune string uint uint8 "
    + "uint16 uint32 uint64 uintptr",
  constants: "true false nil iota",
});

const JAVA = language("Java", "java kotlin kt scala csharp cs c# swift php dart", [
  C_COMMENTS, ["string", `${TRIPLE}|${DOUBLE}|${SINGLE}`], ["meta", raw`@[A-Za-z_]\w*`], ["number", NUMBER], ["word", WORD],
], {
  keywords: "abstract as assert async await break case catch class const continue default do else enum extends final finally fn for "
    + "foreach fun func function goto if implements import in instanceof interface internal is let namespace native new object open "
    + "operator out override package private protected public readonly record return sealed static strictfp struct super "
    + "switch synchronized this throw throws transient try using val var virtual volatile when where while yield boolean byte char "
    + "double float int long short string void",
  constants: "true false null nil self",
});

const SQL = language("SQL", "sql mysql postgres postgresql sqlite psql plsql", [
  ["comment", `--[^\\n]*|${BLOCK_COMMENT}`],
  ["string", raw`'(?:''|[^'])*(?:'|$)`],
  ["attribute", raw`"[^"\n]*"?`],
  ["number", NUMBER],
  ["word", WORD],
], {
  isCaseless: true,
  keywords: "add all alter and any as asc begin between by case check column commit constraint create cross database default delete "
    + "desc distinct drop else end exists except explain foreign from full group having if in index inner insert intersect into is "
    + "join key left like limit not null offset on or order outer over partition primary references returning right rollback select "
    + "set table then to transaction trigger union unique update using values view when where with bigint boolean char date decimal "
    + "double float int integer json jsonb numeric real serial smallint text timestamp uuid varchar",
  constants: "true false",
});

const YAML = language("YAML", "yaml yml", [
  ["comment", raw`(?<![^\s])#[^\n]*`],
  ["attribute", raw`(?<=^|\n)[ \t]{0,99}(?:-[ \t]{1,9})*[\w./-][\w ./-]{0,99}?(?=:(?:\s|$))`],
  ["string", `${DOUBLE}|${SINGLE}`],
  ["meta", raw`(?<![^\s])[&*!][\w!-]+|(?<=^|\n)---`],
  ["number", raw`(?<=[\s[,])-?\d+(?:\.\d+)?(?=[\s,\]]|$)`],
  ["word", raw`(?<=[\s[,])(?:true|false|null|yes|no|on|off)(?=[\s,\]]|$)`],
], { constants: "true false null yes no on off" });

const TOML = language("TOML", "toml ini cfg conf properties env dotenv", [
  ["comment", raw`(?<![^\s])[#;][^\n]*`],
  ["keyword", raw`(?<=^|\n)[ \t]{0,40}\[{1,2}[^\]\n]{0,200}\]{0,2}`],
  ["attribute", raw`(?<=^|\n)[ \t]{0,40}[\w."-]{1,200}(?=[ \t]{0,40}=)`],
  ["string", `${TRIPLE}|${DOUBLE}|${SINGLE}`],
  ["number", raw`(?<=[\s=[,])-?\d[\d_:.TZ-]*`],
  ["word", WORD],
], { constants: "true false" });

const DIFF = language("Diff", "diff patch", [
  ["meta", raw`(?<=^|\n)(?:@@|---|\+\+\+|diff |index )[^\n]*`],
  ["added", raw`(?<=^|\n)\+[^\n]*`],
  ["removed", raw`(?<=^|\n)-[^\n]*`],
]);

const ALL = [PYTHON, JAVASCRIPT, TYPESCRIPT, JSON_, BASH, HTML, CSS, C, CPP, RUST, GO, JAVA, SQL, YAML, TOML, DIFF];

/** Key -> language, and every name -> key. No prototypes: a name comes from the model. */
export const languages = Object.assign(Object.create(null), Object.fromEntries(ALL.map((one) => [one.aliases[0], one])));
export const names = Object.assign(
  Object.create(null),
  Object.fromEntries(ALL.flatMap((one) => one.aliases.map((alias) => [alias, one.aliases[0]]))),
);
