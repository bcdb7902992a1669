"""Every variant's decode step can be recorded: it consists of native operations and views, without PyTorch's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagewick.engine.graph import recorded as graph
from pagewick.engine.graph.recorded import StepGraph
from pagewick.kernels import cpu, recorded_steps
from tests.models.answers import answers, make_prompts, running
from tests.models.checkpoints import VARIANTS, write_checkpoint

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="needs the native library: make install")


@pytest.mark.parametrize("name", VARIANTS)
def test_the_decode_step_is_recorded(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign: list[str] = []
    record = recorded_steps.record

    def noted(*args: object) -> object:
        results, recorded = record(*args)  # type: ignore[arg-type]
        foreign.extend([recorded] if isinstance(recorded, str) else [])
        return results, recorded

    monkeypatch.setattr(graph.recorded_steps, "record", noted)
    write_checkpoint(name, tmp_path)
    with running(tmp_path, **VARIANTS[name].engine) as engine:
        answers(engine, make_prompts((3, 70)), num_tokens=5)
        step = engine._ranks.runner._forward
        assert isinstance(step, StepGraph)
        assert foreign == []
        assert step._recorded
