"""Steps in flight: what is answered is the same at any depth, and masks are computed beside the forward pass."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pagewick.engine.batch import SlotWork, StepPlan
from pagewick.engine.engine import Engine
from pagewick.engine.forward import ForwardStage
from pagewick.engine.messages import EngineRequest
from pagewick.engine.worker import _STOP, _follow
from pagewick.kernels import recorded_steps
from tests.engine.exactness import EvenTokens
from tests.engine.row_by_row import row_by_row
from tests.engine.serving import Answers, assert_same, record_plans, request, running, serve, start
from tests.models.checkpoints import COMMON, write_checkpoint

VOCAB_SIZE = COMMON["vocab_size"]
WAIT_S = 60.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("qwen3")
    write_checkpoint("qwen3", directory)
    with row_by_row():
        yield directory


def engine_of(checkpoint: Path, **options: Any) -> Any:
    given = {"max_model_len": 96, "num_kv_blocks": 60, "constraint_factory": lambda said: EvenTokens(VOCAB_SIZE)}
    return running(checkpoint, **{**given, **options})


def requests() -> list[EngineRequest]:
    """Plain ones, and each kind of those whose next step depends on more than their last token."""
    asked: dict[str, Any] = {"max_tokens": 17, "logprobs": 2}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "n": 2},
        {"temperature": 0.0, "stop_token_ids": tuple(range(2, 60))},
        {"temperature": 0.8, "repetition_penalty": 1.2, "mirostat": 2},
        {"temperature": 0.0, "constraint": "even"},
        {"temperature": 0.8, "constraint": "even", "n": 2, "stop_token_ids": tuple(range(2, 40))},
        {"temperature": 0.0, "use_beam_search": True, "n": 2, "max_tokens": 5},
        {"temperature": 0.0, "max_tokens": 1},
    ]
    return [
        request(range(3 + number, 14 + 5 * number), f"r{number}", seed=number, **{**asked, **kind})
        for number, kind in enumerate(kinds)
    ]


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Answers:
    answers: Answers = {}
    with engine_of(checkpoint, max_steps_in_flight=1) as engine:
        for each in requests():
            answers |= serve(engine, [each])
    assert {answer.finish_reason for answer in answers.values()} == {"stop", "length"}
    return answers


def note_order(engine: Engine) -> list[str]:
    """A list of "submit" and "result" as they come from now on."""
    order: list[str] = []
    submit = engine._ranks.submit

    class Noted:
        def __init__(self, plan: StepPlan) -> None:
            order.append("submit")
            self._handle = submit(plan)
            self.sample = self._handle.sample

        @property
        def awaits_masks(self) -> bool:
            return self._handle.awaits_masks

        def result(self) -> Any:
            order.append("result")
            return self._handle.result()

    engine._ranks.submit = Noted  # type: ignore[method-assign, assignment]
    return order


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_more_steps_than_the_depth_are_in_flight(depth: int, checkpoint: Path) -> None:
    with engine_of(checkpoint, max_steps_in_flight=depth) as engine:
        order = note_order(engine)
        serve(engine, [request(range(20), max_tokens=9, ignore_eos=True)])
    num_in_flight = [order[:place].count("submit") - order[:place].count("result") for place in range(len(order) + 1)]
    assert max(num_in_flight) == depth and num_in_flight[-1] == 0
    # A length that is known beforehand costs no step.
    assert order.count("submit") == 9


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("max_num_batched_tokens", [7, 64])
def test_answers_at_any_depth(depth: int, max_num_batched_tokens: int, checkpoint: Path, expected: Answers) -> None:
    budget = {"max_num_batched_tokens": max_num_batched_tokens}
    with engine_of(checkpoint, max_steps_in_flight=depth, **budget) as engine:
        assert_same(serve(engine, requests()), expected)


def test_answers_with_little_memory(checkpoint: Path, expected: Answers) -> None:
    with engine_of(checkpoint, max_steps_in_flight=2, num_kv_blocks=9) as engine:
        assert_same(serve(engine, requests()), expected)
        assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_that_only_the_device_knows(
    depth: int, checkpoint: Path, expected: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: tokens stay in the device's memory until results are waited for."""
    # Recorded steps overwrite the logits of the step before.
    monkeypatch.setattr(recorded_steps, "can_record", lambda device: False)
    with engine_of(checkpoint, max_steps_in_flight=depth) as engine:
        runner = engine._ranks.runner
        runner._sampler._is_lazy = True
        runner._slots._last_on_host = None
        left = []
        leave = runner._sampler._leave
        monkeypatch.setattr(runner._sampler, "_leave", lambda *args: (left.append(len(args[3])), leave(*args)))
        assert_same(serve(engine, requests()), expected)
        # Alone, since one sequence with mirostat makes the host read the whole step.
        for each in requests():
            assert_same(
                serve(engine, [each]), {choice: expected[choice] for choice in expected if choice[0] == each.request_id}
            )
        assert sum(left) > 60


class Meeting:
    """A constraint whose mask is only done once the forward pass of its step is under way."""

    is_complete = False

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.threads: set[str] = set()

    def allowed_mask(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.has_begun.set()
        assert self.may_end.wait(WAIT_S), "the forward pass waited for the mask"
        self.may_end.clear()

    def accept(self, token_id: int) -> None:
        pass


def test_masks_are_computed_beside_the_forward_pass(checkpoint: Path) -> None:
    meeting = Meeting()
    with engine_of(checkpoint, constraint_factory=lambda said: meeting) as engine:
        forward = engine._ranks.runner._forward

        def meet(*args: Any) -> Any:
            assert meeting.has_begun.wait(WAIT_S), "the mask waited for the forward pass"
            meeting.has_begun.clear()
            meeting.may_end.set()
            return forward(*args)

        engine._ranks.runner._forward = meet
        found = serve(engine, [request(range(9), constraint=True, max_tokens=4, ignore_eos=True, temperature=0.0)])
    assert len(found["a", 0].token_ids) == 4
    assert threading.current_thread().name not in meeting.threads and len(meeting.threads) == 1


def test_an_engine_without_constraints_has_no_thread_for_them(checkpoint: Path) -> None:
    with engine_of(checkpoint) as engine:
        before = threading.active_count()
        serve(engine, [request(range(9), max_tokens=4)])
        assert threading.active_count() == before
        serve(engine, [request(range(9), max_tokens=4, constraint="even")])
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_steps_with_a_mask_skip_the_recorded_argmax(checkpoint: Path) -> None:
    asked: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True, "temperature": 0.0}
    with engine_of(checkpoint) as engine:
        stages: list[ForwardStage] = []
        forward = engine._ranks.runner._forward

        def noted(batch: Any, stage: ForwardStage) -> Any:
            stages.append(stage)
            return forward(batch, stage)

        engine._ranks.runner._forward = noted
        serve(engine, [request(range(9), **asked)])
        assert stages == [ForwardStage.HIDDEN_STATES, *[ForwardStage.MOST_LIKELY] * 3]
        stages.clear()
        serve(engine, [request(range(9, 18), constraint="even", **asked)])
    assert stages == [ForwardStage.HIDDEN_STATES, *[ForwardStage.LOGITS] * 3]


@pytest.mark.parametrize("depth", [1, 2])
def test_masks_reach_every_rank(depth: int, checkpoint: Path, expected: Answers) -> None:
    """Ranks that sampled other tokens would go on with other sequences."""
    with engine_of(checkpoint, tensor_parallel_size=2, max_steps_in_flight=depth, dtype="float32") as engine:
        found = serve(engine, requests())
    for choice, answer in expected.items():
        assert found[choice].token_ids == answer.token_ids, choice


def test_an_engine_may_close_while_steps_are_in_flight(checkpoint: Path) -> None:
    for world_size in (1, 2):
        with engine_of(checkpoint, tensor_parallel_size=world_size, max_steps_in_flight=2) as engine:
            engine.add(request(range(9), max_tokens=20, constraint="even", ignore_eos=True))
            engine.add(request(range(9), "b", max_tokens=20, ignore_eos=True))
            for _ in range(3):
                engine.step()
            assert engine._loop.has_steps


def test_an_engine_closes_its_ranks_even_if_a_step_in_flight_fails(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(checkpoint, max_model_len=96, max_steps_in_flight=2)
    is_closed = []
    close = engine._ranks.close
    monkeypatch.setattr(engine._ranks, "close", lambda: (is_closed.append(True), close()))
    engine.add(request(range(9), max_tokens=20, ignore_eos=True))
    engine.step()
    assert engine._loop.has_steps

    def fail(output: Any) -> Any:
        raise RuntimeError("another rank is lost")

    monkeypatch.setattr(engine._scheduler, "update", fail)
    try:
        with pytest.raises(RuntimeError, match="another rank is lost"):
            engine.close()
        assert is_closed
    finally:
        close()


class _Handle:
    awaits_masks = True

    def sample(self, masks: Any) -> None:
        raise AssertionError("there are no masks")


class _Runner:
    def submit(self, plan: StepPlan) -> _Handle:
        return _Handle()


class _Collectives:
    def __init__(self, messages: list[bytes]) -> None:
        self._messages = messages

    def broadcast_bytes(self, payload: None) -> bytes:
        return self._messages.pop(0)


def test_a_rank_that_awaits_masks_may_be_told_to_stop() -> None:
    """Rank 0 says so if it failed between a plan and its masks."""
    plan = StepPlan(work=[SlotWork(0, 0, 1, [1], [[0]], True, awaits_mask=True)])
    messages = [msgspec.msgpack.encode(plan), _STOP]
    _follow(_Runner(), _Collectives(messages))  # type: ignore[arg-type]
    assert messages == []


@pytest.mark.parametrize("kind", ["draft tokens", "beams"])
def test_sequences_whose_plans_need_results_share_steps(kind: str, checkpoint: Path) -> None:
    """One that joins while another has a step in flight must not take turns with it for good."""
    asked: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    given = {"speculative_method": "ngram"} if kind == "draft tokens" else {}
    if kind == "beams":
        asked |= {"use_beam_search": True, "n": 2}
    num_steps = []
    for depth in (1, 2):
        with engine_of(checkpoint, max_steps_in_flight=depth, max_num_batched_tokens=16, **given) as engine:
            plans = record_plans(engine)
            wanted = [request(range(5, 12), "a", **asked), request(range(30, 60), "b", **asked)]
            serve(engine, wanted, arrivals=[0, 2])
            num_steps.append(len(plans))
    assert num_steps[1] <= 1.25 * num_steps[0], f"steps at depth 1 and 2: {num_steps}"
