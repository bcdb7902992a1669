"""--batch-invariant: the devices that can give a row the same bits in every batch, and errors for the others."""

from __future__ import annotations

import logging
from threading import Event

import pytest
import torch

from pagewick import kernels
from pagewick.config import EngineConfig
from pagewick.demo import MODEL_DIR
from pagewick.engine.model_loading import load_model
from pagewick.errors import ConfigError
from pagewick.kernels import TABLE, batch_invariance, triton
from pagewick.parallel.collectives import Collectives
from tests.kernels.conftest import required_library


@pytest.fixture(autouse=True)
def not_yet_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_invariance, "_IS_REQUIRED", Event())


def test_a_cpu_always_does_it_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    required_library()
    config = EngineConfig(model=str(MODEL_DIR), device="cpu", batch_invariant=True)
    collectives = Collectives(0, 1, ordered_sum=False)
    logger = logging.getLogger("pagewick.engine.model_loading")
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, logger.name)
    try:
        load_model(config, collectives, torch.device("cpu"))
    finally:
        logger.removeHandler(caplog.handler)
    assert batch_invariance.is_required() and collectives._ordered_sum
    assert "--batch-invariant changes nothing: on a CPU, a response never depends on the batch" in caplog.text


def test_devices_that_cannot_do_it_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--batch-invariant: .* on mps; use --device cpu"):
        kernels.require_batch_invariance(torch.device("mps"))
    monkeypatch.setattr(triton, "why_off", lambda: "PAGEWICK_TRITON=0")
    with pytest.raises(ConfigError, match=r"needs the kernels for GPUs, which are off: PAGEWICK_TRITON=0"):
        kernels.require_batch_invariance(torch.device("cuda", 0))
    assert not batch_invariance.is_required()


@pytest.mark.usefixtures("without_the_library")
def test_a_cpu_without_native_kernels_cannot_do_it() -> None:
    with pytest.raises(ConfigError, match=r"needs the native kernels on a CPU \(native kernels off"):
        kernels.require_batch_invariance(torch.device("cpu"))


def test_a_gpu_takes_our_own_products_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "why_off", lambda: "")
    assert TABLE.backend("linear", "cuda", torch.bfloat16) is None
    kernels.require_batch_invariance(torch.device("cuda", 0))
    assert TABLE.backend("linear", "cuda", torch.bfloat16) is triton.BACKEND
    assert TABLE.backend("linear", "mps", torch.bfloat16) is None
