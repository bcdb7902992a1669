"""Copies of whole KV blocks, for swap, forks and sessions: a block of all layers in one launch.

Definitions: gather_blocks and scatter_blocks of reference_kv.py. PyTorch would run a kernel for each layer. The layers
are apart in memory, so that the kernel reads their addresses from a table.

Dimensions: L layers, B bytes of a block in a layer, n blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewick.kernels import reference
from pagewick.kernels.triton.fallback import by_definition
from pagewick.kernels.triton.variant import Variant, Workload

# Words of a program, of 8 bytes.
BLOCK = 2048
_WORD_BYTES = 8
# Each thread loads 16 bytes at once, from an address that is a multiple of this number.
_ALIGNMENT = 16


@triton.jit(do_not_specialize=["num_words", "cache_stride", "content_stride"])
def move_blocks(
    addresses_ptr, block_ids_ptr, content_ptr, num_words, cache_stride, content_stride, IS_GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy a part of block program_id(0) of layer program_id(1) to its place in content [n, L * B], or from there.

    addresses: [L] int64, those of the layers. Numbers are in words.
    """
    place, layer = tl.program_id(0).to(tl.int64), tl.program_id(1)
    words = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = words < num_words
    cache_ptr = tl.load(addresses_ptr + layer).to(tl.pointer_type(tl.int64))
    in_cache = tl.multiple_of(cache_ptr + tl.load(block_ids_ptr + place) * cache_stride, 16) + words
    in_content = tl.multiple_of(content_ptr + place * content_stride + layer * num_words, 16) + words
    if IS_GATHER:
        tl.store(in_content, tl.load(in_cache, mask=inside), mask=inside)
    else:
        tl.store(in_cache, tl.load(in_content, mask=inside), mask=inside)


_SIGNATURE = {
    "addresses_ptr": "*i64", "block_ids_ptr": "*i64", "content_ptr": "*i64", "num_words": "i32", "cache_stride": "i64",
    "content_stride": "i64",
}  # fmt: skip
_GATHER, _SCATTER = (
    Variant(name, move_blocks, _SIGNATURE, {"IS_GATHER": is_gather, "BLOCK": BLOCK}, num_warps=8, in_sample=is_gather)
    for name, is_gather in (("gather", True), ("scatter", False))
)
VARIANTS = (_GATHER, _SCATTER)

# 64 blocks of 32 tokens of Llama 3.1 8B: 32 layers of 8 heads of 128 in bfloat16, read and written.
WORKLOADS = (Workload("gather_blocks", "64 blocks of 32 layers of 131,072 bytes", 2 * 64 * 32 * 131072, 0, False),)


def gather_blocks(block_ids: Tensor, caches: Sequence[Tensor]) -> Tensor:
    """reference.gather_blocks."""
    if not _is_served(caches):
        return by_definition(reference.gather_blocks, block_ids, caches)
    num_bytes = sum(cache.shape[1] for cache in caches)
    content = torch.empty(len(block_ids), num_bytes, dtype=torch.uint8, device=block_ids.device)
    _run(_GATHER, block_ids, caches, content)
    return content


def scatter_blocks(block_ids: Tensor, caches: Sequence[Tensor], content: Tensor) -> None:
    """reference.scatter_blocks."""
    if not (_is_served(caches) and content.is_contiguous() and content.data_ptr() % _ALIGNMENT == 0):
        by_definition(reference.scatter_blocks, block_ids, caches, content)
        return
    _run(_SCATTER, block_ids, caches, content)


def _is_served(caches: Sequence[Tensor]) -> bool:
    """Whether the layers are alike, and their blocks begin where words of 16 bytes do."""
    sizes = {(cache.shape[1], cache.stride(0)) for cache in caches}
    begins = {size % _ALIGNMENT for pair in sizes for size in pair} | {c.data_ptr() % _ALIGNMENT for c in caches}
    return len(sizes) == 1 and begins == {0} and all(cache.stride(1) == 1 for cache in caches)


@functools.lru_cache(maxsize=64)
def _on_device(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """Return addresses as a tensor. Copying them makes the host wait for the GPU, and a model's caches never move."""
    return torch.tensor(addresses, dtype=torch.int64, device=device)


def _run(variant: Variant, block_ids: Tensor, caches: Sequence[Tensor], content: Tensor) -> None:
    num_words = caches[0].shape[1] // _WORD_BYTES
    addresses = _on_device(tuple(cache.data_ptr() for cache in caches), block_ids.device)
    variant.launch(
        (len(block_ids), len(caches), -(-num_words // BLOCK)), addresses_ptr=addresses, block_ids_ptr=block_ids,
        content_ptr=content.view(torch.int64), num_words=num_words, cache_stride=caches[0].stride(0) // _WORD_BYTES,
        content_stride=content.shape[1] // _WORD_BYTES,
    )  # fmt: skip
