"""Models that see images or prompts whole: random requests, of which no step computes such a part in two."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from pagewick.engine.messages import ImageInput
from pagewick.engine.sequence import Sequence
from pagewick.engine.whole_parts import WholeParts, span_of_prompt, spans_of_images
from tests.engine.books import check_books, check_nothing_is_left
from tests.engine.jobs import VOCAB_SIZE
from tests.engine.requests import Simulation, full_spec, window_spec

MAX_IMAGE_TOKENS = 9
DOCUMENT = Random(1).choices(range(VOCAB_SIZE), k=64)
# The images of two documents that begin alike.
IMAGES = [[(2, 9), (13, 5), (18, 1), (30, 9)], [(2, 9), (13, 5), (25, 3)]]


def prompt_with_images(random: Random) -> dict[str, Any]:
    places = random.choice(IMAGES)
    # Behind all tokens of an image that it begins.
    length = random.choice([length for length in range(1, 45) if all(not at < length < at + num for at, num in places)])
    images = [ImageInput(at, num, 1, num, bytes(3 * num)) for at, num in places if at + num <= length]
    keys = [(image.start, image.end, b"image %d" % image.start) for image in images]
    return {"prompt_token_ids": DOCUMENT[:length], "images": images, "extra_keys": keys}


def watch(simulation: Simulation, tally: Counter[str]) -> None:
    """Check every piece of work that the scheduler plans."""
    scheduler = simulation.scheduler
    plan_work = scheduler._plan

    def checked(seq: Sequence, num_tokens: int, *rest: Any) -> None:
        start = seq.num_scheduled_tokens
        end = start + num_tokens
        for image in seq.request.images:
            assert not image.start < end < image.end, "a step ends within an image"
            tally["begun within an image"] += image.start < start < image.end
        budget = rest[-1].budget
        tally["cut before an image"] += num_tokens < budget and any(image.start == end for image in seq.request.images)
        plan_work(seq, num_tokens, *rest)

    scheduler._plan = checked  # type: ignore[method-assign]


@pytest.mark.parametrize("depth", [1, 2])
def test_no_step_ends_within_an_image(depth: int) -> None:
    tally: Counter[str] = Counter()
    for seed in range(60):
        random = Random(seed)
        full = full_spec(random.choice([1, 4]))
        specs = [full_spec(4), window_spec(random.randint(1, 14), 4)] if seed % 2 else [full]
        simulation = Simulation(
            specs,
            [random.randint(18, 40)] * len(specs) if specs[0].block_size == 4 else [random.randint(64, 120)],
            max_num_seqs=random.randint(1, 6),
            budget=random.randint(MAX_IMAGE_TOKENS, 24),
            max_num_prefill_tokens=random.choice([None, 1, 12]),
            whole=WholeParts(MAX_IMAGE_TOKENS, spans_of_images),
            max_model_len=60,
            enable_prefix_caching=random.random() < 0.8,
            depth=depth,
        )
        watch(simulation, tally)
        for number in range(12):
            values = {"max_tokens": random.randint(1, 14), "n": random.choice([1, 1, 3]), **prompt_with_images(random)}
            if random.random() < 0.2:
                values |= {"images": [], "extra_keys": []}
            simulation.add(**values, request_id=f"{seed}-{number}")
            for _ in range(random.randint(0, 3)):
                simulation.step()
                check_books(simulation)
        simulation.run()
        check_nothing_is_left(simulation)
        tally["preemptions"] += simulation.scheduler.refresh_stats().num_preemptions
        simulation.loop.close()
    assert min(tally[event] for event in ("begun within an image", "cut before an image", "preemptions")) > 10, tally


@pytest.mark.parametrize("depth", [1, 2])
def test_no_step_ends_within_the_prompt_of_an_encoder(depth: int) -> None:
    tally: Counter[str] = Counter()
    longest = 30
    for seed in range(60):
        random = Random(seed)
        specs = [full_spec(4), window_spec(random.randint(1, 14), 4)] if seed % 2 else [full_spec(4)]
        simulation = Simulation(
            specs,
            [random.randint(9, 30)] * len(specs),
            max_num_seqs=random.randint(1, 6),
            budget=random.randint(longest, 40),
            max_num_prefill_tokens=random.choice([None, 1, 12]),
            whole=WholeParts(longest, span_of_prompt),
            max_model_len=longest,
            enable_prefix_caching=False,
            depth=depth,
        )
        plan_work = simulation.scheduler._plan

        def checked(seq: Sequence, num_tokens: int, *rest: Any, plan: Any = plan_work) -> None:
            assert (seq.num_scheduled_tokens, num_tokens) == (0, seq.num_prompt_tokens)
            tally["left room"] += num_tokens < rest[-1].budget
            tally["beside others"] += rest[-1].num_sequences > 0
            plan(seq, num_tokens, *rest)

        simulation.scheduler._plan = checked  # type: ignore[method-assign]
        for number in range(12):
            prompt = random.choices(range(VOCAB_SIZE), k=random.randint(1, longest))
            simulation.add(prompt_token_ids=prompt, request_id=f"{seed}-{number}", max_tokens=0)
            for _ in range(random.randint(0, 2)):
                simulation.step()
                check_books(simulation)
        simulation.run()
        check_nothing_is_left(simulation)
        simulation.loop.close()
    assert min(tally.values()) > 50, tally
