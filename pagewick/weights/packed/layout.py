"""PackedFormat: how a checkpoint stores one weight in several tensors, and what the weight becomes. Imports no torch.

N: rows, C: columns of a weight, its output and its input features. A part is one tensor of the checkpoint; its suffix
is the end of its name, such as ".qweight", and the rest is the weight's prefix.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pagewick.errors import ModelLoadError
from pagewick.quantization.block_formats import ORDER_LEAF
from pagewick.weights.tensor_headers import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

    GetTensor = Callable[[str], Tensor]
    """Returns a tensor of the checkpoint, mapped, by its full name."""

# The type of a weight that no block format can hold: numbers, which the loader rounds to the model's data type.
NUMBERS: Final = "F32"


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """One weight. name: of the logical tensor, PREFIX.weight. shape: N, C. parts: its tensors, by suffix.

    stored_type: the block format in which the format's `read` returns it, or NUMBERS. has_column_order: the columns of
    what `read` returns are sorted, as column_order says (GPTQ's act-order). is_flat: headers say only how many numbers
    it has, as one row; `resolved` reads its shape.
    """

    name: str
    shape: tuple[int, int]
    stored_type: str
    format: PackedFormat
    parts: Mapping[str, TensorInfo]
    has_column_order: bool = False
    is_flat: bool = False

    @property
    def prefix(self) -> str:
        return self.name.removesuffix(".weight")

    @property
    def order_name(self) -> str:
        """The name of the logical tensor with the order of the columns."""
        return f"{self.prefix}.{ORDER_LEAF}"

    @property
    def info(self) -> TensorInfo:
        """The weight as one tensor, which has one dimension if its shape is not known."""
        num_bytes = sum(part.num_bytes for part in self.parts.values())
        return TensorInfo(
            self.name, self.stored_type, self.shape[1:] if self.is_flat else self.shape, num_bytes,
            label=self.format.label, has_column_order=self.has_column_order,
        )  # fmt: skip

    def part(self, suffix: str, get: GetTensor) -> Tensor:
        """Read a part."""
        return get(self.parts[suffix].name)


class PackedFormat(ABC):
    """A format and its numbers (bits, group size, ...), as config.json has them: a frozen value without state.

    Every method raises ModelLoadError, which names the tensor, the cause and the fix.
    """

    @property
    @abstractmethod
    def label(self) -> str:
        """The name for people, such as "GPTQ int4 g128"."""

    @abstractmethod
    def planned(self, name: str, rows: int, columns: int) -> TensorInfo:
        """Return what `weight(...).info` would be for a weight of this size, by config.json alone."""

    @abstractmethod
    def weight(self, prefix: str, parts: Mapping[str, TensorInfo]) -> PackedWeight:
        """Return the weight that these parts store, from their headers. Shapes and data types are checked."""

    def resolved(self, weight: PackedWeight, get: GetTensor) -> PackedWeight:
        """Return the weight with its shape, which some formats store in a tensor."""
        return weight

    @abstractmethod
    def read(self, weight: PackedWeight, get: GetTensor) -> Tensor:
        """Return rows of blocks [N, bytes] uint8, or float32 numbers [N, C] if its type is NUMBERS."""

    def numbers(self, weight: PackedWeight, get: GetTensor) -> Tensor:
        """Return float32 numbers [N, C], the columns in the model's order."""
        found = self.read(weight, get)
        if weight.stored_type != NUMBERS:
            from pagewick.quantization.ggml import dequantize

            found = dequantize(weight.stored_type, found, weight.shape[1])
        return found[:, self.column_order(weight, get).argsort()] if weight.has_column_order else found

    def column_order(self, weight: PackedWeight, get: GetTensor) -> Tensor:
        """Return [C] int64: which column of the model each column of `read` is."""
        raise NotImplementedError(f"{self.label} has no order of columns")


@dataclass(frozen=True)
class PackedRules:
    """The rules of a quantization_config: which weights are packed, and how.

    label: the name of the whole for people. suffixes: of all parts. marks: those of them that only a packed weight has.
    format_of: prefix -> the weight's format; None if it is not packed. excluded_by: the entry of config.json that
    leaves weights out, for messages. by_tensors: prefix -> the format of a weight that is packed although format_of
    says no, where tensors say themselves how. check_names: raises ModelLoadError for tensors that are packed in another
    way, by their names.
    """

    label: str
    suffixes: Collection[str]
    marks: Collection[str]
    format_of: Callable[[str], PackedFormat | None]
    excluded_by: str = "modules_to_not_convert"
    by_tensors: Callable[[str], PackedFormat | None] = lambda _: None
    check_names: Callable[[Iterable[str]], None] = lambda _: None


def check_part(part: TensorInfo, dtypes: Collection[str], *shapes: tuple[int, ...]) -> None:
    """Raise ModelLoadError unless a part has one of these data types and one of these shapes."""
    if part.dtype not in dtypes:
        raise ModelLoadError(
            f"cannot load {part.name}: it is stored as {part.dtype}, and must be {' or '.join(dtypes)}\n"
            "  its format is not the one in config.json; download or copy both again"
        )
    if part.shape not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise ModelLoadError(
            f"cannot load {part.name}: its shape is {list(part.shape)}, and must be {expected}\n"
            "  quantization_config and the weights do not belong together; download or copy both again"
        )


def demand_parts(prefix: str, parts: Collection[str], suffixes: Collection[str], label: str) -> None:
    """Raise ModelLoadError unless a weight has these parts."""
    if missing := [f"{prefix}{suffix}" for suffix in suffixes if suffix not in parts]:
        raise ModelLoadError(
            f"the checkpoint lacks {', '.join(missing)}, which {label} needs\n"
            "  quantization_config and the weights do not belong together; download or copy both again"
        )
