"""Linear layers: the rows and columns of checkpoint tensors that a rank holds. A LinearMethod does the products.

A weight is [out_features, in_features]. Column parallel layers give each rank some of the output rows. Row parallel
layers give it some of the input columns, and add the partial sums over the ranks. A fused layer holds several
checkpoint tensors (its parts), one above the other. All sizes here are logical.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from pagewick.layers.context import LayerBatch, LayerContext
from pagewick.layers.lora import LoraLayer
from pagewick.parallel.sharding import kv_heads_of_rank, shard_bounds
from pagewick.quantization.share import Part, Range, Share, check_floats, whole_rows
from pagewick.quantization.weight import Pieces, Weight


class WeightLayer(nn.Module):
    """A layer with one Weight. Its other parameters are vectors with one element for each row that this rank keeps."""

    def __init__(self, weight: Weight) -> None:
        super().__init__()
        self.weight = weight
        self.share = weight.share

    def make_vector(self, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
        """Make an uninitialised parameter with one element for each row."""
        return nn.Parameter(torch.empty(self.share.num_rows, dtype=dtype, device=device), requires_grad=False)

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        yield from self.weight.expected()
        for name, _ in self.named_parameters(recurse=False):
            yield from ((part.name, name) for part in self.share.parts)

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        """Keep this rank's share of one checkpoint tensor. Raises ModelLoadError if its shape is not the layer's."""
        vector = self._parameters.get(name)
        if vector is None:
            self.weight.load(part, name, tensor)
            return
        kept, offset = self.share.part(part)
        check_floats(tensor, (kept.num_rows,))
        for start, stop in kept.ranges:
            vector[offset : offset + stop - start].copy_(tensor[start:stop])
            offset += stop - start

    def load_in_pieces(self, name: str, tensor: Tensor, part: str | None, pieces: Pieces) -> None:
        """load_weight, which reads the tensor as `pieces` says."""
        if name in self._parameters:
            self.load_weight(name, tensor, part)
        else:
            self.weight.load(part, name, tensor, pieces)

    def finish_loading(self) -> None:
        self.weight.finish()


class Linear(WeightLayer):
    """x [..., in] -> [..., out]; the base of the layers below, which only say what a rank keeps.

    prefix: the layer's checkpoint name, or, if the share's parts have names, that of the module that holds them.
    """

    def __init__(self, context: LayerContext, prefix: str, share: Share, *, bias: bool = False) -> None:
        super().__init__(context.make_weight(prefix, share))
        self._collectives = context.collectives
        self.bias = self.make_vector(context.dtype, context.device) if bias else None
        self.lora: LoraLayer | None = None
        if context.lora is not None:
            self.lora = LoraLayer(share, context.lora, context.dtype, context.device)

    def forward(self, x: Tensor, batch: LayerBatch | None = None) -> Tensor:
        """Multiply x by the weight, and by the adapters of the sequences to which the rows of x belong.

        batch: these sequences; None: unknown, and then there are no adapters.
        """
        return self._with_adapters(self.weight.linear(x, self.bias), x, batch)

    def _with_adapters(self, y: Tensor, x: Tensor, batch: LayerBatch | None) -> Tensor:
        if self.lora is None or batch is None or batch.adapter_ids is None:
            return y
        return self.lora.add_to(y, x, batch.adapter_ids)


class ReplicatedLinear(Linear):
    """Every rank holds the whole weight."""

    def __init__(
        self, context: LayerContext, prefix: str, in_features: int, out_features: int, *, bias: bool = False
    ) -> None:
        super().__init__(context, prefix, whole_rows(out_features, in_features), bias=bias)


class MergedReplicatedLinear(Linear):
    """Several weights over the same input, all of them whole on every rank.

    prefix: the checkpoint name of the module that holds the parts. part_sizes: name of a part -> rows. Output: that of
    each part in turn.
    """

    def __init__(self, context: LayerContext, prefix: str, in_features: int, part_sizes: dict[str, int]) -> None:
        parts = tuple(Part(name, size, ((0, size),)) for name, size in part_sizes.items())
        super().__init__(context, prefix, Share(parts, in_features, (0, in_features)))


class MergedColumnParallelLinear(Linear):
    """Several weights over the same input (gate_proj and up_proj), each cut along its rows.

    prefix: the checkpoint name of the module that holds the parts. Output: this rank's share of each part in turn.
    fused_name: name of the one checkpoint tensor that holds all parts, one above the other; None: each has its own.
    is_reversed: the output has the parts of that tensor in reverse order.
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
        is_reversed: bool = False,
    ) -> None:
        parts, ranges, begin = [], [], 0
        for name, size in part_sizes.items():
            start, stop = shard_bounds(size, context.tp_rank, context.tp_size)
            parts.append(Part(name, size, ((start, stop),)))
            ranges.append((begin + start, begin + stop))
            begin += size
        if fused_name is not None:
            parts = [Part(fused_name, begin, tuple(ranges[::-1] if is_reversed else ranges))]
        super().__init__(context, prefix, Share(tuple(parts), in_features, (0, in_features)), bias=bias)


QkvLayout = Literal["parts", "fused", "by_head", "keys_are_values", "queries"]


class QKVParallelLinear(Linear):
    """q_proj, k_proj and v_proj, cut between heads.

    Several ranks may hold the same KV head; see kv_heads_of_rank.
    Output: [..., (num_heads + 2 * num_kv_heads) * head_dim] with this rank's numbers, which are attributes,
    as are the ids of its heads, and of the KV heads that the ranks before this one hold.
    layout: how the checkpoint holds them. "parts": three tensors; "fused": one, qkv_proj, with all queries, then all
    keys, then all values; "by_head": one, in which each key head's queries, its key and its value follow each other;
    "keys_are_values": q_proj and k_proj, whose outputs are keys and values; "queries": q_proj alone, and there are no
    keys and values in the output.
    value_dim: size of a value, if it is not head_dim; in the layout "parts".
    has_gates: in q_proj, of the layout "parts", each head's query is followed by as many rows, its gates. The output
    then begins with the gates of this rank's heads, num_gates numbers.
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
        layout: QkvLayout = "parts",
        value_dim: int | None = None,
        has_gates: bool = False,
    ) -> None:
        rank, size = context.tp_rank, context.tp_size
        first_row, last_row = shard_bounds(total_num_heads * head_dim, rank, size, multiple=head_dim)
        heads = range(first_row // head_dim, last_row // head_dim)
        kv_heads = kv_heads_of_rank(total_num_heads, total_num_kv_heads, rank, size)
        if layout in ("parts", "keys_are_values", "queries"):
            queries = Part("q_proj", total_num_heads * head_dim, ((first_row, last_row),))
            if has_gates:
                places = [2 * head + is_gate for is_gate in (1, 0) for head in heads]
                queries = Part("q_proj", 2 * total_num_heads * head_dim, _rows_of(places, head_dim))
            parts, rows, num_rows = [queries], _rows_of(kv_heads, head_dim), total_num_kv_heads * head_dim
            if layout == "parts":
                of_values = value_dim or head_dim
                values = Part("v_proj", total_num_kv_heads * of_values, _rows_of(kv_heads, of_values))
                parts += [Part("k_proj", num_rows, rows), values]
            elif layout == "keys_are_values":
                parts.append(Part("k_proj", num_rows, rows * 2))
        else:
            # Positions in the tensor, in heads.
            first_key, first_value = total_num_heads, total_num_heads + total_num_kv_heads
            places = [*heads, *(first_key + head for head in kv_heads), *(first_value + head for head in kv_heads)]
            if layout == "by_head":
                queries_of_key = total_num_heads // total_num_kv_heads
                step = queries_of_key + 2
                places = [head // queries_of_key * step + head % queries_of_key for head in heads]
                places += [head * step + queries_of_key + is_value for is_value in (0, 1) for head in kv_heads]
            num_rows = (total_num_heads + 2 * total_num_kv_heads) * head_dim
            parts = [Part("qkv_proj", num_rows, _rows_of(places, head_dim))]
        super().__init__(context, prefix, Share(tuple(parts), hidden_size, (0, hidden_size)), bias=bias)
        self.heads, self.kv_heads = list(heads), kv_heads
        self.earlier_kv_heads = {
            head
            for earlier in range(rank)
            for head in kv_heads_of_rank(total_num_heads, total_num_kv_heads, earlier, size)
        }
        self.num_heads, self.num_kv_heads = len(heads), len(kv_heads)
        self.num_gates = last_row - first_row if has_gates else 0


def _rows_of(heads: Iterable[int], head_dim: int) -> tuple[Range, ...]:
    return tuple((head * head_dim, (head + 1) * head_dim) for head in heads)


def head_share(context: LayerContext, in_features: int, total_num_heads: int, head_dim: int) -> Share:
    """Return the share with this rank's heads of a weight that has `head_dim` rows for each head."""
    return row_share(context, total_num_heads * head_dim, in_features, multiple=head_dim)


def row_share(context: LayerContext, num_rows: int, in_features: int, multiple: int = 1) -> Share:
    """Return this rank's share of a weight whose rows are cut in units of `multiple`."""
    rows = shard_bounds(num_rows, context.tp_rank, context.tp_size, multiple)
    return Share((Part(None, num_rows, (rows,)),), in_features, (0, in_features))


class ColumnParallelLinear(Linear):
    """Each rank holds some of the rows, cut in units of `multiple`; its output has only these."""

    def __init__(
        self, context: LayerContext, prefix: str, in_features: int, out_features: int, *, multiple: int = 1
    ) -> None:
        super().__init__(context, prefix, row_share(context, out_features, in_features, multiple))


class RowParallelLinear(Linear):
    """Input columns are cut in units of `multiple`; the ranks' partial sums are added first, then the bias."""

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
            return super().forward(x, batch)
        # The adapters' products are partial sums, too.
        partial = self._collectives.all_reduce(self._with_adapters(self.weight.linear(x), x, batch))
        return partial if self.bias is None else partial + self.bias
