"""A GPU whose memory is full, or which has failed: the error says so, and which flags help."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pagewick.engine import model_loading, worker
from pagewick.engine.device_errors import explaining_device_errors
from pagewick.engine.model_runner import ModelRunner
from pagewick.errors import EngineDeadError, NotEnoughMemoryError
from tests.engine.serving import request, start
from tests.models.checkpoints import write_checkpoint

SAID = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.94 MiB is free."
    " Including non-PyTorch memory, this process has 79.14 GiB memory in use. Of the allocated memory 78.01 GiB is"
    " allocated by PyTorch. See documentation for Memory Management (https://docs.pytorch.org)"
)
EXPLAINED = (
    "the GPU's memory is full: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB "
    "of which 1.94 MiB is free.\n  lower --gpu-memory-utilization, --max-num-batched-tokens or --max-num-seqs"
)


def full(*arguments: Any, **options: Any) -> Any:
    raise torch.OutOfMemoryError(SAID)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_checkpoint("qwen3", tmp_path)
    return tmp_path


def test_a_step_that_does_not_fit(checkpoint: Path) -> None:
    engine = start(checkpoint, num_kv_blocks=20)
    try:
        layer: nn.Module = engine.model.model.layers[1]
        layer.register_forward_pre_hook(full)
        engine.add(request(range(5), "a"))
        with pytest.raises(NotEnoughMemoryError) as caught:
            engine.step()
        assert str(caught.value).startswith(EXPLAINED)
        assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
        with pytest.raises(EngineDeadError):
            engine.step()
    finally:
        engine.close()


@pytest.mark.parametrize("stage", ["build_model", "load_weights"])
def test_weights_that_do_not_fit(stage: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint is not blamed."""
    monkeypatch.setattr(model_loading, stage, full)
    with pytest.raises(NotEnoughMemoryError) as caught:
        start(checkpoint, num_kv_blocks=20)
    assert str(caught.value).startswith(EXPLAINED) and "config.json" not in str(caught.value)


def test_a_kv_cache_that_does_not_fit(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRunner, "allocate", full)
    with pytest.raises(NotEnoughMemoryError, match="gpu-memory-utilization"):
        start(checkpoint, num_kv_blocks=20)


def test_a_rank_says_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_take_part", full)
    config, topology = worker.EngineConfig("model", device="cpu"), worker.topology_of(worker.EngineConfig("model"), {})
    with pytest.raises(NotEnoughMemoryError, match="gpu-memory-utilization"):
        worker.run(config, topology)


def test_a_message_of_another_form() -> None:
    with pytest.raises(NotEnoughMemoryError, match="is full: HIP out of memory\n"), explaining_device_errors():
        raise torch.OutOfMemoryError("HIP out of memory\nmore")


def test_a_gpu_that_has_failed() -> None:
    said = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(torch.AcceleratorError, match=said) as caught, explaining_device_errors():
        raise torch.AcceleratorError(said)
    (note,) = caught.value.__notes__
    assert "--enforce-eager" in note and "PAGEWICK_TRITON=0" in note and "CUDA_LAUNCH_BLOCKING=1" in note
