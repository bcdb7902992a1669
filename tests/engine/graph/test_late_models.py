"""Models of all kinds on a device that computes late: their steps can be captured, and the answers are those of a CPU.

A graph keeps all numbers of the step that was captured, so that a number of the batch that a layer takes from the host
would be wrong in the steps after it. A tensor that a layer has made in memory of the host fails. PAGEWICK_DEEP=1 runs
every variant of every architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewick.engine.messages import EngineRequest
from tests.deep import IS_DEEP
from tests.engine import test_image_requests as images
from tests.engine.graph.late_device import LateDevice, late_device
from tests.engine.graph.test_captured_steps import graphs_of
from tests.engine.row_by_row import row_by_row
from tests.engine.serving import Answers, request, running, serve
from tests.kernels.conftest import library_off
from tests.models.checkpoints import VARIANTS, write_checkpoint
from tests.models.encoders import ENCODERS, write_encoder
from tests.models.pooled import pooled

# They have each kind of attention, of state, of experts and of residual streams.
SAMPLE = (
    "deepseek-v3", "deepseek-v4", "falcon-h1", "falcon-mamba", "gemma-3n", "glm-5.2", "gpt-oss", "kimi-linear",
    "lfm2-moe", "llama4-scout", "qwen3.5",
)  # fmt: skip


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    with row_by_row():
        yield


def requests() -> list[EngineRequest]:
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.0, "logprobs": 2}, {"temperature": 0.8}]
    return [
        request(range(3 + number, 14 + 9 * number), f"r{number}", max_tokens=8, ignore_eos=True, seed=number, **kind)
        for number, kind in enumerate(kinds)
    ]


def tokens_of(answers: Answers) -> dict[tuple[str, int], list[int]]:
    return {at: answer.token_ids for at, answer in answers.items()}


def on_a_cpu(directory: Path, wanted: list[EngineRequest], **options: Any) -> dict[tuple[str, int], list[int]]:
    """The tokens of each request alone."""
    with library_off(), running(directory, max_steps_in_flight=1, **options) as engine:
        return {at: found for each in wanted for at, found in tokens_of(serve(engine, [each])).items()}


@pytest.mark.parametrize("name", VARIANTS if IS_DEEP else SAMPLE)
def test_the_steps_of_every_model_are_captured(name: str, tmp_path: Path) -> None:
    write_checkpoint(name, tmp_path)
    options = {"max_model_len": 96, "num_kv_blocks": 60, **VARIANTS[name].engine}
    expected = on_a_cpu(tmp_path, requests(), **options)
    with late_device(chance=0.05) as device, running(tmp_path, device="cuda", **options) as engine:
        device.counts.clear()
        assert tokens_of(serve(engine, requests())) == expected
        assert sum(graph.num_replays for graph in graphs_of(engine)) > 3
        assert set(device.counts) == {"event"}, f"hidden waits: {device.counts}"


@pytest.mark.parametrize("name", images.NAMES if IS_DEEP else ["qwen3.5-multimodal"])
def test_images(name: str, tmp_path: Path) -> None:
    images.write(tmp_path, name)
    expected = on_a_cpu(tmp_path, images.requests(), **images.OPTIONS)
    with late_device(chance=0.05), running(tmp_path, device="cuda", **images.OPTIONS) as engine:
        assert tokens_of(serve(engine, images.requests())) == expected
        assert graphs_of(engine)


@pytest.mark.parametrize("name", ENCODERS if IS_DEEP else ["mpnet", "modernbert"])
def test_encoders(name: str, tmp_path: Path) -> None:
    write_encoder(name, tmp_path)
    prompts, options = [[5, 6, 7, 8, 9, 30, 31], [4], [*range(2, 45)]], {"max_model_len": 64, "dtype": "float32"}
    with library_off(), running(tmp_path, **options) as engine:
        expected = pooled(engine, prompts, "mean")
    with late_device(chance=0.05), running(tmp_path, device="cuda", **options) as engine:
        for ours, theirs in zip(pooled(engine, prompts, "mean"), expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "mix",
    [
        lambda late, host: late + host,
        lambda late, host: torch.cat([late, host]),
        lambda late, host: torch.nn.functional.embedding(host.long(), late.unsqueeze(1)),
    ],
)
def test_tensors_of_the_host_are_noticed(mix: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    with late_device() as device, torch.inference_mode():
        assert isinstance(device, LateDevice)
        late, host = torch.ones(3, device="cuda:0"), torch.ones(3)
        assert (late + torch.tensor(2.0)).tolist() == [3.0] * 3
        with pytest.raises(AssertionError, match=r"in memory of the host: \[\(3,\)\]"):
            mix(late, host)
