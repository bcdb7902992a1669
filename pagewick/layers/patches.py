"""Layers over the patches of an image: products, and attention without a cache. T: patches."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from pagewick import kernels
from pagewick.kernels.options import Rotation
from pagewick.layers.context import LayerContext
from pagewick.layers.linear import Linear, ReplicatedLinear, RowParallelLinear
from pagewick.parallel.sharding import shard_bounds
from pagewick.quantization.share import Part, Share, check_shape
from pagewick.quantization.weight import WHOLE, Pieces

__all__ = ["PatchAttention", "PatchProjection", "Rotation", "TransposedLinear", "rotary_angles"]

rotary_angles = kernels.rotary_angles


class PatchProjection(ReplicatedLinear):
    """A convolution whose stride is its size: the product of each patch, [T, numbers of a patch], with its weight.

    patch_shape: the weight in the file is [out_features, *patch_shape]. Every rank holds all of it.
    """

    def __init__(
        self, context: LayerContext, prefix: str, patch_shape: Sequence[int], out_features: int, *, bias: bool
    ) -> None:
        super().__init__(context, prefix, prod(patch_shape), out_features, bias=bias)
        self._shape = (out_features, *patch_shape)

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        self.load_in_pieces(name, tensor, part, WHOLE)

    def load_in_pieces(self, name: str, tensor: Tensor, part: str | None, pieces: Pieces) -> None:
        if name in self._parameters:
            super().load_weight(name, tensor, part)
            return
        check_shape(tensor, self._shape)
        self.weight.load(part, name, tensor.flatten(1), pieces)


class TransposedLinear(ReplicatedLinear):
    """A product whose weight stands in the file as [in_features, out_features]. Every rank holds all of it."""

    def load_in_pieces(self, name: str, tensor: Tensor, part: str | None, pieces: Pieces) -> None:
        check_shape(tensor, (self.weight.share.num_columns, self.weight.share.num_rows))
        self.weight.load(part, name, tensor.t().contiguous(), Pieces(pieces.num_bytes, pieces.take))
        pieces.release(tensor)


class PatchAttention(torch.nn.Module):
    """Attention among the patches of a sequence, with this rank's heads: [T, size] -> [T, size].

    is_fused: the file has queries, keys and values as one tensor, qkv: all queries, then all keys, then all values;
    else it has q_proj, k_proj and v_proj. The ranks' numbers of heads differ by at most one.
    """

    def __init__(
        self,
        context: LayerContext,
        prefix: str,
        size: int,
        num_heads: int,
        *,
        bias: bool = True,
        is_fused: bool = True,
    ) -> None:
        super().__init__()
        self._head_dim = head_dim = size // num_heads
        start, stop = shard_bounds(size, context.tp_rank, context.tp_size, multiple=head_dim)
        if is_fused:
            rows = tuple((begin + start, begin + stop) for begin in (0, size, 2 * size))
            parts = [Part("qkv", 3 * size, rows)]
        else:
            parts = [Part(name, size, ((start, stop),)) for name in ("q_proj", "k_proj", "v_proj")]
        self.qkv = Linear(context, prefix, Share(tuple(parts), size, (0, size)), bias=bias)
        self.proj = RowParallelLinear(context, f"{prefix}.proj", size, size, bias=bias, multiple=head_dim)
        self._scale = head_dim**-0.5

    def forward(self, x: Tensor, rotation: Rotation | None, cu_seqlens: Sequence[int]) -> Tensor:
        """Rotate queries and keys, unless rotation is None; attend within each sequence.

        cu_seqlens: as in kernels.full_attention.
        """
        q, k, v = (part.unflatten(-1, (-1, self._head_dim)) for part in self.qkv(x).chunk(3, dim=-1))
        if rotation is not None:
            q, k = kernels.rotate_heads(q, rotation), kernels.rotate_heads(k, rotation)
        return self.proj(kernels.full_attention(q, k, v, cu_seqlens, self._scale).flatten(1))  # type: ignore[no-any-return]
