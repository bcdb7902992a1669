"""LoRA adapters: the tokens of PEFT's, however requests with different adapters are served beside each other."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from pagewick.engine.messages import EngineRequest
from pagewick.errors import InvalidRequestError, ModelLoadError
from pagewick.kernels import cpu
from tests.engine.exactness import EvenTokens
from tests.engine.serving import Answers, answers_of, assert_same, record_plans, request, running, serve
from tests.models.checkpoints import write_checkpoint
from tests.models.lora_adapters import adapted, write_adapters
from tests.models.predicting import Predicting

exact = pytest.mark.skipif(cpu.library() is None, reason="needs the native library: make install")

OPTIONS: dict[str, Any] = {"block_size": 8, "max_model_len": 96, "dtype": "float32", "num_kv_blocks": 100}
# The adapter of each prompt; the first two prompts are equal.
ADAPTERS = ["wide", "", "narrow", "wide", ""]


def prompts() -> list[list[int]]:
    random = Random(5)
    first = [random.randrange(2, 180) for _ in range(21)]
    return [first, first, first, *([random.randrange(2, 180) for _ in range(length)] for length in (1, 40))]


def requests(adapters: list[str] | None = None) -> list[EngineRequest]:
    wanted = zip(prompts(), ADAPTERS if adapters is None else adapters, strict=True)
    return [
        request(prompt, f"r{number}", temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=0, adapter=adapter)
        for number, (prompt, adapter) in enumerate(wanted)
    ]


def write(name: str, directory: Path) -> nn.Module:
    """Write a model and two adapters for it."""
    model = write_checkpoint(name, directory / "model")
    write_adapters(model, directory)
    return model


def modules(directory: Path) -> tuple[str, ...]:
    return tuple(f"{name}={directory / name}" for name in ("wide", "narrow"))


def assert_peft_agrees(model: nn.Module, directory: Path, found: Answers) -> None:
    for number, (prompt, adapter) in enumerate(zip(prompts(), ADAPTERS, strict=True)):
        answer = found[f"r{number}", 0]
        with adapted(model, directory / adapter if adapter else None) as logits_of:
            logits = logits_of([*prompt, *answer.token_ids])[len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer.token_ids, number
        logprobs = torch.tensor([step.logprob for step in answer.logprobs])
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(answer.token_ids).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(logprobs, chosen, atol=2e-3, rtol=0)


@pytest.mark.parametrize(
    "name",
    ["llama", "phi-3-mini-4k", "starcoder", "qwen2-moe", "qwen3.5", "deepseek-v2-lite", "deepseek-v3", "gemma-3n",
     "gemma-4-e2b", "qwen3-vl", "gemma-3-multimodal", "olmo-2", "phi-2", "granite-moe",
     "gpt2", "pythia", "falcon-40b", "mistral-large-4"],
)  # fmt: skip
def test_tokens_and_logprobs_are_those_of_peft(name: str, tmp_path: Path) -> None:
    model = write(name, tmp_path)
    with running(tmp_path / "model", **OPTIONS, lora_modules=modules(tmp_path)) as engine:
        found = serve(engine, requests())
    assert_peft_agrees(model, tmp_path, found)
    # The adapters matter.
    assert len({tuple(found[f"r{number}", 0].token_ids) for number in range(3)}) == 3


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("llama")
    write("llama", found)
    return found


@pytest.fixture(scope="module")
def alone(directory: Path) -> Answers:
    """The answer to each request by an engine of its own."""
    found: Answers = {}
    for one in requests():
        with running(
            directory / "model", **OPTIONS, lora_modules=modules(directory), enable_prefix_caching=False
        ) as engine:
            found |= serve(engine, [one])
    return found


@exact
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 64, "max_steps_in_flight": 2},
        {"max_num_seqs": 2, "num_kv_blocks": 24},
        {"num_threads": 2},
        {"max_lora_rank": 64, "max_loras": 9},
        {"speculative_method": "ngram"},
    ],
)
def test_however_they_are_served(directory: Path, alone: Answers, options: dict[str, Any]) -> None:
    with running(directory / "model", **{**OPTIONS, **options}, lora_modules=modules(directory)) as engine:
        plans = record_plans(engine)
        # A second time, when steps of these sizes are recorded.
        for _ in range(2):
            assert_same(serve(engine, requests(), arrivals=[0, 1, 1, 3, 6]), alone)
    assert {start.adapter for plan in plans for start in plan.starts} == {-1, 0, 1}


@exact
def test_a_layer_that_predicts_tokens_has_no_adapter(tmp_path: Path) -> None:
    """It serves all of them as it is: its draft tokens may be worse, and the tokens are the same."""
    made = Predicting("deepseek-v3")
    made.write(tmp_path / "model")
    del made.whole.model.layers[-1]
    write_adapters(made.whole, tmp_path)
    with running(tmp_path / "model", **OPTIONS, lora_modules=modules(tmp_path)) as engine:
        alone = serve(engine, requests())
    with running(tmp_path / "model", **OPTIONS, lora_modules=modules(tmp_path), speculative_method="mtp") as engine:
        assert_same(serve(engine, requests()), alone)
        assert engine.stats().num_draft_tokens > 8
    assert len({tuple(alone[f"r{number}", 0].token_ids) for number in range(3)}) == 3


@exact
def test_an_engine_without_adapters_gives_the_same_bits(directory: Path, alone: Answers) -> None:
    plain = [one for one in requests() if not one.adapter]
    with running(directory / "model", **OPTIONS) as engine:
        assert_same(serve(engine, plain), {(one.request_id, 0): alone[one.request_id, 0] for one in plain})


@exact
def test_a_prefix_is_found_again_for_its_own_adapter_only(directory: Path, alone: Answers) -> None:
    with running(directory / "model", **OPTIONS, lora_modules=modules(directory)) as engine:
        hits = []
        for number in (0, 1, 2, 0, 1, 2):
            assert_same(serve(engine, [requests()[number]]), {(f"r{number}", 0): alone[f"r{number}", 0]})
            hits.append(engine.stats().prefix_cache_hits)
    # Two whole blocks of 21 tokens.
    assert hits == [0, 0, 0, 16, 32, 48]


def test_two_ranks(directory: Path, alone: Answers) -> None:
    options = {**OPTIONS, "tensor_parallel_size": 2}
    with running(directory / "model", **options, lora_modules=modules(directory)) as engine:
        found = serve(engine, requests())
        with pytest.raises(ModelLoadError, match="holds no LoRA adapter"):
            engine.load_adapter("other", str(directory / "model"))
        engine.load_adapter("again", str(directory / "wide"))
        found |= serve(engine, [msgspec.structs.replace(requests()[3], request_id="more", adapter="again")])
    for number in range(len(ADAPTERS)):
        assert found[f"r{number}", 0].token_ids == alone[f"r{number}", 0].token_ids
    assert found["more", 0].token_ids == alone["r3", 0].token_ids


@exact
def test_adapters_come_and_go(directory: Path, alone: Answers) -> None:
    """A request keeps the adapter with which it began, and its place is given away only when the request is done."""
    first, plain, narrow, later, _ = requests()
    with running(directory / "model", **OPTIONS, enable_lora=True, max_loras=2) as engine:
        with pytest.raises(InvalidRequestError, match="there is no adapter 'wide'; loaded: none"):
            engine.add(first)
        engine.load_adapter("wide", str(directory / "wide"))
        engine.add(first)
        engine.add(plain)
        deltas = [delta for _ in range(6) for delta in engine.step()]
        engine.unload_adapter("wide")
        with pytest.raises(InvalidRequestError, match="there is no adapter 'wide'; loaded: none"):
            engine.add(later)
        engine.load_adapter("narrow", str(directory / "narrow"))
        with pytest.raises(InvalidRequestError, match="room for 2 adapters, and all of it is used"):
            engine.load_adapter("wide", str(directory / "wide"))
        engine.add(narrow)
        while engine.has_work:
            deltas += engine.step()
        assert_same(answers_of(deltas), {(f"r{number}", 0): alone[f"r{number}", 0] for number in range(3)})
        engine.load_adapter("wide", str(directory / "wide"))
        with pytest.raises(InvalidRequestError, match="'wide' is loaded already"):
            engine.load_adapter("wide", str(directory / "narrow"))
        assert_same(serve(engine, [later]), {("r3", 0): alone["r3", 0]})
        assert engine.info.adapters == {name: str(directory / name) for name in ("narrow", "wide")}
        engine.unload_adapter("narrow")
        with pytest.raises(ModelLoadError, match="holds no LoRA adapter"):
            engine.load_adapter("wide", str(directory), replaces=True)
        assert_same(serve(engine, [later]), {("r3", 0): alone["r3", 0]})
        engine.load_adapter("wide", str(directory / "narrow"), replaces=True)
        found = serve(engine, [msgspec.structs.replace(narrow, adapter="wide")])
        assert_same(found, {("r2", 0): alone["r2", 0]})


@exact
def test_the_engine_goes_on_when_an_adapter_cannot_be_read(
    directory: Path, alone: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("of a kind that no check has foreseen")

    with running(directory / "model", **OPTIONS, enable_lora=True) as engine:
        engine.load_adapter("wide", str(directory / "wide"))
        engine.add(requests()[0])
        deltas = engine.step()
        monkeypatch.setattr("pagewick.engine.adapter_loading.read_adapter", fail)
        with pytest.raises(ModelLoadError, match="narrow failed: RuntimeError: of a kind that no check has foreseen\n"):
            engine.load_adapter("narrow", str(directory / "narrow"))
        while engine.has_work:
            deltas += engine.step()
    assert_same(answers_of(deltas), {("r0", 0): alone["r0", 0]})


@pytest.mark.parametrize(("num_ranks", "depth"), [(1, 1), (1, 2), (2, 2)])
def test_an_adapter_comes_between_the_steps_of_constrained_requests(
    num_ranks: int, depth: int, directory: Path
) -> None:
    """Steps in flight are finished before: other ranks wait for their masks. Nobody misses a delta."""
    options = {**OPTIONS, "tensor_parallel_size": num_ranks, "max_steps_in_flight": depth, "enable_lora": True}
    options |= {"constraint_factory": lambda _: EvenTokens(193), "max_loras": 1}
    wanted = [
        request(prompt, f"r{number}", temperature=0.0, max_tokens=20, ignore_eos=True, constraint="even" * (number % 2))
        for number, prompt in enumerate(prompts())
    ]
    with running(directory / "model", **options) as engine:
        expected = serve(engine, wanted)
        deltas = []
        for one in wanted:
            engine.add(one)
        for _ in range(8):
            deltas += engine.step()
            engine.load_adapter("wide", str(directory / "wide"))
            engine.unload_adapter("wide")
        while engine.has_work:
            deltas += engine.step()
        found = answers_of(deltas)
    assert found == expected
    assert all(token_id % 2 == 0 for token_id in found["r1", 0].token_ids)


@exact
def test_the_adapter_of_requests_that_name_none(directory: Path, alone: Answers) -> None:
    named = [msgspec.structs.replace(one, adapter="wide") for one in requests()]
    unnamed = [msgspec.structs.replace(one, adapter="") for one in requests()]
    with running(directory / "model", **OPTIONS, lora_modules=modules(directory)) as engine:
        expected = serve(engine, named)
    with running(
        directory / "model", **OPTIONS, lora=str(directory / "wide"), lora_modules=modules(directory)
    ) as engine:
        assert set(engine.info.adapters) == {"wide", "narrow"}
        assert_same(serve(engine, unnamed), expected)
        narrow = serve(engine, [requests()[2]])
    assert_same(narrow, {("r2", 0): alone["r2", 0]})


def test_weights_that_are_quantized_at_load(directory: Path) -> None:
    """The product with an adapter does not depend on the format of the weight."""
    with running(directory / "model", **OPTIONS, lora_modules=modules(directory), quantization="q8_0") as engine:
        found = serve(engine, requests())
    assert len({tuple(found[f"r{number}", 0].token_ids) for number in range(3)}) == 3
