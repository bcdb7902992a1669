"""The memory that quantizing at load needs by arithmetic, beside what the quantizers allocate."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pagewick.kernels import reference
from pagewick.kernels.reference_quantizers import FORMATS
from pagewick.quantization import at_load, at_load_memory
from pagewick.quantization.at_load import QuantizingMethod
from pagewick.quantization.at_load_memory import (
    PIECE_BYTES,
    WORKING_BYTES,
    most_quantizing_bytes,
    quantizing_bytes,
    rows_of_piece,
)
from pagewick.quantization.share import whole_rows
from pagewick.quantization.weight import Pieces, Weight

MIB = 2**20


class Allocations(TorchDispatchMode):
    """Counts the bytes of tensors that operations make, as a GPU's allocator does. peak: the most at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage_id(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, Tensor) and (key := _storage_id(one)) not in given and key not in self._sizes:
                storage = one.untyped_storage()
                self._sizes[key] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, key)
        self.peak = max(self.peak, self.now)
        return result

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        assert self.now == 0, "a tensor is left, or was not seen to go"

    def _free(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def _storage_id(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def peak_of(work: Callable[[], object]) -> int:
    with Allocations() as allocations:
        work()
    return allocations.peak


def random_rows(num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(1)).to(dtype)


def test_every_quantizer_is_in_the_table() -> None:
    """Weights in fp8 come from checkpoints only: there is no quantizer for them."""
    assert WORKING_BYTES.keys() == FORMATS.keys()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_working_memory_is_that_of_the_quantizers(name: str, dtype: torch.dtype) -> None:
    rows = random_rows(64, 2048, dtype)
    measured = peak_of(lambda: reference.quantize_weight(rows, name)) / rows.numel()
    assert measured <= WORKING_BYTES[name] <= measured + 1


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "int4_g128", "Q6_K"])
@pytest.mark.parametrize(("dtype", "element_bytes"), [(torch.bfloat16, 2), (torch.float32, 4), (torch.float64, 12)])
@pytest.mark.parametrize("num_rows", [100, 1100])
def test_a_weight_is_quantized_in_as_much_as_was_planned(
    name: str, dtype: torch.dtype, element_bytes: int, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces are copied in place of an upload, and quantized by the operations that a GPU has."""
    monkeypatch.setattr(at_load_memory, "PIECE_BYTES", MIB // 2)
    monkeypatch.setattr(at_load, "quantize_weight", reference.quantize_weight)
    tensor = random_rows(num_rows, 512, dtype)
    weight = Weight(whole_rows(num_rows, 512), [QuantizingMethod(name)], torch.bfloat16, torch.device("cpu"))
    pieces = Pieces(MIB // 2, take=lambda rows: rows.clone())
    measured = peak_of(lambda: weight.load(None, "weight", tensor, pieces))
    planned = quantizing_bytes(name, num_rows, 512, element_bytes)
    assert 0.8 * planned <= measured <= planned


def test_pieces_of_large_weights_by_hand() -> None:
    # 64 MiB of bfloat16 are 2**25 numbers, with 2 bytes as they come and 33.5 for the work; an eighth is a margin.
    assert PIECE_BYTES == 64 * MIB and rows_of_piece(2 * 8192, PIECE_BYTES) == 4096
    assert quantizing_bytes("Q4_K", 28672, 8192, 2) == int(4096 * 8192 * 35.5 * 9 / 8)
    assert quantizing_bytes("Q4_K", 1000, 8192, 2) == int(1000 * 8192 * 35.5 * 9 / 8)
    # A rank of eight quantizes an eighth of an expert that it has uploaded whole.
    whole, kept = 14336 * 4096, 14336 // 8 * 4096
    assert quantizing_bytes("Q8_0", 14336 // 8, 4096, 2, whole) == int((whole * 2 + kept * 28.5) * 9 / 8)


@dataclass(frozen=True)
class Kept:
    name: str
    kept: tuple[int, ...]
    num_elements: int
    role: str


def test_the_largest_tensor_counts() -> None:
    tensors = [
        Kept("a", (100, 256), 25600, "mlp"),
        Kept("b", (90, 256), 23040, "expert"),
        Kept("c", (9999,), 9, "norm"),
    ]
    formats, dtypes = {"a": "Q8_0", "b": "Q6_K"}, {"a": "BF16", "b": "BF16"}
    assert most_quantizing_bytes(tensors, formats, dtypes) == quantizing_bytes("Q6_K", 90, 256, 2, 23040)
    assert most_quantizing_bytes(tensors, {"a": "Q8_0"}, {"a": "U8"}) == quantizing_bytes("Q8_0", 100, 256, 4)
    assert most_quantizing_bytes(tensors, {}, {}) == 0
