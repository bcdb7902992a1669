"""A sequence's speculation: what is guessed for its next tokens, by whom, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagewick.engine.cache.block_manager import BlockManager
from pagewick.engine.scheduling.plan_builder import PlanBuilder
from pagewick.engine.sequence import Sequence
from pagewick.engine.speculation.guessing import NgramIndex, SpeculationControl

# A prompt that was in the cache is learnt in more than one step if it is long: others are waiting.
_INDEXED_PER_STEP = 2048


@dataclass(slots=True)
class Guesses:
    """index: of its own tokens, where guesses come from; None if the draft model makes them.

    token_ids: the draft model's guesses for the next step. num_draft_tokens, num_accepted_tokens: over its whole life.
    """

    control: SpeculationControl
    index: NgramIndex | None
    num_indexed: int = 0
    token_ids: list[int] = field(default_factory=list)
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def catch_up(self, seq: Sequence) -> None:
        """Learn the sequence's tokens, a part of a long prompt at a time; to be called in every step."""
        if self.index is not None:
            end = min(seq.num_tokens, self.num_indexed + _INDEXED_PER_STEP)
            self.index.extend(seq.token_ids[self.num_indexed : end])
            self.num_indexed = end

    def next(self, seq: Sequence, limit: int) -> list[int]:
        """At most `limit` guesses for what comes after the sequence's last token."""
        limit = min(limit, self.control.num_wanted())
        if limit <= 0:
            return []
        if self.index is None:
            return self.token_ids[:limit]
        return self.index.guess(limit) if self.num_indexed == seq.num_tokens else []

    def observe(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """What a step that sampled made of its guesses, if it had any."""
        if num_draft_tokens:
            self.control.observe(num_draft_tokens, num_accepted_tokens)
        else:
            self.control.tick()


@dataclass(frozen=True, slots=True)
class Speculation:
    """How the engine guesses. max_batch: nobody guesses in steps with more sequences, which use the machine well."""

    num_tokens: int
    uses_draft_model: bool
    min_ngram: int
    max_ngram: int
    max_batch: int

    def start(self, seq: Sequence) -> None:
        """Let a new sequence guess, unless its tokens depend on more than the tokens before them."""
        params = seq.params
        if params.mirostat or params.use_beam_search or seq.constraint is not None or seq.is_prompt_only:
            return
        index = None if self.uses_draft_model else NgramIndex(self.min_ngram, self.max_ngram)
        seq.guesses = Guesses(SpeculationControl(self.num_tokens), index)

    def extend(self, plan: PlanBuilder, blocks: BlockManager, max_model_len: int) -> None:
        """Add guesses to the work that samples, as far as budget and blocks are left over."""
        if len(plan.sequences) > self.max_batch:
            return
        for seq in plan.sequences:
            work = plan.work_of(seq)
            if seq.guesses is None or not work.is_sampled:
                continue
            limit = self.limit(seq, max_model_len)
            guesses = seq.guesses.next(seq, min(limit, plan.budget))
            new_block_ids = blocks.allocate(seq, seq.num_tokens + len(guesses)) if guesses else None
            if new_block_ids is not None:
                plan.add_guesses(seq, guesses, new_block_ids)
            if self.uses_draft_model:
                work.num_wanted_drafts = min(max(0, limit - 1), seq.guesses.control.num_wanted())

    def limit(self, seq: Sequence, max_model_len: int) -> int:
        """Most guesses that can become tokens: its output ends at max_tokens, its positions at max_model_len."""
        limit = max_model_len - seq.num_tokens - 1
        if seq.params.max_tokens is not None:
            limit = min(limit, seq.params.max_tokens - seq.num_output_tokens - 1)
        return max(0, limit)
