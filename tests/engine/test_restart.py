"""An engine that is started again with the same --kv-cache-disk finds what it had computed; nobody else does, and what
is damaged is computed again.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagewick.engine.batch import Tier
from tests.engine.row_by_row import row_by_row
from tests.engine.serving import Answers, answers_of, count_transfers, deltas_of, record_plans, request, running
from tests.models.checkpoints import write_checkpoint

BLOCK_SIZE = 8
PROMPTS = {"a": [*range(10, 60)], "b": [*range(10, 35), *range(100, 125)], "c": [*range(60, 70)]}
# Whole blocks, but not the one with the last token of the prompt.
NUM_CACHED = {"a": 48, "b": 48, "c": 8}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    directories = {name: tmp_path_factory.mktemp(name) for name in ("qwen3", "qwen3-tied-bias")}
    for name, directory in directories.items():
        write_checkpoint(name, directory)
    with row_by_row():
        yield directories


def run(model: Path, disk: Path | None, **options: Any) -> tuple[Answers, dict[str, int], int]:
    """Start, serve, close: the answers, cached tokens of each request, and how many blocks came from disk."""
    directory = None if disk is None else str(disk)
    given = {"block_size": BLOCK_SIZE, "num_kv_blocks": 40, "max_model_len": 96, "kv_cache_disk": directory, **options}
    with running(model, **given) as engine:
        plans = record_plans(engine)
        wanted = [
            request(prompt, request_id, seed=3, temperature=0.8, max_tokens=20, ignore_eos=True, logprobs=2)
            for request_id, prompt in PROMPTS.items()
        ]
        deltas = [delta for each in wanted for delta in deltas_of(engine, [each])]
    cached = {delta.request_id: delta.num_cached_tokens for delta in deltas}
    return answers_of(deltas), cached, count_transfers(plans)[Tier.DISK, Tier.DEVICE]


@pytest.fixture
def expected(checkpoints: dict[str, Path]) -> Answers:
    answers, cached, num_loaded = run(checkpoints["qwen3"], None, enable_prefix_caching=False)
    assert set(cached.values()) == {0} and num_loaded == 0
    return answers


@pytest.fixture
def disk(checkpoints: dict[str, Path], expected: Answers, tmp_path: Path) -> Path:
    """Written by an engine that served the requests."""
    directory = tmp_path / "cache"
    answers, cached, num_loaded = run(checkpoints["qwen3"], directory)
    # Cached tokens of b are those that it has in common with a, in whole blocks.
    assert (answers, cached, num_loaded) == (expected, {"a": 0, "b": 24, "c": 0}, 0)
    return directory


def block_files(disk: Path) -> list[Path]:
    return sorted(disk.rglob("*.kv"))


def test_what_was_computed_is_found(checkpoints: dict[str, Path], expected: Answers, disk: Path) -> None:
    # 69 tokens of each of a and b are computed, 24 in common; 29 of c.
    assert len(block_files(disk)) == 8 + (8 - 3) + 3
    for _ in range(2):
        answers, cached, num_loaded = run(checkpoints["qwen3"], disk)
        assert (answers, cached) == (expected, NUM_CACHED)
        assert num_loaded == 6 + (6 - 3) + 1


def test_with_little_memory_and_a_host_tier(checkpoints: dict[str, Path], expected: Answers, disk: Path) -> None:
    answers, cached, _ = run(checkpoints["qwen3"], disk, num_kv_blocks=12, swap_space=2**20)
    assert (answers, cached) == (expected, NUM_CACHED)


def test_an_answer_can_be_gone_on_with(checkpoints: dict[str, Path], expected: Answers, disk: Path) -> None:
    """The output's blocks are there too."""
    longer = [*PROMPTS["a"], *expected["a", 0].token_ids[:15]]
    with running(
        checkpoints["qwen3"], block_size=BLOCK_SIZE, num_kv_blocks=40, max_model_len=96, kv_cache_disk=str(disk)
    ) as engine:
        deltas = deltas_of(engine, [request(longer, seed=3, temperature=0.8, max_tokens=5, ignore_eos=True)])
    assert deltas[0].num_cached_tokens == 64
    assert [token_id for delta in deltas for token_id in delta.token_ids] == expected["a", 0].token_ids[15:]


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("qwen3-tied-bias", {}),
        ("qwen3", {"dtype": "bfloat16"}),
        ("qwen3", {"kv_cache_dtype": "bfloat16"}),
        ("qwen3", {"block_size": 16}),
    ],
    ids=["another model", "another dtype", "another cache dtype", "another block size"],
)
def test_others_do_not_see_it(
    model: str, options: dict[str, Any], checkpoints: dict[str, Path], expected: Answers, disk: Path
) -> None:
    without, _, _ = run(checkpoints[model], None, enable_prefix_caching=False, **options)
    found, cached, num_loaded = run(checkpoints[model], disk, **options)
    assert found == without
    assert (cached["a"], cached["c"], num_loaded) == (0, 0, 0)
    # And what they wrote beside it harms nobody.
    answers, cached, _ = run(checkpoints["qwen3"], disk)
    assert (answers, cached) == (expected, NUM_CACHED)


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def wrong_header(path: Path) -> None:
    path.write_bytes(bytes(8) + path.read_bytes()[8:])


@pytest.mark.parametrize("damage", [flip_bit, wrong_header, Path.unlink])
def test_what_is_damaged_is_computed_again(
    damage: Any, checkpoints: dict[str, Path], expected: Answers, disk: Path
) -> None:
    """The files' names and sizes are right when the engine starts: it notices when it reads them."""
    files = block_files(disk)
    with running(
        checkpoints["qwen3"], block_size=BLOCK_SIZE, num_kv_blocks=40, max_model_len=96, kv_cache_disk=str(disk)
    ) as engine:
        for path in files[::2]:
            damage(path)
        wanted = [
            request(prompt, request_id, seed=3, temperature=0.8, max_tokens=20, ignore_eos=True, logprobs=2)
            for request_id, prompt in PROMPTS.items()
        ]
        # All in one step, so that sequences that share a damaged block start over together.
        assert answers_of(deltas_of(engine, wanted)) == expected
    answers, cached, _ = run(checkpoints["qwen3"], disk)
    assert (answers, cached) == (expected, NUM_CACHED)


def test_what_is_truncated_is_computed_again(checkpoints: dict[str, Path], expected: Answers, disk: Path) -> None:
    for path in block_files(disk):
        path.write_bytes(path.read_bytes()[:-1])
    answers, cached, num_loaded = run(checkpoints["qwen3"], disk)
    assert (answers, cached["a"], num_loaded) == (expected, 0, 0)
    assert run(checkpoints["qwen3"], disk)[:2] == (expected, NUM_CACHED)


def test_it_is_for_this_user_alone(disk: Path) -> None:
    for path in [disk, *disk.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_what_does_not_fit_on_disk_is_left_out(checkpoints: dict[str, Path], expected: Answers, tmp_path: Path) -> None:
    # Keys and values of 3 layers, 2 heads of 32 floats, 8 tokens to a block.
    block_bytes = 3 * 2 * 2 * 32 * 4 * BLOCK_SIZE
    for _ in range(2):
        answers, _, _ = run(checkpoints["qwen3"], tmp_path, kv_cache_disk_size=5 * block_bytes)
        assert answers == expected
        assert len(block_files(tmp_path)) == 5
