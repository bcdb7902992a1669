"""Whole engines over an attention backend of another kind: int8 with scales inside blocks of a size of its own.

Nothing but the backend says what a block is. So whatever the engine does with blocks must change no token.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pagewick.attention.backend import AttentionBackend
from pagewick.engine import model_loading
from pagewick.engine.batch import Tier
from pagewick.engine.messages import EngineRequest
from pagewick.kernels import cpu
from tests.attention.int8_backend import Int8Backend
from tests.engine.row_by_row import row_by_row
from tests.engine.serving import Answers, assert_same, count_transfers, record_plans, request, running, serve
from tests.models.checkpoints import write_checkpoint

BLOCK_SIZE = 6
OPTIONS: dict[str, Any] = {"max_model_len": 72, "dtype": "float32", "num_kv_blocks": 100}
# Keys and values, a window, latents. Without the native library sigmoids of a row have other last bits in a batch.
exact = pytest.mark.skipif(cpu.library() is None, reason="needs the native library: make install")
# With this number of blocks some sequences must be preempted.
KINDS = [("llama", 13), ("mistral-short-window", 5), pytest.param("deepseek-v3", 13, marks=exact)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    directories = {name: tmp_path_factory.mktemp(name) for name in ("llama", "mistral-short-window", "deepseek-v3")}
    for name, directory in directories.items():
        write_checkpoint(name, directory)
    with row_by_row():
        yield directories


@pytest.fixture(autouse=True)
def other_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(device: object, cache_dtype: str, block_size: int) -> AttentionBackend:
        return Int8Backend(BLOCK_SIZE)

    monkeypatch.setattr(model_loading, "choose_backend", choose)


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


def alone(directory: Path) -> Answers:
    """Each by itself, its prompt in one piece, nothing found."""
    found: Answers = {}
    with running(directory, **OPTIONS, enable_prefix_caching=False, max_num_batched_tokens=512) as engine:
        for each in requests():
            found |= serve(engine, [each])
        assert engine.stats().num_preemptions == 0
    return found


@pytest.mark.parametrize(
    ("name", "block_bytes"),
    # For 6 tokens: keys and values of 2 heads or 1, of 16 elements and a scale of 4 bytes each; or 24 and 8 elements
    # with a scale each.
    [
        ("llama", 6 * 2 * 2 * (16 + 4)),
        ("mistral-short-window", 6 * 2 * (16 + 4)),
        ("deepseek-v3", 6 * (24 + 4 + 8 + 4)),
    ],
)
def test_the_engine_allocates_what_the_backend_says(name: str, block_bytes: int, checkpoints: dict[str, Path]) -> None:
    with running(checkpoints[name], **{**OPTIONS, "num_kv_blocks": 17}, block_size=16) as engine:
        (group,) = engine._ranks.runner.groups
        assert (group.spec.block_bytes, group.spec.block_size, group.spec.layout) == (block_bytes, BLOCK_SIZE, "int8 1")
        assert (group.spec.key_dtype, group.spec.value_dtype) == ("int8", "int8")
        assert engine.info.kv_cache_bytes == 17 * block_bytes * len(group.layers)
        assert engine.info.block_size == BLOCK_SIZE


@pytest.mark.parametrize(("name", "few"), KINDS)
def test_no_token_depends_on_how_it_is_served(
    name: str, few: int, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    expected = alone(checkpoints[name])
    assert len(expected) == 6
    with running(checkpoints[name], **OPTIONS, max_steps_in_flight=2) as engine:
        assert_same(serve(engine, requests(), arrivals=[0, 0, 9, 9, 9]), expected)
        assert engine.stats().prefix_cache_hits > 0
    with running(checkpoints[name], **{**OPTIONS, "num_kv_blocks": few}, max_num_batched_tokens=7) as engine:
        assert_same(serve(engine, requests()), expected)
        assert engine.stats().num_preemptions > 0
    tiers = {"num_kv_blocks": few, "max_num_batched_tokens": 7, "kv_cache_disk": str(tmp_path)}
    for run in range(2):
        with running(checkpoints[name], **{**OPTIONS, **tiers}) as engine:
            plans = record_plans(engine)
            assert_same(serve(engine, requests(), arrivals=[0, 0, 2, 30, 50]), expected)
        moved = count_transfers(plans)
        assert moved[Tier.DEVICE, Tier.DISK] > 0 or run > 0, moved
        assert moved[Tier.DISK, Tier.DEVICE] > 0 or run == 0, moved
