"""Callers of compute_logits name the sequences of its rows, which are those of the last forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pagewick.layers.context import LayerBatch
from pagewick.models.decoder import Decoder
from tests.engine.serving import request, running, serve
from tests.models.checkpoints import write_checkpoint


@pytest.mark.parametrize("is_drafting", [False, True])
def test_rows_of_the_head(is_drafting: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy, drawn, beams, with log-probabilities of the prompt; and with the draft tokens of a draft model."""
    write_checkpoint("llama", tmp_path)
    forward, compute_logits = Decoder.forward, Decoder.compute_logits
    last: dict[Decoder, tuple[Tensor, Tensor]] = {}
    num_checked, num_empty = 0, 0

    def remember(model: Decoder, batch: Any) -> Tensor:
        hidden_states = forward(model, batch)
        last[model] = batch.cu_seqlens_q.clone(), hidden_states.clone()
        return hidden_states

    def check(model: Decoder, hidden_states: Tensor, batch: LayerBatch | None = None) -> Tensor:
        nonlocal num_checked, num_empty
        assert batch is not None
        starts, rows = last[model]
        mine = batch.cu_seqlens_q
        assert (mine.dtype, mine.shape, int(mine[-1])) == (torch.int32, starts.shape, len(hidden_states))
        for seq in range(len(starts) - 1):
            of_seq = rows[starts[seq] : starts[seq + 1]]
            for row in hidden_states[mine[seq] : mine[seq + 1]]:
                assert (row == of_seq).all(-1).any()
                num_checked += 1
            num_empty += int(mine[seq] == mine[seq + 1])
        return compute_logits(model, hidden_states, batch)

    monkeypatch.setattr(Decoder, "forward", remember)
    monkeypatch.setattr(Decoder, "compute_logits", check)
    # Every step is computed; none is a recorded step that is replayed.
    monkeypatch.setattr("pagewick.kernels.recorded_steps.can_record", lambda device: False)
    asked: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}
    requests = [
        request(range(2, 9), "greedy", temperature=0.0, **asked),
        request(range(20, 51), "drawn", temperature=0.9, prompt_logprobs=1, **asked),
        request(range(60, 65), "beams", n=2, use_beam_search=True, temperature=0.0, **asked),
    ]
    options = {"speculative_model": str(tmp_path), "num_speculative_tokens": 3} if is_drafting else {}
    with running(tmp_path, num_kv_blocks=40, dtype="float32", max_num_batched_tokens=16, **options) as engine:
        answers = serve(engine, requests)
    assert all(answer.error is None for answer in answers.values())
    assert num_checked > 40 and num_empty > 0
