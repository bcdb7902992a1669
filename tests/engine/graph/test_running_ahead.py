"""Steps that run ahead: the same results as without, whatever comes in place of the step that was expected."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagewick.engine.engine import Engine
from pagewick.engine.forward import ForwardOutput, ForwardStage
from pagewick.engine.graph.recorded import StepGraph
from pagewick.engine.host_batch import HostBatch
from pagewick.engine.messages import EngineRequest
from pagewick.engine.sampling.slot_sampler import SlotSampler
from pagewick.kernels import cpu, recorded_steps
from pagewick.kernels.recorded_steps import RecordedStep
from tests.engine.graph.test_recorded import Model, batch, check, draws_at, make_graph
from tests.engine.serving import Answers, assert_same, request, running, serve
from tests.engine.test_failures import poison
from tests.models.checkpoints import write_checkpoint

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="needs the native library: make install")

# Longer than a step may run ahead.
LONG_S = 0.02
MOST_LIKELY, DRAWN = ForwardStage.MOST_LIKELY, ForwardStage.DRAWN


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    library = cpu.library()
    assert library is not None
    library.set_num_threads(2)
    yield
    library.set_num_threads(torch.get_num_threads())


@pytest.fixture
def resumed(monkeypatch: pytest.MonkeyPatch) -> list[RecordedStep]:
    """The recorded steps that were resumed, in order."""
    steps: list[RecordedStep] = []
    resume = RecordedStep.resume

    def noted(self: RecordedStep, *given: Any) -> None:
        steps.append(self)
        resume(self, *given)

    monkeypatch.setattr(RecordedStep, "resume", noted)
    return steps


def check_kept(found: ForwardOutput, given: HostBatch, stage: ForwardStage = MOST_LIKELY) -> None:
    """A step leaves only these results when the next one may run ahead."""
    expected = make_graph(Model())(given, stage)
    assert found.arrays is not None and expected.arrays is not None
    for ours, theirs in zip(found.arrays, expected.arrays, strict=True):
        assert ours.tolist() == theirs.tolist() and ours.dtype == theirs.dtype


def after(given: HostBatch, found: ForwardOutput) -> HostBatch:
    """The batch that continues the streams of this one."""
    assert found.token_ids is not None
    positions = given.positions + 1
    return replace(
        given,
        extras=draws_at(positions[0]) if given.extras else [],
        input_ids=found.token_ids.numpy().copy(),
        positions=positions,
        context_lens=given.context_lens + np.int32(1),
        slot_mappings=[slots + 1 for slots in given.slot_mappings],
    )


def recorded(model: Model, *token_ids: int, stage: ForwardStage = MOST_LIKELY) -> tuple[StepGraph, HostBatch]:
    """A graph with a recorded step of this size, and a steady batch of it."""
    step, given = make_graph(model), replace(batch(*token_ids), is_steady=True)
    if stage == DRAWN:
        given = replace(given, extras=draws_at(given.positions[0]))
    for _ in range(2):
        step(given, stage)
    return step, given


@pytest.mark.parametrize("stage", [MOST_LIKELY, DRAWN])
@pytest.mark.parametrize("pause_s", [0.0, 0.0002, LONG_S])
def test_streams_that_continue(pause_s: float, stage: ForwardStage, resumed: list[RecordedStep]) -> None:
    step, given = recorded(Model(), 3, 14, 15, stage=stage)
    # Comparing calls native operations, which stop what runs ahead: it comes last.
    batches, results = [given], []
    for turn in range(12):
        found = step(batches[-1], stage)
        time.sleep(pause_s)
        assert len(resumed) == turn and found.arrays is not None
        results.append(replace(found, arrays=(found.arrays[0].copy(), found.arrays[1].copy())))
        batches.append(after(batches[-1], found))
    for given, found in zip(batches, results, strict=False):
        check_kept(found, given, stage)
    if stage == DRAWN:
        # The draws mattered.
        for given, found in zip(batches, results, strict=False):
            most_likely = make_graph(Model())(replace(given, extras=[]), MOST_LIKELY)
            assert found.arrays is not None and most_likely.arrays is not None
            assert found.arrays[0].tolist() != most_likely.arrays[0].tolist()


@pytest.mark.parametrize("column", range(5))
def test_draws_that_are_not_those_of_the_step_that_ran_ahead(column: int, resumed: list[RecordedStep]) -> None:
    step, given = recorded(Model(), 3, 14, 15, stage=DRAWN)
    following = after(given, step(given, DRAWN))
    extras = list(following.extras)
    extras[column] = (extras[column] * 0.5).astype(extras[column].dtype)
    other = replace(following, extras=extras, is_steady=False)
    found = step(other, DRAWN)
    assert not resumed
    check(found, Model(), other, DRAWN)


def with_other_tables(given: HostBatch) -> HostBatch:
    return replace(given, block_tables=[tables + 1 for tables in given.block_tables])


OTHERS: dict[str, Callable[[HostBatch], HostBatch]] = {
    "other tokens": lambda given: replace(given, input_ids=given.input_ids + 1),
    "other positions": lambda given: replace(given, positions=given.positions + 1),
    "other lengths": lambda given: replace(given, context_lens=given.context_lens + np.int32(1)),
    "other slots": lambda given: replace(given, slot_mappings=[slots + 8 for slots in given.slot_mappings]),
    "other block tables": with_other_tables,
    "fewer streams": lambda given: batch(1, 2),
    "other sequences": lambda given: replace(given, cu_seqlens_q=given.cu_seqlens_q.copy()),
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS.keys())
@pytest.mark.parametrize("pause_s", [0.0, LONG_S])
def test_another_step_than_the_one_that_ran_ahead(
    change: Callable[[HostBatch], HostBatch], pause_s: float, resumed: list[RecordedStep]
) -> None:
    step, given = recorded(Model(), 5, 6, 7)
    other = replace(change(after(given, step(given, MOST_LIKELY))), is_steady=False)
    time.sleep(pause_s)
    found = step(other, MOST_LIKELY)
    check(found, Model(), other, MOST_LIKELY)
    assert not resumed


@pytest.mark.parametrize("stage", [ForwardStage.HIDDEN_STATES, ForwardStage.LOGITS, DRAWN])
def test_another_stage_than_the_one_that_ran_ahead(stage: ForwardStage, resumed: list[RecordedStep]) -> None:
    step, given = recorded(Model(), 5, 6, 7)
    drawing = replace(given, extras=draws_at(given.positions[0]))
    for _ in range(2):
        step(drawing if stage == DRAWN else given, stage)
    following = after(drawing if stage == DRAWN else given, step(given, MOST_LIKELY))
    other = replace(following, is_steady=False)
    check(step(other, stage), Model(), other, stage)
    if stage != DRAWN:
        # Nor does a step of that stage run ahead.
        check(step(following, stage), Model(), following, stage)
        check(step(following, stage), Model(), following, stage)
    assert not resumed


def test_a_batch_that_is_not_steady_leaves_all_its_results(resumed: list[RecordedStep]) -> None:
    step, given = recorded(Model(), 5, 6, 7)
    given = replace(given, is_steady=False)
    for _ in range(3):
        found = step(given, MOST_LIKELY)
        time.sleep(LONG_S)
        check(found, Model(), given, MOST_LIKELY)
        given = after(given, found)
    assert not resumed


def test_a_step_that_fails_after_it_ran_ahead_is_an_error_and_the_next_one_runs() -> None:
    model = Model()
    step, given = recorded(model, 5, 6)
    following = after(given, step(given, MOST_LIKELY))
    recorded_steps.stop_ahead()
    # Nothing runs ahead any more, so the test may change the inputs of the recorded step.
    ((_, kept),) = step._recorded.items()
    kept.batch.input_ids[:] = 1000
    broken = replace(following, input_ids=np.full(2, 1000))
    with pytest.raises(RuntimeError, match="status"):
        step(broken, MOST_LIKELY)
    check_kept(step(following, MOST_LIKELY), following)


def test_a_graph_that_is_gone_reads_its_model_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(recorded_steps, "stop_ahead", lambda: calls.append("stop"))
    step = make_graph(Model())
    del step
    assert calls == ["stop"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3")
    write_checkpoint("qwen3", directory)
    return directory


def engine_of(checkpoint: Path, **options: Any) -> Any:
    return running(checkpoint, **{"num_threads": 2, "max_model_len": 96, "num_kv_blocks": 60, **options})


def requests() -> list[EngineRequest]:
    """Greedy and drawn ones of different lengths, with others beside them that keep a step from running ahead."""
    kinds: list[dict[str, Any]] = [
        {"max_tokens": 40},
        {"max_tokens": 77},  # ends at the longest context
        {"max_tokens": 30, "stop_token_ids": tuple(range(2, 12))},
        {"max_tokens": 12, "logprobs": 2},
        {"max_tokens": 40, "temperature": 0.9, "seed": 5},
        {"max_tokens": 30, "temperature": 1.5, "top_k": 20, "top_p": 0.9, "n": 2, "seed": 6},
        {"max_tokens": 30, "temperature": 1.2, "min_p": 0.05, "seed": 7},
        {"max_tokens": 12, "repetition_penalty": 1.3},
        {"max_tokens": 20, "n": 2},
    ]
    return [
        request(range(3 + number, 20 + 3 * number), f"r{number}", **{"temperature": 0.0, "ignore_eos": True, **kind})
        for number, kind in enumerate(kinds)
    ]


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Answers:
    """On one thread nothing runs ahead. Here, no token is drawn in the forward pass either."""
    answers: Answers = {}
    with engine_of(checkpoint, num_threads=1) as engine, pytest.MonkeyPatch.context() as patch:
        stage_of = SlotSampler.forward_stage
        patch.setattr(SlotSampler, "forward_stage", lambda *given: min(stage_of(*given), ForwardStage.LOGITS))
        for each in requests():
            answers |= serve(engine, [each])
    return answers


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_kv_blocks", [60, 9])
def test_answers(
    depth: int, num_kv_blocks: int, checkpoint: Path, expected: Answers, resumed: list[RecordedStep]
) -> None:
    with engine_of(checkpoint, max_steps_in_flight=depth, num_kv_blocks=num_kv_blocks) as engine:
        for each in requests():
            before = len(resumed)
            assert_same(serve(engine, [each]), {key: expected[key] for key in expected if key[0] == each.request_id})
            params = each.params
            if not (params.has_penalty or params.logprobs):
                # Most steps of those that only draw, too, and none of the others'.
                assert len(resumed) - before > 10
            else:
                assert len(resumed) == before
        # Later ones come while the first ones run ahead, and find their prompts in the prefix cache.
        assert_same(serve(engine, requests(), arrivals=[0, 0, 9, 14, 40, 55, 58, 61, 61]), expected)


@pytest.mark.parametrize("pause_s", [0.0, LONG_S])
def test_a_request_is_aborted_and_another_takes_its_blocks(
    pause_s: float, checkpoint: Path, expected: Answers, resumed: list[RecordedStep]
) -> None:
    first, *_, last = requests()

    def abort(number: int, engine: Engine) -> None:
        if number in (13, 14):
            time.sleep(pause_s)
        if number == 14:
            assert resumed
            engine.abort([first.request_id])
            engine.add(last)

    with engine_of(checkpoint, num_kv_blocks=9, enable_prefix_caching=False) as engine:
        answers = serve(engine, [first], before_step=lambda number: abort(number, engine))
    assert_same(answers, {key: answer for key, answer in expected.items() if key[0] == last.request_id})
    tokens = answers[first.request_id, 0].token_ids
    assert 0 < len(tokens) < 40 and tokens == expected[first.request_id, 0].token_ids[: len(tokens)]


def test_an_engine_is_closed_while_a_step_runs_ahead(checkpoint: Path, resumed: list[RecordedStep]) -> None:
    with engine_of(checkpoint) as engine:
        engine.add(requests()[0])
        while len(resumed) < 5:
            engine.step()
    # Closing the engine has stopped it; nothing is left that could be resumed.
    before = len(resumed)
    with engine_of(checkpoint) as engine:
        serve(engine, [requests()[0]])
    assert len(resumed) > before


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_become_no_numbers_while_steps_run_ahead(
    value: float, checkpoint: Path, resumed: list[RecordedStep]
) -> None:
    """A stream draws a token whose embedding has no numbers. Those beside it never meet it."""
    asked = [
        request(range(10, 27), "poisoned", seed=1, temperature=1.0, max_tokens=60, ignore_eos=True),
        request(range(40, 52), "drawn", seed=2, temperature=0.6, top_p=0.8, max_tokens=60, ignore_eos=True),
        request(range(60, 70), "greedy", temperature=0.0, max_tokens=60, ignore_eos=True),
    ]
    with engine_of(checkpoint) as engine:
        clean = serve(engine, asked)
    drawn = clean["poisoned", 0].token_ids
    others = {*clean["drawn", 0].token_ids, *clean["greedy", 0].token_ids, *range(10, 70)}
    place = next(place for place in range(15, 60) if drawn[place] not in {*others, *drawn[:place]})
    resumed.clear()
    with engine_of(checkpoint) as engine:
        poison(engine, value, drawn[place])
        found = serve(engine, asked)
    assert len(resumed) > 30
    answer = found["poisoned", 0]
    assert answer.token_ids == drawn[: place + 1] and "not numbers" in (answer.error or "")
    assert_same(
        {key: one for key, one in found.items() if key[0] != "poisoned"},
        {key: one for key, one in clean.items() if key[0] != "poisoned"},
    )
