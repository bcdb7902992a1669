"""Beam search: the rules against transformers', the scheduler's against the rules, with as little memory as can be."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pagewick.attention.cache_spec import CacheSpec
from pagewick.engine.scheduling.beam_search import num_candidates
from tests.engine.all_works import works_of
from tests.engine.books import check_books, check_nothing_is_left
from tests.engine.jobs import VOCAB_SIZE, plain_beam_search
from tests.engine.requests import Simulation, full_spec, recurrent_spec, window_spec

SETTINGS: list[dict[str, Any]] = [
    {"n": 1},
    {"n": 2},
    {"n": 3, "length_penalty": 0.0},
    {"n": 4, "length_penalty": 2.0},
    {"n": 3, "length_penalty": -1.0},
    {"n": 4, "early_stopping": True},
    {"n": 2, "early_stopping": True, "length_penalty": 0.5},
    {"n": 3, "min_tokens": 3},
    {"n": 2, "min_tokens": 6},
]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, initializer_range=0.6, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("num_ends", [1, 3])
def test_the_rules_are_those_of_transformers(model: LlamaForCausalLM, setting: dict[str, Any], num_ends: int) -> None:
    def rank(token_ids: list[int]) -> list[tuple[int, float]]:
        with torch.no_grad():
            logprobs = model(torch.tensor([token_ids])).logits[0, -1].log_softmax(-1)
        return [(int(token_id), float(logprobs[token_id])) for token_id in logprobs.argsort(descending=True)]

    options = {"length_penalty": 1.0, "early_stopping": False, "min_tokens": 0, **setting}
    del options["n"]
    num_ended = 0
    for seed in range(4):
        prompt = Random(seed).choices(range(1, VOCAB_SIZE), k=3)
        # Tokens that the beams come to.
        free = plain_beam_search(prompt, rank, width=3, ends=set(), length=8, **{**options, "min_tokens": 0})
        ends = [*dict.fromkeys(token_ids[2 + seed] for _, _, token_ids in free)][:num_ends]
        found = plain_beam_search(prompt, rank, width=setting["n"], ends={*ends}, length=8, **options)
        generated = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, 3, dtype=torch.int64), num_beams=setting["n"],
            num_return_sequences=setting["n"], max_new_tokens=8, do_sample=False, eos_token_id=ends, use_cache=False,
            length_penalty=options["length_penalty"], early_stopping=options["early_stopping"],
            min_new_tokens=options["min_tokens"] or None, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        sequences = [sequence[3:].tolist() for sequence in generated.sequences]
        assert len(found) == setting["n"]
        for (score, _, token_ids), sequence, expected in zip(
            found, sequences, generated.sequences_scores.tolist() if setting["n"] > 1 else [None], strict=True
        ):
            assert token_ids == sequence[: len(token_ids)]
            assert {*sequence[len(token_ids) :]} <= {ends[0]}, "more than padding"
            # transformers scores in single precision.
            assert expected is None or score == pytest.approx(expected, rel=1e-6)
            num_ended += token_ids[-1] in ends
    assert num_ended > 0


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_scheduler_finds_what_a_plain_search_finds(setting: dict[str, Any]) -> None:
    """Each delta is checked against it; with two kinds of runners, of which one bans early ends itself."""
    simulation = Simulation(num_blocks=[200], max_num_seqs=16)
    for number in range(12):
        simulation.add(
            range(number, number + 7), max_tokens=1 + number, use_beam_search=True, ignore_eos=number % 3 == 0,
            stop_token_ids=[5] if number % 2 else [], logprobs=2 if number % 4 == 0 else None,
            **{**setting, "min_tokens": min(setting.get("min_tokens", 0), 1 + number)},
        )  # fmt: skip
    deltas = simulation.run()
    check_nothing_is_left(simulation)
    for request_deltas in deltas.values():
        assert [delta.choice_index for delta in request_deltas] == [*range(setting["n"])]
        for delta in request_deltas:
            if delta.logprobs is not None:
                assert sum(one.logprob for one in delta.logprobs) == pytest.approx(delta.cumulative_logprob)
                assert all(one.top[0][1] >= one.logprob and len(one.top) == 2 for one in delta.logprobs)


def test_beams_share_what_they_have_in_common() -> None:
    simulation = Simulation(num_blocks=[60])
    simulation.add(range(32), max_tokens=8, use_beam_search=True, n=4)
    num_computed = 0
    while simulation.live:
        simulation.step()
        check_books(simulation)
        num_computed += sum(work.num_tokens for work in works_of(simulation.plan))
        assert simulation.scheduler.refresh_stats().num_referenced_blocks <= 8 + 4 * 3
    assert num_computed == 32 + 7 * 4


LAYOUTS = {
    "full": ([full_spec()], 7),
    "window": ([window_spec(5)], 4),
    "recurrent": ([recurrent_spec(4)], 4),
    "both": ([full_spec(), recurrent_spec(8)], 7),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_others", [0, 3])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_a_search_ends_with_memory_for_one_beam(layout: str, num_others: int, enable_prefix_caching: bool) -> None:
    """Beams that wait for others hold what these need, and others come between them."""
    specs, num_blocks = LAYOUTS[layout]
    simulation = Simulation(
        specs, [num_blocks] * len(specs), budget=11, max_model_len=28, enable_prefix_caching=enable_prefix_caching
    )
    searches = [
        simulation.add(range(number, number + 13), max_tokens=8, use_beam_search=True, n=3) for number in (0, 5)
    ]
    for number in range(num_others):
        simulation.add([number, 2, 3], max_tokens=9, fairness_key=str(number % 2), priority=number % 3 - 1)
    limit = sum(job.num_steps for job in searches) + num_others * 12
    while simulation.live:
        simulation.step()
        check_books(simulation)
        limit -= 1
        assert limit > 0
    assert simulation.num_preemptions > 0
    check_nothing_is_left(simulation)


@pytest.mark.parametrize("specs", [[full_spec()], [recurrent_spec(4)]], ids=["full", "recurrent"])
def test_a_search_ends_with_fewer_slots_or_tokens_than_beams(specs: list[CacheSpec]) -> None:
    for options in ({"max_num_seqs": 2}, {"budget": 2}):
        simulation = Simulation(specs, [40], **options)
        simulation.add(range(9), max_tokens=8, use_beam_search=True, n=4)
        simulation.run()
        check_nothing_is_left(simulation)


def test_a_beam_without_numbers_ends_the_search() -> None:
    simulation = Simulation(num_blocks=[40])
    simulation.add(range(9), max_tokens=8, use_beam_search=True, n=3, fails=(0, 4))
    well = simulation.add(range(9), max_tokens=8)
    deltas = simulation.run()
    assert [(delta.choice_index, delta.error) for delta in deltas["r1"]] == [(index, "made up") for index in range(3)]
    assert len(deltas[well.request.request_id]) == 8
    check_nothing_is_left(simulation)


@pytest.mark.parametrize(("width", "num_ends"), [(1, 0), (3, 0), (3, 1), (2, 5)])
def test_enough_candidates_are_known_if_every_end_is_among_them(width: int, num_ends: int) -> None:
    assert num_candidates(width, num_ends) - width * num_ends >= width


def test_a_beam_that_waits_for_others_gives_way_before_anybody_who_gets_on() -> None:
    """Whatever its priority: those that it waits for may need what it holds, and somebody else may hold the rest."""
    simulation = Simulation(num_blocks=[40], budget=2)
    simulation.add(range(2), max_tokens=8, use_beam_search=True, n=3, priority=-1)
    simulation.add([9, 8], max_tokens=8)
    num_paused = 0
    while simulation.live:
        simulation.step()
        paused = [seq for seq in simulation.running if seq.num_missing_tokens == 0]
        if paused and len(paused) < len(simulation.running):
            num_paused += 1
            assert simulation.scheduler._sequences.victim() in paused
    assert num_paused > 3
