"""TokenStrings: strings that concern the sampler, which knows no text, as the tokens that spell them."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Iterable, Sequence

from pagewick.errors import InvalidRequestError
from pagewick.sampling_params import SamplingParams
from pagewick.text.tokenizer import Tokenizer

# Users may name any breaker, and each takes up to one entry per token of the vocabulary.
MAX_CACHED_BREAKERS = 64
MAX_CACHED_SETS = 4


class TokenStrings:
    """Looks strings up in one tokenizer; may be used by several threads at once.

    vocab_size: the model's; a tokenizer may have more tokens, which the model can then never choose.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._ids_of_breaker = functools.lru_cache(MAX_CACHED_BREAKERS)(self._find_breaker)
        self._ids_of_breakers = functools.lru_cache(MAX_CACHED_SETS)(self._find_breakers)

    def bad_word_ids(self, params: SamplingParams) -> list[list[int]]:
        """The token sequences of params.bad_words, each as it is and, where that differs, after a space.

        As vLLM does, and as the words go on from a text: a sentencepiece vocabulary adds no space of its own.
        Raises InvalidRequestError for a word that is not Unicode.
        """
        forms = [form for word in params.bad_words for form in (word, f" {word}")]
        return self._possible(self._encode(form, "bad_words") for form in forms)

    def dry_breaker_ids(self, params: SamplingParams) -> list[list[int]]:
        """The token sequences that end a repetition for DRY; none if DRY is off.

        They are all tokens whose text contains one of params.dry_sequence_breakers, and the breaker's own spelling if
        that takes several tokens. The first call reads the whole vocabulary. The list may be another request's too.
        Raises InvalidRequestError for a breaker that is not Unicode.
        """
        return self._ids_of_breakers(params.dry_sequence_breakers) if params.dry_multiplier > 0 else []

    def _find_breakers(self, breakers: tuple[str, ...]) -> list[list[int]]:
        spelled = [self._encode(breaker, "dry_sequence_breakers") for breaker in breakers]
        alone = ([token_id] for breaker in breakers for token_id in self._ids_of_breaker(breaker))
        return self._possible([*alone, *(token_ids for token_ids in spelled if len(token_ids) > 1)])

    def _find_breaker(self, breaker: str) -> array[int]:
        text = breaker.encode()
        return array("i", (token_id for token_id, content in enumerate(self._token_texts) if text in content))

    @functools.cached_property
    def _token_texts(self) -> list[bytes]:
        return [self._tokenizer.token_bytes(token_id) for token_id in range(self._tokenizer.vocab_size)]

    def _encode(self, text: str, param: str) -> list[int]:
        try:
            return self._tokenizer.encode_pieces(["", text])
        except InvalidRequestError:
            message = f"{param} must be valid Unicode; remove the lone surrogate"
            raise InvalidRequestError(message, param=param) from None

    def _possible(self, sequences: Iterable[Sequence[int]]) -> list[list[int]]:
        """Each once, without those that the model cannot write."""
        kept = {tuple(one): None for one in sequences if one and max(one) < self._vocab_size}
        return [list(one) for one in kept]
