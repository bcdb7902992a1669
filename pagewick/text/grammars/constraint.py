"""GrammarConstraint: the tokens that a grammar allows next. GrammarCompiler makes them, in the engine process.

They satisfy the engine's TokenConstraint without importing it; engine_process.py and llm.py join the two.
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import msgspec

from pagewick.engine.messages import EngineStats
from pagewick.errors import InvalidRequestError

# llguidance's words for a grammar beyond its limits.
_BEYOND_LIMITS = re.compile(r"too (many|complex|large)|limit")
# llguidance's errors for a regular expression. The parser's error has several lines: the expression again, marks below
# the part that is wrong, and then the reason.
_WRONG_REGEX = re.compile(r'at \S+ invalid regex "((?:\\.|[^"\\])*)" \(in regex\): ')
_NO_REGEX = re.compile(r"(?:at \S+ invalid regex [^\n]*)?regex parse error:\n(.*?)^error: ([^\n]*).*", re.DOTALL | re.M)
_MAX_REGEX_SHOWN = 100
# llguidance's words -> Pagewick's words for the same.
_OTHER_WORDS = {
    "Unimplemented keys:": "keywords that are not supported:",
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf": (
        "the alternatives of oneOf must exclude each other, by their types or by a property that each requires with "
        "other values; change them, or use anyOf"
    ),
    "NoExtensionBias": "no text fits it (a rule or $ref that only leads back to itself has no end)",
}

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from pagewick.text.tokenizer import Tokenizer


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="grammar"):
    """EngineRequest.constraint for a grammar.

    grammar: as llguidance reads it. ignores_eos: whether the model's own end tokens end nothing.
    stop_token_ids: further tokens that end the response. param: the request's field, for errors.
    """

    grammar: str
    ignores_eos: bool = False
    stop_token_ids: list[int] = []
    param: str = "structured_outputs"


@dataclass(slots=True, weakref_slot=True, eq=False)
class CompiledGrammar:
    """A matcher at the beginning of a response, to be copied."""

    matcher: LLMatcher


@dataclass(slots=True)
class GrammarTotals:
    """Totals for EngineStats, under the same names. Each is changed by one thread at a time."""

    num_compiled_grammars: int = 0
    grammar_compile_s: float = 0.0
    num_grammar_masks: int = 0
    grammar_mask_s: float = 0.0
    num_grammar_violations: int = 0


class GrammarConstraint:
    """One choice's place in a grammar.

    vocab_size: the model's. end_ids: the tokens that end the response, allowed wherever the grammar may end.
    param: the request's field, for errors.
    """

    def __init__(
        self, compiled: CompiledGrammar, vocab_size: int, end_ids: Sequence[int], totals: GrammarTotals, param: str
    ) -> None:
        self._compiled = compiled
        self._param = param
        self._matcher = compiled.matcher.deep_copy()
        self._num_bytes = -(-vocab_size // 8)
        self._last_bits = (1 << (vocab_size - 1) % 8 + 1) - 1
        self._end_ids = [token_id for token_id in end_ids if token_id < vocab_size]
        self._totals = totals

    @property
    def is_complete(self) -> bool:
        """Whether the response has reached an end of the grammar after which nothing can follow."""
        return bool(self._matcher.is_stopped() and self._matcher.is_accepting())

    def allowed_mask(self) -> bytes:
        """Return one bit per token, see TokenConstraint. Raises InvalidRequestError if that is too complex."""
        started = time.perf_counter()
        mask = bytearray(self._matcher.compute_bitmask()[: self._num_bytes])
        self._check()
        # The bit after that of the model's last token is that of the vocabulary's own end token.
        mask[-1] &= self._last_bits
        if self._matcher.is_accepting():
            for token_id in self._end_ids:
                mask[token_id // 8] |= 1 << token_id % 8
        self._totals.num_grammar_masks += 1
        self._totals.grammar_mask_s += time.perf_counter() - started
        return bytes(mask)

    def accept(self, token_id: int) -> None:
        """Raises InvalidRequestError if the grammar becomes too complex, RuntimeError for a token not allowed."""
        if not self._matcher.consume_token(token_id):
            self._check_limits()
            self._totals.num_grammar_violations += 1
            raise RuntimeError(f"the grammar does not allow token {token_id} here")

    def keep_allowed(self, token_ids: Sequence[int]) -> list[int]:
        """Return the beginning of these tokens that the grammar allows next."""
        return list(token_ids[: self._matcher.validate_tokens(list(token_ids))])

    def forced_token_ids(self) -> list[int]:
        """Return tokens that are likely to be next, because the grammar leaves no other text; empty if it does."""
        forced = self._matcher.compute_ff_tokens()
        return [] if self._matcher.is_error() else list(forced)

    def allowed_masks(self, draft_token_ids: Sequence[int]) -> list[bytes]:
        """Return the mask before each draft token and the one after the last. All draft tokens are allowed."""
        masks, num_consumed = [self.allowed_mask()], 0
        for token_id in draft_token_ids:
            if not self._matcher.consume_token(token_id):
                break
            num_consumed += 1
            masks.append(self.allowed_mask())
        if num_consumed:
            self._matcher.rollback(num_consumed)
        self._check()
        return masks

    def _check(self) -> None:
        if self._matcher.is_error():
            self._check_limits()
            raise RuntimeError(reason_of(self._matcher.get_error()))

    def _check_limits(self) -> None:
        if _BEYOND_LIMITS.search(error := self._matcher.get_error()):
            message = f"{self._param} became too complex while the response was generated: {reason_of(error)}"
            raise InvalidRequestError(f"{message}; write it with fewer repetitions or alternatives", param=self._param)


class GrammarCompiler:
    """Compiles grammars for one model; may be used by several threads at once.

    load_tokenizer: called with the first grammar, because most engines never see one. cache_size: number of compiled
    grammars to keep for further requests.
    """

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], cache_size: int) -> None:
        self._totals = GrammarTotals()
        self._load_tokenizer = load_tokenizer
        self._cache_size = cache_size
        self._lock = threading.Lock()
        self._vocabulary_lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._kept: OrderedDict[str, CompiledGrammar] = OrderedDict()
        # Grammars that a sequence uses stay known, too, so that its request's other choices need not compile them.
        self._in_use: WeakValueDictionary[str, CompiledGrammar] = WeakValueDictionary()

    def constraint(self, spec: object, vocab_size: int, eos_token_ids: Sequence[int]) -> GrammarConstraint:
        """Make the constraint of one choice. Raises InvalidRequestError for data or a grammar that is wrong."""
        read = read_spec(spec)
        compiled = self.compile(read, vocab_size)
        end_ids = [*(() if read.ignores_eos else eos_token_ids), *read.stop_token_ids]
        return GrammarConstraint(compiled, vocab_size, end_ids, self._totals, read.param)

    def prepare(self, vocab_size: int) -> None:
        """Make the vocabulary before the first grammar needs it. It takes up to a second, half of it with the GIL."""
        self._vocabulary_of(vocab_size)

    def count_into(self, stats: EngineStats) -> None:
        """Set the totals of grammars."""
        for one in fields(self._totals):
            setattr(stats, one.name, getattr(self._totals, one.name))

    def is_compiled(self, spec: GrammarSpec) -> bool:
        """Whether the grammar is compiled, so that `constraint` is quick."""
        with self._lock:
            return spec.grammar in self._kept or spec.grammar in self._in_use

    def compile(self, spec: GrammarSpec, vocab_size: int) -> CompiledGrammar:
        """Raises InvalidRequestError for a grammar that is wrong or too complex."""
        with self._lock:
            known = self._kept.pop(spec.grammar, None) or self._in_use.get(spec.grammar)
        if known is None:
            known = self._compile(spec, vocab_size)
        with self._lock:
            self._kept[spec.grammar] = self._in_use[spec.grammar] = known
            while len(self._kept) > self._cache_size:
                self._kept.popitem(last=False)
        return known

    def _compile(self, spec: GrammarSpec, vocab_size: int) -> CompiledGrammar:
        # Not at the top: most engines never see a grammar, and should start without llguidance and tokenizers.
        from llguidance import LLMatcher

        from pagewick.text.grammars.vocabulary import LIMITS

        vocabulary = self._vocabulary_of(vocab_size)
        started = time.perf_counter()
        matcher = LLMatcher(vocabulary, spec.grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            message = f"{spec.param} cannot be honoured: {reason_of(matcher.get_error())}"
            raise InvalidRequestError(message, param=spec.param)
        with self._lock:
            self._totals.num_compiled_grammars += 1
            self._totals.grammar_compile_s += time.perf_counter() - started
        return CompiledGrammar(matcher)

    def _vocabulary_of(self, vocab_size: int) -> LLTokenizer:
        from pagewick.text.grammars.vocabulary import make_vocabulary

        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = make_vocabulary(self._load_tokenizer(), vocab_size)
            return self._vocabulary


def read_spec(spec: object) -> GrammarSpec:
    """Raises InvalidRequestError for data that describes no grammar."""
    try:
        return msgspec.convert(spec, GrammarSpec)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"this is not a constraint: {error}", param="constraint") from None


def reason_of(error: str) -> str:
    """Return llguidance's error in one line, for a client who knows nothing of Lark."""
    error = _NO_REGEX.sub(lambda match: f"{_wrong_regex(match[1])}{match[2]}", error)
    error = _WRONG_REGEX.sub(lambda match: _wrong_regex(match[1].replace(r"\\", "\\")), error)
    line = " ".join(error.partition("\n")[0].split())
    _, mark, schema_error = line.partition("failed to compile JSON schema: ")
    line = f"the JSON schema is not supported: {schema_error}" if mark else line
    for words, ours in _OTHER_WORDS.items():
        line = line.replace(words, ours)
    return line[:300] or "it allows no response"


def _wrong_regex(regex: str) -> str:
    shown = " ".join(line.strip() for line in regex.splitlines() if line.strip(" ~^"))
    if len(shown) > _MAX_REGEX_SHOWN:
        shown = f"{shown[:_MAX_REGEX_SHOWN]}..."
    return f"the regular expression {shown} is wrong: "
