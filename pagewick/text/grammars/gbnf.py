"""Translates grammars from llama.cpp's GBNF to llguidance's Lark.

llguidance's parser reads the rules. Lark has other names for them: one begins with a letter, has no dash, and is in
upper case if the rule refers to no rule of the parser, so that the lexer can match it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from llguidance.gbnf_to_lark import (
    ASTNode,
    GbnfToLarkError,
    GrammarParser,
    LiteralNode,
    RegexNode,
    RuleNode,
    RuleRefNode,
)

from pagewick.errors import InvalidRequestError
from pagewick.text.grammars.limits import cannot

_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
# Escapes and line breaks that Lark has in another form between quotes.
_IN_QUOTES = re.compile(r"\\.|[\r\n]", re.DOTALL)
_LARK_QUOTES = {"\\[": "[", "\\]": "]", "\r": "\\r", "\n": "\\n"}
_CHARACTER = r"(\\x..|\\.|[^\\])"
_ONE_OR_RANGE = re.compile(f"{_CHARACTER}(?:-{_CHARACTER})?", re.DOTALL)
# These characters, alone or doubled, have a meaning between the brackets of a regular expression.
_MEANING_MORE = frozenset("-&~^")
_ROOT = "root"
_START = "start"


def is_gbnf(grammar: str) -> bool:
    """Whether a grammar is GBNF, whose rules have `::=` where those of Lark have a colon."""
    return _RULE.search(grammar) is not None


def lark_of_gbnf(grammar: str) -> str:
    """Raises InvalidRequestError for a grammar that is not GBNF, has no rule `root`, or lacks another one."""
    try:
        rules = GrammarParser().parse(_ESCAPE.sub(_character, grammar))
        if _ROOT not in rules:
            raise cannot("a GBNF grammar needs a rule named root")
        for rule in rules.values():
            rule.alternatives = rule.alternatives.simplify()
            _write_as_lark(rule)
        _name_as_lark(rules, _resolve(rules))
        return "\n".join(["%llguidance {}", *map(str, rules.values())])
    except GbnfToLarkError as error:
        raise _wrong(str(error)[:340]) from None
    except ValueError:  # from int()
        raise _wrong("a number of repetitions must be written with the digits 0 to 9, and with fewer of them") from None
    except RecursionError:
        raise _wrong("it is nested too deeply; write parts of it as rules of their own") from None


def _write_as_lark(rule: RuleNode) -> None:
    """Write texts and classes of characters, which are those of GBNF, so that Lark allows the same characters."""
    for node in _nodes(rule):
        if isinstance(node, LiteralNode):
            node.value = _IN_QUOTES.sub(lambda match: _LARK_QUOTES.get(match[0], match[0]), node.value)
        elif isinstance(node, RegexNode):
            node.rx = "(?s:.)" if node.rx == "." else _class(node.rx)


def _class(given: str) -> str:
    sign = "^" if given.startswith("[^") else ""
    return f"[{sign}{_ONE_OR_RANGE.sub(_one_or_range, given[1 + len(sign) : -1])}]"


def _one_or_range(match: re.Match[str]) -> str:
    return "-".join(f"\\{end}" if end in _MEANING_MORE else end for end in match.groups() if end is not None)


def _resolve(rules: Mapping[str, RuleNode]) -> dict[str, set[str]]:
    """Link the references to their rules, and return the names that each rule refers to."""
    referred: dict[str, set[str]] = {}
    for name, rule in rules.items():
        referred[name] = set()
        for node in _nodes(rule):
            if isinstance(node, RuleRefNode):
                if node.name not in rules:
                    shown = node.name[:80]
                    raise _wrong(f"the rule {shown} is used, but not defined; add a line that begins with {shown} ::=")
                node.target = rules[node.name]
                referred[name].add(node.name)
    return referred


def _nodes(rule: RuleNode) -> Iterator[ASTNode]:
    """Yield all parts of a rule."""
    waiting = rule.children()
    while waiting:
        yield (node := waiting.pop())
        waiting += node.children()


def _name_as_lark(rules: Mapping[str, RuleNode], referred: Mapping[str, set[str]]) -> None:
    """Give the rules names for Lark, which differ even where only dashes or capitals tell GBNF's names apart."""
    terminals = _terminals(referred)
    taken = {_START}
    for place, (name, rule) in enumerate(rules.items()):
        if name == _ROOT:
            rule.name = _START
            continue
        made = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
        if not made[:1].isalpha():
            made = f"rule_{made}"
        while made in taken:
            made = f"{made}_{place}"
        taken.add(made)
        rule.name = made.upper() if name in terminals else made


def _terminals(referred: Mapping[str, set[str]]) -> set[str]:
    """Return the rules that refer to terminals only, and so to no rule of the parser; never the root."""
    num_open = {name: len(others) for name, others in referred.items()}
    users = defaultdict(list)
    for name, others in referred.items():
        for other in others:
            users[other].append(name)
    waiting = [name for name, number in num_open.items() if number == 0 and name != _ROOT]
    terminals = set(waiting)
    while waiting:
        for user in users[waiting.pop()]:
            num_open[user] -= 1
            if num_open[user] == 0 and user != _ROOT:
                terminals.add(user)
                waiting.append(user)
    return terminals


def _wrong(reason: str) -> InvalidRequestError:
    return cannot(f"the GBNF grammar is wrong: {reason}")


def _character(match: re.Match[str]) -> str:
    """Replace an escape with four or eight digits, which the parser does not read as llama.cpp, by its character."""
    digits = match[1] or match[2]
    if digits is None:
        return match[0]
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise _wrong(f"{match[0]} is no character")
    char = chr(code)
    if code < 0x20 or char in '"\\[]^-/':
        return f"\\x{code:02x}"
    return char
