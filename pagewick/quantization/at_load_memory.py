"""Memory that quantizing at load needs on a GPU, by arithmetic. Imports no torch.

A weight is uploaded in pieces of at most PIECE_BYTES, in whole rows, and each is quantized there before the next one
comes. Beside the piece itself there are then WORKING_BYTES for each of its numbers: the quantizers
(kernels/reference_quantizers.py) hold seven tensors of float32 at once while they search scales, or three of int64 and
three of float32 while they put levels into bytes, and some numbers of each group. A format has the larger of both. An
eighth more is a margin for gaps between blocks of memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Protocol

# Copies of this size take 2 ms at 32 GB/s, beside which calls take no time; a quantizer's operations fill a GPU.
PIECE_BYTES: Final = 64 * 2**20
# The number of rows of a piece makes whole panels in any layout.
ROWS_AT_ONCE: Final = 256
# A test compares these with what the quantizers allocate.
WORKING_BYTES: Final[Mapping[str, float]] = {
    "Q4_0": 29.5,
    "Q4_1": 30.5,
    "Q5_0": 36.5,
    "Q5_1": 36.5,
    "Q8_0": 28.5,
    "Q2_K": 35,
    "Q3_K": 35,
    "Q4_K": 33.5,
    "Q5_K": 37,
    "Q6_K": 37,
    "int4_g32": 30,
    "int4_g64": 29,
    "int4_g128": 28.5,
}
_MARGIN: Final = 1 / 8
# Bytes of a number while it is quantized, by the dtype in the file: those of F64 are converted to float32 as well.
_ELEMENT_BYTES: Final = {"F64": 12, "F32": 4, "F16": 2, "BF16": 2}
# The most that a packed weight has that is read as numbers.
_OTHER_BYTES: Final = 4


class KeptTensor(Protocol):
    """The facts about a model's tensor that are needed here, as models/tensors.py describes them."""

    @property
    def name(self) -> str: ...

    @property
    def kept(self) -> tuple[int, ...]: ...

    @property
    def num_elements(self) -> int: ...

    @property
    def role(self) -> str: ...


def rows_of_piece(row_bytes: int, piece_bytes: int) -> int:
    """Return the number of rows of a piece of a tensor whose rows have row_bytes bytes."""
    return max(ROWS_AT_ONCE, piece_bytes // max(1, row_bytes) // ROWS_AT_ONCE * ROWS_AT_ONCE)


def most_quantizing_bytes(tensors: Iterable[KeptTensor], formats: Mapping[str, str], dtypes: Mapping[str, str]) -> int:
    """Return the bytes for the one of a rank's tensors that needs most.

    formats: the block formats of those that are quantized at load, by name. dtypes: as the checkpoint stores them.
    """
    needed = (
        quantizing_bytes(
            formats[tensor.name],
            tensor.kept[-2],
            tensor.kept[-1],
            _ELEMENT_BYTES.get(dtypes.get(tensor.name, ""), _OTHER_BYTES),
            # An expert is uploaded whole by every rank, which then cuts its share.
            tensor.num_elements if tensor.role == "expert" else 0,
        )
        for tensor in tensors
        if tensor.name in formats
    )
    return max(needed, default=0)


def quantizing_bytes(name: str, num_rows: int, num_columns: int, element_bytes: int, num_uploaded: int = 0) -> int:
    """Return the bytes that quantizing a rank's share of a weight needs on its GPU, beside the weight in blocks.

    name: the block format. num_rows, num_columns: of the share. element_bytes: of a number as it is uploaded.
    num_uploaded: numbers that are uploaded at once; 0: those of a piece.
    """
    if not num_uploaded:
        num_rows = min(num_rows, rows_of_piece(num_columns * element_bytes, PIECE_BYTES))
    num_quantized = num_rows * num_columns
    used = (num_uploaded or num_quantized) * element_bytes + num_quantized * WORKING_BYTES[name]
    return int(used * (1 + _MARGIN))
