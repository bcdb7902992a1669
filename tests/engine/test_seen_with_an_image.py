"""Engines of a model whose first token and the tokens of an image behind it see each other (Moondream 2)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from PIL import Image

from pagewick.engine.messages import EngineRequest, ImageInput
from pagewick.errors import ConfigError
from pagewick.images.decoding import pictures_of
from pagewick.images.settings_files import read_settings
from tests.engine.serving import Answers, assert_same, record_plans, running, serve
from tests.engine.test_image_requests import Prompt, exact
from tests.images.pictures import noise
from tests.models.checkpoints import write_checkpoint
from tests.models.moondream import Reference

NAME, IMAGE, NUM_TOKENS = "moondream", 6, 25
OPTIONS: dict[str, Any] = {"block_size": 8, "max_model_len": 160, "dtype": "float32", "num_kv_blocks": 120}
# These images are cut into 4, 1 and 5 crops.
PICTURES = [noise(15, 17), noise(9, 40, seed=2), noise(61, 12, seed=3)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    directory = tmp_path_factory.mktemp("moondream")
    return directory, Reference(directory, write_checkpoint(NAME, directory))


@pytest.fixture(scope="module")
def checkpoint(reference: tuple[Path, Reference]) -> Path:
    return reference[0]


def prompt(checkpoint: Path, picture: Image.Image | None, num_tokens: int) -> Prompt:
    """The first token, an image and a random text; texts that differ in length begin alike."""
    random = Random(1)
    text = [random.randrange(7, 180) for _ in range(num_tokens)]
    if picture is None:
        return Prompt([0, *text], [])
    (found,) = pictures_of(picture, read_settings(checkpoint))
    height, width, _ = found.pixels.shape
    image = ImageInput(1, found.num_tokens, height, width, found.pixels.tobytes())
    return Prompt([0, *[IMAGE] * NUM_TOKENS, *text], [image])


SEEN: Sequence[tuple[Image.Image | None, int]] = [
    (PICTURES[0], 9), (PICTURES[1], 9), (None, 30), (PICTURES[2], 1), (PICTURES[0], 13),
]  # fmt: skip


def requests(checkpoint: Path) -> list[EngineRequest]:
    return [prompt(checkpoint, *one).request(f"r{number}") for number, one in enumerate(SEEN)]


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> Answers:
    """The answer to each request by an engine of its own."""
    found: Answers = {}
    for one in requests(checkpoint):
        with running(checkpoint, **OPTIONS, enable_prefix_caching=False) as engine:
            found |= serve(engine, [one])
    return found


def test_tokens_and_logprobs_are_those_of_the_reference(reference: tuple[Path, Reference]) -> None:
    checkpoint, by = reference
    with running(checkpoint, **OPTIONS, max_num_batched_tokens=64) as engine:
        info = engine.info
        assert (info.image_token_id, info.image_fixed_tokens, info.max_image_tokens) == (IMAGE, 25, 26)
        found = serve(engine, requests(checkpoint))
    for number, (picture, length) in enumerate(SEEN):
        one, answer = prompt(checkpoint, picture, length), found[f"r{number}", 0]
        logits = by.logits([*one.token_ids, *answer.token_ids], picture)[len(one.token_ids) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer.token_ids, number
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(answer.token_ids).unsqueeze(1)).squeeze(1)
        logprobs = torch.tensor([step.logprob for step in answer.logprobs])
        torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)
    assert found["r0", 0].logprobs != found["r1", 0].logprobs, "the picture matters"


def test_the_first_token_sees_the_image(reference: tuple[Path, Reference]) -> None:
    """It changes what follows by more than rounding does: the reference with one that does not see it is another."""
    checkpoint, by = reference
    one = prompt(checkpoint, PICTURES[0], 9)
    seeing, blind = (by.logits(one.token_ids, PICTURES[0], num_blind=number) for number in (0, 1))
    assert float((seeing - blind)[-1].abs().max()) > 0.01


@exact
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 26},
        {"max_num_batched_tokens": 27, "max_num_prefill_tokens": 1, "max_steps_in_flight": 2},
        {"max_num_seqs": 2, "num_kv_blocks": 24},
        # The first token has a block of its own, which a text without an image must not share.
        {"block_size": 1, "num_kv_blocks": 600},
    ],
)
def test_however_they_are_served(checkpoint: Path, alone: Answers, options: dict[str, Any]) -> None:
    with running(checkpoint, **{**OPTIONS, **options}) as engine:
        plans = record_plans(engine)
        assert_same(serve(engine, requests(checkpoint), arrivals=[0, 1, 1, 3, 6]), alone)
    assert [start for plan in plans for start in plan.starts if start.images], "images were computed"


@exact
def test_a_preempted_request_computes_its_image_again(checkpoint: Path, alone: Answers) -> None:
    wanted = requests(checkpoint)[:2]
    with running(checkpoint, **{**OPTIONS, "num_kv_blocks": 11, "max_model_len": 80}) as engine:
        plans = record_plans(engine)
        assert_same(serve(engine, wanted), {key: alone[key] for key in alone if key[0] in ("r0", "r1")})
        assert engine.stats().num_preemptions > 0
    assert sum(bool(start.images) for plan in plans for start in plan.starts) > len(wanted)


@exact
@pytest.mark.parametrize(("num_first", "hits"), [(1, 24), (9, 32)])
def test_a_prefix_that_ends_within_the_image_or_behind_it(
    checkpoint: Path, alone: Answers, num_first: int, hits: int
) -> None:
    first, then = prompt(checkpoint, PICTURES[0], num_first), requests(checkpoint)[4]
    with running(checkpoint, **OPTIONS) as engine:
        serve(engine, [first.request("one", max_tokens=1)])
        found = serve(engine, [then])
        assert engine.stats().prefix_cache_hits == hits
        # With another image, and without one, nothing is found.
        others = [requests(checkpoint)[number] for number in (1, 2)]
        found |= serve(engine, others)
        assert engine.stats().prefix_cache_hits == hits
    assert_same(found, {key: alone[key] for key in alone if key[0] in ("r1", "r2", "r4")})


def test_two_ranks_see_the_same(checkpoint: Path, alone: Answers) -> None:
    with running(checkpoint, **OPTIONS, tensor_parallel_size=2) as engine:
        found = serve(engine, requests(checkpoint))
    for key, answer in alone.items():
        assert found[key].token_ids == answer.token_ids


def test_a_step_must_have_room_for_the_image_and_the_token_ahead_of_it(checkpoint: Path) -> None:
    options = {**OPTIONS, "max_num_batched_tokens": 25}
    said = "the largest image has 26\n  give at least 26, or --language-model-only"
    with pytest.raises(ConfigError, match=said), running(checkpoint, **options):
        pass
    with running(checkpoint, **options, language_model_only=True) as engine:
        assert (engine.info.image_token_id, engine.info.max_image_tokens) == (None, 0)
        serve(engine, requests(checkpoint)[2:3])
