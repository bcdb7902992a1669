"""The kinds of tensors that stack the experts of a layer, by the ends of their names. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

GATE_UP, GATE, UP, DOWN = "gate_up_proj", "gate_proj", "up_proj", "down_proj"
# The scales of numbers of 8 bits, in blocks of rows and columns; those of rows or of groups of columns.
SCALE_INV, SCALE = "_scale_inv", "_scale"
_LEAVES: Final = {
    "": "weight", "_bias": "bias", "_blocks": "weight_packed", "_scales": "weight_scale",
    "_packed": "weight_packed", SCALE: "weight_scale", SCALE_INV: "weight_scale_inv",
}  # fmt: skip
# torchao's, whose names are those of the plain tensor between underscores: _down_proj_qdata.
_QDATA: Final = "_qdata"
_TORCHAO_SUFFIXES: Final = (_QDATA, SCALE, "_zero_point")
_NUM_DIMENSIONS: Final = {"_bias": 2, "_blocks": 4}
_SINGLE: Final = re.compile(r"(.+)\.\d+\.(gate_proj|up_proj|down_proj)")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of stack. projection: which one. suffix: the rest of its name. leaf: of an expert's tensor in it.

    is_of_torchao: its numbers have rows and columns as the plain tensor that torchao has quantized.
    """

    projection: str
    suffix: str
    leaf: str
    is_of_torchao: bool = False

    @property
    def num_dimensions(self) -> int:
        return _NUM_DIMENSIONS.get(self.suffix, 3)


def kind_of(projections: Collection[str], leaf: str) -> Kind | None:
    """Return the kind of a tensor by the last part of its name; None if it is no stack of these projections."""
    for projection in projections:
        suffix = leaf.removeprefix(projection)
        if leaf.startswith(projection) and suffix in _LEAVES:
            return Kind(projection, suffix, _LEAVES[suffix])
        suffix = leaf.removeprefix(f"_{projection}")
        if leaf.startswith(f"_{projection}") and suffix in _TORCHAO_SUFFIXES:
            return Kind(projection, suffix, f"_weight{suffix}", is_of_torchao=True)
    return None


def plain_leaf(leaf: str, kind: Kind) -> str:
    """Return the name of the plain tensor that torchao's numbers stand for, and of others that are not torchao's.

    It is empty for torchao's scales and zero points.
    """
    if not kind.is_of_torchao:
        return leaf
    return kind.projection if kind.suffix == _QDATA else ""


def stacks_of(prefix: str) -> list[str]:
    """Return which stacks may have a single expert's weight, by their names; none if it is no expert's."""
    if (match := _SINGLE.fullmatch(prefix)) is None:
        return []
    owner, projection = match.groups()
    return [f"{owner}.{name}" for name in (projection, *(GATE_UP,) * (projection != DOWN))]
