"""Grammars in llama.cpp's GBNF as llguidance's Lark."""

from __future__ import annotations

import re

from llguidance import gbnf_to_lark

from pagewick.text.grammars.limits import cannot

_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)


def is_gbnf(grammar: str) -> bool:
    """Whether a grammar is GBNF, whose rules have `::=` where those of Lark have a colon."""
    return _RULE.search(grammar) is not None


def lark_of_gbnf(grammar: str) -> str:
    """Raises InvalidRequestError for a grammar that is not GBNF, or has no rule `root`."""
    if not re.search(r"^\s*root\s*::=", grammar, re.MULTILINE):
        raise cannot("a GBNF grammar needs a rule named root")
    try:
        lark: str = gbnf_to_lark.any_to_lark(_ESCAPE.sub(_character, grammar))
    except (gbnf_to_lark.GbnfToLarkError, ValueError, LookupError, RecursionError) as error:
        raise cannot(f"the GBNF grammar is wrong: {error}"[:400]) from None
    return lark


def _character(match: re.Match[str]) -> str:
    """Replace an escape with four or eight digits, which the conversion does not know, by its character."""
    digits = match[1] or match[2]
    if digits is None:
        return match[0]
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise cannot(f"the GBNF grammar is wrong: {match[0]} is no character")
    char = chr(code)
    if code < 0x20 or char in '"\\[]^-/':
        return f"\\x{code:02x}"
    return char
