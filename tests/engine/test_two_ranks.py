"""Two ranks with all that an engine can have: host memory, a disk, draft tokens. They sample what one rank draws."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from pagewick.engine.batch import Tier
from pagewick.engine.messages import EngineRequest
from pagewick.engine.model_loading import num_parameters
from pagewick.errors import EngineDeadError
from tests.engine.serving import Answers, count_transfers, record_plans, request, running, serve, start
from tests.models.checkpoints import write_checkpoint

OPTIONS: dict[str, Any] = {"block_size": 8, "max_model_len": 96, "dtype": "float32"}
# Ranks add partial sums, so logits differ in the last bits.
TOLERANCE = 5e-5


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directories = {name: tmp_path_factory.mktemp(name) for name in ("qwen3", "llama")}
    for name, directory in directories.items():
        write_checkpoint(name, directory)
    return directories


def requests() -> list[EngineRequest]:
    random = Random(4)
    made = []
    for number in range(6):
        phrase = [random.randrange(2, 193) for _ in range(4 + 3 * number)]
        made.append(
            request(
                (phrase * 3)[:40], f"r{number}", seed=number, max_tokens=30, ignore_eos=True, logprobs=1,
                **({"temperature": 0.0} if number % 2 else {"temperature": 0.7, "top_k": 30, "n": 2}),
            )
        )  # fmt: skip
    made.append(request([*range(30)], "beams", use_beam_search=True, n=3, max_tokens=10, temperature=0.0))
    return made


@pytest.fixture(scope="module")
def on_one_rank(checkpoints: dict[str, Path]) -> Answers:
    with running(checkpoints["qwen3"], num_kv_blocks=200, **OPTIONS) as engine:
        return serve(engine, requests())


def assert_equal(found: Answers, expected: Answers) -> None:
    assert found.keys() == expected.keys()
    for choice, answer in expected.items():
        assert found[choice].token_ids == answer.token_ids, choice
        assert found[choice].finish_reason == answer.finish_reason
        logprobs = [each.logprob for each in answer.logprobs]
        assert [each.logprob for each in found[choice].logprobs] == pytest.approx(logprobs, abs=TOLERANCE)


def test_the_engine_describes_the_whole_model_and_not_one_rank(checkpoints: dict[str, Path]) -> None:
    with (
        running(checkpoints["qwen3"], num_kv_blocks=20, **OPTIONS) as one,
        running(checkpoints["qwen3"], num_kv_blocks=20, tensor_parallel_size=2, **OPTIONS) as two,
    ):
        assert two.info.num_parameters == one.info.num_parameters == num_parameters(one._ranks.runner.model)
        assert two.info.kv_cache_bytes == one.info.kv_cache_bytes > 0
        assert two.info.num_kv_blocks == one.info.num_kv_blocks


@pytest.mark.parametrize("draft", ["qwen3", "llama", "ngram"])
def test_with_host_memory_and_draft_tokens(draft: str, checkpoints: dict[str, Path], on_one_rank: Answers) -> None:
    speculation: dict[str, Any] = {"speculative_method": "ngram", "ngram_prompt_lookup_min": 1}
    if draft != "ngram":
        speculation = {"speculative_model": str(checkpoints[draft])}
    with running(
        checkpoints["qwen3"], tensor_parallel_size=2, num_kv_blocks=16, swap_space=2**20, max_num_batched_tokens=40,
        **OPTIONS, **speculation,
    ) as engine:  # fmt: skip
        plans = record_plans(engine)
        assert_equal(serve(engine, requests()), on_one_rank)
        stats, transfers = engine.stats(), count_transfers(plans)
    assert stats.num_preemptions > 3
    assert transfers[Tier.DEVICE, Tier.HOST] > 10 and transfers[Tier.HOST, Tier.DEVICE] > 3
    if draft == "qwen3":
        # Two ranks serve and two draft: now and then their last bits disagree.
        assert stats.num_accepted_tokens > 0.9 * stats.num_draft_tokens > 20
    else:
        assert stats.num_draft_tokens > stats.num_accepted_tokens


@pytest.mark.parametrize(("size", "name"), [("tensor", "1-of-2"), ("pipeline", "stage-1-of-2-0-of-1")])
def test_a_rank_that_cannot_allocate_ends_the_start_and_is_named(
    size: str, name: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """A file is where it keeps its blocks."""
    options = {**OPTIONS, f"{size}_parallel_size": 2, "num_kv_blocks": 16, "kv_cache_disk": str(tmp_path)}
    with running(checkpoints["llama"], **options):
        pass
    (share,) = tmp_path.glob(f"*/{name}")
    shutil.rmtree(share)
    share.touch()
    with pytest.raises(EngineDeadError, match="rank 1 has ended; its own message, above, says why"):
        start(checkpoints["llama"], **options)


def test_a_stage_that_is_killed_ends_the_engine(checkpoints: dict[str, Path]) -> None:
    engine = start(checkpoints["llama"], pipeline_parallel_size=2, num_kv_blocks=16, **OPTIONS)
    try:
        engine.add(request([2, 3, 4], max_tokens=50, ignore_eos=True))
        engine.step()
        (child,) = psutil.Process().children()
        child.kill()
        with pytest.raises(RuntimeError, match="Connection"):
            for _ in range(50):
                engine.step()
        with pytest.raises(EngineDeadError, match="an earlier step of this engine failed"):
            engine.step()
    finally:
        engine.close()
    assert not psutil.Process().children()


def test_with_a_disk(checkpoints: dict[str, Path], on_one_rank: Answers, tmp_path: Path) -> None:
    """Each rank keeps its own share; what one of them cannot read, all compute again."""
    for run in range(3):
        with running(
            checkpoints["qwen3"], tensor_parallel_size=2, num_kv_blocks=150, kv_cache_disk=str(tmp_path), **OPTIONS
        ) as engine:
            plans = record_plans(engine)
            if run == 2:
                ranks = [sorted(tmp_path.rglob(f"{rank}-of-2/**/*.kv")) for rank in range(2)]
                assert [path.name for path in ranks[0]] == [path.name for path in ranks[1]]
                for path in ranks[1][::3]:
                    content = bytearray(path.read_bytes())
                    content[-1] ^= 255
                    path.write_bytes(content)
            assert_equal(serve(engine, requests()), on_one_rank)
        assert bool(count_transfers(plans)[Tier.DISK, Tier.DEVICE]) == (run > 0)


def test_a_script_may_end_without_closing_its_ranks() -> None:
    script = """
from pagewick import LLM, SamplingParams
llm = LLM(tensor_parallel_size=2)
stream = llm.stream("Pagewick is", SamplingParams(max_tokens=9, temperature=0))
print(next(stream))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "") and re.fullmatch(r" \w+\n", done.stdout)
