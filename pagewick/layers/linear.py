"""Linear layers: which rows and columns of which checkpoint tensors a rank holds. The arithmetic is the LinearMethod's.

A weight is [out_features, in_features]. Column parallel layers give each rank some of the output rows, row parallel
layers some of the input columns, whose partial sums are then added over the ranks. A fused layer holds several
checkpoint tensors (its parts) one above the other. All sizes here are logical; Packing converts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pagewick.layers.context import LayerContext
from pagewick.layers.shapes import check_shape
from pagewick.parallel.sharding import kv_heads_of_rank, shard_bounds
from pagewick.quantization.method import COLUMNS, ROWS

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint tensor of `num_rows` rows, of which this rank keeps `ranges`, in that order."""

    name: str | None
    num_rows: int
    ranges: tuple[Range, ...]

    @property
    def num_kept(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


class Linear(nn.Module):
    """x [..., in] -> [..., out]; the base of the layers below, which only say what a rank keeps.

    prefix: the checkpoint name of the first part, without `.weight`.
    in_features, columns: input columns of the whole model, and the range of them that this rank holds.
    """

    def __init__(
        self,
        context: LayerContext,
        prefix: str,
        in_features: int,
        columns: Range,
        parts: Sequence[Part],
        *,
        bias: bool,
    ) -> None:
        super().__init__()
        self.parts = tuple(part.name for part in parts if part.name is not None)
        self._parts = {part.name: part for part in parts}
        self._in_features = in_features
        self._columns = columns
        self._collectives = context.collectives
        num_rows = sum(part.num_kept for part in parts)
        self.method = context.choose_method(prefix)
        self.packings = self.method.create(self, columns[1] - columns[0], num_rows, context.dtype, context.device)
        self.bias: nn.Parameter | None = None
        if bias:
            empty = torch.empty(num_rows, dtype=context.dtype, device=context.device)
            self.bias = nn.Parameter(empty, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.method.apply(self, x, self.bias)

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        names = [*self.packings, *(["bias"] if self.bias is not None else [])]
        return ((part, name) for part in self._parts for name in names)

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        """Keep this rank's share of one checkpoint tensor. Raises ModelLoadError if its shape is not the layer's."""
        kept = self._parts[part]
        offset = self._offset_of(part)
        if name == "bias" and self.bias is not None:
            check_shape(tensor, (kept.num_rows,))
            for start, stop in kept.ranges:
                self.bias[offset : offset + stop - start].copy_(tensor[start:stop])
                offset += stop - start
            return
        packing = self.packings[name]
        check_shape(tensor, packing.stored_shape(kept.num_rows, self._in_features))
        columns = packing.cut(tensor, COLUMNS, *self._columns, self._in_features)
        for start, stop in kept.ranges:
            shard = packing.cut(columns, ROWS, start, stop, kept.num_rows)
            self.method.load(self, name, shard, out_offset=offset)
            offset += stop - start

    def finish_loading(self) -> None:
        self.method.finish(self)

    def _offset_of(self, part: str | None) -> int:
        names = list(self._parts)
        return sum(self._parts[name].num_kept for name in names[: names.index(part)])


class ReplicatedLinear(Linear):
    """Every rank holds the whole weight."""

    def __init__(
        self, context: LayerContext, prefix: str, in_features: int, out_features: int, *, bias: bool = False
    ) -> None:
        part = Part(None, out_features, ((0, out_features),))
        super().__init__(context, prefix, in_features, (0, in_features), [part], bias=bias)


class MergedColumnParallelLinear(Linear):
    """Several weights over the same input (gate_proj and up_proj), each cut along its rows.

    prefix: the checkpoint name of the module that holds the parts. Output: this rank's share of each part in turn.
    """

    def __init__(
        self, context: LayerContext, prefix: str, in_features: int, part_sizes: dict[str, int], *, bias: bool = False
    ) -> None:
        parts = [
            Part(name, size, (shard_bounds(size, context.tp_rank, context.tp_size),))
            for name, size in part_sizes.items()
        ]
        super().__init__(context, f"{prefix}.{parts[0].name}", in_features, (0, in_features), parts, bias=bias)


class QKVParallelLinear(Linear):
    """q_proj, k_proj and v_proj, cut between heads.

    A rank that has fewer query heads than share a KV head holds that KV head too; see kv_heads_of_rank.
    Output: [..., (num_heads + 2 * num_kv_heads) * head_dim] with this rank's numbers, which are attributes.
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
    ) -> None:
        rank, size = context.tp_rank, context.tp_size
        first_row, last_row = shard_bounds(total_num_heads * head_dim, rank, size, multiple=head_dim)
        kv_heads = kv_heads_of_rank(total_num_heads, total_num_kv_heads, rank, size)
        kv_ranges = tuple((head * head_dim, (head + 1) * head_dim) for head in kv_heads)
        parts = [
            Part("q_proj", total_num_heads * head_dim, ((first_row, last_row),)),
            Part("k_proj", total_num_kv_heads * head_dim, kv_ranges),
            Part("v_proj", total_num_kv_heads * head_dim, kv_ranges),
        ]
        super().__init__(context, f"{prefix}.q_proj", hidden_size, (0, hidden_size), parts, bias=bias)
        self.num_heads = (last_row - first_row) // head_dim
        self.num_kv_heads = len(kv_heads)


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
        part = Part(None, out_features, ((0, out_features),))
        super().__init__(context, prefix, in_features, columns, [part], bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self._collectives.world_size == 1:
            return self.method.apply(self, x, self.bias)
        partial = self._collectives.all_reduce(self.method.apply(self, x, None))
        return partial if self.bias is None else partial + self.bias
