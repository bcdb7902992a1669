"""Formats that mark all parts of a response: the parts that they read, and what their grammars accept."""

from __future__ import annotations

import re
from typing import Any

from llguidance import LLMatcher

from pagewick.outputs import PartDelta
from pagewick.text.grammars.grammar import Grammar, whole_grammar
from pagewick.text.grammars.limits import GrammarLimits
from pagewick.text.grammars.vocabulary import make_small_vocabulary
from pagewick.text.tool_calls.formats import ToolCallFormat, format_named
from pagewick.text.tool_calls.offer import ToolOffer
from tests.text.tool_calls.families import OFFER, AllTokens

Parts = list[tuple[str, str]]


class _Prompt(AllTokens):
    """A tokenizer whose prompts end with a text."""

    begun = ""

    def decode(self, token_ids: object, *, skip_special_tokens: bool) -> str:
        return self.begun


class MarkedFormat:
    """A format, with its markers as tokens and without."""

    def __init__(self, name: str) -> None:
        self.form = format_named(name)
        self._tokenizer: Any = AllTokens(self.form.words)

    def _format(self, *, has_tokens: bool, begun: str = "") -> ToolCallFormat:
        tokenizer: Any = _Prompt(self.form.words if has_tokens else ())
        tokenizer.begun = begun
        return ToolCallFormat(self.form, tokenizer)

    def parts(
        self,
        text: str,
        *cuts: int,
        offer: ToolOffer | None = OFFER,
        is_guided: bool = False,
        has_tokens: bool = True,
        begun: str = "",
    ) -> Parts:
        """The parts of a response, those of one kind in a row joined; a call begins with its name."""
        form = self._format(has_tokens=has_tokens, begun=begun)
        splitting = form.splitting([1], offer, is_guided=is_guided)
        assert splitting is not None
        splitter = splitting.splitter()
        words = {mark: self.form.words[token_id - 100] for token_id, mark in splitter.marks.items()}
        for mark, word in sorted(words.items(), key=lambda pair: -len(pair[1])):
            text = text.replace(word, mark)
        ends = [*cuts, len(text)]
        runs = [run for a, b in zip([0, *ends], ends, strict=False) for run in splitter.feed(text[a:b])]
        runs += splitter.flush()
        assert "".join(run[1] for run in runs if not isinstance(run, PartDelta)) == text
        found: Parts = []
        for run in runs:
            if isinstance(run, PartDelta):
                assert run.call is not None
                kind, piece = run.call.name, run.text
            else:
                kind, piece = run
            if found and found[-1][0] == kind:
                found[-1] = kind, found[-1][1] + piece
            elif kind != "dropped":
                found.append((kind, piece))
        return found

    def check_cuts(self, text: str, expected: Parts, **how: Any) -> None:
        """Check the parts of a text wherever it is cut."""
        assert self.parts(text, **how) == expected
        for cut in range(len(text)):
            assert self.parts(text, cut, **how) == expected, cut
        assert self.parts(text, *range(len(text)), **how) == expected

    def lark(self, offer: ToolOffer) -> str:
        return self._format(has_tokens=True).grammar(offer, GrammarLimits())

    def form_lark(self) -> str:
        found = self._format(has_tokens=True).form_grammar(GrammarLimits())
        assert found is not None
        return found

    def accepts(self, lark: str, text: str, answer: Grammar | None = None) -> bool:
        """Return whether a grammar accepts a text in which each marker is a token."""
        words = sorted(self.form.words, key=len, reverse=True)
        special = {self._tokenizer.id_of(word): word.encode() for word in words}
        vocabulary = make_small_vocabulary(special, max(special) + 1)
        token_ids: list[int] = []
        for piece in re.split(f"({'|'.join(map(re.escape, words))})", text):
            token_ids += [self._tokenizer.id_of(piece)] if piece in words else vocabulary.tokenize_str(piece)
        made = LLMatcher(vocabulary, whole_grammar(Grammar(lark, answer=answer), None))
        assert not made.is_error(), made.get_error()
        return made.try_consume_tokens(token_ids) == len(token_ids) and made.is_accepting()
