"""TokenStrings: translates strings in sampling parameters to tokens, because the sampler does not see text."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from pagewick.errors import InvalidRequestError
from pagewick.sampling_params import SamplingParams
from pagewick.text.tokenizer import Tokenizer

# Requests may name any sequence breaker. Each, and each set of them, takes one bit per token of the vocabulary.
MAX_CACHED_BREAKERS = 256
MAX_CACHED_SETS = 64


class TokenStrings:
    """Translates strings with one tokenizer; may be used by several threads at once.

    vocab_size: the model's. A tokenizer may have more tokens, which the model can never sample.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._mask_of = functools.lru_cache(MAX_CACHED_BREAKERS)(self._find_tokens_with)
        self._breakers = functools.lru_cache(MAX_CACHED_SETS)(self._find_breakers)

    def bad_word_ids(self, params: SamplingParams) -> list[list[int]]:
        """Token sequences of params.bad_words: each word as it is and, if that differs, after a space, as in vLLM.

        A word is spelled as it continues a text: a SentencePiece vocabulary adds no space of its own. Raises
        InvalidRequestError for a word that is not valid Unicode.
        """
        forms = [form for word in params.bad_words for form in (word, f" {word}")]
        return self._possible(self._encode(form, "bad_words") for form in forms)

    def dry_breakers(self, params: SamplingParams) -> tuple[list[list[int]], bytes]:
        """Return the token sequences and the bit mask of params.dry_sequence_breakers; both are empty if DRY is off.

        The sequences are those of breakers of several tokens. The mask, in EngineRequest's form, has the tokens whose
        text contains a breaker. The first call for a breaker reads the whole vocabulary, and requests share the
        returned list. Raises InvalidRequestError for a breaker that is not valid Unicode.
        """
        return self._breakers(params.dry_sequence_breakers) if params.dry_multiplier > 0 else ([], b"")

    def _find_breakers(self, breakers: tuple[str, ...]) -> tuple[list[list[int]], bytes]:
        """Return the token sequences and the mask, which is empty if no token contains a breaker."""
        spelled = [self._encode(breaker, "dry_sequence_breakers") for breaker in breakers]
        bits = 0
        for breaker in breakers:
            bits |= int.from_bytes(self._mask_of(breaker), "little")
        mask = bits.to_bytes(-(-self._vocab_size // 8), "little") if bits else b""
        return self._possible(token_ids for token_ids in spelled if len(token_ids) > 1), mask

    def _find_tokens_with(self, text: str) -> bytes:
        """Return one bit per token of the model's vocabulary, least significant first."""
        sought, mask = text.encode(), bytearray(-(-self._vocab_size // 8))
        for token_id, content in enumerate(self._token_texts):
            if sought in content:
                mask[token_id // 8] |= 1 << token_id % 8
        return bytes(mask)

    @functools.cached_property
    def _token_texts(self) -> list[bytes]:
        num_tokens = min(self._tokenizer.vocab_size, self._vocab_size)
        return [self._tokenizer.token_bytes(token_id) for token_id in range(num_tokens)]

    def _encode(self, text: str, param: str) -> list[int]:
        try:
            return self._tokenizer.encode_pieces(["", text])
        except InvalidRequestError:
            message = f"{param} must be valid Unicode; remove the lone surrogate"
            raise InvalidRequestError(message, param=param) from None

    def _possible(self, sequences: Iterable[Sequence[int]]) -> list[list[int]]:
        """Drop duplicates, and sequences that the model cannot sample."""
        kept = {tuple(one): None for one in sequences if one and max(one) < self._vocab_size}
        return [list(one) for one in kept]
