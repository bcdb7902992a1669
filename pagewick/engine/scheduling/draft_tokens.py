"""Speculation: which sequences get draft tokens in a step, and how many."""

from __future__ import annotations

from dataclasses import dataclass

from pagewick.engine.cache.block_manager import BlockManager
from pagewick.engine.scheduling.plan_builder import PlanBuilder
from pagewick.engine.sequence import DraftConstraint, Sequence
from pagewick.engine.speculation.drafting import Drafting, NgramIndex, SpeculationControl


@dataclass(frozen=True, slots=True)
class Speculation:
    """How the engine speculates. num_tokens: those of a drafter for each sequence; a constraint may force more.

    uses_draft_model: the runner proposes, with a draft model or a layer of the model itself (uses_mtp).
    max_batch: steps with more sequences use the machine well without draft tokens. max_num_logits: the rows of logits
    that a step has memory for, one for each sequence that samples and for each draft token.
    """

    num_tokens: int
    uses_draft_model: bool
    min_ngram: int
    max_ngram: int
    max_batch: int
    max_num_logits: int
    uses_mtp: bool = False

    def start(self, seq: Sequence) -> None:
        """Let a new sequence speculate, unless its tokens depend on more than the tokens before them."""
        params = seq.params
        if params.mirostat or params.use_beam_search or seq.is_prompt_only:
            return
        if seq.constraint is not None and not isinstance(seq.constraint, DraftConstraint):
            return
        index = None if self.uses_draft_model else NgramIndex(self.min_ngram, self.max_ngram)
        seq.drafting = Drafting(SpeculationControl(self.num_tokens), index)

    def extend(self, plan: PlanBuilder, blocks: BlockManager) -> None:
        """Add draft tokens to the work that samples, as far as budget, memory for logits and blocks are left over."""
        if plan.num_sequences > self.max_batch:
            return
        num_free_rows = max(0, self.max_num_logits - plan.num_sequences)
        for seq, work in plan.work.items():
            if seq.drafting is None or not work.is_sampled:
                continue
            # The step samples one more token than it has draft tokens.
            limit = seq.owner.max_output_tokens - seq.num_output_tokens - 1
            # On a GPU, a prompt goes through states in chunks only if it has no draft tokens.
            has_room = seq.has_sampled or not blocks.has_states
            room = min(limit, plan.budget, num_free_rows) if has_room else 0
            draft_token_ids = _propose(seq, seq.drafting, room)
            if self.uses_draft_model:
                work.num_wanted_drafts = min(max(0, limit - 1), seq.drafting.control.num_wanted())
            num_tokens = seq.num_tokens + len(draft_token_ids)
            # A layer of the model makes all predictions but the first at places behind the step's tokens, though not
            # behind the sequence's longest length, for which there need not be room in block tables.
            most_ahead = min(work.num_wanted_drafts - 1, seq.max_num_tokens - num_tokens)
            num_ahead = max(0, most_ahead) if self.uses_mtp else 0
            if not draft_token_ids and not num_ahead:
                continue
            new_block_ids = blocks.allocate(seq, num_tokens + num_ahead, for_drafts=True)
            if new_block_ids is None and draft_token_ids and num_ahead:
                new_block_ids = blocks.allocate(seq, num_tokens, for_drafts=True)
            if new_block_ids is not None:
                plan.add_draft_tokens(seq, draft_token_ids, new_block_ids, has_states=blocks.has_states)
                num_free_rows -= len(draft_token_ids)


def plan_options(speculation: Speculation | None) -> dict[str, bool]:
    """Return what the runner needs of a plan to propose draft tokens: options of PlanBuilder."""
    if speculation is None or not speculation.uses_draft_model:
        return {"keeps_history": False}
    return {"keeps_history": not speculation.uses_mtp, "looks_ahead": speculation.uses_mtp}


def _propose(seq: Sequence, drafting: Drafting, limit: int) -> list[int]:
    """Return up to `limit` draft tokens: those that a constraint forces, else those of the drafter that it allows."""
    constraint = seq.constraint
    if not isinstance(constraint, DraftConstraint):
        return drafting.propose(seq.num_tokens, limit)
    if limit > 0 and (forced := constraint.forced_token_ids()):
        return constraint.keep_allowed(forced[:limit])
    return constraint.keep_allowed(drafting.propose(seq.num_tokens, limit))
