"""The draft model's tokens are those of the same model computed anew over the whole sequence, by transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pagewick.attention.cache_spec import CacheSpec
from pagewick.config import EngineConfig
from pagewick.engine.batch import SlotSampling
from pagewick.engine.cache.kv_cache import CacheGroup
from pagewick.engine.model_loading import load_model, read_model_config
from pagewick.engine.sampling.traits import SampleRow
from pagewick.engine.speculation import draft_model
from pagewick.engine.speculation.draft_model import DraftModel
from pagewick.engine.speculation.draft_vocabulary import check_same_tokens, check_vocabulary
from pagewick.engine.speculation.drafting import Drafter, DraftRequest
from pagewick.errors import ConfigError, ModelLoadError
from pagewick.kernels import recorded_steps
from pagewick.models.config import ModelConfig
from pagewick.parallel.collectives import Collectives
from pagewick.sampling_params import SamplingParams
from tests.engine.sample_rows import sample
from tests.layers.ranks import ThreadCollectives, on_ranks
from tests.models.checkpoints import write_checkpoint

VOCAB_SIZE = 193
MAX_MODEL_LEN = 200
BLOCK_SIZE = 8
NUM_PROMPT_TOKENS = 5


class Oracle:
    """The checkpoint in transformers, without cache and batches; it shares nothing with the tested code."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model: nn.Module = write_checkpoint("qwen3", directory)
        self._next: dict[Any, int] = {}

    def next_token(self, token_ids: Sequence[int], sampling: SlotSampling) -> int:
        key = (tuple(token_ids), repr(sampling))
        if key not in self._next:
            with torch.no_grad():
                logits = self.model(torch.tensor([list(token_ids)]), use_cache=False).logits[0, -1:]
            row = SampleRow(sampling, len(token_ids), list(token_ids))
            self._next[key] = int(sample(logits, [row]).token_ids)
        return self._next[key]

    def draft_tokens(self, request: DraftRequest, max_len: int = MAX_MODEL_LEN) -> list[int]:
        token_ids = list(request.token_ids)
        for _ in range(min(request.num_tokens, max_len - len(token_ids))):
            token_ids.append(self.next_token(token_ids, request.sampling))
        return token_ids[len(request.token_ids) :]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(tmp_path_factory.mktemp("qwen3"))


def make_draft(
    directory: Path, *, num_blocks: int = 200, max_model_len: int = MAX_MODEL_LEN, target_vocab_size: int = VOCAB_SIZE,
    collectives: Collectives | None = None, **options: Any,
) -> DraftModel:  # fmt: skip
    config = EngineConfig(
        model=str(directory), device="cpu", num_threads=1, block_size=BLOCK_SIZE, max_num_seqs=8, **options
    )
    target = replace(read_model_config(directory), vocab_size=target_vocab_size)
    draft = DraftModel(
        config, collectives or Collectives.single(), torch.device("cpu"), target=target, target_directory=directory
    )
    draft.allocate([num_blocks] * len(draft.groups), max_model_len)
    return draft


def sampling(number: int, **params: Any) -> SlotSampling:
    """Greedy, sampled, or looking back, by number; all that a token depends on differs."""
    kind: dict[str, Any] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.95},
        {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.5, "presence_penalty": 0.5},
    ][number % 3]
    return SlotSampling(
        params=SamplingParams(**{**kind, **params}),
        seed=1000 + number,
        choice_index=number % 2,
        num_prompt_tokens=NUM_PROMPT_TOKENS,
    )


def tokens(seed: int, length: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(2, VOCAB_SIZE) for _ in range(length)]


@dataclass
class Computed:
    """Records the inputs of a model, batch by batch: (position, token) of every token."""

    batches: list[list[tuple[int, int]]] = field(default_factory=list)

    def watch(self, model: nn.Module) -> None:
        model.register_forward_pre_hook(self._record)

    def _record(self, model: nn.Module, arguments: tuple[Any, ...]) -> None:
        batch = arguments[0]
        self.batches.append(list(zip(batch.positions[0].tolist(), batch.input_ids.tolist(), strict=True)))


def num_free_blocks(draft: DraftModel) -> list[int]:
    return [len(free) for free in draft._blocks._free]


LENGTHS = (1, 7, 8, 9, 16, 31, 64)


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_draft_tokens_in_a_batch_of_all_kinds(oracle: Oracle, num_tokens: int) -> None:
    draft: Drafter = make_draft(oracle.directory)
    requests = [
        DraftRequest(slot, tokens(slot, length), sampling(slot), num_tokens) for slot, length in enumerate(LENGTHS)
    ]
    found = draft.propose(requests)
    assert found == [oracle.draft_tokens(request) for request in requests]
    # The kinds do differ: not all tokens are those of a greedy draft.
    greedy = [oracle.draft_tokens(replace(request, sampling=sampling(0))) for request in requests]
    assert sum(a != b for a, b in zip(found, greedy, strict=True)) >= 2


def test_each_request_has_a_number_of_its_own(oracle: Oracle) -> None:
    draft = make_draft(oracle.directory)
    requests = [DraftRequest(slot, tokens(slot, 10), sampling(slot), slot) for slot in range(6)]
    assert draft.propose(requests) == [oracle.draft_tokens(request) for request in requests]
    assert draft.propose([]) == []


@pytest.mark.parametrize("number", range(3))
def test_the_served_model_itself_is_always_right(oracle: Oracle, number: int) -> None:
    """It proposes the tokens that it would sample itself, so all four draft tokens of every step are accepted."""
    prompt = tokens(number, NUM_PROMPT_TOKENS)
    drawn = oracle.draft_tokens(DraftRequest(0, prompt, sampling(number), 40))
    draft = make_draft(oracle.directory)
    for start in range(0, 36, 5):
        request = DraftRequest(3, prompt + drawn[:start], sampling(number), 4)
        assert draft.propose([request]) == [drawn[start : start + 4]]


def test_only_what_is_new_is_computed(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """All, some or none of the draft tokens are accepted; rejected ones are overwritten.

    The sequence may also have continued without the draft, so that a rejected token lies further back.
    """
    # A recorded step does not call the model, which is where batches are noted.
    monkeypatch.setattr(recorded_steps, "can_record", lambda device: False)
    draft = make_draft(oracle.directory)
    sequence = tokens(1, 20)
    (drafted,) = draft.propose([DraftRequest(0, sequence, sampling(0), 4)])
    computed = Computed()
    computed.watch(draft.model)
    # The last of four draft tokens is never computed, because no token after it is wanted.
    for num_accepted, more, num_missing in (
        (4, [], 2), (2, [], 1), (0, [], 1), (3, [], 1), (0, [9, 8], 3), (1, drafted, 5), (4, [7], 3), (3, [6, 5, 4], 4),
    ):  # fmt: skip
        wrong = (drafted[num_accepted] if num_accepted < 4 else 7) % 100 + 50
        sequence = [*sequence, *drafted[:num_accepted], wrong, *more]
        computed.batches.clear()
        request = DraftRequest(0, sequence, sampling(0), 4)
        (drafted,) = draft.propose([request])
        assert drafted == oracle.draft_tokens(request)
        expected = list(enumerate(sequence))[-num_missing:]
        assert computed.batches[0] == expected
        assert computed.batches[1:] == [[(len(sequence) + i, drafted[i])] for i in range(3)]


def test_the_same_sequence_again(oracle: Oracle) -> None:
    """The sequence has not grown although draft tokens were drafted; also with another number of them."""
    draft = make_draft(oracle.directory)
    for num_tokens in (4, 4, 1, 6):
        request = DraftRequest(0, tokens(4, 17), sampling(1), num_tokens)
        assert draft.propose([request]) == [oracle.draft_tokens(request)]


def test_another_sequence_in_the_slot(oracle: Oracle) -> None:
    """The new sequence may begin with the same tokens, be shorter, or consist of the draft tokens."""
    draft = make_draft(oracle.directory)
    first = DraftRequest(2, tokens(1, 30), sampling(1), 4)
    (drafted,) = draft.propose([first])
    for sequence in (tokens(1, 30)[:12], tokens(2, 33), drafted, [*tokens(1, 30), *drafted]):
        draft.start(2)
        request = DraftRequest(2, sequence, sampling(2), 3)
        assert draft.propose([request]) == [oracle.draft_tokens(request)]
    draft.start(2)
    assert num_free_blocks(draft) == [200]


def test_catching_up_in_pieces(oracle: Oracle) -> None:
    """Sixteen tokens per call, in equal shares; who misses less than a share leaves the rest to the other."""
    draft = make_draft(oracle.directory, max_num_batched_tokens=16)
    computed = Computed()
    computed.watch(draft.model)
    long, short = DraftRequest(0, tokens(1, 40), sampling(1), 3), DraftRequest(1, tokens(2, 11), sampling(2), 3)
    assert draft.propose([long, short]) == [[], []]
    assert [len(batch) for batch in computed.batches] == [16]
    computed.batches.clear()
    assert draft.propose([long, short]) == [[], oracle.draft_tokens(short)]
    assert [len(batch) for batch in computed.batches] == [16, 1, 1]  # 3 and 13; then the draft tokens
    assert draft.propose([long]) == [[]]
    assert draft.propose([long, short]) == [oracle.draft_tokens(long), oracle.draft_tokens(short)]


def test_a_budget_smaller_than_the_number_of_sequences(oracle: Oracle) -> None:
    """Those that miss least are served first."""
    draft = make_draft(oracle.directory, max_num_batched_tokens=2)
    requests = [DraftRequest(slot, tokens(slot, 4 - slot), sampling(slot), 2) for slot in range(4)]
    found = [draft.propose(requests) for _ in range(8)]
    assert found[0] == [[], [], [], oracle.draft_tokens(requests[3])]
    assert found[-1] == [[], [], *map(oracle.draft_tokens, requests[2:])]
    assert draft.propose(requests[:2]) == [[], []]


def test_blocks_run_out(oracle: Oracle) -> None:
    """Five blocks of eight tokens: sequences of 20 need three each."""
    draft = make_draft(oracle.directory, num_blocks=5)
    first, second = (DraftRequest(slot, tokens(slot, 20), sampling(slot), 2) for slot in (0, 1))
    assert draft.propose([first, second]) == [oracle.draft_tokens(first), []]
    # One that is not asked for gives up its blocks, and must catch up afterwards.
    assert draft.propose([second]) == [oracle.draft_tokens(second)]
    assert draft.propose([first, second]) == [[], oracle.draft_tokens(second)]
    draft.start(1)
    assert draft.propose([first]) == [oracle.draft_tokens(first)]
    draft.start(0)
    assert num_free_blocks(draft) == [5]


def test_a_sequence_that_outgrows_the_blocks_gives_all_of_them_back(oracle: Oracle) -> None:
    draft = make_draft(oracle.directory, num_blocks=5)
    small, large = DraftRequest(0, tokens(0, 8), sampling(0), 1), DraftRequest(1, tokens(1, 30), sampling(1), 3)
    assert draft.propose([small, large]) == [oracle.draft_tokens(small), oracle.draft_tokens(large)]
    assert num_free_blocks(draft) == [0]
    grown = replace(large, token_ids=[*large.token_ids, *oracle.draft_tokens(large)])
    assert draft.propose([small, grown]) == [oracle.draft_tokens(small), []]
    assert num_free_blocks(draft) == [4]
    never = replace(large, token_ids=tokens(3, 40))
    assert draft.propose([never]) == [[]]
    # It could not have had enough blocks: so nobody lost any for it.
    assert num_free_blocks(draft) == [4]


@pytest.mark.parametrize(("length", "num_draft_tokens"), [(47, 3), (48, 2), (49, 1), (50, 0), (60, 0)])
def test_no_draft_token_beyond_the_context(oracle: Oracle, length: int, num_draft_tokens: int) -> None:
    draft = make_draft(oracle.directory, max_model_len=50)
    request = DraftRequest(0, tokens(0, length), sampling(0), 3)
    assert draft.propose([request]) == [oracle.draft_tokens(request)[:num_draft_tokens]]


def test_a_draft_of_shorter_context(oracle: Oracle, tmp_path: Path) -> None:
    """The served model's --max-model-len is no mistake then; the draft just falls silent."""
    directory = copy_of(oracle.directory, tmp_path, max_position_embeddings=32)
    draft = make_draft(directory, max_model_len=300)
    short, long = DraftRequest(0, tokens(0, 30), sampling(0), 5), DraftRequest(1, tokens(1, 32), sampling(1), 5)
    assert draft.propose([short, long]) == [oracle.draft_tokens(short, max_len=32), []]
    config = EngineConfig(model=str(directory), device="cpu", max_model_len=300)
    target = read_model_config(oracle.directory)
    DraftModel(
        config, Collectives.single(), torch.device("cpu"), target=target, target_directory=oracle.directory
    ).allocate([4], 300)


def test_anything_a_scheduler_may_do(oracle: Oracle) -> None:
    """Sequences come, grow, rest, grow unseen and leave; draft tokens are right or there are none."""
    random = Random(3)
    draft = make_draft(oracle.directory, num_blocks=24, max_num_batched_tokens=24, max_model_len=90)
    held: dict[int, DraftRequest] = {}
    num_right = num_none = 0
    for number in range(120):
        for slot in random.sample(range(5), random.randint(1, 4)):
            if slot not in held or len(held[slot].token_ids) > 80 or random.random() < 0.05:
                draft.start(slot)
                sequence = tokens(number, random.choice((1, 8, 20, 45)))
                held[slot] = DraftRequest(slot, sequence, sampling(number), random.randint(1, 4))
        requests = [held[slot] for slot in random.sample(sorted(held), random.randint(1, len(held)))]
        for request, drafted in zip(requests, draft.propose(requests), strict=True):
            if drafted:
                assert drafted == oracle.draft_tokens(request, max_len=90)
                num_right += 1
            else:
                num_none += 1
            num_accepted = random.choice((0, random.randint(0, len(drafted)), len(drafted)))
            more = tokens(number, random.choice((1, 1, 1, 3)))
            grown = [*request.token_ids, *drafted[:num_accepted], *more]
            held[request.slot] = replace(request, token_ids=grown, num_tokens=random.randint(1, 4))
    assert num_right > 100
    assert num_none > 10
    for slot in range(5):
        draft.start(slot)
    assert num_free_blocks(draft) == [24]


def test_a_smaller_vocabulary(oracle: Oracle) -> None:
    """Parameters may name tokens that the draft does not have; a sequence that has one gets no draft tokens."""
    draft = make_draft(oracle.directory, target_vocab_size=VOCAB_SIZE + 7)
    # With a temperature this high, tokens that it lacks would turn up if they were possible.
    params = {"temperature": 2.0, "logit_bias": {VOCAB_SIZE + 3: 5.0}}
    requests = [DraftRequest(slot, tokens(slot, 9), sampling(3 + slot, **params), 6) for slot in range(6)]
    found = draft.propose(requests)
    assert all(len(drafted) == 6 and max(drafted) < VOCAB_SIZE for drafted in found)
    known = DraftRequest(0, tokens(0, 9), sampling(1), 4)
    foreign = DraftRequest(1, [*tokens(1, 9), VOCAB_SIZE, 5], sampling(1), 4)
    assert draft.propose([known, foreign]) == [oracle.draft_tokens(known), []]
    assert draft.propose([foreign]) == [[]]


def test_logits_that_are_not_numbers_end_the_draft_tokens_of_their_sequence(oracle: Oracle) -> None:
    draft = make_draft(oracle.directory)
    compute_logits = draft.model.compute_logits
    calls = 0

    def broken(hidden_states: Tensor, batch: object) -> Tensor:
        nonlocal calls
        logits = compute_logits(hidden_states, batch)
        calls += 1
        if calls == 3:
            logits[0, 5] = float("nan")
        return logits

    draft.model.compute_logits = broken  # type: ignore[method-assign]
    requests = [DraftRequest(slot, tokens(slot, 9 + slot), sampling(slot), 4) for slot in range(2)]
    first, second = map(oracle.draft_tokens, requests)
    assert draft.propose(requests) == [first[:2], second]
    assert draft.propose(requests) == [first, second]


def test_on_two_ranks(oracle: Oracle) -> None:
    requests = [DraftRequest(slot, tokens(slot, 9 + slot), sampling(slot), 4) for slot in range(3)]
    barrier, board = Barrier(2), [torch.empty(0)] * 2

    def drafted(context: Any) -> list[list[int]]:
        rank = context.collectives.rank
        return make_draft(oracle.directory, collectives=ThreadCollectives(rank, 2, barrier, board)).propose(requests)

    assert on_ranks(2, drafted) == [[oracle.draft_tokens(request) for request in requests]] * 2


def test_layers_that_cannot_drop_a_draft_token_are_refused(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model(
        EngineConfig(model=str(oracle.directory), device="cpu"), Collectives.single(), torch.device("cpu")
    )
    recurrent = CacheSpec(kind="recurrent", block_size=8, block_bytes=8, lookback=1, prefix_reuse="snapshots")
    with_state = replace(loaded, groups=[*loaded.groups, CacheGroup(recurrent, ())])
    monkeypatch.setattr(draft_model, "load_model", lambda *_: with_state)
    with pytest.raises(ConfigError, match=r"--speculative-model.*cannot be taken back"):
        make_draft(oracle.directory)


def model_config(directory: Path, vocab_size: int) -> ModelConfig:
    return replace(read_model_config(directory), vocab_size=vocab_size)


def test_vocabulary_sizes(oracle: Oracle) -> None:
    small, large = model_config(oracle.directory, 100), model_config(oracle.directory, 101)
    check_vocabulary(small, large)
    check_vocabulary(small, small)
    with pytest.raises(ConfigError, match=r"--speculative-model .* 101 .* 100"):
        check_vocabulary(large, small)


def write_tokenizer(directory: Path, content: object) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


def test_vocabularies_are_compared_by_meaning(tmp_path: Path) -> None:
    words = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<end>"}]}
    target = write_tokenizer(tmp_path / "target", words)
    same = [
        {"model": {"vocab": {"b": 1, "a": 0}}},
        {"model": {"vocab": [["a", -1.5], ["b", -2.0], ["<end>", 0.0]]}, "added_tokens": None},
        {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1, "content": "b"}, {"id": 9, "content": "<more>"}]},
    ]
    for content in same:
        check_same_tokens(write_tokenizer(tmp_path / "draft", content), target)
    different = [
        {"model": {"vocab": {"a": 1, "b": 0}}},
        {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<stop>"}]},
        {"model": {"vocab": {"a": 0, "c": 1}}},
    ]
    for content in different:
        with pytest.raises(ConfigError, match=r"--speculative-model .*different vocabularies"):
            check_same_tokens(write_tokenizer(tmp_path / "draft", content), target)


@pytest.mark.parametrize("content", ["{", "[]", '{"model": {}}', '{"model": {"vocab": [1]}}', "[" * 100_000])
def test_a_broken_tokenizer(tmp_path: Path, content: str) -> None:
    target = write_tokenizer(tmp_path / "target", {"model": {"vocab": {"a": 0}}})
    with pytest.raises(ModelLoadError, match=r"draft.tokenizer\.json is not a usable tokenizer"):
        check_same_tokens(write_tokenizer(tmp_path / "draft", content), target)


def test_without_a_tokenizer_nothing_is_compared(tmp_path: Path) -> None:
    target = write_tokenizer(tmp_path / "target", {"model": {"vocab": {"a": 0}}})
    check_same_tokens(tmp_path, target)
    check_same_tokens(target, tmp_path)


def test_a_wrong_draft_is_refused_before_its_weights_are_read(oracle: Oracle, tmp_path: Path) -> None:
    directory = copy_of(oracle.directory, tmp_path)
    write_tokenizer(directory, {"model": {"vocab": {"a": 0}}})
    other = write_tokenizer(tmp_path / "other", {"model": {"vocab": {"b": 0}}})
    config = EngineConfig(model=str(directory), device="cpu")
    target = read_model_config(directory)
    for vocab_size, target_directory, message in (
        (VOCAB_SIZE - 1, directory, "193 .* 192"),
        (VOCAB_SIZE, other, "different vocabularies"),
    ):
        with pytest.raises(ConfigError, match=message):
            DraftModel(
                config, Collectives.single(), torch.device("cpu"),
                target=replace(target, vocab_size=vocab_size), target_directory=target_directory,
            )  # fmt: skip


def copy_of(directory: Path, parent: Path, **changes: Any) -> Path:
    copy = parent / "copy"
    copy.mkdir()
    for file in directory.iterdir():
        (copy / file.name).symlink_to(file)
    config = json.loads((directory / "config.json").read_text())
    (copy / "config.json").unlink()
    (copy / "config.json").write_text(json.dumps({**config, **changes}))
    return copy
