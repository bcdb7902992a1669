"""The order of a weight's columns: what is refused, and that it is compared where it lies."""

from __future__ import annotations

from unittest.mock import create_autospec

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from pagewick.errors import ModelLoadError
from pagewick.quantization.act_order import OrderedMethod
from pagewick.quantization.block_formats import ORDER_LEAF
from pagewick.quantization.method import LinearMethod, Storage, StorageSpec


def ordered(device: str = "cpu") -> tuple[OrderedMethod, Storage]:
    inner = create_autospec(LinearMethod, instance=True)
    inner.create.return_value = {}
    method = OrderedMethod(inner, "q_proj")
    storage = Storage(StorageSpec((("q_proj", 3),), 5, torch.float32, torch.device(device)))
    method.create(storage)
    return method, storage


def test_an_order_has_every_column_once() -> None:
    method, storage = ordered()
    method.load(storage, ORDER_LEAF, torch.tensor([4, 0, 3, 1, 2]), out_offset=0)
    assert storage.get_parameter(ORDER_LEAF).tolist() == [4, 0, 3, 1, 2]
    for wrong in ([0, 1, 2, 3, 3], [1, 2, 3, 4, 5], [0, 1, 2, 3]):
        with pytest.raises(ModelLoadError, match="does not list every column once"):
            method.load(storage, ORDER_LEAF, torch.tensor(wrong), out_offset=0)


def test_an_order_is_compared_on_its_device() -> None:
    """A tensor without memory stands in for one of a GPU: PyTorch refuses devices that differ before it compares."""
    with FakeTensorMode():
        method, storage = ordered("cuda")
        with pytest.raises(DataDependentOutputException):
            method.load(storage, ORDER_LEAF, torch.empty(5, dtype=torch.int64, device="cuda"), out_offset=0)
