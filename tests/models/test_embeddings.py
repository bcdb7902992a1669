"""Embeddings of prompts are the hidden states of transformers: alone, in a batch, in chunks and on a prefix hit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pagewick.engine.admission import check_request
from pagewick.engine.messages import EngineRequest
from pagewick.errors import ModelLoadError, UnsupportedError
from pagewick.pooling_params import EMBEDDING
from pagewick.sampling_params import SamplingParams
from tests.models.answers import make_prompts, running
from tests.models.checkpoints import write_checkpoint
from tests.models.pooled import pooled
from tests.weights.modules import modules, write_files

PROMPTS = make_prompts((1, 33, 7, 64, 40))


def expected(model: nn.Module, prompts: Sequence[list[int]], pooling: str) -> list[Tensor]:
    with torch.no_grad():
        states = [
            model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0].double() for prompt in prompts
        ]
    vectors = {"last": lambda each: each[-1], "cls": lambda each: each[0], "mean": lambda each: each.mean(0)}
    return [vectors[pooling](each).float() for each in states]


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("name", ["llama-bias-tied", "gemma-2", "qwen3.5"])
def test_they_are_the_last_hidden_states(name: str, pooling: str, tmp_path: Path) -> None:
    model = write_checkpoint(name, tmp_path)
    reference = expected(model, PROMPTS, pooling)
    with running(tmp_path) as engine:
        together = pooled(engine, PROMPTS, pooling)
        again = pooled(engine, PROMPTS, pooling)
        alone = [
            pooled(engine, [prompt], pooling, cache_salt=f"salt {index}")[0] for index, prompt in enumerate(PROMPTS)
        ]
    with running(tmp_path, max_num_batched_tokens=7) as engine:
        in_chunks = pooled(engine, PROMPTS, pooling)
    for ours, theirs in zip(together, reference, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    for others in (again, alone, in_chunks):
        assert all(torch.equal(one, other) for one, other in zip(together, others, strict=True))


def test_the_first_token_is_kept_while_further_steps_compute_the_rest(tmp_path: Path) -> None:
    model = write_checkpoint("llama-bias-tied", tmp_path)
    reference = expected(model, PROMPTS, "cls")
    with running(tmp_path, max_num_batched_tokens=16) as engine:
        for _ in range(2):
            for ours, theirs in zip(pooled(engine, PROMPTS, "cls"), reference, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        pooler = engine._ranks.runner._sampler._pooler
        assert not pooler._firsts and not pooler._sums


def test_only_the_last_token_can_use_the_prefix_cache(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path)
    with running(tmp_path) as engine:
        pooled(engine, PROMPTS[3:4], "last")
        before = engine.stats().prefix_cache_hits
        pooled(engine, PROMPTS[3:4], "mean")
        assert engine.stats().prefix_cache_hits == before
        pooled(engine, PROMPTS[3:4], "last")
        assert engine.stats().prefix_cache_hits > before


def test_numbers_that_are_none_fail_the_request_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint("llama", tmp_path)
    with running(tmp_path) as engine:
        forward = engine._ranks.runner._forward

        def spoilt(batch: Any, stage: Any) -> Any:
            output = forward(batch, stage)
            output.hidden_states[-1, 3] = torch.nan
            return output

        monkeypatch.setattr(engine._ranks.runner, "_forward", spoilt)
        for index in range(2):
            engine.add(EngineRequest(
                request_id=str(index), prompt_token_ids=PROMPTS[2], params=EMBEDDING, seed=0, pooling="last",
            ))  # fmt: skip
        deltas = []
        while engine.has_work:
            deltas += engine.step()
    assert [(delta.request_id, delta.error is None, bool(delta.embedding)) for delta in deltas] == [
        ("0", True, True), ("1", False, False),
    ]  # fmt: skip


def test_ranks_have_the_same_embeddings(tmp_path: Path) -> None:
    model = write_checkpoint("qwen3-tied-bias", tmp_path)
    with running(tmp_path, tensor_parallel_size=2, max_num_batched_tokens=50) as engine:
        for pooling in ("last", "mean"):
            for ours, theirs in zip(pooled(engine, PROMPTS, pooling), expected(model, PROMPTS, pooling), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3Model"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_an_embedding_model_has_no_output_layer(is_tied: bool, architecture: str, tmp_path: Path) -> None:
    """As Qwen3-Embedding is published: names of tensors lack "model.", in the small ones the head would be tied."""
    model = write_checkpoint("qwen3-tied-bias" if is_tied else "qwen3", tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    stored = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items() if "lm_head" not in name}
    save_file(stored, file)
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": [architecture]}))
    with running(tmp_path) as engine:
        assert engine.info.embedding == "last"
        found = pooled(engine, PROMPTS, "last")
        with pytest.raises(UnsupportedError, match="makes embeddings and writes no text"):
            check_request(
                EngineRequest(request_id="x", prompt_token_ids=[1], params=SamplingParams(), seed=0), engine.info
            )
    for ours, theirs in zip(found, expected(model, PROMPTS, "last"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("flag", "pooling"), [("mean_tokens", "mean"), ("lasttoken", "last")])
def test_the_files_of_sentence_transformers_say_how_to_pool(flag: str, pooling: str, tmp_path: Path) -> None:
    """The model makes embeddings then, whether it has an output layer or not."""
    write_checkpoint("qwen3", tmp_path)
    listed = {"modules.json": modules(["Transformer", "Pooling", "Normalize"])}
    write_files(tmp_path, {**listed, "1_Pooling/config.json": {f"pooling_mode_{flag}": True}})
    with running(tmp_path) as engine:
        assert engine.info.embedding == pooling


def test_attention_to_later_tokens_needs_attention_of_the_usual_kind(tmp_path: Path) -> None:
    for name, message in (("qwen3.5", "cannot see later tokens"), ("gemma-2", "windows to later tokens")):
        write_checkpoint(name, tmp_path / name)
        config = tmp_path / name / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "is_causal": False}))
        with pytest.raises(ModelLoadError, match=message), running(tmp_path / name):
            pass
