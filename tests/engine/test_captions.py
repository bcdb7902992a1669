"""Engines of models that write captions: the tokens of transformers, and the same ones however a request is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagewick.engine.messages import EngineRequest, ImageInput
from pagewick.errors import ConfigError, InvalidRequestError, ModelLoadError, UnsupportedError
from pagewick.kernels import cpu, recorded_steps
from tests.engine.serving import Answers, assert_same, record_plans, request, running, serve
from tests.models.captions import BOS, NUM_TOKENS, PAD, SEP, SIDE, values_of, write_captioner
from tests.models.checkpoints import write_checkpoint

OPTIONS: dict[str, Any] = {"block_size": 8, "dtype": "float32", "num_kv_blocks": 120}
exact = pytest.mark.skipif(cpu.library() is None, reason="needs the native library: make install")


def pixels(seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), np.uint8)


ONE, OTHER = pixels(1), pixels(2)
# Images, and texts behind them.
PROMPTS = [(ONE, [BOS]), (OTHER, [BOS]), (ONE, [BOS, 11, 50, 92]), (OTHER, [BOS, *range(20, 37)]), (pixels(3), [9, 8])]


def caption(number: int, **values: Any) -> EngineRequest:
    image, text = PROMPTS[number]
    given = ImageInput(0, NUM_TOKENS, SIDE, SIDE, image.tobytes())
    values = {"max_tokens": 12, "ignore_eos": True, "temperature": 0.0, "logprobs": 1, **values}
    return request([PAD] * NUM_TOKENS + text, f"r{number}", images=[given], **values)


def captions() -> list[EngineRequest]:
    return [caption(number) for number in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("captioner")
    write_captioner(found)
    return found


@pytest.fixture(scope="module")
def alone(directory: Path) -> Answers:
    """The answer to each request by an engine of its own."""
    found: Answers = {}
    for one in captions():
        with running(directory, **OPTIONS, enable_prefix_caching=False) as engine:
            found |= serve(engine, [one])
    return found


@torch.inference_mode()
def test_captions_are_those_of_transformers(tmp_path: Path) -> None:
    model = write_captioner(tmp_path)
    with running(tmp_path, **OPTIONS, max_num_batched_tokens=48) as engine:
        assert engine.info.max_model_len == NUM_TOKENS + 37 and engine.info.eos_token_ids == [SEP]
        found = serve(engine, captions())
    for number, (image, text) in enumerate(PROMPTS):
        answer = found[f"r{number}", 0]
        ids = torch.tensor([[*text, *answer.token_ids]])
        logits = model(values_of(image), ids).logits[0, len(text) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer.token_ids, number
        assert len(set(answer.token_ids)) > 1
        chosen = torch.log_softmax(logits, -1).gather(1, ids[0, len(text) :, None]).squeeze(1)
        logprobs = torch.tensor([step.logprob for step in answer.logprobs])
        torch.testing.assert_close(logprobs, chosen, atol=1e-4, rtol=0)
    assert found["r0", 0].token_ids != found["r1", 0].token_ids
    # generate drops the last token of a prompt, and begins with bos_token_id.
    by_generate = model.generate(
        values_of(ONE), torch.tensor([[1, 11, 50, 92, SEP]]), max_new_tokens=12, min_new_tokens=12, do_sample=False
    )
    assert by_generate[0].tolist() == [BOS, 11, 50, 92, *found["r2", 0].token_ids]


@exact
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 80, "max_steps_in_flight": 2, "block_size": 32},
        {"max_num_seqs": 2, "num_kv_blocks": 24},
        {"num_threads": 2, "speculative_method": "ngram"},
    ],
)
def test_however_they_are_served(directory: Path, alone: Answers, options: dict[str, Any]) -> None:
    with running(directory, **{**OPTIONS, **options}) as engine:
        assert_same(serve(engine, captions(), arrivals=[0, 1, 1, 3, 6]), alone)


@exact
def test_a_preempted_request_brings_its_image_again(directory: Path, alone: Answers) -> None:
    # Blocks for 160 tokens, and two sequences get 12 more than the 65 that they begin with.
    wanted = captions()[:2]
    with running(directory, **{**OPTIONS, "num_kv_blocks": 19}, enable_prefix_caching=False) as engine:
        plans = record_plans(engine)
        assert_same(serve(engine, wanted), {key: alone[key] for key in alone if key[0] in ("r0", "r1")})
        assert engine.stats().num_preemptions > 0
    assert sum(bool(start.images) for plan in plans for start in plan.starts) > len(wanted)


@exact
def test_another_text_about_an_image_needs_no_encoder(directory: Path, alone: Answers) -> None:
    with running(directory, **OPTIONS) as engine:
        serve(engine, [caption(0)])
        plans = record_plans(engine)
        found = serve(engine, [caption(2)])
        assert engine.stats().prefix_cache_hits == NUM_TOKENS
        assert plans[0].starts[0].images[0].pixels == b""
        assert_same(found, {key: alone[key] for key in found})
        serve(engine, [caption(1)])
        assert engine.stats().prefix_cache_hits == NUM_TOKENS, "another image shares nothing"


def test_steps_are_recorded(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if cpu.library() is None:
        pytest.skip("needs the native library: make install")
    recorded = []
    record = recorded_steps.record
    monkeypatch.setattr(recorded_steps, "record", lambda *args: recorded.append(record(*args)) or recorded[-1])
    with running(directory, **OPTIONS) as engine:
        serve(engine, [caption(0)])
    assert recorded and not any(isinstance(step, str) for _, step in recorded)


def test_choices_and_beams(directory: Path, alone: Answers) -> None:
    with running(directory, **OPTIONS) as engine:
        choices = serve(engine, [caption(0, n=3, temperature=0.9, seed=5)])
        assert len(choices) == 3 and len({tuple(answer.token_ids) for answer in choices.values()}) > 1
        best = serve(engine, [caption(0, use_beam_search=True, n=2, logprobs=None)])
    assert best["r0", 0].cumulative_logprob is not None


def test_two_ranks_see_the_same(directory: Path, alone: Answers) -> None:
    with running(directory, **OPTIONS, tensor_parallel_size=2) as engine:
        found = serve(engine, captions())
    for key, answer in alone.items():
        assert found[key].token_ids == answer.token_ids


def test_quantized_and_other_caches(directory: Path, alone: Answers) -> None:
    for options in ({"quantization": "q8_0"}, {"kv_cache_dtype": "fp8_e4m3"}, {"dtype": "bfloat16"}):
        with running(directory, **{**OPTIONS, **options}) as engine:
            found = serve(engine, captions())
        assert found.keys() == alone.keys()
        first = torch.tensor([found[key].logprobs[0].logprob - alone[key].logprobs[0].logprob for key in alone])
        assert 0 < float(first.abs().max()) < 0.5, options


def test_prompts_that_are_no_captions_are_refused(directory: Path) -> None:
    image = ImageInput(0, NUM_TOKENS, SIDE, SIDE, ONE.tobytes())
    later = ImageInput(1, NUM_TOKENS, SIDE, SIDE, ONE.tobytes())
    ids = [PAD] * NUM_TOKENS
    with running(directory, **OPTIONS) as engine:
        for prompt, images, said in (
            ([BOS, 5], [], "has 0; send one"),
            ([*ids, BOS], [image, image], "has 2; send"),
            ([BOS, *ids, 5], [later], "tokens of an image first, and then those of a text"),
            (ids, [image], "tokens of an image first"),
            ([*ids, BOS, PAD], [image], "tokens of an image first"),
            ([*ids, BOS], [ImageInput(0, NUM_TOKENS - 1, SIDE, SIDE, ONE.tobytes())], "it needs .* 64 tokens"),
        ):
            with pytest.raises(InvalidRequestError, match=said):
                engine.add(request(prompt, "a", images=images))
        with pytest.raises(UnsupportedError, match="prompts have no log-probabilities"):
            engine.add(caption(0, prompt_logprobs=1))


def test_what_a_captioner_cannot_do_is_refused(directory: Path, tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path)
    for options, kind, said in (
        ({"max_model_len": NUM_TOKENS}, ConfigError, "leaves no room for a caption: its image alone has 64 tokens"),
        ({"language_model_only": True}, ModelLoadError, "writes captions of images, and nothing without"),
        ({"enable_lora": True}, ConfigError, "LoRA adapters of BlipForConditionalGeneration are not supported"),
        ({"speculative_method": "draft", "speculative_model": str(tmp_path)}, ConfigError, "have no draft"),
    ):
        with pytest.raises(kind, match=said), running(directory, **OPTIONS, **options):
            pass
