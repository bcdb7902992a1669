"""Passes of a predicting layer that are recorded on a CPU, or captured on a GPU: they predict what others predict."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pagewick.engine.batch import StepPlan
from pagewick.engine.engine import Engine
from pagewick.engine.graph import recorded
from pagewick.engine.graph.captured import CapturedSteps
from pagewick.engine.graph.recorded import StepGraph
from pagewick.engine.messages import EngineRequest
from pagewick.engine.sampling.step_results import StepResults
from pagewick.engine.speculation.drafting import SpeculationControl
from pagewick.engine.speculation.mtp import MtpPass, MtpProposals
from pagewick.kernels import cpu
from tests.deep import IS_DEEP
from tests.engine.graph.late_device import late_device
from tests.engine.row_by_row import row_by_row
from tests.engine.serving import Answers, request, running, serve
from tests.engine.speculation.test_mtp import KINDS
from tests.kernels.conftest import library_off
from tests.models.predicting import Predicting

OPTIONS: dict[str, Any] = {
    "block_size": 8, "num_kv_blocks": 90, "max_model_len": 128, "speculative_method": "mtp", "max_num_seqs": 6,
    "num_speculative_tokens": 3, "speculative_max_batch": 32, "max_num_batched_tokens": 40, "num_threads": 1,
}  # fmt: skip

# They have latents, experts, an indexer, and states beside them.
CAPTURED = ("deepseek-v3", "glm-4.5", "glm-5.2", "qwen3-next")

Drafts = list[list[int]]


@pytest.fixture(scope="module", params=KINDS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    Predicting(request.param, **KINDS[request.param]).write(directory)
    return directory


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Drafts]:
    """The draft tokens of all works of all steps. No sequence pauses."""
    found: Drafts = []
    add_to = MtpProposals.add_to

    def noted(self: MtpProposals, results: StepResults, plan: StepPlan, *rest: Any) -> None:
        add_to(self, results, plan, *rest)
        found.extend(list(result.draft_token_ids) for result in results.get())

    monkeypatch.setattr(MtpProposals, "add_to", noted)
    monkeypatch.setattr(SpeculationControl, "_pause", lambda self: None)
    yield found


def requests() -> list[EngineRequest]:
    """Six at a time, of other lengths, so that steps have many sizes; some begin alike, and some tokens are drawn."""
    random = Random(5)
    return [
        request(
            [*range(2, 22), *(random.randrange(2, 190) for _ in range(1 + 4 * number))],
            f"r{number}",
            max_tokens=24 - number,
            temperature=0.8 * (number % 2),
            ignore_eos=True,
            seed=number,
        )
        for number in range(9)
    ]


def served(engine: Engine, drafts: Drafts) -> tuple[Answers, Drafts]:
    drafts.clear()
    answers = serve(engine, requests())
    return answers, [list(tokens) for tokens in drafts]


def graph_of(engine: Engine) -> Any:
    proposals = engine._ranks.runner._proposals
    assert isinstance(proposals, MtpProposals)
    return proposals._forward


@pytest.mark.skipif(cpu.library() is None, reason="needs the native library: make install")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recorded_passes(directory: Path, dtype: str, drafts: Drafts, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(directory, dtype=dtype, **OPTIONS) as engine:
        found = served(engine, drafts)
        graph = graph_of(engine)
        assert isinstance(graph, StepGraph) and isinstance(graph._model, MtpPass)
        assert graph._is_on and len(graph._recorded) > 8
    monkeypatch.setattr(recorded, "MAX_TOKENS", 0)
    with running(directory, dtype=dtype, **OPTIONS) as engine:
        assert found == served(engine, drafts)
        assert not graph_of(engine)._recorded
    assert sum(map(len, found[1])) > 200


@pytest.mark.parametrize("directory", KINDS if IS_DEEP else CAPTURED, indirect=True)
def test_captured_passes(directory: Path, drafts: Drafts) -> None:
    with row_by_row(), library_off():
        with running(directory, dtype="float32", **OPTIONS) as engine:
            expected = served(engine, drafts)
        with late_device(chance=0.1), running(directory, device="cuda", dtype="float32", **OPTIONS) as engine:
            assert served(engine, drafts) == expected
            graph = graph_of(engine)
            assert isinstance(graph, CapturedSteps) and graph._is_on
            assert sum(captured.graph.num_replays for captured in graph._graphs.values()) > 3  # type: ignore[attr-defined]
