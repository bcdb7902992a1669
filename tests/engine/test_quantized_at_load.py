"""Weights that are quantized at load give the same bits as a GGUF file with the same formats, kept or not kept.

The file has llama.cpp's names of tensors, by which its formats are chosen, and stacked experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from pagewick.demo import MODEL_DIR
from pagewick.engine import preflight
from pagewick.engine.messages import EngineRequest
from pagewick.errors import ConfigError
from pagewick.kernels import quantize_weight
from pagewick.quantization.mixes import MixedModel, mix_types
from pagewick.weights.quantized_cache import QuantizedCache
from tests.deep import IS_DEEP
from tests.engine.row_by_row import row_by_row
from tests.engine.serving import Answers, assert_same, request, running, serve
from tests.models.checkpoints import write_checkpoint
from tests.models.kept_ranks import kept_ranks
from tests.weights.gguf.demo import write_demo
from tests.weights.gguf.mixes import Numbers, rewrite
from tests.weights.gguf.random_models import KINDS, VOCAB_SIZE, write_random

deep = pytest.mark.skipif(not IS_DEEP, reason="a second engine with two processes")
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 96, "num_kv_blocks": 40}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of weights that are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pagewick" / "quantized"


@pytest.fixture(scope="module", autouse=True)
def exact_products() -> Iterator[None]:
    with row_by_row(), kept_ranks():
        yield


def requests(vocab_size: int = VOCAB_SIZE) -> list[EngineRequest]:
    random = Random(7)
    return [
        request(
            [random.randrange(2, vocab_size) for _ in range(length)], f"r{length}", seed=length, max_tokens=12,
            ignore_eos=True, logprobs=3, temperature=0.7 * (length % 2),
        )
        for length in (1, 20, 33)
    ]  # fmt: skip


def answers(model: Path, **options: Any) -> tuple[Answers, str]:
    with running(model, **{**OPTIONS, **options}) as engine:
        return serve(engine, requests()), engine.info.weights


def quantized_file(source: Path, target: Path, kind: str, mix: str) -> Path:
    """Copy a GGUF file of float32 with the formats of a mix."""
    sizes = KINDS[kind].sizes
    shapes: dict[str, tuple[int, ...]] = {}
    rewrite(source, target, lambda name, numbers: shapes.update({name: numbers.shape}) or [])
    facts = MixedModel(
        sizes["block_count"], sizes["attention.head_count"], sizes["attention.head_count_kv"],
        sizes.get("expert_count", 0),
    )  # fmt: skip
    kinds = mix_types(mix, shapes, facts)

    def change(name: str, numbers: Numbers) -> Iterator[tuple[str, Numbers, str]]:
        if (found := kinds[name]) in (None, "F16"):
            yield name, numbers, "F32"
        else:
            rows = quantize_weight(torch.from_numpy(numbers.copy()).flatten(0, -2), found)
            yield name, rows.view(*numbers.shape[:-1], -1).numpy(), found

    return rewrite(source, target, change)


@pytest.mark.parametrize(
    ("kind", "mix"),
    [("dense", "q4_k_m"), ("dense", "q2_k"), ("experts", "q4_k"), ("experts", "q5_0"), ("latents", "q3_k_m")],
)
def test_answers_are_those_of_a_file_with_these_formats(kind: str, mix: str, tmp_path: Path, cache: Path) -> None:
    source = write_random(tmp_path / "plain.gguf", kind, "F32")
    expected, formats = answers(quantized_file(source, tmp_path / "blocks.gguf", kind, mix))
    for options in ({"quantized_cache": False}, {}, {}):
        found, weights = answers(source, quantization=mix, **options)
        assert_same(found, expected)
        assert weights.partition(" (")[0] == formats
        assert len(list(cache.glob("*"))) == ("quantized_cache" not in options)


WAYS: dict[str, dict[str, Any]] = {
    "in chunks of 7": {"max_num_batched_tokens": 7},
    "preempted": {"num_kv_blocks": 9, "enable_prefix_caching": False},
    "on three threads": {"num_threads": 3},
    "one at a time": {"max_num_seqs": 1},
}


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_answers_do_not_depend_on_what_else_is_served(kind: str, tmp_path: Path) -> None:
    source = write_random(tmp_path / "plain.gguf", kind, "F32")
    expected, _ = answers(source, quantization="q4_k_m")
    for way, options in WAYS.items():
        assert_same(answers(source, quantization="q4_k_m", **options)[0], expected), way


@pytest.mark.parametrize("is_kept", [pytest.param(False, marks=deep), True])
def test_two_ranks_have_the_blocks_of_one(is_kept: bool, tmp_path: Path) -> None:
    """Ranks add partial sums, so that activations may be rounded otherwise: compared with the file on two ranks."""
    source = write_random(tmp_path / "plain.gguf", "dense", "F32")
    file = quantized_file(source, tmp_path / "blocks.gguf", "dense", "q8_0")
    expected, _ = answers(file, tensor_parallel_size=2)
    found, _ = answers(source, tensor_parallel_size=2, quantization="q8_0", quantized_cache=is_kept)
    assert_same(found, expected)


@pytest.mark.parametrize(
    "name",
    ["llama-bias-tied", "phi-3-mini-4k", "gemma-2", "starcoder2-3b", "glm-4.5", "minimax-m2", "ernie-4.5-moe"],
)
def test_checkpoints_of_other_families_whose_rows_are_short(name: str, tmp_path: Path, cache: Path) -> None:
    """Their rows have less than 256 columns, and some of them less than 32."""
    write_checkpoint(name, tmp_path / "model")
    options: dict[str, Any] = {"block_size": 16, "max_model_len": 64}
    with running(tmp_path / "model", quantization="q4_k_m", quantized_cache=False, **OPTIONS | options) as engine:
        expected, weights = serve(engine, requests(190)), engine.info.weights
    with running(tmp_path / "model", quantization="q4_k_m", **OPTIONS | options) as engine:
        assert_same(serve(engine, requests(190)), expected)
        assert engine.info.types() == f"weights in {weights}, float32"
    assert "rows too short for Q4_K: " in weights


def test_the_built_in_model_is_that_of_its_file(tmp_path: Path) -> None:
    expected, _ = answers(write_demo(tmp_path / "demo.gguf", "Q6_K"))
    found, weights = answers(MODEL_DIR, quantization="q6_k")
    assert_same(found, expected)
    assert weights == "Q6_K"


def test_a_file_in_blocks_is_refused(tmp_path: Path) -> None:
    path = write_random(tmp_path / "blocks.gguf", "dense", "Q4_K")
    with pytest.raises(ConfigError, match=r"quantized already \(Q4_K\)\n  leave the flag out"):
        answers(path, quantization="q8_0")


def test_the_draft_model_is_not_quantized(tmp_path: Path) -> None:
    path = write_random(tmp_path / "plain.gguf", "dense", "F32")
    with running(path, quantization="q8_0", speculative_model=str(path), **OPTIONS) as engine:
        draft = engine._ranks.runner.draft_model
        assert draft is not None and {tensor.dtype for tensor in draft.model.parameters()} == {torch.float32}
        serve(engine, requests()[:1])


def test_auto_does_not_quantize_a_model_that_fits(tmp_path: Path, cache: Path) -> None:
    path = write_random(tmp_path / "plain.gguf", "dense", "F32")
    assert answers(path, quantization="auto")[1] == "float32"
    assert not cache.exists()


def test_auto_chooses_what_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    path = write_random(tmp_path / "plain.gguf", "dense", "F32")
    caplog.set_level("INFO")
    with running(path, quantization="q6_k", **OPTIONS) as engine:
        num_bytes = sum(tensor.nbytes for tensor in engine._ranks.runner.model.parameters())
    monkeypatch.setattr(preflight, "available_memory", lambda device: int(num_bytes / 0.75 * 1.02))
    assert answers(path, quantization="auto")[1] == "Q6_K"
    assert "the choice is q6_k" in caplog.text


def test_the_cache_is_in_the_users_cache_directory() -> None:
    assert QuantizedCache.of({"XDG_CACHE_HOME": "/x"}).directory == Path("/x/pagewick/quantized")
    assert QuantizedCache.of({"HOME": "/home/u"}).directory == Path("/home/u/.cache/pagewick/quantized")
