"""AWQ: whole numbers of 4 bits, for groups of columns that share a scale and a zero point.

For a weight of N rows and C columns with G groups of columns, in the layout "gemm":

    .qweight [C, N / 8] int32   a word holds eight neighbouring rows of a column: 0, 2, 4, 6, 1, 3, 5, 7 from the lowest
    .qzeros  [G, N / 8] int32   zero points, likewise
    .scales  [G, N]             float16 as a rule

candle-vllm's examples/convert_awq_marlin.py puts the zero points of this layout into the order of Marlin kernels: 64
neighbouring ones are transposed as 8 x 8. In the layout "gemv" words hold numbers in their order:

    .qweight [N, C / 8] int32   eight neighbouring columns of a row
    .qzeros  [N, Z] int32       zero points of eight groups; rows are filled up with zeros to Z words
    .scales  [N, 8 Z]           float16 as a rule, filled up likewise

and in the layout "gemv_fast":

    .qweight [N / 4, C] int16   for each four rows and 64 columns, the numbers of one row after the other, each 32 in
                                the order of the kernel's threads; a word holds four numbers
    .scales  [8 Z, N] float16   filled up likewise
    .qzeros  [8 Z, N] float16   -scale * zero, rounded

Source: https://github.com/casper-hansen/AutoAWQ and https://github.com/ModelCloud/GPTQModel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pagewick.errors import ModelLoadError
from pagewick.weights.packed.fp8 import matrix_shape
from pagewick.weights.packed.integer_format import IntegerFormat, Integers
from pagewick.weights.packed.layout import PackedFormat, PackedRules, PackedWeight, check_part, demand_parts
from pagewick.weights.packed.marlin import AWQ_SUFFIXES, MarlinFormat
from pagewick.weights.packed.settings import Settings, named
from pagewick.weights.packed.sizes import SCALE_DTYPES, group_label, num_groups, stored_type_of
from pagewick.weights.tensor_headers import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

    from pagewick.quantization.calibrated.results import QuantizedLinear
    from pagewick.weights.packed.layout import GetTensor

SUFFIXES: Final = (".qweight", ".qzeros", ".scales")
_ROWS_IN_WORD: Final = (0, 2, 4, 6, 1, 3, 5, 7)
_WORD: Final = 8
# GPTQModel's names for the entry with the layout come after AutoAWQ's.
_VERSION_ENTRIES: Final = ("version", "checkpoint_format", "format")
# Our name for the layout gemm with zero points for Marlin; candle-vllm reads no version.
MARLIN_ZEROS: Final = "gemm_marlin_zeros"
_VERSIONS: Final = ("gemm", "gemv", "gemv_fast", "marlin", MARLIN_ZEROS)
# The rows and columns of a tile in the layout gemv_fast.
_TILE: Final = (4, 64)


@dataclass(frozen=True, slots=True)
class AwqFormat(IntegerFormat):
    """group_size: -1 for all columns. is_gemv: which of the layouts. has_marlin_zeros: those of the layout gemm."""

    group_size: int
    is_gemv: bool = False
    has_marlin_zeros: bool = False
    method: str = "AWQ"

    @property
    def label(self) -> str:
        order = " with zero points for Marlin" * self.has_marlin_zeros
        return f"{self.method} int4 {group_label(self.group_size)}{order}"

    @property
    def num_bits(self) -> int:
        return 4

    def planned(self, name: str, rows: int, columns: int) -> TensorInfo:
        self._check_sizes(name, rows, columns)
        groups = _zero_words(columns, self.group_size) * _WORD if self.is_gemv else num_groups(columns, self.group_size)
        num_bytes = rows * columns // 2 + groups * rows // 2 + 2 * groups * rows
        return TensorInfo(name, self._stored_type(columns), (rows, columns), num_bytes, label=self.label)

    def weight(self, prefix: str, parts: Mapping[str, TensorInfo]) -> PackedWeight:
        demand_parts(prefix, parts, SUFFIXES, self.label)
        qweight, qzeros, scales = (parts[suffix] for suffix in SUFFIXES)
        if len(qweight.shape) != 2:
            raise ModelLoadError(f"cannot load {qweight.name}: it must have two dimensions\n  download the file again")
        first, second = qweight.shape
        rows, columns = (first, second * _WORD) if self.is_gemv else (second * _WORD, first)
        self._check_sizes(qweight.name, rows, columns)
        groups, words = num_groups(columns, self.group_size), _zero_words(columns, self.group_size)
        check_part(qweight, ("I32",), qweight.shape)
        check_part(qzeros, ("I32",), (rows, words) if self.is_gemv else (groups, rows // _WORD))
        check_part(scales, SCALE_DTYPES, (rows, words * _WORD) if self.is_gemv else (groups, rows))
        return PackedWeight(f"{prefix}.weight", (rows, columns), self._stored_type(columns), self, parts)

    def integers(self, weight: PackedWeight, get: GetTensor) -> Integers:
        from pagewick.weights.packed.integers import levels_in_rows, unpack_rows, unpack_words

        qweight, qzeros, scales = (weight.part(suffix, get) for suffix in SUFFIXES)
        if self.is_gemv:
            groups = num_groups(weight.shape[1], self.group_size)

            def gemv_levels(first: int, end: int) -> Tensor:
                return unpack_words(qweight[first:end], 4)

            return Integers(gemv_levels, scales[:, :groups], unpack_words(qzeros, 4)[:, :groups], self.group_size)

        zeros = unpack_rows(qzeros, _ROWS_IN_WORD)
        if self.has_marlin_zeros:
            zeros = zeros.reshape(-1, 64, zeros.shape[1])[:, _zero_order().argsort()].flatten(0, 1)
        return Integers(levels_in_rows(qweight, _ROWS_IN_WORD), scales.t(), zeros, self.group_size)

    def pack(self, linear: QuantizedLinear) -> dict[str, Tensor]:
        from pagewick.weights.packed.integers import zero_points

        self.check(linear)
        zeros = zero_points(linear.zeros, linear.scales, 4)
        if int(zeros.max()) > 15:
            raise self.refused(linear, f"a zero point is {int(zeros.max())}")
        if self.has_marlin_zeros:
            zeros = zeros.reshape(-1, 64, zeros.shape[1])[:, _zero_order()].flatten(0, 1)
        return {
            ".qweight": _pack_rows(linear.levels),
            ".qzeros": _pack_rows(zeros.byte()),
            ".scales": linear.scales.t().contiguous(),
        }

    def entries(self, left_out: Sequence[str]) -> dict[str, Any]:
        # Readers look for .qzeros if zero_point is true, and symmetric weights have them, too.
        return {
            "quant_method": "awq", "bits": 4, "group_size": self.group_size, "zero_point": True,
            "version": MARLIN_ZEROS if self.has_marlin_zeros else "gemm",
            "modules_to_not_convert": list(left_out) or None,
        }  # fmt: skip

    def misfit(self, rows: int, columns: int) -> str:
        unit = 64 if self.has_marlin_zeros else _WORD
        fits = rows * columns and not (columns if self.is_gemv else rows) % unit
        return "" if fits else f"{rows} x {columns} numbers of 4 bits are not packed by {unit}"

    def _stored_type(self, columns: int) -> str:
        return stored_type_of(4, columns, self.group_size, "F16")

    def _check_sizes(self, name: str, rows: int, columns: int) -> None:
        """Raise ModelLoadError if words cannot hold a weight of this size."""
        if reason := self.misfit(rows, columns):
            raise ModelLoadError(
                f"cannot load {name}: {reason}\n"
                "  quantization_config and the weights do not belong together; download or copy both again"
            )


@dataclass(frozen=True, slots=True)
class AwqFastFormat(PackedFormat):
    """The layout gemv_fast. group_size: -1 for all columns."""

    group_size: int

    @property
    def label(self) -> str:
        return f"AWQ int4 {group_label(self.group_size)}"

    def planned(self, name: str, rows: int, columns: int) -> TensorInfo:
        self._check_sizes(name, rows, columns)
        num_bytes = rows * columns // 2 + 4 * _zero_words(columns, self.group_size) * _WORD * rows
        return TensorInfo(name, self._stored_type(columns), (rows, columns), num_bytes, label=self.label)

    def weight(self, prefix: str, parts: Mapping[str, TensorInfo]) -> PackedWeight:
        demand_parts(prefix, parts, SUFFIXES, self.label)
        qweight = parts[".qweight"]
        quarter, columns = matrix_shape(qweight)
        rows = 4 * quarter
        self._check_sizes(qweight.name, rows, columns)
        check_part(qweight, ("I16",), (quarter, columns))
        for suffix in (".qzeros", ".scales"):
            check_part(parts[suffix], ("F16",), (_zero_words(columns, self.group_size) * _WORD, rows))
        return PackedWeight(f"{prefix}.weight", (rows, columns), self._stored_type(columns), self, parts)

    def read(self, weight: PackedWeight, get: GetTensor) -> Tensor:
        import torch

        from pagewick.weights.packed.integers import encode, unpack_words

        (rows, columns), (height, width) = weight.shape, _TILE
        groups = num_groups(columns, self.group_size)
        scales, stored = (weight.part(suffix, get)[:groups].t() for suffix in (".scales", ".qzeros"))
        zeros = torch.where(scales == 0, 0, -stored.float() / scales.float()).round()
        if not torch.equal((-scales.float() * zeros).half(), stored) or not bool(((zeros >= 0) & (zeros < 16)).all()):
            raise ModelLoadError("its qzeros are not its scales times whole numbers\n  download the file again")
        tiles = unpack_words(weight.part(".qweight", get), 4).view(rows // height, -1, height, width)
        halves = tiles.transpose(1, 2).reshape(rows, -1, 32)
        # Each half holds the columns 0, 8, 16, 24, 1, 9, 17, 25, 2, ...
        order = torch.arange(32).view(4, 4, 2).permute(1, 2, 0).flatten()
        numbers = halves[..., order.argsort()].view(rows, columns)
        size = columns if self.group_size == -1 else self.group_size
        return encode(
            weight.stored_type, weight.shape, lambda first, end: numbers[first:end], scales, zeros.short(), size
        )

    def _stored_type(self, columns: int) -> str:
        return stored_type_of(4, columns, self.group_size, "F16")

    def _check_sizes(self, name: str, rows: int, columns: int) -> None:
        """Raise ModelLoadError if tiles cannot hold a weight of this size."""
        if rows % _TILE[0] or columns % _TILE[1] or not rows * columns:
            raise ModelLoadError(
                f"cannot load {name}: {rows} x {columns} numbers are not packed in tiles of {_TILE[0]} x {_TILE[1]}\n"
                "  quantization_config and the weights do not belong together; download or copy both again"
            )


def read_rules(settings: Settings) -> PackedRules:
    """Return what the quantization_config of an AWQ checkpoint says. Raises ModelLoadError.

    AutoAWQ's own file, quant_config.json, calls bits and group_size w_bit and q_group_size.
    """
    names = {"w_bit": "bits", "q_group_size": "group_size"}
    settings = Settings({names.get(name, name): value for name, value in settings.values.items()}, settings.path)
    settings.choice("bits", (4,))
    entry = next((name for name in _VERSION_ENTRIES if name in settings), _VERSION_ENTRIES[0])
    version, size = settings.word(entry, _VERSIONS, "gemm"), settings.group_size()
    is_left_out = named((*settings.texts("modules_to_not_convert"), "lm_head"))
    whole: PackedFormat = AwqFormat(size, version == "gemv", version == MARLIN_ZEROS)
    if version == "gemv_fast":
        whole = AwqFastFormat(size)
    elif version == "marlin":
        whole = MarlinFormat(size, AWQ_SUFFIXES)
    return rules_of(whole, is_left_out)


def rules_of(whole: PackedFormat, is_left_out: Callable[[str], bool]) -> PackedRules:
    """Return the rules of a checkpoint whose weights have one format, except some that are not packed."""
    return PackedRules(whole.label, SUFFIXES, SUFFIXES[:1], lambda prefix: None if is_left_out(prefix) else whole)


def _zero_words(columns: int, group_size: int) -> int:
    """Return the words of zero points in a row of the layout gemv."""
    multiple = {64: 2, 32: 4}.get(group_size, 1)
    words = -(-num_groups(columns, group_size) // _WORD)
    return -(-words // multiple) * multiple


def _zero_order() -> Tensor:
    """Return which of 64 neighbouring zero points each stored one is, in the order of Marlin kernels."""
    import torch

    return torch.arange(64).view(8, 8).t().flatten()


def _pack_rows(numbers: Tensor) -> Tensor:
    """Do the reverse of unpack_rows: numbers [N, n] uint8 become words [n, N / 8] int32."""
    from pagewick.weights.packed.integers import pack_words

    eights = numbers.t().reshape(numbers.shape[1], -1, _WORD)
    return pack_words(eights[..., list(_ROWS_IN_WORD)].flatten(1), 4)
