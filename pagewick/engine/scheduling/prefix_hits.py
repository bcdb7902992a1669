"""Notes in requests and statistics how much of a prompt the prefix cache had, and what of it could not be read."""

from __future__ import annotations

from pagewick.engine.cache.block_manager import BlockManager
from pagewick.engine.messages import EngineStats
from pagewick.engine.scheduling.plan_builder import ScheduledStep
from pagewick.engine.scheduling.sequence_manager import SequenceManager
from pagewick.engine.sequence import Sequence


def note_prefix(seq: Sequence, num_cached: int, blocks: BlockManager, stats: EngineStats) -> None:
    """Note that a request, which starts for the first time, finds `num_cached` tokens of its prompt in the cache."""
    seq.owner.num_cached_tokens = num_cached
    if seq.may_use_prefix_cache:
        seq.owner.prefix_miss = blocks.explain_miss(seq, num_cached)
        stats.prefix_cache_queries += seq.num_prompt_tokens
        stats.prefix_cache_hits += num_cached


def _forget_prefix(seq: Sequence, stats: EngineStats) -> None:
    """Take back a noted hit whose blocks could not be read, if no delta has reported it yet."""
    owner = seq.owner
    if seq.choice_index == 0 and seq.num_output_tokens == 0 and seq.may_use_prefix_cache:
        stats.prefix_cache_queries -= seq.num_prompt_tokens
        stats.prefix_cache_hits -= owner.num_cached_tokens or 0
        owner.num_cached_tokens = None


def forget_unreadable(
    step: ScheduledStep, unreadable: list[bytes], sequences: SequenceManager, blocks: BlockManager, stats: EngineStats
) -> None:
    """Forget the blocks that could not be read from disk. Sequences that were to start with them start again.

    No work of the step was done. Other sequences continue where they are, but the runner is told about them again.
    """
    planned = [(seq, work.num_tokens, work.is_sampled) for seq, work in step.work.items()]
    for seq, num_tokens, is_sampled in [*((seq, 1, True) for seq in step.streams), *planned]:
        if seq.is_finished:
            continue
        seq.num_tokens_in_flight -= num_tokens
        seq.num_unknown_tokens -= is_sampled
        seq.is_started = seq.has_sampled = False
        if blocks.holds_any(seq, unreadable):
            _forget_prefix(seq, stats)
            sequences.preempt(seq)
    for key in unreadable:
        for group in range(len(blocks.groups)):
            blocks.forget(group, key)
