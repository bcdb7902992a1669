"""Numbers of 8 and of 4 bits in a KV cache, in plain PyTorch; a part of `reference`.

A vector, such as a key of a KV head, is stored as vector / scale, rounded to the nearest number of the format, ties to
even, and bounded by its largest number. It stands for the stored numbers times the scale. The scale is computed from
the vector alone, in float32: its largest magnitude divided by a large number of the format. For int8 this is 127, the
largest. Numbers of fp8 lie far apart, so the best of its large numbers depends on the vector: it is the first of
TARGETS with the least squared error. A vector of zeros has the scale 0. The scale of a vector that is
not finite is NaN.

A vector of 4-bit numbers, whole ones from -7 to 7, is rotated before it is stored, and what the numbers stand for is
rotated back: a few large magnitudes would otherwise leave all others next to no numbers. The rotation is that of a
Hadamard matrix (rotate_vectors), as in QuaRot (Ashkboos et al., arXiv:2404.00456). Here, too, the best of TARGETS is
taken: where the largest magnitude becomes more than 7, it is cut off and the others lie closer.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pagewick.kernels.kv_cache import INT4, LARGEST, KVCache

# Numbers of a format, over a little more than a factor of 2: below, the same numbers follow with another exponent.
TARGETS = {
    torch.int8: (127.0,),
    torch.float8_e4m3fn: (448.0, 416.0, 384.0, 352.0, 320.0, 288.0, 256.0, 240.0),
    torch.float8_e5m2: (57344.0, 49152.0, 40960.0, 32768.0),
    INT4: (7.0, 7.75, 8.5),
}
_SIGNIFICANT_BITS = {torch.float8_e4m3fn: 4, torch.float8_e5m2: 3}


def quantize_vectors(vectors: Tensor, dtype: torch.dtype, constant: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return vectors [..., D] in an 8-bit dtype, and their scales, float32 [...].

    Numbers of 4 bits are those of the rotated vectors, two in a byte: uint8 [..., D / 2].
    constant: the scale of all vectors; 0: each has its own.
    """
    wide = vectors.to(torch.float32)
    if dtype == INT4:
        wide = rotate_vectors(wide)
    largest = wide.abs().amax(-1)
    is_finite = largest.isfinite()
    scales = torch.full_like(largest, constant) if constant else largest / _best_targets(wide, largest, dtype)
    scales = scales.where(is_finite, float("nan"))
    divisors = scales.where(scales > 0, 1.0).unsqueeze(-1)
    numbers = torch.where(is_finite.unsqueeze(-1), wide / divisors, 0.0).clamp(-LARGEST[dtype], LARGEST[dtype])
    if dtype == INT4:
        return pack_pairs(numbers.round()), scales
    return (numbers.round() if dtype == torch.int8 else numbers).to(dtype), scales


def rotation_size(dim: int) -> int:
    """Return the size of the Hadamard matrices that rotate a vector of `dim` numbers: the largest that divides it."""
    return dim & -dim


def rotate_vectors(vectors: Tensor) -> Tensor:
    """Return vectors [..., D] float32 rotated: successive numbers, as many as rotation_size says, by a Hadamard matrix.

    The matrix is symmetric and orthogonal, so that a second rotation undoes the first. Sums are made in this order:
    of numbers half the size apart first, and of neighbours last.
    """
    size = distance = rotation_size(vectors.shape[-1])
    vectors = vectors.contiguous()
    while distance > 1:
        distance //= 2
        first, second = vectors.view(*vectors.shape[:-1], -1, 2, distance).unbind(-2)
        vectors = torch.stack((first + second, first - second), dim=-2).flatten(-3)
    return vectors * math.sqrt(1.0 / size)


def pack_pairs(numbers: Tensor) -> Tensor:
    """Return whole numbers [..., D] from -8 to 7 two in a byte, uint8 [..., D / 2], as a plain cache has them."""
    low, high = (numbers.to(torch.int32) & 15).view(*numbers.shape[:-1], -1, 2).unbind(-1)
    return (low | high << 4).to(torch.uint8)


def unpack_pairs(pairs: Tensor) -> Tensor:
    """Return the numbers of pack_pairs in float32."""
    numbers = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2).to(torch.float32)
    return numbers - 16.0 * (numbers > 7)


def _best_targets(vectors: Tensor, largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return for each vector [..., D] the number that its largest magnitude is to become."""
    targets = torch.tensor(TARGETS[dtype], device=vectors.device)
    if len(targets) == 1:
        return targets
    parts = vectors / largest.where(largest > 0, 1.0).unsqueeze(-1)
    if dtype == INT4:
        wanted = parts.unsqueeze(-1) * targets
        missed = (wanted.clamp(-LARGEST[dtype], LARGEST[dtype]).round() - wanted).square().sum(-2)
        return targets[(missed / targets.square()).argmin(-1)]
    # Dekker's splitting (Numerische Mathematik 18, 1971) rounds to some bits, as if there were no smallest exponent.
    splitter = 2.0 ** (24 - _SIGNIFICANT_BITS[dtype]) + 1
    errors = []
    for target in TARGETS[dtype]:
        wanted = parts * target
        product = wanted * splitter
        errors.append((product - (product - wanted) - wanted).square().sum(-1) / target**2)
    return targets[torch.stack(errors).argmin(0)]


def take_blocks(data: Tensor, scales: Tensor | None, block_ids: Tensor) -> Tensor:
    """Return blocks of a cache as they are, or what numbers with scales [...] stand for, in float32."""
    if data.dtype not in LARGEST:
        return data[block_ids]
    if data.dtype == INT4:
        assert scales is not None, "no latents are kept in 4 bits"
        return rotate_vectors(unpack_pairs(data[block_ids]) * scales[block_ids].unsqueeze(-1))
    numbers = data.view(torch.uint8)[block_ids].view(data.dtype).to(torch.float32)
    return numbers if scales is None else numbers * scales[block_ids].unsqueeze(-1)


def store_vectors(cache: KVCache, which: int, vectors: Tensor, block_ids: Tensor, offsets: Tensor) -> None:
    """Store keys (which = 0) or values (1) [T, KVH, D] in a plain cache."""
    if cache.scales is None:
        cache.data[block_ids, which, :, offsets] = vectors.to(cache.dtype)
        return
    numbers, scales = quantize_vectors(vectors, cache.dtype, cache.constant_scales[which])
    cache.data.view(torch.uint8)[block_ids, which, :, offsets] = numbers.view(torch.uint8)
    cache.scales[block_ids, which, :, offsets] = scales


def store_latents(cache: Tensor, scales: Tensor | None, rows: Tensor, latent_dim: int, slots: Tensor) -> None:
    """Store rows [T, L + R] in a cache of latents; each of both parts has a scale of its own."""
    block_ids, offsets = slots // cache.shape[1], slots % cache.shape[1]
    if scales is None:
        cache[block_ids, offsets] = rows.to(cache.dtype)
        return
    for part, (begin, end) in enumerate(((0, latent_dim), (latent_dim, rows.shape[1]))):
        numbers, part_scales = quantize_vectors(rows[:, begin:end], cache.dtype)
        cache.view(torch.uint8)[block_ids, offsets, begin:end] = numbers.view(torch.uint8)
        scales[block_ids, offsets, part] = part_scales


def take_latents(cache: Tensor, scales: Tensor | None, latent_dim: int, block_ids: Tensor) -> Tensor:
    """Return blocks of a cache of latents, as take_blocks does."""
    if scales is None:
        return cache[block_ids]
    numbers, factors = take_blocks(cache, None, block_ids), scales[block_ids]
    parts = numbers[..., :latent_dim] * factors[..., :1], numbers[..., latent_dim:] * factors[..., 1:]
    return torch.cat(parts, dim=-1)


def gather_blocks(block_ids: Tensor, caches: Sequence[Tensor]) -> Tensor:
    """Return blocks block_ids [n] int64 of caches [num_blocks, B] uint8, those of all caches side by side: [n, L * B].

    L: the number of caches, such as the layers of a cache group. B may differ.
    """
    return torch.cat([cache.index_select(0, block_ids) for cache in caches], dim=1)


def scatter_blocks(block_ids: Tensor, caches: Sequence[Tensor], content: Tensor) -> None:
    """Store content [n, L * B], as gather_blocks returns it, in blocks block_ids [n] int64, which are all different."""
    parts = torch.split(content, [cache.shape[1] for cache in caches], dim=1)
    for cache, part in zip(caches, parts, strict=True):
        cache.index_copy_(0, block_ids, part)
