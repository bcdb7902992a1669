"""The result of a slot for given logits: tokens, candidates, or an error."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pagewick.engine.batch import SlotResult, SlotSampling, SlotStart, SlotWork, StepPlan, StreamWork
from pagewick.engine.forward import ForwardOutput, ForwardStage
from pagewick.engine.sampling.slot_sampler import SlotSampler
from pagewick.engine.sampling.step_rows import Streams
from pagewick.engine.slots import Slots
from pagewick.sampling_params import SamplingParams

VOCAB_SIZE = 11
PROMPT = [1, 2, 3]
CPU = torch.device("cpu")


class Head:
    """A model whose hidden states are the logits."""

    def compute_logits(self, hidden_states: Tensor, batch: object = None) -> Tensor:
        return hidden_states


def sampled(
    logits: Tensor,
    drafted: tuple[int, ...] = (),
    *,
    mask: bytes | None = None,
    stop: tuple[int, ...] = (),
    **params: Any,
) -> SlotResult:
    """Sample a slot after PROMPT and these draft tokens, with logits [1 + len(drafted), V]."""
    slots = Slots([], max_num_seqs=1, max_model_len=64, device=CPU)
    given = SamplingParams(**{"temperature": 0.0, **params})
    sampling = SlotSampling(given, seed=0, choice_index=0, num_prompt_tokens=len(PROMPT), stop_token_ids=list(stop))
    work = SlotWork(
        slot=0,
        start=0,
        num_tokens=len(PROMPT) + len(drafted),
        token_ids=[*PROMPT, *drafted],
        new_block_ids=[],
        is_sampled=True,
        num_draft_tokens=len(drafted),
        awaits_mask=mask is not None,
    )
    plan = StepPlan(starts=[SlotStart(0, sampling, [], list(PROMPT))], work=[work])
    slots.apply(plan)
    before = torch.full((len(PROMPT) - 1, VOCAB_SIZE), math.nan)  # never used
    (result,) = (
        SlotSampler(Head(), slots, CPU, is_lazy=False)  # type: ignore[arg-type]
        .sample(plan, ForwardOutput(torch.cat([before, logits])), {} if mask is None else {0: [mask]})
        .get()
    )
    return result


def random_logits(num_rows: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


KINDS: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"use_beam_search": True, "n": 2}]
NONE_LEFT: list[dict[str, Any]] = [
    {"allowed_token_ids": (4,), "stop": (4,), "min_tokens": 1},
    {"mask": bytes(2)},
    {"allowed_token_ids": (8,), "mask": b"\xff\x00"},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("poison", [[math.nan], [math.inf], [-math.inf] * VOCAB_SIZE], ids=str)
def test_logits_that_are_no_numbers_poison_the_sequence(kind: dict[str, Any], poison: list[float]) -> None:
    logits = random_logits(1)
    logits[0, : len(poison)] = torch.tensor(poison)
    for more in ({}, NONE_LEFT[0]):
        result = sampled(logits, **kind, **more)
        assert result.is_poisoned and "not numbers" in (result.error or "") and result.error_kind == "EngineError"
        assert (result.token_ids, result.candidates, result.logprobs) == ([], [], None)


# The engine refuses a beam search with a constraint, so that beams have no masks.
@pytest.mark.parametrize(
    ("kind", "banned"),
    [(kind, banned) for kind in KINDS for banned in NONE_LEFT if not ("mask" in banned and "n" in kind)],
    ids=str,
)
def test_a_request_that_allows_nothing_poisons_nothing(kind: dict[str, Any], banned: dict[str, Any]) -> None:
    result = sampled(random_logits(1), **kind, **banned)
    assert not result.is_poisoned and result.error_kind == "InvalidRequestError"
    assert "no token was allowed next" in (result.error or "") and "numbers" not in (result.error or "")
    assert (result.token_ids, result.candidates, result.logprobs) == ([], [], None)


def test_draft_tokens_are_accepted_up_to_the_first_wrong_or_invalid_one() -> None:
    """The first row gives 5, which is the draft token; the second is invalid, so the third is not used."""
    logits = random_logits(3)
    logits[0, 5] = 20.0
    usual = sampled(logits, (5, int(logits[1].argmax())))
    assert usual.token_ids == [5, *logits[1:].argmax(dim=-1).tolist()] and usual.error is None
    logits[1, 3] = math.nan
    poisoned = sampled(logits, (5, 6))
    assert (poisoned.token_ids, poisoned.is_poisoned) == ([5], True)
    wrong_draft = sampled(logits, (4, 6))
    assert (wrong_draft.token_ids, wrong_draft.error, wrong_draft.is_poisoned) == ([5], None, False)


@pytest.mark.parametrize("num_top", [None, 0, 2, 11])
def test_candidates_are_ranked_with_bias_and_reported_without(num_top: int | None) -> None:
    logits = random_logits(1, seed=3)
    bias = {2: 5.0, 9: 4.5, int(logits.argmax()): -50.0}
    result = sampled(
        logits, use_beam_search=True, n=3, logit_bias=bias, logprobs=num_top, allowed_token_ids=[*range(10)]
    )
    values = logits[0].double()
    own = (values - values.exp().sum().log()).tolist()
    scores = {token_id: own[token_id] + bias.get(token_id, 0.0) for token_id in range(10)}
    expected = sorted(scores, key=lambda token_id: -scores[token_id])
    # Twice as many as beams, so that enough are left if the best ones end.
    found = result.candidates
    assert [one.token_id for one in found] == expected[:6] and {2, 9} <= set(expected[:2])
    assert [one.score for one in found] == pytest.approx([scores[token_id] for token_id in expected[:6]], abs=1e-5)
    order = sorted(range(VOCAB_SIZE), key=lambda token_id: -own[token_id])
    for one in found:
        if num_top is None:
            assert one.logprobs is None
            continue
        assert one.logprobs is not None and one.logprobs.token_id == one.token_id
        assert one.logprobs.logprob == pytest.approx(own[one.token_id], abs=1e-5)
        assert one.logprobs.rank == order.index(one.token_id) + 1
        assert [token_id for token_id, _ in one.logprobs.top] == order[:num_top]
        assert [value for _, value in one.logprobs.top] == pytest.approx(
            [own[token_id] for token_id in order[:num_top]], abs=1e-5
        )


def test_the_arrays_of_the_streams_are_made_once_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[StreamWork] = []
    make = Streams.of

    def of(given: StreamWork) -> Streams:
        made.append(given)
        return make(given)

    slots = Slots([], max_num_seqs=2, max_model_len=64, device=CPU)
    sampler = SlotSampler(Head(), slots, CPU, is_lazy=False)  # type: ignore[arg-type]
    greedy = SlotSampling(SamplingParams(temperature=0.0), 0, 0, len(PROMPT), [])
    slots.apply(StepPlan(starts=[SlotStart(slot, greedy, [], list(PROMPT)) for slot in range(2)]))
    monkeypatch.setattr(Streams, "of", of)
    logits = random_logits(1)
    for slot in range(2):
        plan = StepPlan(streams=StreamWork([slot], [len(PROMPT)]))
        sampler.forward_stage(plan)
        results = sampler.sample(plan, ForwardOutput(logits, logits), {})
        assert results.streams.token_ids == [int(logits.argmax())]
    assert len(made) == 2


@pytest.mark.parametrize(
    ("fields", "stop", "stage"),
    [
        ({"temperature": 0.0, "min_p": 0.1}, (), ForwardStage.MOST_LIKELY),
        ({"temperature": 0.7, "top_k": 5, "top_p": 0.9}, (), ForwardStage.DRAWN),
        ({"temperature": 0.7, "min_p": 0.1}, (), ForwardStage.DRAWN),
        ({"temperature": 0.7, "presence_penalty": 0.5}, (), ForwardStage.LOGITS),
        ({"temperature": 0.7, "min_tokens": 2}, (4,), ForwardStage.LOGITS),
    ],
    ids=str,
)
def test_how_far_the_forward_pass_goes(fields: dict[str, Any], stop: tuple[int, ...], stage: ForwardStage) -> None:
    slots = Slots([], max_num_seqs=2, max_model_len=64, device=CPU)
    first, greedy = (
        SlotSampling(SamplingParams(**each), 0, 0, len(PROMPT), list(stop)) for each in (fields, {"temperature": 0.0})
    )
    slots.apply(StepPlan(starts=[SlotStart(slot, one, [], list(PROMPT)) for slot, one in enumerate((first, greedy))]))
    start = len(PROMPT)
    for is_lazy in (False, True):
        sampler = SlotSampler(Head(), slots, CPU, is_lazy=is_lazy)  # type: ignore[arg-type]

        def stage_of(plan: StepPlan, sampler: SlotSampler = sampler) -> ForwardStage:
            return sampler.forward_stage(plan)

        expected = ForwardStage.LOGITS if is_lazy and stage == ForwardStage.DRAWN else stage
        assert stage_of(StepPlan(streams=StreamWork([0, 1], [start, start]))) == expected
        assert stage_of(StepPlan(work=[SlotWork(0, start, 1, [3], [], is_sampled=True)])) == expected
        assert stage_of(StepPlan(streams=StreamWork([1], [start]))) == ForwardStage.MOST_LIKELY
        if stop:
            later = StreamWork([0], [start + 2])
            assert stage_of(StepPlan(streams=later)) == (ForwardStage.LOGITS if is_lazy else ForwardStage.DRAWN)
