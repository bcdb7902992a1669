"""ThinkingBudget: makes the constraint by which the engine, which does not see text, limits a thought's tokens."""

from __future__ import annotations

import functools
from typing import Any

from pagewick.errors import InvalidRequestError
from pagewick.sampling_params import SamplingParams
from pagewick.text.reasoning import BLANKS, Reasoning, ReasoningTags, Stage
from pagewick.text.tokenizer import Tokenizer

MAX_BUDGET = 2**31
_Spelling = list[tuple[int, bytes]]
_BLANK_BYTES = BLANKS.encode()


class ThinkingBudget:
    """Makes thinking budgets for one model. pagewick/engine/constraints/thinking_budget.py applies them."""

    def __init__(self, tokenizer: Tokenizer, tags: ReasoningTags | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._tags = tags
        self._vocab_size = vocab_size

    def prepare(self) -> None:
        """Read the vocabulary, which takes a while the first time."""
        if self._tags is not None:
            _ = self._spellings

    def check(self, budget: int, params: SamplingParams) -> None:
        """Raises InvalidRequestError for an invalid budget, and if the model or these params do not allow a budget."""
        if not isinstance(budget, int) or isinstance(budget, bool) or not 0 <= budget <= MAX_BUDGET:
            message = f"thinking_budget must be a whole number of tokens, 0 or more; got {budget!r}"
            raise InvalidRequestError(message, param="thinking_budget")
        if self._tags is None:
            message = "this model has no tags around its thoughts; leave out thinking_budget"
            raise InvalidRequestError(message, param="thinking_budget")
        if params.use_beam_search:
            message = "thinking_budget cannot be combined with use_beam_search; leave one of them out"
            raise InvalidRequestError(message, param="thinking_budget")
        written = b"".join(map(self._tokenizer.token_bytes, self._tags.end_ids))
        if written != self._tags.end.encode() or max(self._tags.end_ids) >= self._vocab_size:
            message = f"this model cannot write {self._tags.end}, which ends its thoughts; leave out thinking_budget"
            raise InvalidRequestError(message, param="thinking_budget")

    def constraint(self, budget: int, reasoning: Reasoning) -> dict[str, Any] | None:
        """Make EngineRequest.constraint; None if no thought can follow the prompt.

        budget: accepted by `check`. reasoning: the state at the end of the prompt.
        """
        if reasoning.stage == Stage.OVER:
            return None
        tags = reasoning.tags
        parts, blanks = self._spellings
        is_open = reasoning.stage in (Stage.OPENED, Stage.INSIDE)
        return {
            "type": "thinking_budget",
            "budget": budget,
            "is_open": is_open,
            "start_ids": list(tags.start_ids),
            "end_ids": list(tags.end_ids),
            "spelling": parts if is_open else parts + blanks,
            "blanks": _BLANK_BYTES,
        }

    @functools.cached_property
    def _spellings(self) -> tuple[_Spelling, _Spelling]:
        """(id, bytes) of the tokens that overlap with a tag, and of the tokens that are only white space."""
        assert self._tags is not None
        tags, blanks = self._tags, []
        written = [tag.encode() for tag in (tags.start, tags.end)]
        # A token overlaps with a tag if it ends with its beginning, begins with its end, or if one contains the other.
        heads = tuple({tag[:size] for tag in written for size in range(1, len(tag))})
        tails = tuple({tag[-size:] for tag in written for size in range(1, len(tag))})
        # If tags are tokens, the same letters in other tokens are text.
        parts = {token_id: self._tokenizer.token_bytes(token_id) for token_id in (*tags.start_ids, *tags.end_ids)}
        for token_id, content in self._tokenizer.iterate_token_bytes(self._vocab_size):
            if content and not content.strip(_BLANK_BYTES):
                blanks.append((token_id, content))
            elif not content or tags.are_tokens:
                continue
            elif (
                content.endswith(heads)
                or content.startswith(tails)
                or any(content in t or t in content for t in written)
            ):
                parts[token_id] = content
        return [*parts.items()], blanks
