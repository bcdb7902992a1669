"""IntegerFormat: whole numbers with scales and zero points, which are read and written. Imports no torch.

N: rows, C: columns, G: groups of a row. A number is scale * (level - zero).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagewick.errors import ConfigError
from pagewick.weights.packed.layout import PackedFormat, PackedWeight
from pagewick.weights.packed.sizes import num_groups

if TYPE_CHECKING:
    from torch import Tensor

    from pagewick.quantization.calibrated.results import QuantizedLinear
    from pagewick.weights.packed.layout import GetTensor


@dataclass(frozen=True)
class Integers:
    """levels: (first row, end) -> the levels of these rows, [n, C] uint8. scales, zeros: [N, G]. group_size: or -1."""

    levels: Callable[[int, int], Tensor]
    scales: Tensor
    zeros: Tensor
    group_size: int


class IntegerFormat(PackedFormat):
    """A PackedFormat with two directions: `linear` undoes `pack`, to the last bit.

    group_size: columns with a scale, or -1 for all of a row.
    """

    group_size: int

    @property
    @abstractmethod
    def num_bits(self) -> int:
        """The size of a level."""

    @abstractmethod
    def integers(self, weight: PackedWeight, get: GetTensor) -> Integers:
        """Return a weight's levels, by groups of neighbouring columns, as column_order sorts them."""

    @abstractmethod
    def pack(self, linear: QuantizedLinear) -> dict[str, Tensor]:
        """Return the parts of a weight by their suffix, contiguous. Raises ConfigError if the format cannot hold it."""

    @abstractmethod
    def entries(self, left_out: Sequence[str]) -> dict[str, Any]:
        """Return the quantization_config from which this format is read.

        left_out: the prefixes of the matrices in layers that are not packed.
        """

    @abstractmethod
    def misfit(self, rows: int, columns: int) -> str:
        """Return why a weight of this size cannot be written, such as "rows are no multiple of 64"; empty if it can."""

    def read(self, weight: PackedWeight, get: GetTensor) -> Tensor:
        from pagewick.weights.packed.integers import encode

        found = self.integers(weight, get)
        size = weight.shape[1] if found.group_size == -1 else found.group_size
        return encode(weight.stored_type, weight.shape, found.levels, found.scales, found.zeros, size)

    def linear(self, weight: PackedWeight, get: GetTensor) -> QuantizedLinear:
        """Return a weight's levels with the columns in the model's order. Raises ModelLoadError for its zero points."""
        from pagewick.quantization.calibrated.results import QuantizedLinear
        from pagewick.weights.packed.integers import groups_of, zeros_of

        (num_rows, num_columns), found = weight.shape, self.integers(weight, get)
        levels, groups = found.levels(0, num_rows), None
        if weight.has_column_order:
            place = self.column_order(weight, get).argsort()
            levels, groups = levels[:, place], groups_of(num_columns, found.group_size)[place]
        return QuantizedLinear(
            name=weight.prefix, levels=levels, scales=found.scales, zeros=zeros_of(found.zeros, self.num_bits),
            group_of_column=groups, bits=self.num_bits, group_size=found.group_size, input_scale=None,
        )  # fmt: skip

    def check(self, linear: QuantizedLinear, *, has_order: bool = False, has_zeros: bool = True) -> None:
        """Raise ConfigError unless the format can hold a weight.

        has_order, has_zeros: whether it has groups of columns that are not neighbours (act-order), and zero points.
        """
        (rows, columns), groups = linear.levels.shape, linear.scales.shape[1]
        if linear.bits != self.num_bits:
            raise self.refused(linear, f"it has {linear.bits} bits")
        if groups != num_groups(columns, self.group_size):
            raise self.refused(linear, f"its {columns} columns have {groups} groups")
        if linear.group_of_column is not None and not has_order:
            raise self.refused(linear, "its groups of columns are not neighbours (act-order)")
        if linear.zeros is not None and not has_zeros:
            raise self.refused(linear, "it has zero points (it is not symmetric)")
        if reason := self.misfit(rows, columns):
            raise self.refused(linear, reason)

    def refused(self, linear: QuantizedLinear, reason: str) -> ConfigError:
        """Return the error for a weight that the format cannot hold."""
        return ConfigError(f"{linear.name} cannot be written as {self.label}: {reason}\n  choose another format: --to")
