"""Layers over the patches of an image: products, positions, and attention without a cache. T: patches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import torch
from torch import Tensor

from pagewick import kernels
from pagewick.kernels.options import Rotation
from pagewick.layers.clipped import ClippedLinear
from pagewick.layers.context import LayerContext
from pagewick.layers.linear import ColumnParallelLinear, Linear, ReplicatedLinear, RowParallelLinear
from pagewick.layers.norm import PlainRMSNorm, RMSNorm, empty_parameter
from pagewick.parallel.sharding import kept_key_heads, shard_bounds
from pagewick.quantization.share import Part, Share, check_floats, check_shape
from pagewick.quantization.weight import WHOLE, Pieces

__all__ = [
    "AxisPositions", "GroupedPatchAttention", "NormedPatchAttention", "PatchAttention", "PatchProjection", "Rotation",
    "Standardizer", "TransposedLinear", "WholeRows", "WideNormedPatchAttention", "rotary_angles",
]  # fmt: skip

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

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        self.load_in_pieces(name, tensor, part, WHOLE)

    def load_in_pieces(self, name: str, tensor: Tensor, part: str | None, pieces: Pieces) -> None:
        check_shape(tensor, (self.weight.share.num_columns, self.weight.share.num_rows))
        self.weight.load(part, name, tensor.t().contiguous(), Pieces(pieces.num_bytes, pieces.take))
        pieces.release(tensor)


class PatchAttention(torch.nn.Module):
    """Attention among the patches of a sequence, with this rank's heads: [T, size] -> [T, size].

    num_kv_heads: heads of keys and values, each of which serves as many heads of queries as any other; None: every head
    has its own. is_fused: the file has queries, keys and values as one tensor, qkv: all queries, then all keys, then
    all values; else it has q_proj, k_proj and v_proj. bias: of all products; qkv_bias: of these, if it is another.
    head_norm_eps: of RMS norms of each head's queries and keys; None: there are none. The ranks' numbers of heads of
    queries differ by at most one.
    """

    def __init__(
        self,
        context: LayerContext,
        prefix: str,
        size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        bias: bool = True,
        qkv_bias: bool | None = None,
        is_fused: bool = True,
        head_norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        self._head_dim = head_dim = size // num_heads
        has_bias = bias if qkv_bias is None else qkv_bias
        num_kv_heads = num_kv_heads or num_heads
        key_size = num_kv_heads * head_dim
        start, stop = shard_bounds(size, context.tp_rank, context.tp_size, multiple=head_dim)
        first_key, last_key = kept_key_heads(num_heads, num_kv_heads, context.tp_rank, context.tp_size)
        keys = (first_key * head_dim, last_key * head_dim)
        if is_fused:
            rows = ((start, stop), *((begin + keys[0], begin + keys[1]) for begin in (size, size + key_size)))
            parts = [Part("qkv", size + 2 * key_size, rows)]
        else:
            parts = [Part("q_proj", size, ((start, stop),))]
            parts += [Part(name, key_size, (keys,)) for name in ("k_proj", "v_proj")]
        self._widths = [stop - start, *[keys[1] - keys[0]] * 2]
        self._places = None
        if num_kv_heads != num_heads:
            self._places = _key_places(context, num_heads, num_kv_heads)
        self.qkv = Linear(context, prefix, Share(tuple(parts), size, (0, size)), bias=has_bias)
        self.q_norm, self.k_norm = (
            None if head_norm_eps is None else RMSNorm(context, head_dim, head_norm_eps) for _ in range(2)
        )
        self.proj = RowParallelLinear(context, f"{prefix}.proj", size, size, bias=bias, multiple=head_dim)
        self._scale = head_dim**-0.5

    def forward(self, x: Tensor, rotation: Rotation | None, cu_seqlens: Sequence[int]) -> Tensor:
        """Rotate queries and keys, unless rotation is None; attend within each sequence.

        cu_seqlens: as in kernels.full_attention.
        """
        q, k, v = (part.unflatten(-1, (-1, self._head_dim)) for part in self.qkv(x).split(self._widths, dim=-1))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q.contiguous()), self.k_norm(k.contiguous())
        if rotation is not None:
            q, k = kernels.rotate_heads(q, rotation), kernels.rotate_heads(k, rotation)
        if self._places is not None:
            k, v = k[:, self._places], v[:, self._places]
        return self.proj(kernels.full_attention(q, k, v, cu_seqlens, self._scale).flatten(1))  # type: ignore[no-any-return]


class WideNormedPatchAttention(torch.nn.Module):
    """Attention whose queries and keys are divided by their root mean squares over all heads, and scaled by weights.

    Every rank computes the queries and keys of all heads, and goes on with those of its own; the ranks' numbers of
    heads differ by at most one. [T, size] -> [T, size].
    """

    def __init__(
        self, context: LayerContext, prefix: str, size: int, num_heads: int, eps: float, *, qkv_bias: bool
    ) -> None:
        super().__init__()
        self._head_dim = head_dim = size // num_heads
        start, stop = shard_bounds(size, context.tp_rank, context.tp_size, multiple=head_dim)
        self._own = slice(start, stop)
        whole = tuple(Part(name, size, ((0, size),)) for name in ("q_proj", "k_proj"))
        self.qk = Linear(context, prefix, Share(whole, size, (0, size)), bias=qkv_bias)
        own = (Part("v_proj", size, ((start, stop),)),)
        self.v = Linear(context, prefix, Share(own, size, (0, size)), bias=qkv_bias)
        self.q_norm, self.k_norm = RMSNorm(context, size, eps), RMSNorm(context, size, eps)
        self.proj = RowParallelLinear(context, f"{prefix}.proj", size, size, bias=True, multiple=head_dim)
        self._scale = head_dim**-0.5

    def forward(self, x: Tensor, rotation: None, cu_seqlens: Sequence[int]) -> Tensor:
        """Attend within each sequence; cu_seqlens: as in kernels.full_attention. Nothing is rotated."""
        q, k = self.qk(x).chunk(2, dim=-1)
        q, k = self.q_norm(q.contiguous())[:, self._own], self.k_norm(k.contiguous())[:, self._own]
        q, k, v = (part.contiguous().unflatten(-1, (-1, self._head_dim)) for part in (q, k, self.v(x)))
        return self.proj(kernels.full_attention(q, k, v, cu_seqlens, self._scale).flatten(1))  # type: ignore[no-any-return]


class GroupedPatchAttention(torch.nn.Module):
    """Attention in which each of `num_kv_heads` heads of keys and values serves several heads of queries.

    Queries and keys are divided by the root mean square of their head, and scaled by weights. Nothing has a bias. The
    ranks' numbers of heads of queries differ by at most one. [T, size] -> [T, size].
    """

    def __init__(
        self, context: LayerContext, prefix: str, size: int, num_heads: int, num_kv_heads: int, eps: float
    ) -> None:
        super().__init__()
        self._head_dim = head_dim = size // num_heads
        first, last = shard_bounds(num_heads, context.tp_rank, context.tp_size)
        first_key, last_key = kept_key_heads(num_heads, num_kv_heads, context.tp_rank, context.tp_size)
        key_rows = ((first_key * head_dim, last_key * head_dim),)
        parts = (
            Part("q_proj", size, ((first * head_dim, last * head_dim),)),
            Part("k_proj", num_kv_heads * head_dim, key_rows),
            Part("v_proj", num_kv_heads * head_dim, key_rows),
        )
        self.qkv = Linear(context, prefix, Share(parts, size, (0, size)))
        self._widths = [part.num_kept for part in parts]
        self.q_norm, self.k_norm = RMSNorm(context, head_dim, eps), RMSNorm(context, head_dim, eps)
        self.proj = RowParallelLinear(context, f"{prefix}.proj", size, size, multiple=head_dim)
        self._places = _key_places(context, num_heads, num_kv_heads)
        self._scale = head_dim**-0.5

    def forward(self, x: Tensor, rotation: Rotation, cu_seqlens: Sequence[int]) -> Tensor:
        """Rotate queries and keys, and attend within each sequence; cu_seqlens: as in kernels.full_attention."""
        q, k, v = self._heads(x, rotation)
        return self.proj(kernels.full_attention(q, k, v, cu_seqlens, self._scale).flatten(1))  # type: ignore[no-any-return]

    def _heads(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values [T, H, D], keys and values once for each head of queries."""
        parts = self.qkv(x).split(self._widths, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self._head_dim)) for part in parts)
        q = kernels.rotate_heads(self.q_norm(q.contiguous()), rotation)
        k = kernels.rotate_heads(self.k_norm(k.contiguous()), rotation)
        return q, k[:, self._places], v[:, self._places]


def _key_places(context: LayerContext, num_heads: int, num_kv_heads: int) -> Tensor:
    """Return the place of each of this rank's heads of queries among the heads of keys that the rank keeps."""
    first, last = shard_bounds(num_heads, context.tp_rank, context.tp_size)
    first_key, _ = kept_key_heads(num_heads, num_kv_heads, context.tp_rank, context.tp_size)
    places = [head // (num_heads // num_kv_heads) - first_key for head in range(first, last)]
    return torch.tensor(places, device=context.device)


class NormedPatchAttention(torch.nn.Module):
    """Attention among the patches of a sequence, with this rank's heads, as Gemma 4 has it: [T, size] -> [T, size].

    Queries, keys and values are divided by their root mean squares, which are scaled by weights for queries and keys;
    the scores are not scaled. is_clipped: see ClippedLinear. The ranks' numbers of heads differ by at most one.
    """

    def __init__(
        self, context: LayerContext, prefix: str, size: int, num_heads: int, eps: float, *, is_clipped: bool
    ) -> None:
        super().__init__()
        self._head_dim = head_dim = size // num_heads
        self.q_proj, self.k_proj, self.v_proj = (
            ClippedLinear(
                context,
                ColumnParallelLinear(context, f"{prefix}.{name}.linear", size, size, multiple=head_dim),
                is_clipped=is_clipped,
            )
            for name in ("q_proj", "k_proj", "v_proj")
        )
        output = RowParallelLinear(context, f"{prefix}.o_proj.linear", size, size, multiple=head_dim)
        self.o_proj = ClippedLinear(context, output, is_clipped=is_clipped)
        self.q_norm, self.k_norm = RMSNorm(context, head_dim, eps), RMSNorm(context, head_dim, eps)
        self.v_norm = PlainRMSNorm(context, head_dim, eps)

    def forward(self, x: Tensor, rotation: Rotation, cu_seqlens: Sequence[int]) -> Tensor:
        """Rotate queries and keys, and attend within each sequence; cu_seqlens: as in kernels.full_attention.

        The first half of a head has the first half of the rotation's pairs, each a number of its first quarter and one
        of its second quarter; the second half likewise has the others.
        """
        shape = len(x), -1, self._head_dim
        q = kernels.rotate_heads(_halves_as_pairs(self.q_norm(self.q_proj(x).view(shape))), rotation)
        k = kernels.rotate_heads(_halves_as_pairs(self.k_norm(self.k_proj(x).view(shape))), rotation)
        v = self.v_norm(self.v_proj(x).view(shape))
        return self.o_proj(kernels.full_attention(q, k, v, cu_seqlens, 1.0).flatten(1))  # type: ignore[no-any-return]


def _halves_as_pairs(heads: Tensor) -> Tensor:
    """Swap the second and the third quarter of each head [T, H, D], so that a pair is half of a head apart.

    The products of queries and keys stay the same.
    """
    num_rows, num_heads, size = heads.shape
    return heads.view(num_rows, num_heads, 2, 2, size // 4).transpose(2, 3).flatten(2)


class WholeRows(torch.nn.Module):
    """Learned rows, which the file has in another shape: [num_rows, size]. Every rank holds all of them.

    shape: that in the file; None: [1, num_rows, size].
    """

    def __init__(
        self, context: LayerContext, num_rows: int, size: int, *, shape: tuple[int, ...] | None = None
    ) -> None:
        super().__init__()
        self._shape = shape or (1, num_rows, size)
        self.weight = empty_parameter(context, num_rows, size)

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        return [(None, "weight")]

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        """Raises ModelLoadError for a tensor of another shape or of whole numbers."""
        check_floats(tensor, self._shape)
        self.weight.copy_(tensor.view(self.weight.shape))


class AxisPositions(torch.nn.Module):
    """The sum of two learned positions, on two axes: indices [T] on each axis -> [T, size].

    The file has one tensor, [2, num_positions, size]. Every rank holds all of it.
    """

    def __init__(self, context: LayerContext, num_positions: int, size: int) -> None:
        super().__init__()
        self.weight = empty_parameter(context, 2, num_positions, size)

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        return [(None, "weight")]

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        """Raises ModelLoadError for a tensor of another shape or of whole numbers."""
        check_floats(tensor, tuple(self.weight.shape))
        self.weight.copy_(tensor)

    def forward(self, on_first: Tensor, on_second: Tensor) -> Tensor:
        return self.weight[0, on_first] + self.weight[1, on_second]


class Standardizer(torch.nn.Module):
    """(x - std_bias) * std_scale in float32, with vectors of the file: [..., size] -> [..., size]."""

    def __init__(self, context: LayerContext, size: int) -> None:
        super().__init__()
        self.std_bias, self.std_scale = empty_parameter(context, size), empty_parameter(context, size)

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        return [(None, name) for name, _ in self.named_parameters()]

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        """Raises ModelLoadError for a tensor of another shape or of whole numbers."""
        parameter = self.get_parameter(name)
        check_floats(tensor, tuple(parameter.shape))
        parameter.copy_(tensor)

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() - self.std_bias.float()) * self.std_scale.float()
