"""Recorded steps against the same steps run one operation after the other, on a model of three native operations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from pagewick.engine.device_copies import Array
from pagewick.engine.forward import ForwardOutput, ForwardStage, forward
from pagewick.engine.graph import recorded as graph
from pagewick.engine.graph.recorded import MAX_TOKENS, StepGraph
from pagewick.engine.host_batch import Batch, HostBatch
from pagewick.engine.progress import Progress
from pagewick.kernels import cpu
from pagewick.kernels.matrix import Matrix

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="needs the native library: make install")

VOCAB_SIZE, HIDDEN_SIZE = 83, 48
CPU = torch.device("cpu")


def matrix(num_rows: int, num_columns: int, seed: int, *, is_multiplied: bool = True) -> Matrix:
    made = Matrix.empty(num_rows, num_columns, torch.float32, CPU, is_multiplied=is_multiplied)
    made.load(torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(seed)), 0)
    return made


class Model:
    """An embedding, a product and a head. extra: an operation of PyTorch's own, which cannot be recorded."""

    def __init__(self, extra: bool = False) -> None:
        self.embedding = matrix(VOCAB_SIZE, HIDDEN_SIZE, 1, is_multiplied=False)
        self.product, self.head = matrix(HIDDEN_SIZE, HIDDEN_SIZE, 2), matrix(VOCAB_SIZE, HIDDEN_SIZE, 3)
        self.extra = extra
        self.num_calls = 0

    def __call__(self, batch: Batch) -> Tensor:
        self.num_calls += 1
        hidden_states = self.product.linear(self.embedding.take(batch.input_ids))
        return hidden_states * 2 if self.extra else hidden_states

    def compute_logits(self, hidden_states: Tensor, batch: object = None) -> Tensor:
        return self.head.linear(hidden_states, out_dtype=torch.float32)


def make_graph(model: Model) -> StepGraph:
    return StepGraph(model, [3, 5], Progress.private())  # type: ignore[arg-type]


def batch(*token_ids: int, num_seqs: int | None = None) -> HostBatch:
    count = len(token_ids) if num_seqs is None else num_seqs
    lens = np.full(count, len(token_ids) // count, np.int32)
    return HostBatch(
        input_ids=np.array(token_ids, np.int64),
        positions=np.arange(len(token_ids))[np.newaxis],
        cu_seqlens_q=np.concatenate([[0], np.cumsum(lens)]).astype(np.int32),
        context_lens=lens,
        slot_mappings=[np.arange(len(token_ids)) for _ in range(2)],
        block_tables=[np.ones((count, 2), np.int32), np.ones((count, 1), np.int32)],
    )


def draws_at(positions: Array) -> list[Array]:
    """Arrays of draws for tokens at these positions. Each stream draws in its own way, the second one not at all."""
    rows = np.arange(len(positions))
    noise = [(at * 0.618034 + rows * 0.27) % 1 for at in (positions + 1, positions + 2)]
    temperature = np.where(rows == 1, 0.0, 50.0 + rows).astype(np.float32)
    min_p = np.where(rows == 0, 1e-4, 0.0)
    return [temperature, min_p, np.where(rows == 2, 5, 0), np.where(rows == 0, 0.9, 1.0), *noise]


def check(found: ForwardOutput, model: Model, given: HostBatch, stage: ForwardStage) -> None:
    expected = ForwardOutput(*forward(model, given.to(CPU), stage))  # type: ignore[arg-type]
    assert torch.equal(found.hidden_states, expected.hidden_states)
    for name in ("logits", "token_ids", "highest"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert (ours is None) == (theirs is None), name
        assert ours is None or torch.equal(ours, theirs), name
    assert (found.logits is not None) == (stage >= ForwardStage.LOGITS)
    if stage == ForwardStage.MOST_LIKELY:
        assert found.logits is not None and found.token_ids is not None and found.highest is not None
        assert torch.equal(found.token_ids, found.logits.argmax(-1))
        assert torch.equal(found.highest, found.logits.amax(-1))


@pytest.mark.parametrize("stage", list(ForwardStage))
def test_a_size_is_run_then_recorded_then_replayed(stage: ForwardStage) -> None:
    model, other = Model(), Model()
    step = make_graph(model)
    for turn in range(6):
        given = batch(turn, 7 * turn, 82 - turn)
        if stage == ForwardStage.DRAWN:
            given = replace(given, extras=draws_at(given.positions[0]))
        check(step(given, stage), other, given, stage)
        assert model.num_calls == min(turn + 1, 2)


def test_sizes_and_stages_have_separate_recorded_steps() -> None:
    model, other = Model(), Model()
    step = make_graph(model)
    asked = [
        (batch(*range(first, first + size), num_seqs=num_seqs), stage)
        for first in (0, 9, 30)
        for size, num_seqs in ((1, 1), (2, 2), (2, 1), (6, 3), (MAX_TOKENS - 30, 1))
        for stage in ForwardStage
        # Where tokens are drawn, each sequence has one.
        if stage != ForwardStage.DRAWN or size == num_seqs
    ]
    for given, stage in asked:
        if stage == ForwardStage.DRAWN:
            given = replace(given, extras=draws_at(given.positions[0]))
        check(step(given, stage), other, given, stage)
    assert model.num_calls == 2 * len(asked) // 3


def test_many_tokens_are_not_recorded() -> None:
    model, other = Model(), Model()
    step = make_graph(model)
    given = batch(*(token % VOCAB_SIZE for token in range(MAX_TOKENS + 1)), num_seqs=1)
    for _ in range(4):
        check(step(given, ForwardStage.LOGITS), other, given, ForwardStage.LOGITS)
    assert model.num_calls == 4


def test_steps_with_an_image_are_not_recorded_and_those_beside_them_are() -> None:
    model, other = Model(), Model()
    step = make_graph(model)
    text = batch(3, 1, 4)
    embedded = replace(text, inputs_embeds=torch.ones(3, HIDDEN_SIZE), embeds_mask=np.array([False, True, True]))
    on_three_axes = replace(text, positions=np.repeat(text.positions, 3, axis=0))
    for with_image in (embedded, on_three_axes):
        before = model.num_calls
        for _ in range(3):
            step(with_image, ForwardStage.LOGITS)
        assert model.num_calls == before + 3
    assert not step._seen
    for turn in range(4):
        check(step(text, ForwardStage.LOGITS), other, text, ForwardStage.LOGITS)
        assert model.num_calls == 6 + min(turn + 1, 2)


def test_a_model_that_cannot_be_recorded_runs() -> None:
    model, other = Model(extra=True), Model(extra=True)
    step = make_graph(model)
    for turn in range(5):
        given = batch(turn, turn + 1)
        check(step(given, ForwardStage.MOST_LIKELY), other, given, ForwardStage.MOST_LIKELY)
    assert model.num_calls == 5


def test_the_least_recently_used_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "MAX_RECORDED_STEPS", 2)
    model = Model()
    step = make_graph(model)

    def calls_for(*token_ids: int) -> int:
        before = model.num_calls
        step(batch(*token_ids), ForwardStage.LOGITS)
        return model.num_calls - before

    for _ in range(2):
        for size in (1, 2):
            calls_for(*range(size))
    assert [calls_for(5), calls_for(5, 6)] == [0, 0]
    assert [calls_for(5), calls_for(1, 2, 3), calls_for(1, 2, 3)] == [0, 1, 1]
    assert [calls_for(5), calls_for(1, 2, 3), calls_for(5, 6)] == [0, 0, 1]


def test_results_of_all_sizes_share_their_memory() -> None:
    step = make_graph(Model())
    for size in range(MAX_TOKENS, 0, -1):
        for _ in range(2):
            step(batch(*range(size)), ForwardStage.MOST_LIKELY)
    # Blocks have sizes that are powers of two: those of a result of each size come to twice the largest.
    largest = MAX_TOKENS * (VOCAB_SIZE + 2 * HIDDEN_SIZE + 3) * 4
    assert step._results.num_bytes <= 4 * largest


def test_progress_is_counted_with_every_operation() -> None:
    progress = Progress.private()
    step = StepGraph(Model(), [3, 5], progress)  # type: ignore[arg-type]
    for _ in range(2):
        step(batch(1), ForwardStage.MOST_LIKELY)
    before = progress.read().count
    step(batch(2), ForwardStage.MOST_LIKELY)
    assert progress.read().count == before + 4  # embedding, product, head, argmax


def test_what_a_replayed_operation_refuses_is_an_error() -> None:
    step = make_graph(Model())
    for _ in range(2):
        step(batch(1, 2), ForwardStage.LOGITS)
    with pytest.raises(RuntimeError, match="status"):
        step(batch(1, VOCAB_SIZE), ForwardStage.LOGITS)
    check(step(batch(1, 2), ForwardStage.LOGITS), Model(), batch(1, 2), ForwardStage.LOGITS)
