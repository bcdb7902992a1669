"""An indexer of sparse attention drops its selection once no other layer needs it, and selects no more than exist."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagewick.kernels.options import SelectedKeys
from pagewick.layers.indexer import Indexer, LentSelection
from pagewick.layers.latent_attention import LatentAttention
from tests.engine.serving import request, running, serve
from tests.models.checkpoints import write_checkpoint


@pytest.mark.parametrize(("name", "num_indexers"), [("deepseek-v3.2", 3), ("glm-5.2", 2)])
def test_no_selection_outlives_a_step(
    name: str, num_indexers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second layer of GLM-5.2 sees what the first one selects; in DeepSeek-V3.2, no layer keeps anything."""
    write_checkpoint(name, tmp_path)
    held = []
    forward = LatentAttention.forward

    def watched(self: LatentAttention, *given: object) -> object:
        out = forward(self, *given)  # type: ignore[arg-type]
        held.append(self.indexer is not None and self.indexer.lent.is_kept)
        return out

    monkeypatch.setattr(LatentAttention, "forward", watched)
    with running(tmp_path) as engine:
        serve(engine, [request(range(2, 40), max_tokens=3)])
        indexers = [module for module in engine.model.modules() if isinstance(module, Indexer)]
        assert len(indexers) == num_indexers and not any(indexer.lent.is_kept for indexer in indexers)
    assert held[:3] == [name == "glm-5.2", False, False]


def test_a_short_context_makes_short_selections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint("deepseek-v3.2", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), "index_topk": 200}))
    widths: set[int] = set()
    put = LentSelection.put

    def watched(self: LentSelection, selected: SelectedKeys) -> None:
        widths.add(selected.slots.shape[1])
        put(self, selected)

    monkeypatch.setattr(LentSelection, "put", watched)
    answers = []
    for max_model_len, width in ((45, 45), (300, 200)):
        widths.clear()
        with running(tmp_path, max_model_len=max_model_len) as engine:
            answers.append(serve(engine, [request(range(2, 40), max_tokens=6)]))
        assert widths == {width}
    assert answers[0] == answers[1]
