"""The recipe of a calibrated quantization, and its results: a linear layer's weight, and a decoder layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

import torch
from torch import Tensor

from pagewick.errors import ConfigError

Method = Literal["gptq", "awq", "rtn"]
METHODS: Final = get_args(Method)
BITS: Final = (2, 3, 4, 8)
GROUP_SIZES: Final = (32, 64, 128, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How weights are quantized. Raises ConfigError for numbers that no method has.

    method: gptq, awq, or rtn, which rounds to nearest and needs no text. bits: of a level. group_size: columns that
    share a scale; -1: the whole row. symmetric: the zero point is in the middle of the levels.
    act_order: GPTQ takes the columns by falling size of their inputs; groups are then made of columns in that order,
    unless static_groups keeps them as neighbours. compensation: AWQ rounds as GPTQ does, with its factors, and not to
    nearest. damping: share of the mean of the Hessian's diagonal that is added to it. num_tokens: tokens of the text;
    those that quantize_layers gets count.
    """

    method: Method = "gptq"
    bits: int = 4
    group_size: int = 128
    symmetric: bool = True
    act_order: bool = False
    static_groups: bool = False
    compensation: bool = True
    damping: float = 0.01
    num_tokens: int = 4096

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"there is no method {self.method!r}; give one of {', '.join(METHODS)}")
        for name, allowed in (("bits", BITS), ("group_size", GROUP_SIZES)):
            if (value := getattr(self, name)) not in allowed:
                raise ConfigError(f"{name} {value} is not supported; give one of {', '.join(map(str, allowed))}")
        if self.act_order and self.method != "gptq":
            raise ConfigError(f"act_order is GPTQ's, and the method is {self.method}; leave it out")
        if not 0 < self.damping < 1:
            raise ConfigError(f"damping {self.damping:g} is not between 0 and 1; 0.01 is usual")

    @property
    def max_level(self) -> int:
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        """The zero point of symmetric levels."""
        return 1 << (self.bits - 1)

    def columns_per_group(self, columns: int) -> int:
        """Return the number of columns of a group, in a weight with this number of columns."""
        return columns if self.group_size == -1 else self.group_size


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """A weight [out, in] as whole numbers: value = (level - zero) * scale.

    name: the weight's name in the checkpoint without ".weight". levels: uint8 [out, in], columns in the model's order.
    scales: float16 [out, num_groups]. zeros: uint8 [out, num_groups]; None: symmetric, every zero is 2 ** (bits - 1).
    group_of_column: int32 [in]; None: column c is in group c // group_size. group_size: -1 is the whole row.
    input_scale: float32 [in], the factors by which the weight's columns were multiplied and the inputs divided before
    (AWQ); None: there were none. The levels already contain them.
    """

    name: str
    levels: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_of_column: Tensor | None
    bits: int
    group_size: int
    input_scale: Tensor | None = None

    @property
    def groups(self) -> Tensor:
        """The group of each column, int64 [in]."""
        columns = self.levels.shape[1]
        if self.group_of_column is not None:
            return self.group_of_column.long()
        return torch.arange(columns) // (columns if self.group_size == -1 else self.group_size)

    def dequantize(self) -> Tensor:
        """Return the weight that the levels stand for, float32 [out, in]."""
        groups = self.groups
        zeros = float(1 << (self.bits - 1)) if self.zeros is None else self.zeros.float()[:, groups]
        return (self.levels.float() - zeros) * self.scales.float()[:, groups]


@dataclass(frozen=True, slots=True)
class LayerResult:
    """A decoder layer.

    linears: the quantized weights. tensors: other tensors of the layer that have changed, by their names in the
    checkpoint, in the checkpoint's dtypes. unquantized: weights of linear layers that stay as they are, or are in
    `tensors`, by their names without ".weight", with the reason. remarks: further weights that did not get all that
    the method does, such as experts with too few tokens, likewise.
    """

    linears: tuple[QuantizedLinear, ...]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    unquantized: Mapping[str, str] = field(default_factory=dict)
    remarks: Mapping[str, str] = field(default_factory=dict)
