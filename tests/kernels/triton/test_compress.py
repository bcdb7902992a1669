"""Compressed entries in Triton against their definition, interpreted, and bit for bit however a prompt is cut."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from pagewick.kernels import reference_compressed
from pagewick.kernels.options import AttentionMetadata, CompressOptions, Rotation
from tests.kernels.triton.comparison import DTYPES, assert_near, numbers

compress = pytest.importorskip("pagewick.kernels.triton.compress")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DIM, NUM_TOKENS = 32, 27
TABLES = torch.tensor([[7, 2, 5, 1], [3, 8, 4, 0]], dtype=torch.int32)


@dataclass(frozen=True)
class Prompts:
    """Two sequences of tokens, whose blocks are in another order."""

    rows: Tensor
    options: CompressOptions
    block_size: int

    def written(self, operations: ModuleType, step: int) -> tuple[Tensor, Tensor]:
        """The caches of rows and of entries after all tokens, `step` of each sequence at a time."""
        dtype, size, ratio = self.rows.dtype, self.rows.shape[2], self.options.ratio
        cache = torch.full((10, self.block_size, size), float("nan"), dtype=dtype)
        entries = torch.full((10, self.block_size // ratio, DIM), 9.0, dtype=dtype)
        for first in range(0, NUM_TOKENS, step):
            new = torch.arange(first, min(first + step, NUM_TOKENS))
            slots = torch.cat([self._slots(seq, new) for seq in range(2)])
            lengths, starts = torch.full((2,), int(new[-1]) + 1), torch.tensor([0, len(new), 2 * len(new)])
            operations.compress_rows(
                self.rows[:, new].flatten(0, 1), cache, slots, AttentionMetadata(TABLES, lengths.int(), starts.int()),
                entries, slots, rotation=rotation_at((new + 1 - ratio).repeat(2)), options=self.options,
            )  # fmt: skip
        return cache, entries

    def _slots(self, seq: int, positions: Tensor) -> Tensor:
        return TABLES[seq][positions // self.block_size].long() * self.block_size + positions % self.block_size


def rotation_at(positions: Tensor) -> Rotation:
    """Angles of whole vectors, of which some pairs stand still, as a part of wider rows."""
    angles = torch.zeros(len(positions), 20 + DIM // 2)
    angles[:, -5:] = positions[:, None] * torch.tensor([1.0, 0.6, 0.3, 0.1, 0.02])
    return Rotation(angles.cos()[:, 20:], angles.sin()[:, 20:], interleaved=True)


def prompts_of(ratio: int, dtype: torch.dtype, *, overlaps: bool, block_size: int = 12) -> Prompts:
    num_kinds = 2 if overlaps else 1
    rows = 2 * numbers(2, NUM_TOKENS, 2 * num_kinds * DIM, seed=ratio)
    bias, weight = numbers(ratio, num_kinds * DIM, seed=1), numbers(DIM, seed=2).to(dtype)
    return Prompts(rows.to(dtype), CompressOptions(ratio, overlaps, bias, weight, 1e-3), block_size)


@pytest.mark.parametrize(("ratio", "overlaps"), [(4, True), (6, False), (12, True)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_entries_are_those_of_the_definition(ratio: int, overlaps: bool, dtype: torch.dtype) -> None:
    prompts = prompts_of(ratio, dtype, overlaps=overlaps)
    found, expected = (prompts.written(each, NUM_TOKENS) for each in (compress, reference_compressed))
    assert torch.equal(found[0].nan_to_num(7), expected[0].nan_to_num(7))
    assert_near(found[1], expected[1], 2e-5)


@pytest.mark.parametrize(("overlaps", "step"), [(False, 1), (True, 5)])
def test_entries_have_the_same_bits_however_prompts_are_cut(overlaps: bool, step: int) -> None:
    prompts = prompts_of(4, torch.bfloat16, overlaps=overlaps)
    whole, found = (prompts.written(compress, each)[1] for each in (NUM_TOKENS, step))
    assert torch.equal(found, whole) and (whole != 9).all(2).sum() == 2 * (NUM_TOKENS // 4)


def test_tokens_without_a_slot_store_nothing() -> None:
    prompts = prompts_of(4, torch.float32, overlaps=False)
    rows, rotation = prompts.rows[0, :8], rotation_at(torch.arange(8) - 3)
    slots = torch.arange(8) + 24
    metadata = AttentionMetadata(TABLES[:1, 1:], torch.tensor([8], dtype=torch.int32), torch.tensor([0, 8]).int())
    cache, entries = torch.full((10, 12, 2 * DIM), 7.0), torch.full((10, 3, DIM), 7.0)
    without = torch.where(torch.arange(8) == 7, -1, slots)
    compress.compress_rows(rows, cache, without, metadata, entries, without, rotation=rotation, options=prompts.options)
    assert (cache[2, :7] != 7).all() and (cache[2, 7:] == 7).all() and (entries[2, 0] != 7).all()
    assert (entries[2, 1:] == 7).all() and (entries[[0, 1, *range(3, 10)]] == 7).all()


def test_other_calls_pass_to_the_definition() -> None:
    prompts = prompts_of(4, torch.float32, overlaps=True)
    other = replace(prompts, options=replace(prompts.options, norm_weight=prompts.options.norm_weight.double()))
    found, expected = (other.written(each, 16) for each in (compress, reference_compressed))
    assert torch.equal(found[1], expected[1])
