"""Engines some of whose experts are in host memory answer with the same bits as those that have all on the device."""

from __future__ import annotations

import logging
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pagewick.engine.messages import EngineRequest
from pagewick.engine.model_loading import num_parameters
from pagewick.errors import ConfigError
from pagewick.kernels import cpu
from tests.engine.serving import Answers, assert_same, request, running, serve
from tests.models.checkpoints import write_checkpoint

OPTIONS: dict[str, Any] = {"block_size": 8, "max_model_len": 96, "dtype": "float32", "num_kv_blocks": 100}
MODELS = ("mixtral", "qwen2-moe", "deepseek-v3")
# Without it, products and sigmoids of a row may have other last bits where there are more rows.
exact = pytest.mark.skipif(cpu.library() is None, reason="needs the native library: make install")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directories = {name: tmp_path_factory.mktemp(name) for name in (*MODELS, "llama")}
    for name, directory in directories.items():
        write_checkpoint(name, directory)
    return directories


def requests() -> list[EngineRequest]:
    random = Random(6)
    return [
        request(
            [random.randrange(2, 190) for _ in range(5 + 9 * number)], f"r{number}", seed=number, max_tokens=12,
            ignore_eos=True, logprobs=2, temperature=0.8 * (number % 2),
        )
        for number in range(5)
    ]  # fmt: skip


def answers(directory: Path, **options: Any) -> tuple[Answers, dict[str, int]]:
    with running(directory, **{**OPTIONS, **options}) as engine:
        found = serve(engine, requests(), arrivals=[0, 0, 1, 3, 9])
        stats = engine.stats()
    counts = {"hits": stats.num_expert_hits, "copies": stats.num_expert_copies, "bytes": stats.expert_copy_bytes}
    return found, {**counts, "preemptions": stats.num_preemptions}


@exact
@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits_on_one_rank(name: str, checkpoints: dict[str, Path]) -> None:
    expected, counts = answers(checkpoints[name])
    assert counts == {"hits": 0, "copies": 0, "bytes": 0, "preemptions": 0}
    for options in ({}, {"max_num_batched_tokens": 7}, {"num_kv_blocks": 14}):
        found, counts = answers(checkpoints[name], num_experts_offload_per_rank=2, **options)
        assert_same(found, expected)
        assert counts["hits"] > counts["copies"] > 10 and counts["bytes"] % counts["copies"] == 0
        assert (counts["preemptions"] > 0) == ("num_kv_blocks" in options)


def test_the_same_answers_on_two_ranks(checkpoints: dict[str, Path]) -> None:
    """That the bits are those of two ranks without is held by tests of the layer."""
    expected, _ = answers(checkpoints["qwen2-moe"])
    found, counts = answers(checkpoints["qwen2-moe"], tensor_parallel_size=2, num_experts_offload_per_rank=1)
    assert {choice: answer.token_ids for choice, answer in found.items()} == {
        choice: answer.token_ids for choice, answer in expected.items()
    }
    assert counts["copies"] > 10


@exact
def test_a_draft_model_needs_no_experts(checkpoints: dict[str, Path]) -> None:
    expected, _ = answers(checkpoints["mixtral"])
    found, counts = answers(
        checkpoints["mixtral"], num_experts_offload_per_rank=1, speculative_model=str(checkpoints["llama"])
    )
    assert_same(found, expected)
    assert counts["copies"] > 0


def test_what_is_loaded(checkpoints: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="pagewick")
    with running(checkpoints["qwen2-moe"], **OPTIONS) as engine:
        expected, at_hand = engine.info.num_parameters, sum(p.nbytes for p in engine._ranks.runner.model.parameters())
    assert "host memory" not in caplog.text
    with running(checkpoints["qwen2-moe"], num_experts_offload_per_rank=3, **OPTIONS) as engine:
        model = engine._ranks.runner.model
        assert engine.info.num_parameters == num_parameters(model) == expected
        experts = [layer.mlp.experts.store for layer in model.model.layers]
        away = sum(store.num_offloaded * store.bytes_per_expert for store in experts)
        assert sum(parameter.nbytes for parameter in model.parameters()) == at_hand - away
        serve(engine, requests())
    assert f"3 experts of each of {len(experts)} layers are in host memory" in caplog.text
    assert "were on the device when they were needed" in caplog.text


@pytest.mark.parametrize(
    ("name", "per_rank", "message"),
    [
        ("llama", 1, "--num-experts-offload-per-rank 1: LlamaForCausalLM has no experts; leave it out"),
        ("mixtral", 90, r"moves 90 of \d+ experts .* give at most \d+$"),
    ],
)
def test_what_cannot_be(name: str, per_rank: int, message: str, checkpoints: dict[str, Path]) -> None:
    with (
        pytest.raises(ConfigError, match=message),
        running(checkpoints[name], num_experts_offload_per_rank=per_rank, **OPTIONS),
    ):
        pass
