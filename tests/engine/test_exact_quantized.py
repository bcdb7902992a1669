"""Models with quantized weights: a request has the same bits whatever is served beside it, on any number of threads.

PAGEWICK_DEEP=1 tries every way of serving with every number of threads, and plays 50 times as many random scenes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from pagewick.engine.messages import EngineRequest
from pagewick.errors import ConfigError
from pagewick.kernels import native_status
from tests.deep import IS_DEEP
from tests.engine.exactness import Model, Tally, make_scene, play
from tests.engine.row_by_row import row_by_row
from tests.engine.serving import Answers, assert_same, request, running, serve, start
from tests.models.kept_ranks import kept_ranks
from tests.weights.gguf.random_models import KINDS, VOCAB_SIZE, write_random

FORMATS = ("Q8_0", "Q4_K", "Q6_K")
CASES = [(kind, stored_type) for kind in KINDS for stored_type in FORMATS]
DTYPES = {case: ("bfloat16", "float32")[number % 2] for number, case in enumerate(CASES)}
NUM_SCENES = 2
WAYS: dict[str, dict[str, Any]] = {
    "together": {"enable_prefix_caching": False},
    "in chunks of 7": {"max_num_batched_tokens": 7},
    "preempted": {"num_kv_blocks": 9, "enable_prefix_caching": False},
    "drafted": {"speculative_method": "ngram", "ngram_prompt_lookup_min": 1},
    "with experts in host memory": {"num_experts_offload_per_rank": 1},
}
THREADS = (1, 2, 3)
needs_threads = pytest.mark.skipif("off" in native_status(), reason="needs the native library: make install")
pytestmark = pytest.mark.timeout(0 if IS_DEEP else 300)


@pytest.fixture(scope="module", autouse=True)
def exact_products() -> Iterator[None]:
    with row_by_row(), kept_ranks():
        yield


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    found: tuple[str, str] = request.param
    return found


@pytest.fixture(scope="module")
def path(case: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, stored_type = case
    return write_random(tmp_path_factory.mktemp(kind) / f"{kind}-{stored_type}.gguf", kind, stored_type)


def requests() -> list[EngineRequest]:
    """Prompts of all lengths with repetitions to draft from; greedy and drawn."""
    random = Random(9)
    common = [random.randrange(2, VOCAB_SIZE) for _ in range(60)]
    made = []
    for number, length in enumerate((1, 33, 70, 17)):
        prompt = [*common[: length // 2], *common[: length // 4], *(random.randrange(2, VOCAB_SIZE) for _ in range(40))]
        drawn: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9} if number % 2 else {"temperature": 0.0}
        made.append(
            request(prompt[:length], f"r{number}", seed=number, max_tokens=24, ignore_eos=True, logprobs=3, **drawn)
        )
    return made


@pytest.fixture(scope="module")
def alone(case: tuple[str, str], path: Path) -> Answers:
    """Each by itself, on one thread."""
    answers: Answers = {}
    options: dict[str, Any] = {"dtype": DTYPES[case], "max_model_len": 128, "max_num_seqs": 1}
    with running(path, enable_prefix_caching=False, **options) as engine:
        for each in requests():
            answers |= serve(engine, [each])
    return answers


@needs_threads
@pytest.mark.parametrize("way", WAYS)
def test_bits_are_the_same(way: str, case: tuple[str, str], path: Path, alone: Answers) -> None:
    """With every number of threads in a deep run; else one for each way, and another one for each model."""
    if "num_experts_offload_per_rank" in WAYS[way] and case[0] == "dense":
        with pytest.raises(ConfigError, match="has no experts; leave it out"):
            start(path, **WAYS[way])
        return
    chosen = THREADS[(CASES.index(case) + list(WAYS).index(way)) % len(THREADS)]
    for num_threads in THREADS if IS_DEEP else (chosen,):
        with running(path, dtype=DTYPES[case], max_model_len=128, num_threads=num_threads, **WAYS[way]) as engine:
            assert_same(serve(engine, requests()), alone)
            # Once more: now prompts are in the prefix cache, and steps are replayed.
            assert_same(serve(engine, requests()[::-1]), alone)
            assert way != "preempted" or engine.stats().num_preemptions > 0
            assert "num_experts_offload_per_rank" not in WAYS[way] or engine.stats().num_expert_copies > 0


def test_random_histories(case: tuple[str, str], path: Path) -> None:
    """The scenes of test_exactness_properties; the model itself drafts, and another one."""
    other = write_random(path.with_name("other.gguf"), "dense", case[1], seed=1)
    model = Model(str(path), [str(path), str(other)], VOCAB_SIZE, {"dtype": DTYPES[case]})
    seeds, tally = Random() if IS_DEEP else Random(path.name), Tally()
    try:
        for number in range(NUM_SCENES * (50 if IS_DEEP else 1)):
            scene = make_scene(Random(seeds.getrandbits(64)))
            with TemporaryDirectory() as disk:
                try:
                    play(model, scene, Path(disk), tally, depth=1 + number % 2)
                except BaseException:
                    print(scene)
                    raise
    finally:
        model.close()
    print(tally)
    assert tally.counts["tokens"] > 0


def test_two_ranks_say_the_same(path: Path) -> None:
    """Two ranks add in another order, and a last bit decides how an activation is rounded to 8 bits.

    So log-probabilities differ a little, and a token differs only where another one is as likely.
    """
    greedy = [each for each in requests() if each.params.temperature == 0.0]
    found = []
    for size in (1, 2):
        with running(path, dtype="float32", max_model_len=128, tensor_parallel_size=size) as engine:
            found.append(serve(engine, greedy))
    num_equal = 0
    for choice, answer in found[0].items():
        for one, two in zip(answer.logprobs, found[1][choice].logprobs, strict=True):
            likely = dict(one.top)
            assert one.logprob - likely.get(two.token_id, -100.0) < 0.1, (choice, one, two)
            if two.token_id != one.token_id:
                break
            assert two.logprob == pytest.approx(one.logprob, abs=0.1)
            num_equal += 1
    assert num_equal > 20
