"""Marlin: symmetric numbers of 4 bits in the order in which the Marlin kernel's threads read them.

For a weight of N rows and C columns with G groups of columns:

    .B [C / 16, 2 N] int32   tiles of 16 x 16 numbers, permuted in runs of four tiles; a word holds eight numbers
    .s [G, N] float16        scales, permuted in runs of 64, or of 32 if a row is one group

A number is scale * (level - 8). AutoAWQ's checkpoints of this kind have other names (AWQ_SUFFIXES).
Source of the layout: https://github.com/IST-DASLab/marlin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pagewick.errors import ModelLoadError
from pagewick.weights.packed.choice import choose_format, left_out_entry
from pagewick.weights.packed.integer_format import IntegerFormat, Integers
from pagewick.weights.packed.layout import PackedRules, PackedWeight, check_part, demand_parts
from pagewick.weights.packed.settings import Settings
from pagewick.weights.packed.sizes import group_label, num_groups, stored_type_of
from pagewick.weights.tensor_headers import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

    from pagewick.quantization.calibrated.results import QuantizedLinear
    from pagewick.weights.packed.layout import GetTensor

_SUFFIXES: Final = (".B", ".s", ".workspace")
# The names of the numbers and of the scales in AutoAWQ's checkpoints.
AWQ_SUFFIXES: Final = (".qweight", ".scales")
_TILE: Final = 16
_RUN: Final = 64
# The kernels of vLLM read this many columns at a time, or a multiple.
_KERNEL_COLUMNS: Final = 128
# The kernels have groups of these sizes.
MARLIN_GROUPS: Final = (128, -1)
_ZERO: Final = 8


@dataclass(frozen=True, slots=True)
class MarlinFormat(IntegerFormat):
    """group_size: -1 for all columns. suffixes: of the numbers and of the scales."""

    group_size: int
    suffixes: tuple[str, str] = (".B", ".s")

    @property
    def label(self) -> str:
        return f"Marlin int4 {group_label(self.group_size)}"

    def planned(self, name: str, rows: int, columns: int) -> TensorInfo:
        self._check_sizes(name, rows, columns)
        num_bytes = rows * columns // 2 + 2 * num_groups(columns, self.group_size) * rows
        return TensorInfo(name, self._stored_type(columns), (rows, columns), num_bytes, label=self.label)

    def weight(self, prefix: str, parts: Mapping[str, TensorInfo]) -> PackedWeight:
        demand_parts(prefix, parts, self.suffixes, self.label)
        words, scales = (parts[suffix] for suffix in self.suffixes)
        if len(words.shape) != 2:
            raise ModelLoadError(f"cannot load {words.name}: it must have two dimensions\n  download the file again")
        columns, rows = words.shape[0] * _TILE, words.shape[1] // 2
        self._check_sizes(words.name, rows, columns)
        check_part(words, ("I32",), (columns // _TILE, 2 * rows))
        check_part(scales, ("F16",), (num_groups(columns, self.group_size), rows))
        return PackedWeight(f"{prefix}.weight", (rows, columns), self._stored_type(columns), self, parts)

    @property
    def num_bits(self) -> int:
        return 4

    def integers(self, weight: PackedWeight, get: GetTensor) -> Integers:
        import torch

        from pagewick.weights.packed.integers import unpack_words

        (num_rows, num_columns), (of_words, of_scales) = weight.shape, self.suffixes
        numbers = unpack_words(weight.part(of_words, get), 4).view(-1, 1024)
        numbers = numbers[:, torch.tensor(_number_order()).argsort()]
        tiles = numbers.view(num_columns // _TILE, num_rows // _TILE, _TILE, _TILE)
        by_column = tiles.transpose(1, 2).reshape(num_columns, num_rows)
        stored = weight.part(of_scales, get)
        order = torch.tensor(_scale_order(is_one_group=len(stored) == 1))
        scales = stored.reshape(-1, len(order))[:, order.argsort()].view(stored.shape).t()
        zeros = torch.full_like(scales, _ZERO, dtype=torch.int16)

        def levels(first: int, end: int) -> Tensor:
            return by_column[:, first:end].t().contiguous()

        return Integers(levels, scales, zeros, self.group_size)

    def pack(self, linear: QuantizedLinear) -> dict[str, Tensor]:
        import torch

        from pagewick.weights.packed.integers import pack_words

        self.check(linear, has_zeros=False)
        scales = linear.scales.half().t()
        if not torch.equal(scales.t().float(), linear.scales.float()):
            raise self.refused(linear, f"float16 does not hold its scales, which are {linear.scales.dtype}")
        num_rows, num_columns = linear.levels.shape
        tiles = linear.levels.t().reshape(num_columns // _TILE, _TILE, num_rows // _TILE, _TILE).transpose(1, 2)
        numbers = tiles.reshape(-1, 1024)[:, torch.tensor(_number_order())].view(num_columns // _TILE, -1)
        order = torch.tensor(_scale_order(is_one_group=len(scales) == 1))
        stored = scales.reshape(-1, len(order))[:, order].view(scales.shape)
        return dict(zip(self.suffixes, (pack_words(numbers, 4), stored), strict=True))

    def entries(self, left_out: Sequence[str]) -> dict[str, Any]:
        if self.suffixes == AWQ_SUFFIXES:
            left = {"modules_to_not_convert": list(left_out) or None}
            return {"quant_method": "awq", "bits": 4, "group_size": self.group_size, "version": "marlin"} | left
        return {
            "quant_method": "gptq", "bits": 4, "group_size": self.group_size, "sym": True, "desc_act": False,
            "checkpoint_format": "marlin", "is_marlin_format": True, "lm_head": False, **left_out_entry(left_out),
        }  # fmt: skip

    def misfit(self, rows: int, columns: int) -> str:
        fits = rows * columns and not rows % _RUN and not columns % _KERNEL_COLUMNS
        return "" if fits else f"{rows} x {columns} are not multiples of 64 x 128, which Marlin kernels need"

    def _stored_type(self, columns: int) -> str:
        return stored_type_of(4, columns, self.group_size, "F16")

    def _check_sizes(self, name: str, rows: int, columns: int) -> None:
        if rows % _RUN or columns % _TILE or not rows * columns:
            raise ModelLoadError(
                f"cannot load {name}: {rows} x {columns} numbers are not whole runs of tiles (64 x 16)\n"
                "  quantization_config and the weights do not belong together; download or copy both again"
            )


def read_rules(settings: Settings) -> PackedRules:
    """Return what the quantization_config of a Marlin checkpoint says. Raises ModelLoadError."""
    settings.demand("bits", (4,))
    settings.demand("sym", (True,))
    settings.demand("desc_act", (False,))
    whole = MarlinFormat(settings.group_size())
    return PackedRules(whole.label, _SUFFIXES, _SUFFIXES[:1], choose_format(settings, whole, _changed), "a rule")


def _changed(whole: MarlinFormat, settings: Settings) -> MarlinFormat:
    settings.demand("bits", (4,))
    return MarlinFormat(settings.group_size(default=whole.group_size), whole.suffixes)


def _number_order() -> list[int]:
    """Return the place in four tiles, one after the other, of each number that is stored.

    32 threads read eight numbers of each tile: two columns of the tile, eight apart, and in each of them two pairs of
    rows, eight apart. The even ones of these eight come first.
    """
    found = []
    for thread in range(32):
        rows = [2 * (thread % 4) + step for step in (0, 1, 8, 9)]
        places = [16 * row + thread // 4 + 8 * block for block in (0, 1) for row in rows]
        for tile in range(4):
            found += [256 * tile + place for place in (*places[::2], *places[1::2])]
    return found


def _scale_order(*, is_one_group: bool) -> list[int]:
    """Return which scale of a run each stored one is."""
    if is_one_group:
        return [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    return [i + 8 * j for i in range(8) for j in range(8)]
