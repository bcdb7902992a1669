"""Random requests, random engines to serve them, and the answer of each request alone, to compare with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from pagewick.engine import worker
from pagewick.engine.batch import StepPlan, Tier
from pagewick.engine.engine import Engine
from pagewick.engine.messages import EngineRequest, EngineStats
from pagewick.sampling_params import SamplingParams
from tests.engine.serving import Answer, Answers, assert_idle, count_transfers, record_plans, request, serve, start

MAX_LEN = 64
MAX_PROMPT = 40
# Below every vocabulary that is tested.
NUM_TOKENS = 190
FIRST_TOKEN = 2

# Parameters of requests; each is combined with lengths, choices, log-probabilities and options.
GREEDY: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3, "repeat_last_n": 7},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": {5: 4.0, 150: -100.0, 8: 3.0}},
    {"dry_multiplier": 3.0, "dry_base": 2.0, "dry_allowed_length": 1, "dry_breaker_ids": [[9], [30, 31]]},
    {"bad_words": ("some",), "bad_word_ids": [[7], *([token_id] for token_id in range(60, 110)), [20, 21]]},
    {"allowed_token_ids": tuple(range(50, 80))},
    {"constraint": "even"},
]
DRAWN: list[dict[str, Any]] = [
    {},
    {"top_p": 0.9, "top_k": 20},
    {"min_p": 0.05, "repetition_penalty": 1.2},
    {"typical_p": 0.8, "frequency_penalty": 0.7},
    {"top_n_sigma": 1.5, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"bad_words": ("some",), "bad_word_ids": [[3, 4], *([token_id] for token_id in range(100, 130))]},
    {"xtc_probability": 0.5, "top_p": 0.95},
    {"mirostat": 1, "mirostat_tau": 3.0},
    {"mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.3, "presence_penalty": 0.5},
    {"dry_multiplier": 1.0, "dry_allowed_length": 1, "logit_bias": {17: 5.0}},
    {"constraint": "even", "top_k": 50},
]


class EvenTokens:
    """A TokenConstraint: even ids only."""

    is_complete = False

    def __init__(self, vocab_size: int) -> None:
        self._mask = bytes([0b01010101] * -(-vocab_size // 8))

    def allowed_mask(self) -> bytes:
        return self._mask

    def accept(self, token_id: int) -> None:
        assert token_id % 2 == 0


@dataclass
class Model:
    """A served model with two drafts for it, and its answers to single requests, found only once.

    adapters: names of those in `options`.
    """

    directory: str
    drafts: list[str]
    vocab_size: int
    options: dict[str, Any] = field(default_factory=dict)
    adapters: list[str] = field(default_factory=list)
    _alone: dict[bytes, dict[int, Answer]] = field(default_factory=dict)
    _engine: Engine | None = None

    def start(self, **options: Any) -> Engine:
        return start(
            self.directory,
            constraint_factory=lambda _: EvenTokens(self.vocab_size),
            **{"max_model_len": MAX_LEN, **self.options, **options},
        )

    def alone(self, wanted: EngineRequest) -> dict[int, Answer]:
        """Serve a request alone, in an engine with default options; returns its outputs by choice."""
        bare = msgspec.structs.replace(wanted, request_id="alone", options=type(wanted.options)())
        key = msgspec.msgpack.encode(bare)
        if key not in self._alone:
            if self._engine is None or self._engine.has_work:
                self._engine = self.start(enable_prefix_caching=False)
            found = serve(self._engine, [bare])
            assert_idle(self._engine)
            assert all(answer.error is None for answer in found.values())
            self._alone[key] = {index: answer for (_, index), answer in found.items()}
        return self._alone[key]

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()


def documents() -> list[list[int]]:
    """Prompts are cut from these: text without pattern, and one that repeats itself."""
    random = Random(3)
    texts = [[random.randrange(FIRST_TOKEN, NUM_TOKENS) for _ in range(MAX_PROMPT)] for _ in range(3)]
    phrase = texts[0][:5]
    return [*texts, (phrase * MAX_PROMPT)[:MAX_PROMPT]]


DOCUMENTS = documents()


def make_prompt(random: Random) -> list[int]:
    """The beginning of a document, sometimes with an end of its own."""
    length = random.choice([random.randint(1, MAX_PROMPT), random.choice([8, 9, 16, 17, 24, 32, 33])])
    own = [random.randrange(FIRST_TOKEN, NUM_TOKENS) for _ in range(random.choice([0, 0, 1, 3]))]
    return [*random.choice(DOCUMENTS)[:length], *own][-MAX_PROMPT:]


def make_fields(random: Random) -> dict[str, Any]:
    """Fields of SamplingParams and EngineRequest, the seed among them."""
    max_tokens = random.choice([1, 2, random.randint(3, 24), random.randint(12, 24)])
    given: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": random.random() < 0.5, "seed": random.randrange(3)}
    kind = random.choice(["greedy", "greedy", "drawn", "drawn", "drawn", "beams"])
    if kind == "greedy":
        given |= {"temperature": 0.0, **random.choice(GREEDY)}
    elif kind == "drawn":
        given |= {"temperature": 0.8, **random.choice(DRAWN)}
    else:
        given |= {"temperature": 0.0, "use_beam_search": True, "length_penalty": random.choice([0.0, 1.0, 2.0])}
        given["max_tokens"] = max_tokens = min(max_tokens, 10)
    given["n"] = random.choice([1, 1, 2, 3])
    if random.random() < 0.3:
        given["stop_token_ids"] = tuple(range(2, random.randint(3, 23 if kind == "beams" else 50)))
        given["min_tokens"] = random.randint(0, max_tokens)
    for name in ("logprobs", "prompt_logprobs"):
        if random.random() < 0.3:
            given[name] = random.randrange(4)
    return given


def make_options(random: Random) -> dict[str, Any]:
    """How a request is served: nothing that its tokens may depend on."""
    return {
        "priority": random.choice([0, 0, 0, 1, -1]),
        "fairness_key": random.choice(["", "", "a"]),
        "cache_salt": random.choice([None, None, None, "salt"]),
        "session_id": random.choice([None, None, "s1", "s2"]),
    }


@dataclass(repr=False)
class Scene:
    """Requests with their arrivals (numbers of steps), those that are aborted, and the engine that gets them."""

    wanted: list[EngineRequest]
    arrivals: list[int]
    aborts: dict[int, list[str]]
    unwanted_choices: dict[int, list[tuple[str, int]]]
    engine: dict[str, Any]
    num_host_blocks: int
    num_disk_blocks: int
    draft: int | None

    def __repr__(self) -> str:
        """List the values that differ from the defaults, one request per line."""
        lines = [f"{name}={getattr(self, name)!r}" for name in self.__dataclass_fields__ if name != "wanted"]
        for each in self.wanted:
            asked = {f.name: getattr(each.params, f.name) for f in fields(SamplingParams)}
            asked = {name: value for name, value in asked.items() if value != getattr(SamplingParams(), name)}
            lines.append(f"{each.request_id} {each.prompt_token_ids} seed={each.seed} {asked} {each.options}")
            lines[-1] += f" {each.bad_word_ids} {each.dry_breaker_ids} {each.constraint} {each.adapter}"
        return "\n".join(lines)


def make_scene(random: Random, adapters: Sequence[str] = ()) -> Scene:
    wanted, arrivals = [], []
    for number in range(random.randint(2, 9)):
        given = {**make_fields(random), **make_options(random)}
        if adapters:
            given["adapter"] = random.choice(["", *adapters])
        wanted.append(request(make_prompt(random), f"r{number}", **given))
        arrivals.append(random.choice([0, 0, random.randint(0, 40)]))
    ids = [each.request_id for each in wanted]
    aborts = {random.randint(1, 40): [random.choice(ids)] for _ in range(random.choice([0, 0, 1]))}
    choices = {
        random.randint(1, 40): [(random.choice(ids), random.randrange(3))] for _ in range(random.choice([0, 0, 2]))
    }
    block_size = random.choice([4, 8, 16])
    engine: dict[str, Any] = {
        "block_size": block_size,
        "max_num_seqs": random.choice([1, 2, 5, 8, 8, 16]),
        "num_kv_blocks": -(-MAX_LEN // block_size) + random.choice([0, 0, 0, 1, 3, 12]),
    }
    budget = random.choice([1, 3, 5, 16, 30, 64, None, None])
    if budget is not None:
        engine["max_num_batched_tokens"] = budget
    tiers = random.choice(["", "off", "host", "host off", "disk", "host disk"])
    engine["enable_prefix_caching"] = "off" not in tiers
    draft = random.choice([None, 0, 1, 1, 2])
    if draft is not None:
        engine |= {"num_speculative_tokens": random.randint(1, 6), "speculative_max_batch": 8}
    return Scene(
        wanted,
        arrivals,
        aborts,
        choices,
        engine,
        num_host_blocks=random.choice([1, 4, 10, 30]) if "host" in tiers else 0,
        num_disk_blocks=random.choice([2, 10, 30, 60]) if "disk" in tiers else 0,
        draft=draft,
    )


@dataclass
class Tally:
    """Counts events over all scenes: an event that never occurred was not tested."""

    num_scenes: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, stats: EngineStats, plans: list[StepPlan], found: Answers) -> None:
        self.num_scenes += 1
        transfers = count_transfers(plans)
        self.counts.update(
            choices=len(found),
            tokens=sum(len(answer.token_ids) for answer in found.values()),
            steps=stats.num_steps,
            preemptions=stats.num_preemptions,
            prefix_hits=stats.prefix_cache_hits,
            draft_tokens_accepted=stats.num_accepted_tokens,
            draft_tokens_rejected=stats.num_draft_tokens - stats.num_accepted_tokens,
            to_host=transfers[Tier.DEVICE, Tier.HOST],
            from_host=transfers[Tier.HOST, Tier.DEVICE],
            to_disk=transfers[Tier.DEVICE, Tier.DISK] + transfers[Tier.HOST, Tier.DISK],
            from_disk=transfers[Tier.DISK, Tier.DEVICE],
            copies=transfers[Tier.DEVICE, Tier.DEVICE],
            stopped=sum(answer.finish_reason == "stop" for answer in found.values()),
            chunks=sum(not work.is_sampled for plan in plans for work in plan.work),
            adapters=sum(start.adapter >= 0 for plan in plans for start in plan.starts),
        )

    def __str__(self) -> str:
        return f"{self.num_scenes} scenes: " + ", ".join(f"{name} {count}" for name, count in self.counts.items())


def play(model: Model, scene: Scene, disk: Path, tally: Tally, depth: int) -> None:
    """Serve the scene; every choice that was not aborted must be what it is alone, to the last bit.

    depth: steps in flight; whatever is alone is computed with one.
    """
    engine_options = {**scene.engine, "max_steps_in_flight": depth}
    if scene.draft == 0:
        engine_options |= {"speculative_method": "ngram", "ngram_prompt_lookup_min": 1}
    elif scene.draft is not None:
        engine_options["speculative_model"] = model.drafts[scene.draft - 1]
    if scene.num_host_blocks:
        engine_options["swap_space"] = 2**20
    if scene.num_disk_blocks:
        engine_options["kv_cache_disk"] = str(disk)
    with pytest.MonkeyPatch.context() as patch:
        if scene.num_host_blocks:
            # As few as make blocks leave again; a mebibyte, the least there is, holds dozens of these.
            patch.setattr(worker, "blocks_in", lambda groups, num_bytes: [scene.num_host_blocks] * len(groups))
        if scene.num_disk_blocks:
            patch.setattr(
                "pagewick.engine.engine.blocks_in", lambda groups, num_bytes: [scene.num_disk_blocks] * len(groups)
            )
        engine = model.start(**engine_options)
    try:
        plans = record_plans(engine)

        def before_step(number: int) -> None:
            engine.abort(scene.aborts.get(number, []), scene.unwanted_choices.get(number, []))
            assert engine.check_integrity() == []

        found = serve(engine, scene.wanted, arrivals=scene.arrivals, before_step=before_step)
        assert_idle(engine)
        tally.add(engine.stats(), plans, found)
    finally:
        engine.close()
    aborted = {request_id for ids in scene.aborts.values() for request_id in ids}
    unwanted = {choice for choices in scene.unwanted_choices.values() for choice in choices}
    for wanted in scene.wanted:
        for index, answer in model.alone(wanted).items():
            choice = (wanted.request_id, index)
            if wanted.request_id in aborted or (choice in unwanted and found.get(choice) != answer):
                assert_beginning(found.get(choice, Answer()), answer)
            else:
                assert found[choice] == answer, choice


def assert_beginning(found: Answer, expected: Answer) -> None:
    """An aborted choice got what it would have got, as far as it came."""
    assert found.error is None
    assert found.token_ids == expected.token_ids[: len(found.token_ids)]
    assert found.logprobs == expected.logprobs[: len(found.logprobs)]
    assert found.prompt_logprobs == expected.prompt_logprobs[: len(found.prompt_logprobs)]
