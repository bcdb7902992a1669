"""Choices sorted by expert and cut into tiles, on the device. C: choices; E: experts.

A choice is one of a token's experts. The host must not wait for the GPU, so there are as many tiles as any choices may
need, some of them empty.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewick.kernels.triton.variant import Variant


class Grouping(NamedTuple):
    """order: [C] int32, the choices sorted by expert, stably.

    tiles: [tiles, 3] int32, the expert of each tile and its part of `order`, from one place to before another.
    """

    order: Tensor
    tiles: Tensor


@triton.jit(do_not_specialize=["num_choices", "num_tiles"])
def group_kernel(
    expert_ids, order, tiles, num_choices, num_experts, num_tiles, rows_of_tile,
    BLOCK: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Place BLOCK choices in `order`, and write BLOCK tiles. Grid: [C / BLOCK]. BLOCK_E is more than E.

    Defined by `sorted_group`. Each program compares its choices with all others, and counts those of each expert: C^2 +
    C * E * C / BLOCK comparisons in one launch, which takes less time than launching a sort for up to a few thousand.
    """
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own_id = tl.load(expert_ids + own, mask=own < num_choices, other=0)
    own_id = tl.where((own_id < 0) | (own_id >= num_experts), num_experts, own_id)
    expert = tl.arange(0, BLOCK_E)
    rank = tl.zeros([BLOCK], tl.int32)
    counts = tl.zeros([BLOCK_E], tl.int32)
    for first in range(0, num_choices, BLOCK_J):
        other = first + tl.arange(0, BLOCK_J)
        other_id = tl.load(expert_ids + other, mask=other < num_choices, other=0)
        other_id = tl.where((other_id < 0) | (other_id >= num_experts), num_experts, other_id)
        # Places beyond the last choice get an id that sorts after all experts and is not counted.
        other_id = tl.where(other < num_choices, other_id, BLOCK_E)
        is_equal = (other_id[None, :] == own_id[:, None]) & (other[None, :] < own[:, None])
        rank += tl.sum(((other_id[None, :] < own_id[:, None]) | is_equal).to(tl.int32), 1)
        counts += tl.sum((other_id[:, None] == expert[None, :]).to(tl.int32), 0)
    tl.store(order + rank, own, mask=own < num_choices)
    ends = tl.cumsum(counts, 0)
    tile_counts = (counts + rows_of_tile - 1) // rows_of_tile
    tile_ends = tl.cumsum(tile_counts, 0)
    of_tile = tl.minimum(tl.sum((tile_ends[None, :] <= own[:, None]).to(tl.int32), 1), num_experts)
    is_own = expert[None, :] == of_tile[:, None]
    within = own - tl.sum(tl.where(is_own, (tile_ends - tile_counts)[None, :], 0), 1)
    start = tl.sum(tl.where(is_own, (ends - counts)[None, :], 0), 1) + within * rows_of_tile
    end = tl.minimum(start + rows_of_tile, tl.sum(tl.where(is_own, ends[None, :], 0), 1))
    is_tile = own < num_tiles
    tl.store(tiles + 3 * own, of_tile, mask=is_tile)
    tl.store(tiles + 3 * own + 1, start, mask=is_tile)
    tl.store(tiles + 3 * own + 2, end, mask=is_tile)


# More choices are sorted by PyTorch.
_MOST_CHOICES: Final = 8192
# By the number of experts that a variant has room for, one more included.
GROUPS: Final = {
    size: Variant(
        name=f"group {size}",
        kernel=group_kernel,
        signature={
            "expert_ids": "*i32",
            "order": "*i32",
            "tiles": "*i32",
            **dict.fromkeys(("num_choices", "num_experts", "num_tiles", "rows_of_tile"), "i32"),
        },
        # Larger blocks would spill the masks of comparisons on AMD's GPUs.
        constexprs={**dict.fromkeys(("BLOCK", "BLOCK_J"), 32 if size <= 128 else 16), "BLOCK_E": size},
        num_warps=4 if size <= 128 else 8,
        in_sample=size == 256,
    )
    for size in (16, 64, 128, 256, 512)
}


def group(expert_ids: Tensor, num_experts: int, rows_of_tile: int) -> Grouping:
    """Sort choices expert_ids [T, A] int32 by expert, and cut each expert's into tiles; see sorted_group."""
    num_choices = expert_ids.numel()
    size = next((size for size in GROUPS if size > num_experts), None)
    if size is None or num_choices > _MOST_CHOICES:
        return sorted_group(expert_ids, num_experts, rows_of_tile)
    order = torch.empty(num_choices, dtype=torch.int32, device=expert_ids.device)
    tiles = torch.empty(_num_tiles(num_choices, num_experts, rows_of_tile), 3, dtype=torch.int32, device=order.device)
    variant = GROUPS[size]
    variant.launch(
        (-(-num_choices // variant.constexprs["BLOCK"]),),
        expert_ids=expert_ids.contiguous(),
        order=order,
        tiles=tiles,
        num_choices=num_choices,
        num_experts=num_experts,
        num_tiles=len(tiles),
        rows_of_tile=rows_of_tile,
    )
    return Grouping(order, tiles)


def _num_tiles(num_choices: int, num_experts: int, rows_of_tile: int) -> int:
    """Return how many tiles choices may need, whatever their experts are; ids of no expert are one more expert."""
    return min(num_choices, num_choices // rows_of_tile + num_experts + 1)


def sorted_group(expert_ids: Tensor, num_experts: int, rows_of_tile: int) -> Grouping:
    """Sort choices expert_ids [T, A] int32 by expert, stably, and cut each expert's into tiles.

    Ids outside 0 .. num_experts - 1 come last, as expert num_experts. There are as many tiles as any ids may need;
    tiles that these do not need are empty.
    """
    ids = expert_ids.flatten().long()
    ids = torch.where((ids < 0) | (ids >= num_experts), num_experts, ids)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, ids, torch.ones_like(ids))
    ends, tile_counts = counts.cumsum(0), (counts + (rows_of_tile - 1)).div(rows_of_tile, rounding_mode="floor")
    tile_ends = tile_counts.cumsum(0)
    tile = torch.arange(_num_tiles(len(ids), num_experts, rows_of_tile), device=ids.device)
    of_tile = torch.searchsorted(tile_ends, tile, right=True).clamp(max=num_experts)
    within = tile - (tile_ends - tile_counts)[of_tile]
    first = (ends - counts)[of_tile] + within * rows_of_tile
    last = torch.minimum(first + rows_of_tile, ends[of_tile])
    return Grouping(ids.argsort(stable=True).int(), torch.stack((of_tile, first, last), 1).int())
