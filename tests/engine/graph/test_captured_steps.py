"""Engines on a device that computes late: graphs, waits, and answers that are those of an engine on the CPU."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewick.config import EngineConfig
from pagewick.engine.batch import SlotResult
from pagewick.engine.engine import Engine
from pagewick.engine.graph import captured, choice
from pagewick.engine.graph.captured import CapturedSteps
from pagewick.engine.messages import EngineRequest
from pagewick.engine.sampling.step_results import StepResults
from pagewick.parallel.collectives import Collectives
from tests.engine.exactness import EvenTokens
from tests.engine.foresight import Foresight
from tests.engine.graph.late_device import DEVICE, LateDevice, LateEvent, LateGraph, late_device
from tests.engine.graph.test_static_batch import Forgetful
from tests.engine.row_by_row import row_by_row
from tests.engine.serving import Answers, assert_same, request, running, serve
from tests.kernels.conftest import library_off
from tests.models.checkpoints import COMMON, write_checkpoint

VOCAB_SIZE = COMMON["vocab_size"]
# Requests for which the host need not see a token before the next step begins.
FREE: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.9, "top_p": 0.8, "logprobs": 2},
    {"temperature": 0.7, "top_k": 9, "n": 2},
    {"temperature": 0.0, "stop_token_ids": tuple(range(2, 40)), "min_tokens": 3, "logprobs": 0},
    {"temperature": 0.0, "logit_bias": {5: 3.0, 7: -4.0}},
    {"temperature": 0.8, "min_p": 0.05, "allowed_token_ids": tuple(range(50, 90))},
    {"temperature": 0.8, "typical_p": 0.8, "top_n_sigma": 2.0},
    {"temperature": 0.8, "xtc_probability": 0.5, "xtc_threshold": 0.05, "top_p": 0.9},
]
# Requests for which it must see a token before the next step is sampled.
LOOKING_BACK: list[dict[str, Any]] = [
    {"temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.4, "bad_word_ids": [[7], [20, 21]]},
    {"temperature": 0.0, "frequency_penalty": 0.7, "repetition_penalty": 1.1, "logprobs": 1},
    {"temperature": 0.0, "dry_multiplier": 2.0, "dry_allowed_length": 1},
]
# Requests for which it must see one in the middle of a step, and whose next plan depends on results.
BOUND: list[dict[str, Any]] = [
    {"temperature": 0.8, "mirostat": 2},
    {"temperature": 0.8, "mirostat": 1},
    {"temperature": 0.0, "constraint": "even"},
    {"temperature": 0.0, "dry_multiplier": 2.0, "dry_allowed_length": 1, "constraint": "even"},
    {"temperature": 0.0, "use_beam_search": True, "n": 2, "max_tokens": 5, "logprobs": 1},
    {"temperature": 0.0, "prompt_logprobs": 1},
]


def requests(kinds: list[dict[str, Any]]) -> list[EngineRequest]:
    return [
        request(range(3 + number, 14 + 5 * number), f"r{number}", seed=number, **{"max_tokens": 12, **kind})
        for number, kind in enumerate(kinds)
    ]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("qwen3")
    write_checkpoint("qwen3", directory)
    with row_by_row():
        yield directory


@contextmanager
def engine_of(checkpoint: Path, **options: Any) -> Iterator[Engine]:
    given = {"max_model_len": 96, "num_kv_blocks": 60, "constraint_factory": lambda said: EvenTokens(VOCAB_SIZE)}
    with running(checkpoint, **{**given, **options}) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[str, Answers]:
    """The answers of an engine on the CPU, without its library, to each request alone."""
    answers: dict[str, Answers] = {"free": {}, "looking back": {}, "bound": {}}
    with library_off(), engine_of(checkpoint, max_steps_in_flight=1) as engine:
        for name, kinds in (("free", FREE), ("looking back", LOOKING_BACK), ("bound", BOUND)):
            for each in requests(kinds):
                answers[name] |= serve(engine, [each])
    return answers


def steps_of(engine: Engine) -> CapturedSteps:
    steps = engine._ranks.runner._forward
    assert isinstance(steps, CapturedSteps)
    return steps


def graphs_of(engine: Engine) -> list[LateGraph]:
    return [found.graph for found in steps_of(engine)._graphs.values() if isinstance(found.graph, LateGraph)]


def check_some(engine: Engine, expected: Answers, **options: Any) -> None:
    """Serve the first four of FREE, and compare the answers."""
    wanted = requests(FREE[:4])
    ids = {each.request_id for each in wanted}
    assert_same(serve(engine, wanted, **options), {at: answer for at, answer in expected.items() if at[0] in ids})


@pytest.mark.parametrize(("depth", "chance"), [(1, 0.3), (2, 0.0), (3, 0.1)])
def test_the_host_waits_for_nothing_but_results(
    depth: int, chance: float, checkpoint: Path, expected: dict[str, Answers]
) -> None:
    with late_device(seed=depth, chance=chance) as device, engine_of(checkpoint, max_steps_in_flight=depth) as engine:
        device.counts.clear()
        assert_same(serve(engine, requests(FREE)), expected["free"])
        assert set(device.counts) <= {"event"}, f"hidden waits: {device.counts}"
        graphs = graphs_of(engine)
        assert sum(graph.num_replays for graph in graphs) >= 2 * len(graphs) > 0
        assert 0 < device.counts["event"] <= engine.stats().num_steps or chance


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_requests_that_look_back_at_their_tokens(
    depth: int, checkpoint: Path, expected: dict[str, Answers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host reads a step while the device computes the next one, which is sampled after that."""
    queued_behind: list[int] = []
    read = StepResults.get

    def noted(results: StepResults) -> list[SlotResult]:
        queued_behind.extend(event.num_queued_behind for _, event in results._unread if isinstance(event, LateEvent))
        return read(results)

    monkeypatch.setattr(StepResults, "get", noted)
    with late_device(seed=depth) as device, engine_of(checkpoint, max_steps_in_flight=depth) as engine:
        device.counts.clear()
        assert_same(serve(engine, requests(LOOKING_BACK)), expected["looking back"])
        assert set(device.counts) <= {"event"}, f"hidden waits: {device.counts}"
        num_steps = engine.stats().num_steps
        assert len(queued_behind) == num_steps
    # After the last step there is none, and after one whose results end a request there may be none.
    assert sum(number > 0 for number in queued_behind) >= (num_steps - 4 if depth > 1 else 0)
    assert depth > 1 or not any(queued_behind)


@pytest.mark.parametrize("depth", [2, 3])
def test_a_sequence_that_has_ended_leaves_its_last_token_to_nobody(
    depth: int, checkpoint: Path, expected: dict[str, Answers]
) -> None:
    """Its slot is another's when the token that was drawn after its end becomes known."""
    asked: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 1.5, "max_tokens": 9}
    kinds = [{**asked, "stop_token_ids": tuple(range(first, first + 60))} for first in (0, 60, 9, 30, 0, 50, 0, 40)]
    answers: Answers = {}
    with library_off(), engine_of(checkpoint, max_steps_in_flight=1) as engine:
        for each in requests(kinds):
            answers |= serve(engine, [each])
    with late_device(), engine_of(checkpoint, max_steps_in_flight=depth, max_num_seqs=2) as engine:
        assert_same(serve(engine, requests(kinds)), answers)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_model_with_running_states(depth: int, tmp_path: Path) -> None:
    """The definition of such a layer makes the host wait; without a kernel, capturing fails after the first step."""
    write_checkpoint("qwen3.5", tmp_path)
    wanted = requests([{"temperature": 0.0, "ignore_eos": True}] * 3)
    with row_by_row(), library_off():
        with engine_of(tmp_path, max_steps_in_flight=1) as engine:
            expected = [serve(engine, [each])[each.request_id, 0].token_ids for each in wanted]
        with late_device(without=["gated_delta_net"]), engine_of(tmp_path, max_steps_in_flight=depth) as engine:
            found = serve(engine, wanted)
            assert steps_of(engine)._seen and not graphs_of(engine)
            assert not steps_of(engine)._may_repeat
    assert [found[each.request_id, 0].token_ids for each in wanted] == expected


def test_draft_tokens_behind_states(tmp_path: Path) -> None:
    """A captured step reads how many of its tokens change the state that is stored."""
    write_checkpoint("qwen3.5", tmp_path)
    wanted = requests([{"temperature": 0.0, "ignore_eos": True, "max_tokens": 24}] * 3)
    with row_by_row(), library_off():
        with engine_of(tmp_path, max_steps_in_flight=1) as engine:
            expected = serve(engine, wanted)
        drafter = Foresight(wanted, expected, 0.8, VOCAB_SIZE)
        options = {"drafter": drafter, "num_speculative_tokens": 2, "max_steps_in_flight": 2}
        with late_device(), engine_of(tmp_path, **options) as engine:
            assert_same(serve(engine, wanted), expected)
            assert engine.stats().num_accepted_tokens > 0
            assert any(key[0].num_tokens > key[0].num_seqs for key in steps_of(engine)._graphs)


def test_a_closed_engine_keeps_no_graph(checkpoint: Path, expected: dict[str, Answers]) -> None:
    """NCCL would wait for graphs that use it when the ranks part."""
    with late_device(), engine_of(checkpoint) as engine:
        check_some(engine, expected["free"])
        assert graphs_of(engine)
        steps = weakref.ref(steps_of(engine))
        engine.close()
        gc.collect()
        assert steps() is None


def test_requests_whose_steps_the_host_must_see(checkpoint: Path, expected: dict[str, Answers]) -> None:
    with late_device() as device, engine_of(checkpoint, max_steps_in_flight=2) as engine:
        device.counts.clear()
        assert_same(serve(engine, requests(BOUND)), expected["bound"])
        assert not {name for name in device.counts if "ordinary memory" in name}, device.counts


def test_draft_tokens(checkpoint: Path, expected: dict[str, Answers]) -> None:
    options = {"num_speculative_tokens": 3, "speculative_max_batch": 32, "max_steps_in_flight": 2}
    with late_device(chance=0.2), engine_of(checkpoint, speculative_model=str(checkpoint), **options) as engine:
        assert_same(serve(engine, requests(FREE)), expected["free"])
        assert engine.stats().num_accepted_tokens > 0
        assert any(key[0].num_tokens > key[0].num_seqs for key in steps_of(engine)._graphs)


def test_a_step_is_copied_to_the_device_at_once(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy for a step that is captured, and one for its results."""
    with late_device() as device, engine_of(checkpoint, max_steps_in_flight=2) as engine:
        wanted = [request(range(9), f"{number}", max_tokens=30, ignore_eos=True) for number in range(2)]
        for each in wanted:
            engine.add(each)
        for _ in range(6):
            engine.step()
        device.counts.clear()
        copies: list[tuple[str, str]] = []
        copy = LateDevice._copy

        def noted(self: LateDevice, target: Any, source: Any, *more: Any, **options: Any) -> Any:
            if {target.device, source.device} == {DEVICE, torch.device("cpu")}:
                copies.append((str(source.device), str(target.device)))
            return copy(self, target, source, *more, **options)

        monkeypatch.setattr(LateDevice, "_copy", noted)
        monkeypatch.setattr(LateDevice, "_from_host", None)
        num_replays = sum(graph.num_replays for graph in graphs_of(engine))
        for _ in range(5):
            engine.step()
        assert sum(graph.num_replays for graph in graphs_of(engine)) == num_replays + 5
        assert sorted(copies) == [("cpu", "cuda:0")] * 5 + [("cuda:0", "cpu")] * 5
        assert device.counts.keys() <= {"event"}
        engine.abort([each.request_id for each in wanted], [])
        while engine.has_work:
            engine.step()


def test_prompts_are_not_captured(checkpoint: Path) -> None:
    with late_device(), engine_of(checkpoint) as engine:
        serve(engine, [request(range(2, 60), f"{number}", max_tokens=1) for number in range(3)])
        assert not graphs_of(engine) and not steps_of(engine)._seen


def test_the_least_recently_used_graph_goes_first(
    checkpoint: Path, expected: dict[str, Answers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured, "MAX_GRAPHS", 2)
    with late_device(), engine_of(checkpoint, max_steps_in_flight=2) as engine:
        assert_same(
            serve(engine, requests(FREE), arrivals=[3 * number for number in range(len(FREE))]), expected["free"]
        )
        assert len(graphs_of(engine)) == 2


def test_enforce_eager(checkpoint: Path, expected: dict[str, Answers]) -> None:
    with late_device(), engine_of(checkpoint, enforce_eager=True, max_steps_in_flight=2) as engine:
        assert not isinstance(engine._ranks.runner._forward, CapturedSteps)
        check_some(engine, expected["free"])


def test_steps_of_flashinfer_are_not_captured() -> None:
    """It plans every step on the host."""
    alone = Collectives.single()
    assert not choice._why_not_captured(EngineConfig(), alone)
    assert "FLASHINFER" in choice._why_not_captured(EngineConfig(attention_backend="FLASHINFER"), alone)


@pytest.mark.parametrize("is_seen_at_once", [True, False])
def test_what_cannot_be_captured_runs_eagerly_and_says_so_once(
    is_seen_at_once: bool, checkpoint: Path, expected: dict[str, Answers], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="pagewick")
    with late_device() as device, engine_of(checkpoint, max_steps_in_flight=2) as engine:

        def look(module: Any, inputs: Any, output: Any) -> None:
            # Some waits are only noticed while a graph is captured.
            if is_seen_at_once or device._capturing is not None:
                output[0].sum().item()

        engine._ranks.runner.model.model.layers[0].register_forward_hook(look)
        check_some(engine, expected["free"])
        assert not graphs_of(engine)
    said = [record.getMessage() for record in caplog.records if "CUDA graphs" in record.getMessage()]
    assert len(said) == 1 and said[0].startswith(
        "steps are slower, since CUDA graphs cannot hold them: aten._local_scalar_dense waits"
    )


def test_graphs_are_freed_once_no_step_runs_them() -> None:
    order: list[str] = []

    class Stream:
        def record_event(self) -> Stream:
            return self

        def synchronize(self) -> None:
            order.append("done")

    class Graph:
        pass

    stream: Any = Stream()
    unused: Any = None
    steps = CapturedSteps(unused, unused, DEVICE, stream, Collectives.single())
    steps._turn_off("it has none yet")
    assert order == []
    graph: Any = Graph()
    weakref.finalize(graph, order.append, "freed")
    steps._graphs[unused] = graph
    del graph
    steps._turn_off("the next one cannot be captured")
    assert order == ["done", "freed"]


def test_a_batch_that_is_overwritten_too_early_is_noticed(checkpoint: Path) -> None:
    """These tests would notice if the pieces of host memory were not awaited."""
    found = []
    for copied in ([None, None], Forgetful([None, None])):
        with late_device(), engine_of(checkpoint, max_steps_in_flight=3) as engine:
            steps_of(engine)._static._copied = copied  # type: ignore[assignment]
            found.append(serve(engine, [request(range(2, 40), max_tokens=12, ignore_eos=True, temperature=0.0)]))
    assert found[0] != found[1]
