"""Engines whose layers are on several ranks say exactly what one rank says, on every tier and with adapters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pagewick import LLM, PoolingParams
from pagewick.config import EngineConfig
from pagewick.engine.batch import Tier
from pagewick.engine.cache.kv_cache import CacheGroup, CacheMemory, blocks_in, blocks_per_group, machine_block_bytes
from pagewick.engine.messages import EngineRequest
from pagewick.engine.model_loading import read_model_config
from pagewick.engine.preflight import WeightBytes
from pagewick.errors import ConfigError
from pagewick.kernels import cpu
from pagewick.models.tensors import model_tensors
from pagewick.parallel.layout import layout_of
from tests.engine import test_image_requests, test_images_seen_whole
from tests.engine.requests import full_spec
from tests.engine.row_by_row import row_by_row
from tests.engine.serving import Answers, assert_same, count_transfers, record_plans, request, running, serve, start
from tests.models.checkpoints import write_checkpoint
from tests.models.encoders import write_encoder
from tests.models.kept_ranks import kept_ranks
from tests.models.lora_adapters import write_adapters
from tests.models.word_pieces import TEXTS, word_pieces, write_tokenizer
from tests.weights.gguf.random_models import write_random

OPTIONS: dict[str, Any] = {"block_size": 8, "max_model_len": 96, "dtype": "bfloat16", "max_num_batched_tokens": 32}
exact = pytest.mark.skipif(cpu.library() is None, reason="needs the native library: make install")


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    with kept_ranks(), row_by_row():
        yield


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    found: dict[str, Path] = {}

    def directory_of(name: str) -> Path:
        if name not in found:
            found[name] = tmp_path_factory.mktemp(name)
            write_checkpoint(name, found[name])
        return found[name]

    return directory_of


def requests() -> list[EngineRequest]:
    """A prompt in chunks, one that begins like it, short ones; a beam search, and the score of a prompt's tokens."""
    random = Random(8)
    texts = [[random.randrange(2, 90) for _ in range(size)] for size in (40, 21, 9)]
    texts.append(texts[0][:32] + texts[1][:5])
    made = [
        request(
            text, f"r{number}", seed=number, max_tokens=10, ignore_eos=True, logprobs=2,
            temperature=0.7 * (number % 2), prompt_logprobs=1 if number == 2 else None,
        )
        for number, text in enumerate(texts)
    ]  # fmt: skip
    return [*made, request(texts[1], "beams", use_beam_search=True, n=2, max_tokens=4, temperature=0.0)]


def answers(directory: Path, **options: Any) -> Answers:
    with running(directory, **{**OPTIONS, "num_kv_blocks": 100, **options}) as engine:
        return serve(engine, requests(), arrivals=[0, 0, 2, 9, 4])


# Dense with a tied head; experts; windows; latents; streams; several kinds of states, some of them without a cache in
# one of the stages; learned positions; norms behind layers; chunks.
@pytest.mark.parametrize(
    ("name", "num_stages"),
    [("llama-bias-tied", 2), ("qwen3-moe", 3), ("gemma-3-1b", 3), ("deepseek-v3", 2), ("deepseek-v4", 2),
     ("qwen3-next", 2), ("jamba", 3), ("nemotron-h", 2), ("gpt2", 2), ("llama4-scout", 2)],
)  # fmt: skip
def test_stages_say_what_one_rank_says(name: str, num_stages: int, directory_of: Any) -> None:
    expected = answers(directory_of(name))
    assert_same(answers(directory_of(name), pipeline_parallel_size=num_stages), expected)


@exact
def test_stages_whose_ranks_share_layers(directory_of: Any) -> None:
    expected = answers(directory_of("qwen3-moe"), tensor_parallel_size=2)
    assert_same(answers(directory_of("qwen3-moe"), tensor_parallel_size=2, pipeline_parallel_size=2), expected)


@pytest.mark.parametrize("name", ["gemma-3-1b", "jamba"])
def test_blocks_come_back_from_host_memory_and_disk(name: str, directory_of: Any, tmp_path: Path) -> None:
    """One stage of the second model has no layer with a KV cache, and none has all kinds of layers."""
    expected = answers(directory_of(name), enable_prefix_caching=False)
    # Sequences must wait for each other's blocks.
    options = {"num_kv_blocks": 14, "swap_space": 2**20, "kv_cache_disk": str(tmp_path), "pipeline_parallel_size": 3}
    for run in range(2):
        with running(directory_of(name), **OPTIONS, **options) as engine:
            plans = record_plans(engine)
            assert_same(serve(engine, requests(), arrivals=[0, 0, 2, 9, 4]), expected)
        moved = count_transfers(plans)
        assert moved[Tier.DEVICE, Tier.HOST] + moved[Tier.DEVICE, Tier.DISK] > 0
        assert bool(moved[Tier.DISK, Tier.DEVICE]) == (run > 0), moved


@pytest.mark.parametrize("draft", ["qwen3", "ngram"])
def test_with_draft_tokens(draft: str, directory_of: Any) -> None:
    """Every stage has the whole draft model."""
    options: dict[str, Any] = {"speculative_method": "ngram", "ngram_prompt_lookup_min": 1}
    if draft != "ngram":
        options = {"speculative_model": str(directory_of(draft))}
    directory = directory_of("qwen3")
    with running(directory, **OPTIONS, num_kv_blocks=60, pipeline_parallel_size=2, **options) as engine:
        assert_same(serve(engine, requests(), arrivals=[0, 0, 2, 9, 4]), answers(directory))
        stats = engine.stats()
    assert stats.num_draft_tokens > 0
    assert draft == "ngram" or stats.num_draft_tokens == stats.num_accepted_tokens


@exact
def test_quantized_weights(directory_of: Any, tmp_path: Path) -> None:
    """At load, and in a file; experts of a GGUF file are one tensor of a layer."""
    options = {"quantization": "q8_0", "quantized_cache": False}
    expected = answers(directory_of("llama"), **options)
    assert_same(answers(directory_of("llama"), pipeline_parallel_size=3, **options), expected)
    path = write_random(tmp_path / "experts.gguf", "experts", "Q4_K")
    assert_same(answers(path, pipeline_parallel_size=2), answers(path))


def test_adapters(tmp_path: Path) -> None:
    """Each stage loads what it has of an adapter."""
    write_adapters(write_checkpoint("qwen3", tmp_path / "model"), tmp_path)
    modules = tuple(f"{name}={tmp_path / name}" for name in ("wide", "narrow"))
    wanted = [
        request([*range(2, 20)], name or "plain", temperature=0.0, max_tokens=8, logprobs=1, adapter=name)
        for name in ("wide", "", "narrow")
    ]
    found = []
    for num_stages in (1, 3):
        options = {**OPTIONS, "num_kv_blocks": 40, "lora_modules": modules, "pipeline_parallel_size": num_stages}
        with running(tmp_path / "model", **options) as engine:
            found.append(serve(engine, wanted))
    assert_same(found[1], found[0])
    assert len({tuple(answer.token_ids) for answer in found[0].values()}) == 3


@pytest.mark.parametrize("kind", [test_image_requests, test_images_seen_whole], ids=["qwen3-vl", "gemma-3"])
def test_only_the_first_stage_sees_images(kind: Any, directory_of: Any) -> None:
    """In the first model, the encoder also adds to the outputs of the first layers."""
    name = "qwen3-vl" if kind is test_image_requests else kind.NAME
    found = []
    for num_stages in (1, 2):
        with running(directory_of(name), **kind.OPTIONS, pipeline_parallel_size=num_stages) as engine:
            found.append(serve(engine, kind.requests()))
    assert_same(found[1], found[0])


def test_embeddings_and_labels(tmp_path: Path) -> None:
    """A decoder computes them in chunks; the layers of an encoder share a table of distances."""
    write_encoder("mpnet", tmp_path, "ForSequenceClassification", num_labels=3)
    write_tokenizer(word_pieces(), tmp_path)
    found = []
    for num_stages in (1, 2):
        options: dict[str, Any] = {"num_threads": 1, "pipeline_parallel_size": num_stages}
        with LLM(max_num_batched_tokens=64, **options) as llm:
            outputs = llm.embed(["Where is the station?" * 9, "a"], PoolingParams(pooling="mean"))
            outputs += llm.embed(["Where is the station?"])
        with LLM(str(tmp_path), **options) as llm:
            labels = [output.outputs.probs for output in llm.classify(TEXTS)]
        found.append(([output.outputs.embedding for output in outputs], labels))
    assert found[0] == found[1]


def test_the_engine_describes_the_whole_model(directory_of: Any) -> None:
    found = []
    for num_stages in (1, 3):
        with running(
            directory_of("gemma-3-1b"), **OPTIONS, num_kv_blocks=20, pipeline_parallel_size=num_stages
        ) as engine:
            info = engine.info
            found.append(
                (info.num_parameters, info.kv_cache_bytes, info.num_kv_blocks, info.max_model_len, info.weights)
            )
            assert info.num_ranks == num_stages
    assert found[0] == found[1]


def test_blocks_fit_into_the_stage_that_has_most_layers() -> None:
    layer: Any = None
    spec, other = full_spec(8), replace(full_spec(32), block_bytes=96)
    stages = [CacheGroup(spec, (layer,), (1, 3)), CacheGroup(other, (layer,), (1, 0))]
    first, second = [CacheGroup(spec, (layer,)), CacheGroup(other, (layer,))], [CacheGroup(spec, (layer,) * 3)]
    config = EngineConfig(device="cpu", kv_cache_memory=960, max_model_len=64, max_num_batched_tokens=64)
    memory = CacheMemory(usual=0, most=10**6)
    for blocks in (lambda groups: blocks_per_group(groups, config, 0, memory), lambda groups: blocks_in(groups, 960)):
        both, alone = blocks(first), blocks(second)
        assert blocks(stages) == [min(both[0], alone[0]), both[1]] and both[0] != alone[0]
    layout = layout_of(4, 2)
    assert [machine_block_bytes(group, layout, 4) for group in stages] == [2 * 8 + 2 * 24, 2 * 96]
    assert [machine_block_bytes(group, layout, 2) for group in stages] == [2 * 24, 2 * 96]
    assert [machine_block_bytes(group, layout, 1) for group in stages] == [24, 96]


def test_more_stages_than_layers_are_refused_before_a_rank_is_started(directory_of: Any) -> None:
    message = "--pipeline-parallel-size 4: the model can be divided into 3 parts of layers; give at most as many"
    with pytest.raises(ConfigError, match=message):
        start(directory_of("llama"), **OPTIONS, pipeline_parallel_size=4)


def test_a_stage_may_wait_for_chunks_that_others_still_compute(directory_of: Any) -> None:
    """The first stage sends a chunk without waiting; with the last one, it waits for all."""
    with running(directory_of("llama"), **OPTIONS, num_kv_blocks=60, pipeline_parallel_size=2) as engine:
        runner, limits = engine._ranks.runner, []
        expect = runner._progress.expect

        def record(seconds: float = 0.0, cpu_seconds: float = 0.0) -> None:
            limits[-1] = max(limits[-1], seconds)
            expect(seconds, cpu_seconds)

        runner._progress.expect = record  # type: ignore[method-assign]
        wanted = [request([*range(2, 67)], max_tokens=3, ignore_eos=True, temperature=0.0)]
        serve(engine, wanted, before_step=lambda number: limits.append(0.0))
    first, second, last, alone, *_ = limits
    # Chunks of 32, 32 and 1 tokens.
    assert second > first > alone > 0 and last > first + alone and last < 2 * (first + second)


def test_the_memory_of_a_rank_is_that_of_the_largest_stage(directory_of: Any) -> None:
    """Three layers: the first stage also has the embedding, the second two layers, and both have the head."""
    path, found = directory_of("llama"), []
    for num_stages in (1, 2):
        found.append(WeightBytes.of(EngineConfig(model=str(path), pipeline_parallel_size=num_stages), 1).all)
    sizes = {tensor.path: tensor.kept_bytes("float32") for tensor in model_tensors(read_model_config(path))}
    layers = [sum(size for name, size in sizes.items() if name.startswith(f"model.layers.{n}.")) for n in range(3)]
    embedding = sizes["model.embed_tokens.weight"]
    assert found[0] == sum(sizes.values())
    rest = found[0] - sum(layers) - embedding
    assert found[1] == rest + max(layers[0] + embedding, layers[1] + layers[2])
