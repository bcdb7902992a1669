"""The memory that step_memory counts for attention, against what a layer takes as it runs."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from pagewick.engine.step_memory import activation_bytes
from pagewick.models.config import ModelConfig
from pagewick.models.mixers import DecoderAttention
from pagewick.models.parts import AttentionConfig, MlpConfig
from pagewick.models.registry import read_config
from tests.models.answers import answers, running
from tests.models.checkpoints import VARIANTS, write_checkpoint

NUM_TOKENS = 32


def counted_bytes(model: ModelConfig, layer: int) -> int:
    """The bytes that are counted for the widest part if that is a layer's attention."""
    narrow = replace(model.layers[layer], mlp=MlpConfig(intermediate_size=1))
    alone = replace(model, layers=(narrow,))
    return activation_bytes(alone, NUM_TOKENS, 0, 4, 0) - 4 * NUM_TOKENS * model.hidden_size * 4


@pytest.mark.parametrize(
    "name", ["llama", "qwen3-next", "laguna-xs", "laguna-m", "step-3.7", "olmo-0424", "mimo-v2-flash"]
)
def test_attention_takes_what_is_counted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peaks: list[int] = []
    original = DecoderAttention.forward

    def forward(self: DecoderAttention, hidden_states: Tensor, *arguments: Any) -> Tensor:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
            result = original(self, hidden_states, *arguments)
        events = [event for event in measured.profiler.kineto_results.events() if event.name() == "[memory]"]
        changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
        if len(hidden_states) == NUM_TOKENS:
            peaks.append(max(accumulate(changes)))
        return result

    write_checkpoint(name, tmp_path)
    model = read_config(json.loads((tmp_path / "config.json").read_text(encoding="utf-8")))
    monkeypatch.setattr(DecoderAttention, "forward", forward)
    with running(tmp_path, **{**VARIANTS[name].engine, "dtype": "float32"}) as engine:
        answers(engine, [[*range(5, 5 + NUM_TOKENS)]], num_tokens=1)
    layers = [index for index, layer in enumerate(model.layers) if isinstance(layer.attention, AttentionConfig)]
    assert len(peaks) == len(layers) > 0
    for layer, peak in zip(layers, peaks, strict=True):
        assert peak == counted_bytes(model, layer)
