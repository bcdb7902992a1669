"""Infill: prompts that ask a code model for the text between a prefix and a suffix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from pagewick.text.control_tokens import CUT, Cutter
from pagewick.text.tokenizer import Tokenizer

# The tokens before the prefix, before the suffix, and before the middle, which the model writes.
KNOWN_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek
    ("<PRE>", "<SUF>", "<MID>"),
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # Code Llama
    ("[PREFIX]", "[SUFFIX]", None),  # Mistral: the suffix first, and the middle goes on from the prefix
)


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """Token ids of a model's infill tokens. If middle_id is None, the suffix precedes the prefix in the prompt."""

    prefix_id: int
    suffix_id: int
    middle_id: int | None

    @classmethod
    def find(cls, tokenizer: Tokenizer) -> Self | None:
        """Find the infill tokens in the vocabulary; None for a model without."""
        for names in KNOWN_TOKENS:
            ids = [None if name is None else tokenizer.id_of(name) for name in names]
            prefix_id, suffix_id, middle_id = ids
            if prefix_id is not None and suffix_id is not None and (middle_id is None) == (names[2] is None):
                return cls(prefix_id, suffix_id, middle_id)
        return None

    def prompt(self, prefix: str, suffix: str, tokenizer: Tokenizer, *, max_len: int | None) -> list[int]:
        """Return the prompt for the text between prefix and suffix. Control tokens in either are read as plain text.

        Raises ContextLengthError, InvalidRequestError as Tokenizer.encode does.
        """
        cutter = Cutter([text for text, is_special in tokenizer.added_tokens.items() if is_special])

        def encode(text: str, first: Sequence[str]) -> list[int]:
            return tokenizer.encode_pieces([*first, *cutter.cut(text).split(CUT)], max_len=max_len)

        begin = tokenizer.start_token_ids
        before, after = [self.prefix_id, *encode(prefix, ())], [self.suffix_id, *encode(suffix, ("",))]
        if self.middle_id is None:
            return [*begin, *after, *before]
        return [*begin, *before, *after, self.middle_id]
