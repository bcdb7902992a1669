"""Linear layers: which rows and columns of which checkpoint tensors a rank holds. The arithmetic is the LinearMethod's.

A weight is [out_features, in_features]. Column parallel layers give each rank some of the output rows, row parallel
layers some of the input columns, whose partial sums are then added over the ranks. A fused layer holds several
checkpoint tensors (its parts) one above the other. All sizes here are logical.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from pagewick.layers.context import LayerBatch, LayerContext
from pagewick.parallel.sharding import kv_heads_of_rank, shard_bounds
from pagewick.quantization.shapes import check_floats
from pagewick.quantization.share import Part, Range, Share, whole_rows


class Linear(nn.Module):
    """x [..., in] -> [..., out]; the base of the layers below, which only say what a rank keeps.

    prefix: the layer's checkpoint name, or, if the share's parts have names, that of the module that holds them.
    """

    def __init__(self, context: LayerContext, prefix: str, share: Share, *, bias: bool = False) -> None:
        super().__init__()
        self._collectives = context.collectives
        self.share = share
        self.weight = context.make_weight(prefix, share)
        self.bias: nn.Parameter | None = None
        if bias:
            empty = torch.empty(share.num_rows, dtype=context.dtype, device=context.device)
            self.bias = nn.Parameter(empty, requires_grad=False)

    def forward(self, x: Tensor, batch: LayerBatch | None = None) -> Tensor:
        """batch: to which sequences the rows of x belong; None: unknown. For what takes this layer's place, such as a
        layer with adapters; this one treats all rows alike."""
        return self.weight.linear(x, self.bias)

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        yield from self.weight.expected()
        if self.bias is not None:
            yield from ((part.name, "bias") for part in self.share.parts)

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        """Keep this rank's share of one checkpoint tensor. Raises ModelLoadError if its shape is not the layer's."""
        if name != "bias" or self.bias is None:
            self.weight.load(part, name, tensor)
            return
        kept, offset = self.share.part(part)
        check_floats(tensor, (kept.num_rows,))
        for start, stop in kept.ranges:
            self.bias[offset : offset + stop - start].copy_(tensor[start:stop])
            offset += stop - start

    def finish_loading(self) -> None:
        self.weight.finish()


class ReplicatedLinear(Linear):
    """Every rank holds the whole weight."""

    def __init__(
        self, context: LayerContext, prefix: str, in_features: int, out_features: int, *, bias: bool = False
    ) -> None:
        super().__init__(context, prefix, whole_rows(out_features, in_features), bias=bias)


class MergedColumnParallelLinear(Linear):
    """Several weights over the same input (gate_proj and up_proj), each cut along its rows.

    prefix: the checkpoint name of the module that holds the parts. Output: this rank's share of each part in turn.
    fused_name: what the checkpoint calls one tensor that holds all the parts, one above the other.
    """

    def __init__(
        self,
        context: LayerContext,
        prefix: str,
        in_features: int,
        part_sizes: dict[str, int],
        *,
        bias: bool = False,
        fused_name: str | None = None,
    ) -> None:
        shares = {name: shard_bounds(size, context.tp_rank, context.tp_size) for name, size in part_sizes.items()}
        if fused_name is None:
            parts = [Part(name, size, (shares[name],)) for name, size in part_sizes.items()]
        else:
            begins = itertools.accumulate(part_sizes.values(), initial=0)
            ranges = (
                (begin + start, begin + stop) for begin, (start, stop) in zip(begins, shares.values(), strict=False)
            )
            parts = [Part(fused_name, sum(part_sizes.values()), tuple(ranges))]
        super().__init__(context, prefix, Share(tuple(parts), in_features, (0, in_features)), bias=bias)


class QKVParallelLinear(Linear):
    """q_proj, k_proj and v_proj, cut between heads.

    A rank that has fewer query heads than share a KV head holds that KV head too; see kv_heads_of_rank.
    Output: [..., (num_heads + 2 * num_kv_heads) * head_dim] with this rank's numbers, which are attributes,
    as are the ids of its heads.
    layout: how the checkpoint holds them. "parts": three tensors; "fused": one, qkv_proj, with all queries, then all
    keys, then all values; "by_head": one with each head's query, key and value after the other.
    """

    def __init__(
        self,
        context: LayerContext,
        prefix: str,
        hidden_size: int,
        head_dim: int,
        total_num_heads: int,
        total_num_kv_heads: int,
        *,
        bias: bool = False,
        layout: Literal["parts", "fused", "by_head"] = "parts",
    ) -> None:
        rank, size = context.tp_rank, context.tp_size
        first_row, last_row = shard_bounds(total_num_heads * head_dim, rank, size, multiple=head_dim)
        heads = range(first_row // head_dim, last_row // head_dim)
        kv_heads = kv_heads_of_rank(total_num_heads, total_num_kv_heads, rank, size)
        if layout == "parts":
            parts = [
                Part("q_proj", total_num_heads * head_dim, ((first_row, last_row),)),
                Part("k_proj", total_num_kv_heads * head_dim, _rows_of(kv_heads, head_dim)),
                Part("v_proj", total_num_kv_heads * head_dim, _rows_of(kv_heads, head_dim)),
            ]
        else:
            # Where, in heads, those of each kind begin, and how far they are apart.
            begins, step = (0, total_num_heads, total_num_heads + total_num_kv_heads), 1
            if layout == "by_head":
                begins, step = (0, 1, 2), 3
            of_kinds = zip(begins, (heads, kv_heads, kv_heads), strict=True)
            ranges = [row for begin, those in of_kinds for row in _rows_of([begin + step * n for n in those], head_dim)]
            parts = [Part("qkv_proj", (total_num_heads + 2 * total_num_kv_heads) * head_dim, tuple(ranges))]
        super().__init__(context, prefix, Share(tuple(parts), hidden_size, (0, hidden_size)), bias=bias)
        self.heads, self.kv_heads = list(heads), kv_heads
        self.num_heads, self.num_kv_heads = len(heads), len(kv_heads)


def _rows_of(heads: Iterable[int], head_dim: int) -> tuple[Range, ...]:
    return tuple((head * head_dim, (head + 1) * head_dim) for head in heads)


class HeadParallelLinear(Linear):
    """Output rows are cut between heads of `head_dim` rows."""

    def __init__(
        self, context: LayerContext, prefix: str, in_features: int, total_num_heads: int, head_dim: int
    ) -> None:
        super().__init__(context, prefix, head_share(context, in_features, total_num_heads, head_dim))


def head_share(context: LayerContext, in_features: int, total_num_heads: int, head_dim: int) -> Share:
    """This rank's heads of a weight with `head_dim` rows for each."""
    num_rows = total_num_heads * head_dim
    rows = shard_bounds(num_rows, context.tp_rank, context.tp_size, multiple=head_dim)
    return Share((Part(None, num_rows, (rows,)),), in_features, (0, in_features))


class RowParallelLinear(Linear):
    """Input columns are cut in units of `multiple`; the ranks' partial results are added, then the bias once."""

    def __init__(
        self,
        context: LayerContext,
        prefix: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        multiple: int = 1,
    ) -> None:
        columns = shard_bounds(in_features, context.tp_rank, context.tp_size, multiple=multiple)
        super().__init__(context, prefix, whole_rows(out_features, in_features, columns), bias=bias)

    def forward(self, x: Tensor, batch: LayerBatch | None = None) -> Tensor:
        if self._collectives.tp_size == 1:
            return self.weight.linear(x, self.bias)
        partial = self._collectives.all_reduce(self.weight.linear(x))
        return partial if self.bias is None else partial + self.bias
