"""Engines of models with latents or windows: their caches, on every tier, with prefix hits and draft tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pagewick.engine.batch import Tier
from pagewick.engine.messages import EngineRequest
from pagewick.kernels import cpu
from tests.engine.row_by_row import row_by_row
from tests.engine.serving import Answers, assert_same, count_transfers, record_plans, request, running, serve
from tests.models.checkpoints import write_checkpoint

OPTIONS: dict[str, Any] = {"block_size": 8, "max_model_len": 128, "dtype": "float32"}
KINDS = ("deepseek-v3", "gemma-3-1b", "mistral-short-window")
# Without it, products and sigmoids of a row may have other last bits where there are more rows; see row_by_row.
exact = pytest.mark.skipif(cpu.library() is None, reason="needs the native library: make install")
EXACT_KINDS = [pytest.param(name, marks=exact) if name == "deepseek-v3" else name for name in KINDS]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    directories = {name: tmp_path_factory.mktemp(name) for name in (*KINDS, "phi-3.5-mini-short")}
    for name, directory in directories.items():
        write_checkpoint(name, directory)
    with row_by_row():
        yield directories


def requests() -> list[EngineRequest]:
    """Return requests for five texts, two of which begin like another one."""
    random = Random(8)
    texts = [[random.randrange(2, 190) for _ in range(size)] for size in (70, 45, 9)]
    texts += [texts[0][:48] + texts[1][:5], texts[1][:24] + texts[2]]
    return [
        request(
            text, f"r{number}", seed=number, max_tokens=25, ignore_eos=True, logprobs=1, temperature=0.7 * (number % 2)
        )
        for number, text in enumerate(texts)
    ]


def answers(directory: Path, **options: Any) -> Answers:
    with running(directory, **{**OPTIONS, "num_kv_blocks": 120, **options}) as engine:
        return serve(engine, requests())


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_latents_take_no_byte_more_than_they_have(num_ranks: int, dtype: str, checkpoints: dict[str, Path]) -> None:
    """A token has a latent of 24 numbers and a key of 8 in each of 3 layers, not divided among ranks."""
    options = {**OPTIONS, "kv_cache_dtype": dtype, "tensor_parallel_size": num_ranks}
    with running(checkpoints["deepseek-v3"], num_kv_blocks=17, **options) as engine:
        info = engine.info
        per_rank = 17 * 8 * (24 + 8) * 3 * {"float32": 4, "bfloat16": 2}[dtype]
        assert info.kv_cache_bytes == num_ranks * per_rank
        assert info.num_kv_blocks == 17 and info.block_size == 8


@pytest.mark.parametrize("name", EXACT_KINDS)
def test_blocks_come_back_from_host_memory_and_disk(name: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    expected = answers(checkpoints[name], enable_prefix_caching=False)
    options = {**OPTIONS, "num_kv_blocks": 17, "swap_space": 2**20, "kv_cache_disk": str(tmp_path)}
    for run in range(2):
        with running(checkpoints[name], **options) as engine:
            plans = record_plans(engine)
            assert_same(serve(engine, requests(), arrivals=[0, 0, 2, 30, 50]), expected)
        moved = count_transfers(plans)
        assert moved[Tier.DEVICE, Tier.HOST] + moved[Tier.DEVICE, Tier.DISK] > 0
        assert bool(moved[Tier.DISK, Tier.DEVICE]) == (run > 0), moved


@pytest.mark.parametrize("name", EXACT_KINDS)
def test_with_draft_tokens(name: str, checkpoints: dict[str, Path]) -> None:
    """Those that are not taken leave nothing behind: not in latents, not in blocks that a window is about to leave."""
    expected = answers(checkpoints[name])
    other = KINDS[0] if name == KINDS[-1] else KINDS[-1]
    for draft in (name, other):
        for num_kv_blocks in (120, 24):
            options = {**OPTIONS, "speculative_model": str(checkpoints[draft]), "num_kv_blocks": num_kv_blocks}
            with running(checkpoints[name], **options) as engine:
                assert_same(serve(engine, requests()), expected)
                stats = engine.stats()
            assert stats.num_draft_tokens > 20
            assert (stats.num_accepted_tokens == stats.num_draft_tokens) == (draft == name)


# phi-3.5-mini-short rotates otherwise when sequences may be longer than 160 tokens.
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mistral-short-window", {"rope_theta": 3000.0}),
        ("mistral-short-window", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("deepseek-v3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("phi-3.5-mini-short", {"max_model_len": 200}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_who_rotates_otherwise_finds_nothing_on_disk(
    name: str, options: dict[str, Any], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    answers(checkpoints[name], kv_cache_disk=str(tmp_path))
    expected = answers(checkpoints[name], enable_prefix_caching=False, **options)
    with running(
        checkpoints[name], **{**OPTIONS, "num_kv_blocks": 120, "kv_cache_disk": str(tmp_path), **options}
    ) as engine:
        plans = record_plans(engine)
        assert_same(serve(engine, requests()), expected)
        turned_otherwise = engine.info.rotations
    assert count_transfers(plans)[Tier.DISK, Tier.DEVICE] == 0
    with running(checkpoints[name], **OPTIONS, num_kv_blocks=20) as engine:
        assert engine.info.rotations != turned_otherwise


def test_the_longest_sequence_alone_is_no_reason_to_find_nothing(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    for max_model_len, is_found in ((128, False), (160, True), (161, False), (200, True)):
        options = {**OPTIONS, "num_kv_blocks": 120, "kv_cache_disk": str(tmp_path), "max_model_len": max_model_len}
        with running(checkpoints["phi-3.5-mini-short"], **options) as engine:
            plans = record_plans(engine)
            serve(engine, requests()[:1])
        assert bool(count_transfers(plans)[Tier.DISK, Tier.DEVICE]) == is_found
