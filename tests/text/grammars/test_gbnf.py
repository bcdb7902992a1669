"""GBNF allows the texts that llama.cpp's documentation says, whatever its rules are called; a wrong one names why."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from llguidance import LLMatcher

from pagewick.errors import InvalidRequestError
from pagewick.structured_outputs import StructuredOutputsParams
from pagewick.text.grammars.grammar import grammar_of, whole_grammar
from pagewick.text.grammars.limits import GrammarLimits
from pagewick.text.grammars.vocabulary import LIMITS, make_small_vocabulary

VOCABULARY = make_small_vocabulary({}, 1)


def lark(gbnf: str) -> str:
    return whole_grammar(grammar_of(StructuredOutputsParams(grammar=gbnf), GrammarLimits()), None)


def fits(gbnf: str, text: str) -> bool:
    matcher = LLMatcher(VOCABULARY, lark(gbnf), log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    token_ids = VOCABULARY.tokenize_str(text)
    return bool(matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("gbnf", "words"),
    [
        ("root ::= foo", "the rule foo is used, but not defined; add a line that begins with foo ::="),
        ('root ::= ("a" | [b] (no-such?)*)+', "the rule no-such is used"),
        ("root ::= \"no\" 'x'", "Expected name at line 1"),
        ('roots ::= "a"', "a GBNF grammar needs a rule named root"),
        ('x ::= "\nroot ::= "', "a GBNF grammar needs a rule named root"),
        ('root ::= "a', "Unexpected end of input"),
        ('root ::= ( "a"', "Expected ')'"),
        ('root ::= "\\q"', r"Invalid escape sequence \q"),
        ('root ::= "\\ud800"', r"\ud800 is no character"),
        ('root ::= "a"{x}', "Expected integer"),
        ('root ::= "a"{\u00b2}', "a number of repetitions must be written with the digits 0 to 9, and with fewer"),
        (f'root ::= "a"{{{"9" * 5000}}}', "a number of repetitions must be written with the digits 0 to 9"),
    ],
    ids=lambda value: value[:40],
)
def test_a_wrong_grammar_names_its_mistake(gbnf: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(words)) as caught:
        lark(gbnf)
    assert str(caught.value).startswith("structured_outputs cannot be honoured: ") and len(str(caught.value)) < 500


def test_a_grammar_too_deep_for_the_parser_says_so() -> None:
    deep = StructuredOutputsParams(grammar="root ::= " + "(" * 5000 + '"a"' + ")" * 5000)
    with pytest.raises(InvalidRequestError, match="the GBNF grammar is wrong: it is nested too deeply"):
        grammar_of(deep, GrammarLimits(max_depth=10_000))


# Names that mean something in Lark, that Lark does not allow, or that are alike but for what Lark takes for the same.
NAMES = [
    "start", "START", "Start", "Root", "a-b", "a_b", "A-B", "A_B", "aB", "ab", "_a", "__a_b__", "-a", "1", "1a",
    "rule", "rule_1", "json", "regex", "start_1", "a_b_5", "i", "if-x", "X", "x",
]  # fmt: skip


@pytest.mark.parametrize("is_recursive", [False, True])
def test_rules_may_have_any_name(is_recursive: bool) -> None:
    """Recursive rules are rules of the parser; the others become terminals of the lexer."""
    more = "{}?" if is_recursive else ""
    rules = [f'{name} ::= "<{place}>" {more.format(name)}' for place, name in enumerate(NAMES)]
    gbnf = "\n".join([f"root ::= {' '.join(NAMES)}", *rules])
    assert fits(gbnf, "".join(f"<{place}>" for place in range(len(NAMES))))
    twice = "".join(f"<{place}><{place}>" for place in range(len(NAMES)))
    assert fits(gbnf, twice) is is_recursive
    assert not fits(gbnf, "".join(f"<{place}>" for place in range(len(NAMES) - 1)))


@pytest.mark.parametrize("name", NAMES)
def test_one_rule_beside_the_root_may_have_any_name(name: str) -> None:
    assert fits(f'root ::= {name} | "(" root ")"\n{name} ::= [0-9]+', "((17))")


def test_names_in_texts_and_comments_are_no_rules() -> None:
    gbnf = 'start ::= "start: root" [start] # start: none ::= "x"\n# %llguidance {}\nroot ::= start+ | "foo ::= bar"'
    assert fits(gbnf, "start: roots") and fits(gbnf, "foo ::= bar") and not fits(gbnf, "start_1: roots")


def test_the_root_may_be_used_in_rules() -> None:
    gbnf = 'root ::= "a" | list\nlist ::= "[" root ("," root)* "]"'
    assert fits(gbnf, "[a,[a],[[a]]]") and not fits(gbnf, "[a,]")


def test_thousands_of_rules_are_converted() -> None:
    """Each refers to the next, and in Lark's spelling all names are one: no step may go through all rules for each."""
    names = ["".join(char.upper() if place >> bit & 1 else char for bit, char in enumerate("a" * 14))
             for place in range(12_000)]  # fmt: skip
    rules = [f"{name} ::= {following}" for name, following in pairwise(names)]
    gbnf = "\n".join([f"root ::= {names[0]}", *rules, f'{names[-1]} ::= "a"'])
    made = grammar_of(StructuredOutputsParams(grammar=gbnf), GrammarLimits(max_size=2**22)).lark
    assert len(set(re.findall("^[A-Z0-9_]+(?=:)", made, re.MULTILINE))) == len(names)


@pytest.mark.parametrize(
    ("gbnf", "fitting", "others"),
    [
        ('root ::= "\\[a\\]\\t\\"\\\\/"', ['[a]\t"\\/'], ["\\[a\\]\t"]),
        ('root ::= "a\nb\r\nc" # two lines', ["a\nb\r\nc"], ["a", "a\\nb"]),
        ("root ::= [a&&b~~]", ["a", "&", "b", "~"], ["c"]),
        ("root ::= [^&&]", ["a", "^", "é", "\n"], ["&"]),
        ("root ::= [+--]", ["+", ",", "-"], [".", "*"]),
        ("root ::= [--/]", ["-", ".", "/"], ["0", ","]),
        ("root ::= [a-]", ["a", "-"], ["b"]),
        ("root ::= [a^]", ["a", "^"], ["b"]),
        ("root ::= [\\[-\\]x/]", ["[", "\\", "]", "x", "/"], ["Z", "^"]),
        ("root ::= [\\x41-C\\n]", ["A", "B", "C", "\n"], ["D", "x", "n"]),
        ("root ::= [[:alpha:]", ["[", ":", "a", "l"], ["b"]),
        ("root ::= [^\\r\\n\\\\]", ["a", "\t"], ["\r", "\n", "\\"]),
        ("root ::= .*", ["", "a\nb\r"], []),
        ('root ::= "" [0-9]{2,} | "a"{3} | ([b] "c"?){0,1}', ["12", "123", "aaa", "", "b", "bc"], ["1", "aa", "bb"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_texts_and_classes_mean_what_they_do_in_llama_cpp(gbnf: str, fitting: list[str], others: list[str]) -> None:
    assert [text for text in (*fitting, *others) if fits(gbnf, text)] == fitting
