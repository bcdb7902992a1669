"""The measurement of a step around its products: parts written by hand, and the operations of a real step."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.around_products import NUM_PROMPT_TOKENS, WARM_UP_STEPS, StepTimes, measure_around_products
from pagewick.kernels import cpu
from tests.models.answers import running
from tests.weights.gguf.random_models import write_random


def test_parts_of_a_step_are_taken_within_a_round() -> None:
    times = StepTimes()
    for step in (1e-3, 2e-3, 4e-3):
        kinds = {"linear": 0.3 * step, "quantized_linear": 0.5 * step, "rms_norm": 0.05 * step, "rope": 0.1 * step}
        times.add(step, 0.95 * step, kinds)
    assert times.products == pytest.approx([0.8e-3, 1.6e-3, 3.2e-3])
    assert times.row().split() == ["2,000", "20.0%", "5.0%", "rope", "10.0%,", "rms_norm", "5.0%"]


@pytest.mark.skipif(cpu.library() is None, reason="steps are recorded with native kernels")
def test_the_operations_of_a_step_are_repeated_by_kind(tmp_path: Path) -> None:
    with running(write_random(tmp_path / "model.gguf", "dense", "Q4_K"), num_threads=1) as engine:
        times = measure_around_products(engine, 3)
        assert not engine.has_work
        assert engine.stats().generation_tokens == WARM_UP_STEPS + 2 * 3 + 2
        assert engine.stats().prompt_tokens == NUM_PROMPT_TOKENS
    assert {"quantized_linear", "rms_norm", "paged_attention", "rope_and_store", "activation"} <= set(times.kinds)
    assert all(len(seconds) == 3 and min(seconds) > 0 for seconds in (times.step, times.recorded, times.products))
