"""The step's tensors against plain loops over what the plans said."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
import pytest
import torch

from pagewick.attention.cache_spec import CacheSpec
from pagewick.engine.batch import SlotSampling, SlotStart, SlotWork, StepPlan, StreamWork
from pagewick.engine.host_batch import Batch, ragged_batch
from pagewick.engine.slots import Slots
from pagewick.sampling_params import SamplingParams
from tests.engine.all_works import works_of
from tests.engine.requests import full_spec, recurrent_spec, window_spec

MAX_MODEL_LEN = 50
CPU = torch.device("cpu")


def sampling(seed: int = 0) -> SlotSampling:
    return SlotSampling(SamplingParams(), seed, choice_index=0, num_prompt_tokens=1)


def make_slots(*specs: CacheSpec, max_num_seqs: int = 4) -> Slots:
    return Slots(specs, max_num_seqs=max_num_seqs, max_model_len=MAX_MODEL_LEN, device=torch.device("cpu"))


@dataclass
class Held:
    """One slot as the test knows it."""

    token_ids: list[int]
    tables: list[list[int]]
    num_computed_tokens: int
    has_history: bool
    is_last_sampled: bool = False
    new: list[list[int]] = field(default_factory=list)


class PlanMaker:
    """Random plans that a scheduler could have made."""

    def __init__(self, specs: list[CacheSpec], max_num_seqs: int, seed: int) -> None:
        self.random = Random(seed)
        self.specs = specs
        self.max_num_seqs = max_num_seqs
        self.held: dict[int, Held] = {}

    def plan(self) -> StepPlan:
        plan = StepPlan()
        slots = self.random.sample(range(self.max_num_seqs), self.random.randint(1, self.max_num_seqs))
        for slot in slots:
            if slot not in self.held or self.random.random() < 0.2 or self._is_full(slot):
                plan.starts.append(self._start(slot))
            work = self._work(slot)
            if work.token_ids is None and work.is_sampled and self.random.random() < 0.7:
                if any(work.new_block_ids):
                    plan.streams.new_block_ids[len(plan.streams.slots)] = work.new_block_ids
                plan.streams.slots.append(slot)
                plan.streams.starts.append(work.start)
            else:
                plan.work.append(work)
        return plan

    def _is_full(self, slot: int) -> bool:
        return self.held[slot].num_computed_tokens == MAX_MODEL_LEN

    def _start(self, slot: int) -> SlotStart:
        num_hit = 4 * self.random.randint(0, 4)
        tables = [[self._block() for _ in range(num_hit // spec.block_size)] for spec in self.specs]
        if len(tables) > 1 and tables[1]:
            tables[1][0] = -1
        token_ids = [self.random.randrange(1000) for _ in range(num_hit + 1 + self.random.randrange(20))]
        # All tokens of a sequence that has run before may be known; at least one of them must still be computed.
        has_history = self.random.random() < 0.5
        self.held[slot] = Held(token_ids, tables, num_hit, has_history)
        history = list(token_ids) if has_history else []
        return SlotStart(slot, sampling(slot), [list(table) for table in tables], history)

    def _work(self, slot: int) -> SlotWork:
        held = self.held[slot]
        start, missing = held.num_computed_tokens, len(held.token_ids) - held.num_computed_tokens
        num_tokens = min(self.random.randint(1, missing), MAX_MODEL_LEN - start)
        end = start + num_tokens
        held.new = [
            [self._block() for _ in range(spec.num_blocks(end) - len(table))]
            for spec, table in zip(self.specs, held.tables, strict=True)
        ]
        for table, new in zip(held.tables, held.new, strict=True):
            table += new
        is_last = held.is_last_sampled and num_tokens == 1
        is_sampled = num_tokens == missing
        work = SlotWork(slot, start, num_tokens, None if is_last else held.token_ids[start:end], held.new, is_sampled)
        held.num_computed_tokens = end
        held.is_last_sampled = False
        return work

    def accept(self, slot: int, token_ids: list[int]) -> None:
        """Add sampled tokens; all but the last were draft tokens, so they are computed and have blocks."""
        held = self.held[slot]
        held.token_ids += token_ids
        held.num_computed_tokens += len(token_ids) - 1
        held.is_last_sampled = True

    def _block(self) -> int:
        return self.random.randrange(100)


def check(batch: Batch, plan: StepPlan, maker: PlanMaker) -> None:
    input_ids, positions, cu_seqlens_q, context_lens = [], [], [0], []
    works = works_of(plan, len(maker.specs))
    for work in works:
        for position in range(work.start, work.start + work.num_tokens):
            input_ids.append(maker.held[work.slot].token_ids[position])
            positions.append(position)
        cu_seqlens_q.append(len(input_ids))
        context_lens.append(work.start + work.num_tokens)
    assert batch.input_ids.tolist() == input_ids and batch.input_ids.dtype == torch.int64
    assert batch.positions.tolist() == [positions] and batch.positions.dtype == torch.int64
    assert batch.cu_seqlens_q.tolist() == cu_seqlens_q and batch.cu_seqlens_q.dtype == torch.int32
    assert batch.context_lens.tolist() == context_lens and batch.context_lens.dtype == torch.int32
    for group, spec in enumerate(maker.specs):
        tables = [maker.held[work.slot].tables[group] for work in works]
        slot_mapping = [
            tables[row][position // spec.block_size] * spec.block_size + position % spec.block_size
            for row, work in enumerate(works)
            for position in range(work.start, work.start + work.num_tokens)
        ]
        found = batch.groups[group]
        assert found.slot_mapping.tolist() == slot_mapping and found.slot_mapping.dtype == torch.int64
        assert found.block_tables.dtype == torch.int32 and found.block_tables.shape[0] == len(works)
        assert bool((found.block_tables >= 0).all()), "a kernel might follow a block id below 0"
        for row, table in zip(found.block_tables.tolist(), tables, strict=True):
            assert row[: len(table)] == [max(0, block_id) for block_id in table]


@pytest.mark.parametrize("seed", range(20))
def test_batches_are_what_the_plans_say(seed: int) -> None:
    specs = [[full_spec(4)], [full_spec(2), window_spec(lookback=3, block_size=4)]][seed % 2]
    slots, maker, num_streams = make_slots(*specs), PlanMaker(specs, 4, seed), 0
    for _ in range(25):
        plan = maker.plan()
        check(slots.build(plan).to(CPU), plan, maker)
        num_streams += len(plan.streams.slots)
        for work in works_of(plan, len(specs)):
            held = maker.held[work.slot]
            if work.is_sampled:
                # Several tokens where draft tokens were accepted; all but the last have been computed already.
                num_new = min(maker.random.choice([1, 1, 3]), MAX_MODEL_LEN + 1 - len(held.token_ids))
                token_ids = [maker.random.randrange(1000) for _ in range(num_new)]
                slots.remember([work.slot], [token_ids])
                maker.accept(work.slot, token_ids)
            assert list(slots.history(work.slot)) == (held.token_ids if held.has_history else [])
    assert num_streams > 0


@pytest.mark.parametrize("seed", range(10))
def test_batches_of_streams_that_continue_are_what_the_plans_say(seed: int) -> None:
    """Some streams continue for several steps, then others do. Each gets most of its blocks before its turn."""
    specs = [[full_spec(4)], [full_spec(2), window_spec(lookback=3, block_size=8)]][seed % 2]
    slots, maker = make_slots(*specs), PlanMaker(specs, 4, seed)
    for slot in range(4):
        start = maker._start(slot)
        held = maker.held[slot]
        for spec, table, mine in zip(specs, start.block_tables, held.tables, strict=True):
            ahead = [maker._block() for _ in range(spec.num_blocks(MAX_MODEL_LEN - 8) - len(table))]
            table += ahead
            mine += ahead
        work = SlotWork(slot, held.num_computed_tokens, 0, [], [[] for _ in specs], True)
        work.token_ids = held.token_ids[work.start :]
        work.num_tokens = len(work.token_ids)
        held.num_computed_tokens = len(held.token_ids)
        slots.build(StepPlan(starts=[start], work=[work]))
        slots.remember([slot], [[slot + 1]])
        maker.accept(slot, [slot + 1])
    chosen, num_steps = [0, 1, 2, 3], 0
    while chosen and num_steps < 30:
        if maker.random.random() < 0.15:
            chosen = maker.random.sample(range(4), maker.random.randint(1, 4))
        chosen = [slot for slot in chosen if not maker._is_full(slot)]
        plan = StepPlan()
        for slot in chosen:
            work = maker._work(slot)
            if any(work.new_block_ids):
                plan.streams.new_block_ids[len(plan.streams.slots)] = work.new_block_ids
            plan.streams.slots.append(slot)
            plan.streams.starts.append(work.start)
        if not chosen:
            break
        num_steps += 1
        check(slots.build(plan).to(CPU), plan, maker)
        token_ids = [maker.random.randrange(1000) for _ in chosen]
        slots.remember_last(np.array(chosen), torch.tensor(token_ids))
        for slot, token_id in zip(chosen, token_ids, strict=True):
            maker.accept(slot, [token_id])
    assert num_steps > 5


def test_a_stream_that_continues_elsewhere_is_not_taken_for_the_next_token() -> None:
    slots = make_slots(full_spec(8))
    slots.build(StepPlan(starts=[SlotStart(0, sampling(), [[5]])], work=[SlotWork(0, 0, 1, [3], [[]], True)]))
    for start in (1, 2, 6):
        plan = StepPlan()
        plan.streams.slots, plan.streams.starts = [0], [start]
        batch = slots.build(plan)
        assert (batch.positions.tolist(), batch.context_lens.tolist()) == ([[start]], [start + 1])
        assert batch.slot_mappings[0].tolist() == [5 * 8 + start]


def test_of_states_the_batch_has_the_one_before_and_the_one_to_store() -> None:
    slots = make_slots(full_spec(4), recurrent_spec(8))
    starts = [SlotStart(0, sampling(), [[], [-1]]), SlotStart(2, sampling(), [[5, 6], [4]])]
    works = [SlotWork(0, 0, 2, [7, 8], [[3], [-1, 9]], False), SlotWork(2, 8, 1, [7], [[2], [4, 1]], True)]
    batch = slots.build(StepPlan(starts=starts, work=works))
    assert batch.block_tables[1].tolist() == [[0, 9, 0], [4, 1, 0]]
    assert batch.slot_mappings[1].tolist() == [9, 9, 1]
    assert batch.block_tables[0].tolist() == [[3, 0, 0], [5, 6, 2]]
    # They are said anew in every step.
    works = [
        SlotWork(2, 9, 3, [1, 2, 3], [[], [1, 1]], True, num_draft_tokens=1, num_stored=2),
        SlotWork(0, 2, 1, [5], [[], [9, 8]], False),
    ]
    batch = slots.build(StepPlan(work=works))
    assert batch.block_tables[1].tolist() == [[1, 1, 2], [9, 8, 0]]
    assert batch.slot_mappings[1].tolist() == [1, 1, 1, 8]
    assert batch.to(CPU).groups[1].block_tables.dtype == torch.int32
    # A stream in the place of such a sequence stores the state after its token.
    batch = slots.build(StepPlan(streams=StreamWork([2], [11], {0: [[], [1, 1]]})))
    assert batch.block_tables[1].tolist() == [[1, 1, 0]]


def test_a_plan_without_a_batch_is_remembered_all_the_same() -> None:
    slots = make_slots(full_spec(4))
    plan = StepPlan(
        starts=[SlotStart(2, sampling(), [[5]], [7, 8, 9, 6, 4], 3.5)],
        work=[SlotWork(2, 4, 1, [4], [[9]], True)],
    )
    slots.apply(plan)
    assert slots.mirostat_mu[2] == 3.5
    batch = slots.build(StepPlan(work=[SlotWork(2, 4, 1, [4], [[]], True)]))
    assert batch.block_tables[0].tolist() == [[5, 9]]
    assert batch.slot_mappings[0].tolist() == [9 * 4]
    assert list(slots.history(2)) == [7, 8, 9, 6, 4]


def test_a_slot_that_starts_again_has_nothing_of_the_sequence_before() -> None:
    slots = make_slots(full_spec(4))
    slots.build(
        StepPlan(starts=[SlotStart(0, sampling(), [[1, 2]], [3] * 9, 1.0)], work=[SlotWork(0, 8, 1, [3], [[4]], True)])
    )
    slots.remember([0], [[11]])
    batch = slots.build(StepPlan(starts=[SlotStart(0, sampling(), [[]])], work=[SlotWork(0, 0, 1, [5], [[7]], True)]))
    assert batch.block_tables[0].tolist() == [[7]]
    assert (list(slots.history(0)), slots.mirostat_mu[0]) == ([], None)
    slots.remember([0], [[12]])
    assert list(slots.history(0)) == []


def test_a_batch_of_text_has_one_axis_and_nothing_given() -> None:
    host = ragged_batch(np.arange(3), starts=[4], num_tokens=[3], block_tables=[], specs=[])
    assert host.is_text and host.positions.tolist() == [[4, 5, 6]]
    batch = host.to(CPU)
    assert batch.inputs_embeds is None and batch.embeds_mask is None


def test_given_embeddings_and_three_axes_reach_the_device() -> None:
    host = ragged_batch(np.arange(3), starts=[4], num_tokens=[3], block_tables=[], specs=[])
    given, positions = torch.randn(3, 5), np.array([[4, 4, 5], [4, 4, 6], [4, 5, 7]])
    with_image = replace(host, inputs_embeds=given, embeds_mask=np.array([False, True, False]), positions=positions)
    assert not with_image.is_text
    assert not replace(host, positions=positions).is_text
    batch = with_image.to(CPU)
    assert batch.inputs_embeds is not None and torch.equal(batch.inputs_embeds, given)
    assert batch.embeds_mask is not None and batch.embeds_mask.tolist() == [False, True, False]
    assert batch.embeds_mask.dtype == torch.bool
    assert batch.positions.tolist() == positions.tolist()


def test_sampling_parameters_are_those_of_the_slot_s_last_start() -> None:
    slots = make_slots(full_spec())
    for seed in (5, 6):
        starts = [SlotStart(1, sampling(seed), [[]])]
        slots.build(StepPlan(starts=starts, work=[SlotWork(1, 0, 1, [7], [[0]], True)]))
        assert slots.sampling(1).seed == seed
    with pytest.raises(AssertionError):
        slots.sampling(0)


def test_a_sequence_may_be_as_long_as_the_model_allows() -> None:
    slots = make_slots(full_spec(4))
    work = SlotWork(0, 0, MAX_MODEL_LEN, [*range(MAX_MODEL_LEN)], [[*range(13)]], True)
    batch = slots.build(StepPlan(starts=[SlotStart(0, sampling(), [[]])], work=[work]))
    assert batch.slot_mappings[0].tolist() == [*range(MAX_MODEL_LEN)]
