"""HOSTILE: forms of responses that a client might send to do harm, as arguments of StructuredOutputsParams by name."""

from __future__ import annotations

from typing import Any

HOSTILE: dict[str, dict[str, Any]] = {
    "60,000 parentheses in a regular expression": {"regex": "(" * 60_000 + "a" + ")" * 60_000},
    "60,000 parentheses in Lark": {"grammar": "start: " + "(" * 60_000 + '"a"' + ")" * 60_000},
    "60,000 parentheses in GBNF": {"grammar": "root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000},
    "depth 3,000": {"json": '{"items":' * 3000 + "{}" + "}" * 3000},
    "depth 100": {"json": '{"items":' * 100 + "{}" + "}" * 100},
    "an enum of 100,000": {"json": {"enum": [f"v{i}" for i in range(100_000)]}},
    "nested repetitions": {"regex": "(a{1,1000}){1,1000}"},
    "deeper repetitions": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "optional letters": {"regex": "(a?){100000}a{100000}"},
    "a huge repetition": {"regex": "a{1000000000}"},
    "a huge repetition or a letter": {"regex": "a{1000000000}|z"},
    "exponential states": {"regex": "(a|b)*a(a|b){30}"},
    "quadratic states": {"regex": "(.*a.{20}){3}"},
    "classes of Unicode": {"regex": r"(\p{L}{1,500}\d){1,100}"},
    "look-ahead": {"regex": "a(?=b)"},
    "a remote reference": {"json": {"$ref": "http://example.com/x.json"}},
    "a file": {"json": {"$ref": "file:///etc/passwd"}},
    "a reference to itself": {"json": {"$ref": "#"}},
    "deep left recursion": {
        "grammar": "start: a0\n" + "\n".join(f'a{i}: a{i + 1} "x" | "y"' for i in range(3000)) + '\na3000: "z"'
    },
    "ambiguity": {"grammar": 'start: a\na: a a | "x" | '},
    "a rule that is missing": {"grammar": "start: b"},
    "6,000 properties": {"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(6000)}}},
    "500 alternatives": {"json": {"anyOf": [{"properties": {f"p{j}": {} for j in range(50)}} for _ in range(500)]}},
    "a product of alternatives": {
        "json": {"allOf": [{"anyOf": [{"properties": {f"a{i}": {"const": j}}} for j in range(6)]} for i in range(12)]}
    },
    "many items": {"json": {"type": "array", "items": {"type": "array", "minItems": 10**5}, "minItems": 10**5}},
    "a long string": {"json": {"type": "string", "minLength": 10**6, "maxLength": 10**8}},
    "a huge number": {"json": {"type": "integer", "maximum": 10**30}},
    "long text": {"grammar": 'start: "' + "a" * 10**6 + '"'},
    "no JSON": {"json": "{"},
    "a description of 10 MB": {"json": {"type": "null", "description": "x" * 10**7}},
    "references in a circle": {
        "json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    },
    "patterns of properties": {
        "json": {"type": "object", "patternProperties": {f"^(a{{1,99}}b?){{1,{i}}}$": {} for i in range(1, 200)}}
    },
    "a reference that grows": {
        "json": {
            "$ref": "#/$defs/a20",
            "$defs": {"a0": {"type": "null"}}
            | {
                f"a{i}": {
                    "anyOf": [
                        {"type": "array", "items": {"$ref": f"#/$defs/a{i - 1}"}},
                        {"properties": {"x": {"$ref": f"#/$defs/a{i - 1}"}}},
                    ]
                }
                for i in range(1, 21)
            },
        }
    },
    "a wide alternation": {"regex": "|".join(f"{i:x}[a-z]*{i}" for i in range(8000))},
    "a pattern in a schema": {"json": {"type": "string", "pattern": "^((a|b){1,200}c?){1,200}$"}},
    "10,000 long choices": {"choice": [f"{i}" * 8 for i in range(10_000)]},
    "a factor of large numbers": {"json": {"type": "number", "multipleOf": 1e-9, "minimum": -1e15, "maximum": 1e15}},
    "tags in tags": {
        "structural_tag": {
            "triggers": ["<"],
            "structures": [
                {"begin": f"<{i}>", "schema": {"type": "array", "minItems": 1000 + i}, "end": f"</{i}>"}
                for i in range(500)
            ],
        }
    },
}
