"""PromptChunks: where a step may end inside a prompt, so that the layers' caches can continue and be shared."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pagewick.attention.cache_spec import CacheSpec


class PromptChunks:
    """Cuts prompts for some cache groups.

    alignment: a chunk that is not a prompt's last ends at a multiple of this number of tokens. keeps_snapshots: whether
    another sequence can continue from a group's snapshot.
    """

    def __init__(self, groups: Sequence[CacheSpec], *, keeps_snapshots: bool) -> None:
        self.alignment = math.lcm(*(spec.chunk_alignment for spec in groups))
        distances = [spec.block_size for spec in groups if spec.has_snapshots and keeps_snapshots]
        self._distance = math.lcm(self.alignment, *distances) if distances else 0

    def length(self, start: int, num_missing: int, budget: int, whole: Sequence[tuple[int, int]] = ()) -> int:
        """Return how many of `num_missing` tokens to compute from `start` on: all, or what `budget` and groups allow.

        whole: (begin, end) of tokens within which a chunk must not end, in order: the images of models that see them
        whole. No such model has groups with an alignment or with snapshots.

        A prompt is also cut at the last place where a running state becomes a snapshot, for prompts that begin alike.
        Its end does not count: a prompt that is the same must compute its last token.
        """
        end = start + min(num_missing, budget)
        last = end - (num_missing <= budget)
        if self._distance and start < (snapshot := last // self._distance * self._distance):
            return snapshot - start
        if num_missing <= budget:
            return num_missing
        if whole:
            assert self.alignment == 1, "the end of an image need not be a multiple of it"
            return max(0, next((begin for begin, stop in whole if begin < end < stop), end) - start)
        return max(0, end // self.alignment * self.alignment - start)
