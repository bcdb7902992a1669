"""Engines with a KV cache of 8-bit numbers: what they do with blocks changes no token, and blocks have their size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewick.attention.cache_spec import CACHE_DTYPES
from pagewick.engine.batch import Tier
from pagewick.engine.messages import EngineRequest
from pagewick.errors import ModelLoadError
from pagewick.kernels import cpu
from tests.deep import IS_DEEP
from tests.engine.row_by_row import row_by_row
from tests.engine.serving import Answers, assert_same, count_transfers, record_plans, request, running, serve, start
from tests.kernels.conftest import library_off, with_isa
from tests.models.checkpoints import write_checkpoint

NAMES = ("int8", "fp8_e4m3", "fp8_e5m2", "int4")
OPTIONS: dict[str, Any] = {"max_model_len": 72, "dtype": "float32", "num_kv_blocks": 100, "block_size": 6}
# Without the native library sigmoids of a row have other last bits in a batch.
exact = pytest.mark.skipif(cpu.library() is None, reason="needs the native library: make install")
# With this number of blocks some sequences must be preempted.
NUM_FEW_BLOCKS = {"llama": 13, "mistral-short-window": 5, "deepseek-v3": 13}
FEW = [
    ("llama", "int8"),
    ("llama", "int4"),
    ("mistral-short-window", "fp8_e4m3"),
    pytest.param("deepseek-v3", "int8", marks=exact),
]
REST = [("llama", "fp8_e5m2"), ("llama", "fp8_e4m3"), ("mistral-short-window", "int8"), ("deepseek-v3", "fp8_e4m3")]
KINDS = [*FEW, *REST] if IS_DEEP else FEW


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    directories = {name: tmp_path_factory.mktemp(name) for name in NUM_FEW_BLOCKS}
    for name, directory in directories.items():
        write_checkpoint(name, directory)
    with row_by_row():
        yield directories


def requests() -> list[EngineRequest]:
    """Some begin as others, one has two choices."""
    random = Random(8)
    texts = [[random.randrange(2, 190) for _ in range(size)] for size in (40, 25)]
    texts += [texts[0][:26] + texts[1][:5], texts[0][:30], texts[1][:13] + texts[0][:9]]
    return [
        request(
            text, f"r{number}", seed=number, max_tokens=12, ignore_eos=True, logprobs=1, n=1 + (number == 1),
            temperature=0.7 * (number % 2),
        )
        for number, text in enumerate(texts)
    ]  # fmt: skip


def alone(directory: Path, **options: Any) -> Answers:
    """Each by itself, its prompt in one piece, nothing found."""
    found: Answers = {}
    options = {**OPTIONS, **options, "enable_prefix_caching": False, "max_num_batched_tokens": 512}
    with running(directory, **options) as engine:
        for each in requests():
            found |= serve(engine, [each])
        assert engine.stats().num_preemptions == 0
    return found


@pytest.mark.parametrize(
    ("name", "vectors", "dtype"),
    [
        # Keys and values of 2 heads or 1, of 16 elements each; a latent of 24 and a key of 8.
        *(("llama", (16,) * 4, dtype) for dtype in NAMES),
        *(("mistral-short-window", (16,) * 2, dtype) for dtype in NAMES),
        *(("deepseek-v3", (24, 8), dtype) for dtype in NAMES if dtype != "int4"),
    ],
)
def test_a_block_has_a_byte_or_half_for_each_number_and_four_for_each_scale(
    name: str, vectors: tuple[int, ...], dtype: str, checkpoints: dict[str, Path]
) -> None:
    used = 6 * sum((size // 2 if dtype == "int4" else size) + 4 for size in vectors)
    block_bytes = -(-used // 16) * 16
    with running(checkpoints[name], **{**OPTIONS, "num_kv_blocks": 17}, kv_cache_dtype=dtype) as engine:
        (group,) = engine._ranks.runner.groups
        assert (group.spec.block_bytes, group.spec.key_dtype, group.spec.value_dtype) == (block_bytes, dtype, dtype)
        assert engine.info.kv_cache_bytes == 17 * block_bytes * len(group.layers)
        assert engine.info.kv_cache_dtype == dtype
    assert CACHE_DTYPES[dtype].vector_bytes(16) == (12 if dtype == "int4" else 20)


@pytest.mark.parametrize(("name", "dtype"), KINDS)
def test_no_token_depends_on_how_it_is_served(
    name: str, dtype: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    options, few = {**OPTIONS, "kv_cache_dtype": dtype}, NUM_FEW_BLOCKS[name]
    expected = alone(checkpoints[name], kv_cache_dtype=dtype)
    assert len(expected) == 6
    with running(checkpoints[name], **options, max_steps_in_flight=2, speculative_method="ngram") as engine:
        assert_same(serve(engine, requests(), arrivals=[0, 0, 9, 9, 9]), expected)
        assert engine.stats().prefix_cache_hits > 0
    with running(checkpoints[name], **{**options, "num_kv_blocks": few}, max_num_batched_tokens=7) as engine:
        assert_same(serve(engine, requests()), expected)
        assert engine.stats().num_preemptions > 0
    tiers = {"num_kv_blocks": few, "max_num_batched_tokens": 7, "swap_space": 2**20, "kv_cache_disk": str(tmp_path)}
    for run in range(2):
        with running(checkpoints[name], **{**options, **tiers}) as engine:
            plans = record_plans(engine)
            assert_same(serve(engine, requests(), arrivals=[0, 0, 2, 30, 50]), expected)
        moved = count_transfers(plans)
        assert moved[Tier.DEVICE, Tier.HOST] > 0, moved
        assert moved[Tier.DISK, Tier.DEVICE] > 0 or run == 0, moved


@pytest.mark.parametrize(("name", "dtype"), KINDS)
def test_beams_do_not_depend_on_how_they_are_served(name: str, dtype: str, checkpoints: dict[str, Path]) -> None:
    """Their sequences fork in the middle of blocks, whose scales are then copied with them."""
    options = {**OPTIONS, "kv_cache_dtype": dtype}
    texts = [each.prompt_token_ids for each in requests()[:2]]
    beams = [request(text, f"b{len(text)}", n=3, use_beam_search=True, max_tokens=9) for text in texts]
    expected: Answers = {}
    with running(checkpoints[name], **options, enable_prefix_caching=False, max_num_batched_tokens=512) as engine:
        for each in beams:
            expected |= serve(engine, [each])
    assert len(expected) == 6 and len({tuple(answer.token_ids) for answer in expected.values()}) == 6
    few = {"num_kv_blocks": 2 * NUM_FEW_BLOCKS[name], "max_num_batched_tokens": 11}
    with running(checkpoints[name], **{**options, **few}) as engine:
        assert_same(serve(engine, [*beams, *requests()], arrivals=[4, 9, 0, 0, 2, 5, 8]), expected)
        assert engine.stats().num_preemptions > 0
    with running(checkpoints[name], **options) as engine:
        assert_same(serve(engine, [*requests()[:2], *beams], arrivals=[0, 0, 30, 30]), expected)
        assert engine.stats().prefix_cache_hits > 0


@pytest.mark.parametrize(("name", "dtype"), KINDS)
def test_a_session_finds_its_blocks_again(name: str, dtype: str, checkpoints: dict[str, Path]) -> None:
    options, size = {**OPTIONS, "kv_cache_dtype": dtype}, {"max_tokens": 7, "ignore_eos": True, "logprobs": 1}
    first = request(range(2, 33), "first", **size, session_id="s")
    with running(checkpoints[name], **options, enable_prefix_caching=False) as engine:
        told = serve(engine, [first])
        said = told["first", 0].token_ids
        second = request([*range(2, 33), *said, 5, 6], "second", **size, session_id="s")
        told |= serve(engine, [second])
    with running(checkpoints[name], **{**options, "num_kv_blocks": 28}, session_ttl=3600) as engine:
        assert_same(serve(engine, [first]), {("first", 0): told["first", 0]})
        for number in range(8):
            serve(engine, [request([40 + number] * 50, **size)])
        num_hits = engine.stats().prefix_cache_hits
        assert_same(serve(engine, [second]), {("second", 0): told["second", 0]})
        assert engine.stats().num_sessions == 1
        assert engine.stats().prefix_cache_hits > num_hits


@pytest.mark.parametrize("other", ["float32", "fp8_e4m3"])
def test_blocks_of_another_dtype_on_disk_are_not_found(
    other: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    directory, found = checkpoints["llama"], []
    for dtype in ("int8", other, "int8"):
        options = {**OPTIONS, "kv_cache_disk": str(tmp_path), "kv_cache_dtype": dtype}
        with running(directory, **options) as engine:
            plans = record_plans(engine)
            serve(engine, requests()[:1])
        found.append(count_transfers(plans)[Tier.DISK, Tier.DEVICE] > 0)
    assert found == [False, False, True]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name in ("qwen3", "mistral-short-window", "gemma-2", "deepseek-v3")
        for dtype in NAMES
        if (name, dtype) != ("deepseek-v3", "int4")
    ],
)
@exact
def test_every_kind_of_attention_is_near_the_definition(name: str, dtype: str, tmp_path: Path) -> None:
    """Log-probabilities of a prompt with the native library, in plain C++, and without it."""
    write_checkpoint(name, tmp_path)
    text = Random(3).sample(range(2, 190), 60)
    wanted = [request(text, max_tokens=1, prompt_logprobs=1)]

    def logprobs(cache_dtype: str) -> list[float]:
        with running(tmp_path, **OPTIONS, kv_cache_dtype=cache_dtype) as engine:
            (answer,) = serve(engine, wanted).values()
        return [token.logprob for token in answer.prompt_logprobs]

    with contextmanager(with_isa)("generic"):
        native, exact_cache = logprobs(dtype), logprobs("float32")
    with library_off():
        defined = logprobs(dtype)

    def distance(one: list[float], other: list[float]) -> float:
        return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)

    assert len(native) == 59
    # A number that lies between two of the format may be rounded to the other one after another rounding error.
    assert distance(native, defined) < distance(exact_cache, defined) / 10


@pytest.mark.parametrize(
    "leaves",
    [
        ("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"), ("kv_scale",),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)  # fmt: skip
def test_scales_of_a_checkpoint_are_used_for_fp8_alone(leaves: tuple[str, ...], tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(2):
        for number, leaf in enumerate(leaves):
            tensors[f"model.layers.{layer}.self_attn.{leaf}"] = torch.tensor(0.01 * (1 + layer + number))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for dtype, is_used in (("fp8_e4m3", True), ("fp8_e5m2", False), ("int8", False), ("float32", False)):
        with running(tmp_path, **OPTIONS, kv_cache_dtype=dtype) as engine:
            serve(engine, [request(list(range(2, 20)), max_tokens=1)])
            (group,) = engine._ranks.runner.groups
            for index, layer in enumerate(group.layers):
                cache = layer._bound.cache
                expected = (0.01 * (1 + index), 0.01 * (index + len(leaves))) if is_used and index < 2 else (0.0, 0.0)
                assert cache.constant_scales == pytest.approx(expected)
                if is_used and index < 2:
                    stored = cache.scales[cache.scales[:, 0, 0, 0] > 0]
                    assert len(stored) >= 3
                    assert torch.equal(stored[:, 1, :, 0].unique(), torch.tensor([expected[1]]))


def test_a_scale_of_more_than_one_number_is_refused(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.k_scale"] = torch.ones(2)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"self_attn.k_scale: its shape is \[2\], and it must be one number"):
        start(tmp_path, **OPTIONS)
