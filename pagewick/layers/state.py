"""Layers that keep one state of a sequence in place of keys and values: what they have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pagewick.attention.backend import AttentionBatch
from pagewick.attention.cache_spec import CacheSpec, KeptState, state_spec
from pagewick.kernels.options import AttentionMetadata
from pagewick.layers.context import LayerContext
from pagewick.quantization.share import Range, check_floats


class Constant(NamedTuple):
    """A tensor of the file that such a layer keeps in float32.

    shape: in the file. ranges: rows that this rank keeps. target: where they go. row_scales: factors of these rows.
    dimension: that of the rows, behind dimensions of 1.
    """

    shape: tuple[int, ...]
    ranges: tuple[Range, ...]
    target: Tensor
    row_scales: Tensor | None = None
    dimension: int = 0


class StateLayer(nn.Module):
    """The base of such layers. The engine reads `cache_spec` and calls `bind_cache` once.

    state_bytes: of a sequence on this rank. layout: a name, which changes whenever the meaning of a state's bytes does.
    """

    def __init__(self, state_bytes: int, layout: str) -> None:
        super().__init__()
        self._spec = state_spec(KeptState(state_bytes), layout=layout)
        self._bound: tuple[Tensor, int] | None = None
        # By the name in the file.
        self._constants: dict[str, Constant] = {}

    @property
    def cache_spec(self) -> CacheSpec:
        return self._spec

    def bind_cache(self, blocks: Tensor, group: int) -> None:
        """Use `blocks` [num_blocks, block_bytes] uint8, addressed by the block tables of cache group `group`."""
        self._bound = (blocks, group)

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        return ((None, name) for name in self._constants)

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        """Keep this rank's rows, in float32. Raises ModelLoadError if the tensor does not fit."""
        shape, ranges, target, row_scales, dimension = self._constants[name]
        check_floats(tensor, shape)
        rows = tensor.view(shape[dimension:])
        target.copy_(torch.cat([rows[start:stop] for start, stop in ranges]).view(target.shape))
        if row_scales is not None:
            target.mul_(row_scales if target.dim() == 1 else row_scales[:, None])

    def states(self, batch: AttentionBatch, num_tokens: int) -> tuple[Tensor, AttentionMetadata]:
        """Return the blocks of states, and which of them the sequences of a batch read and write."""
        assert self._bound is not None, "bind_cache comes first"
        blocks, group = self._bound
        # Every sequence has a new token at least, those of padding included.
        longest = num_tokens - len(batch.context_lens) + 1
        tables = batch.groups[group].block_tables
        return blocks, AttentionMetadata(tables, batch.context_lens, batch.cu_seqlens_q, longest)


def constant(context: LayerContext, *shape: int) -> nn.Parameter:
    """Make an uninitialised parameter, in float32 as the state is."""
    return nn.Parameter(torch.empty(shape, dtype=torch.float32, device=context.device), requires_grad=False)


def times(heads: Range, size: int) -> Range:
    """Return the rows of heads that have `size` rows each."""
    return heads[0] * size, heads[1] * size
