"""Notes in requests and statistics how much of a prompt the prefix cache had."""

from __future__ import annotations

from pagewick.engine.cache.block_manager import BlockManager
from pagewick.engine.messages import EngineStats
from pagewick.engine.sequence import Sequence


def note_prefix(seq: Sequence, num_cached: int, blocks: BlockManager, stats: EngineStats) -> None:
    """Note that a request, which starts for the first time, finds `num_cached` tokens of its prompt in the cache."""
    seq.owner.num_cached_tokens = num_cached
    if seq.may_use_prefix_cache:
        seq.owner.prefix_miss = blocks.explain_miss(seq, num_cached)
        stats.prefix_cache_queries += seq.num_prompt_tokens
        stats.prefix_cache_hits += num_cached


def forget_prefix(seq: Sequence, stats: EngineStats) -> None:
    """Take back a noted hit whose blocks could not be read, if no delta has reported it yet."""
    owner = seq.owner
    if seq.choice_index == 0 and seq.num_output_tokens == 0 and seq.may_use_prefix_cache:
        stats.prefix_cache_queries -= seq.num_prompt_tokens
        stats.prefix_cache_hits -= owner.num_cached_tokens or 0
        owner.num_cached_tokens = None
