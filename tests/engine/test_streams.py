"""CudaStream where capturing fails, over stand-ins for PyTorch's functions: what only a GPU could do is not tested."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from pagewick.engine.streams import CudaStream


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The streams that become current, first to last. The end of a capture fails as PyTorch's does."""
    current = ["usual"]

    @contextmanager
    def graph(*given: Any, **options: Any) -> Iterator[None]:
        current.append("capturing")
        try:
            yield
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", current.append)
    return current


def test_after_a_failed_capture_the_stream_is_the_one_before(streams: list[str]) -> None:
    def step() -> list[torch.Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="previous error"):
        CudaStream(torch.device("cuda", 0)).capture(step)
    assert streams == ["usual", "capturing", "usual"]
