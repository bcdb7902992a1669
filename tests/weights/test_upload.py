"""Uploads through two buffers, with a stream that copies as late as it may."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pagewick.quantization.at_load import QuantizingMethod
from pagewick.quantization.method import LinearMethod
from pagewick.quantization.share import whole_rows
from pagewick.quantization.unquantized import UnquantizedMethod
from pagewick.quantization.weight import Pieces, Weight
from pagewick.weights.loader import load_weights
from pagewick.weights.upload import Upload
from tests.late_stream import LateMark, LateStream
from tests.weights.test_loader import MemorySource

CPU = torch.device("cpu")


class Uploading(Upload):
    """An upload to the CPU that counts, and that does copy what is there already."""

    def __init__(self, num_bytes: int, stream: LateStream) -> None:
        super().__init__(CPU, stream, num_bytes, is_pinned=False)
        # Unlike the device of any tensor, so that tensors on the CPU are copied. New memory is on the CPU.
        self._device = None  # type: ignore[assignment]
        self.taken: list[tuple[int, ...]] = []

    def take(self, rows: Tensor) -> Tensor:
        self.taken.append(tuple(rows.shape))
        return super().take(rows)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("num_bytes", [28, 29, 56, 100, 10**4])
@pytest.mark.parametrize(
    "cut", [lambda x: x, lambda x: x[3:20], lambda x: x[:, 1:4], lambda x: x.t(), lambda x: x[:0]],
    ids=["whole", "rows", "columns", "transposed", "empty"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_rows_arrive_as_they_are(num_bytes: int, cut: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    upload = Uploading(num_bytes, LateStream())
    for count in (23, 1, 7):
        rows = cut((10 * numbers(count, 7)).to(dtype))
        found = upload.take(rows)
        assert torch.equal(found, rows) and found.dtype == dtype
        is_too_wide = rows[:1].nbytes > num_bytes
        assert is_too_wide or not rows.numel() or found.data_ptr() != rows.data_ptr()


def test_the_host_fills_one_buffer_while_the_other_is_copied() -> None:
    stream = LateStream()
    upload = Uploading(28, stream)
    rows = numbers(5, 7)
    assert torch.equal(upload.take(rows), rows)
    # Five rows, one in a buffer: the third to the fifth wait for the row that was two before them.
    assert (stream.num_waits, stream.num_waits_for_current) == (3, 1)


def test_a_host_that_does_not_wait_gives_wrong_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """This proves that the stand-in finds a race."""
    monkeypatch.setattr(LateMark, "wait_on_host", lambda self: None)
    rows = numbers(5, 7)
    assert not torch.equal(Uploading(28, LateStream()).take(rows), rows)


def test_a_buffer_that_is_filled_while_only_the_device_has_waited_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """This proves that the stand-in finds a race between two uploads, too."""
    monkeypatch.setattr(LateMark, "wait_on_host", lambda self: None)
    upload = Uploading(28, LateStream())
    for row in numbers(2, 7):
        upload.take(row[None])
    with pytest.raises(AssertionError, match="changed what a copy may still read"):
        upload.take(numbers(1, 7))


def test_other_devices_need_no_upload() -> None:
    assert Upload.to_gpu(CPU) is None and Upload.to_gpu(torch.device("mps")) is None


class Layer(nn.Module):
    def __init__(self, method: LinearMethod, num_rows: int, num_columns: int) -> None:
        super().__init__()
        self.weight = Weight(whole_rows(num_rows, num_columns, (0, num_columns)), [method], torch.float32, CPU)

    def expected_weights(self) -> list[tuple[str | None, str]]:
        return list(self.weight.expected())

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        raise AssertionError("it is loaded in pieces")

    def load_in_pieces(self, name: str, tensor: Tensor, part: str | None, pieces: Pieces) -> None:
        self.weight.load(part, name, tensor, pieces)


@pytest.mark.parametrize(
    "method", [UnquantizedMethod(), QuantizingMethod("Q4_K"), QuantizingMethod("int4_g128")], ids=str
)
def test_a_model_that_is_uploaded_has_the_same_weights(method: LinearMethod) -> None:
    source = MemorySource({"weight": numbers(600, 256)})
    plain, uploaded = (Layer(method, 600, 256) for _ in range(2))
    load_weights(plain, source)
    upload = Uploading(300 * 1024, LateStream())
    load_weights(uploaded, source, upload=upload)
    # A piece has 256 rows or more, and no more than a buffer has room for.
    assert upload.taken == [(256, 256), (256, 256), (88, 256)]
    assert torch.equal(plain.weight.unpack(), uploaded.weight.unpack())
    assert source.events.count("release weight") >= len(upload.taken)
