"""ThinkingBudget: closes a thought that has reached its limit of tokens."""

from __future__ import annotations

import msgspec


class ThinkingBudgetSpec(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking_budget"):
    """budget: tokens of thought before the closing tag is forced.

    is_open: the prompt ends inside a thought; else one may follow, after nothing but `blanks` (ASCII characters).
    start_ids, end_ids: the tokens of the tags. spelling: the bytes of all tokens that can contain a part of a tag, and
    of blank ones; no other token matters for where a thought begins and ends.
    """

    budget: int
    is_open: bool
    start_ids: list[int]
    end_ids: list[int]
    spelling: list[tuple[int, bytes]]
    blanks: bytes = b""

    def problem(self, vocab_size: int) -> str | None:
        """Return the first problem of these values, or None."""
        spelled = {token_id for token_id, _ in self.spelling}
        if self.budget < 0:
            return "a budget is not negative"
        if not self.start_ids or not self.end_ids or not spelled.issuperset((*self.start_ids, *self.end_ids)):
            return "both tags need tokens, each with its spelling"
        if not all(0 <= token_id < vocab_size for token_id in self.end_ids):
            return "the closing tag has a token that is not in the vocabulary"
        return None


class ThinkingBudget:
    """A TokenConstraint that is over with the sequence's thought, or once it is clear that there is none."""

    is_complete = False

    def __init__(self, spec: ThinkingBudgetSpec, vocab_size: int) -> None:
        self.is_over = False
        self._spec = spec
        self._vocab_size = vocab_size
        self._spelling = dict(spec.spelling)
        self._start, self._end = (
            b"".join(map(self._spelling.__getitem__, ids)) for ids in (spec.start_ids, spec.end_ids)
        )
        self._is_thinking = spec.is_open
        self._read = b""  # bytes that may be, or become, a part of a tag
        self._num_thought_tokens = 0
        self._last_ids: list[int] = []
        self._forced: list[int] = []
        self._force_if_spent()

    def allowed_mask(self) -> bytes | None:
        """Return a mask of the next token of the closing tag once it is forced; None before."""
        if not self._forced:
            return None
        token_id = self._forced[0]
        mask = bytearray(-(-self._vocab_size // 8))
        mask[token_id // 8] = 1 << token_id % 8
        return bytes(mask)

    def accept(self, token_id: int) -> None:
        if self.is_over:
            return
        if self._forced:
            forced = self._forced.pop(0)
            if token_id != forced:
                raise RuntimeError(f"token {token_id} was sampled where only {forced} was allowed")
            self.is_over = not self._forced
            return
        content = self._spelling.get(token_id)
        if self._is_thinking:
            self._num_thought_tokens += 1
            self._read = b"" if content is None else self._read + content
            self._last_ids = [*self._last_ids, token_id][-len(self._spec.end_ids) :]
            self._look_for_end()
        elif content is None:
            self.is_over = True
        else:
            self._read += content
            self._look_for_start()
        self._force_if_spent()

    def _look_for_start(self) -> None:
        self._read = self._read.lstrip(self._spec.blanks)
        if self._read.startswith(self._start):
            self._is_thinking = True
            self._read = self._read[len(self._start) :]
            self._look_for_end()
        else:
            self.is_over = not self._start.startswith(self._read)

    def _look_for_end(self) -> None:
        self.is_over = self._end in self._read
        self._read = self._read[-len(self._end) :]

    def _force_if_spent(self) -> None:
        if self.is_over or not self._is_thinking or self._num_thought_tokens < self._spec.budget:
            return
        # The model may be writing the tag itself right now.
        end_ids, last_ids = self._spec.end_ids, self._last_ids
        sizes = range(len(end_ids) - 1, -1, -1)
        num_written = next(size for size in sizes if last_ids[len(last_ids) - size :] == end_ids[:size])
        self._forced = end_ids[num_written:]
