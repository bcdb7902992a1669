"""The measurements of benchmarks.gpu. Each returns figures by name; those of time are medians of several runs."""

from __future__ import annotations

import importlib
import itertools
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.gpu_models import FORMATS, SHAPES, Place, RandomSource, running
from benchmarks.gpu_serving import Figures, Sizes, greedy, median, prompt_of, serve
from pagewick.config import EngineConfig
from pagewick.demo import MODEL_DIR
from pagewick.engine.engine import Engine
from pagewick.sampling_params import SamplingParams
from pagewick.text.tokenizer import Tokenizer

TEXT: Final = Path(__file__).with_name("README.md")
# The share of argmaxes that must be the CPU's, and that of responses, whose tokens all follow the first other one.
LEAST_AGREEMENT: Final = 0.99
LEAST_RESPONSES: Final = 0.9
# How steps may be run: the first of these that differs from the CPU has the mistake.
MODES: Final[Mapping[str, dict[str, Any]]] = {
    "eager": {"enforce_eager": True, "max_steps_in_flight": 1},
    "eager in flight": {"enforce_eager": True},
    "graphs": {"max_steps_in_flight": 1},
    "graphs in flight": {},
}
# These requests differ in what the host must know before a step: nothing, random numbers, candidates, or all tokens.
KINDS: Final[Sequence[dict[str, Any]]] = (
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "logprobs": 1},
    {"temperature": 0.0, "repetition_penalty": 1.2},
)


def bandwidth(place: Place) -> float:
    """Return the bytes per second of reading memory on the device: the best of several sums of one large tensor."""
    sizes = Sizes.of(place)
    numbers = torch.ones(sizes.bandwidth_bytes // 4, device=place.device)
    seconds = []
    for _ in range(sizes.num_runs):
        place.finish()
        began = time.perf_counter()
        numbers.sum()
        place.finish()
        seconds.append(time.perf_counter() - began)
    return sizes.bandwidth_bytes / min(seconds)


def decode(place: Place, shape: str, form: str) -> Figures:
    """One stream, beside the limit by bandwidth that is measured in the same run."""
    sizes = Sizes.of(place)
    source = RandomSource(place.shape(shape), FORMATS[form], place.device)
    limit = bandwidth(place) / source.bytes_in_step()
    with running(source, place, max_model_len=2 * sizes.num_output + 64, max_num_seqs=1) as engine:
        vocab_size = engine.info.vocab_size
        rates = [
            serve(engine, place, [prompt_of(vocab_size, 32, run)], [greedy(sizes.num_output)]).decode_rate
            for run in range(1 + sizes.num_runs)  # the first one compiles and captures
        ][1:]
    rate = median(rates)
    return {"tokens per second": rate, "limit": limit, "part of the limit": rate / limit}


def prompts(place: Place, shape: str, form: str = "bf16", activations: str = "") -> Figures:
    """Tokens per second until the first token, for prompts of each length.

    activations: "fp8" rounds them to FP8, "fp8 rows" with one scale for each row of the weights, too.
    """
    sizes = Sizes.of(place)
    has_row_scales = activations == "fp8 rows"
    source = RandomSource(place.shape(shape), FORMATS[form], place.device, has_row_scales=has_row_scales)
    # A dry run has no GPU, which the flag needs.
    options = {"fp8_activations": bool(activations) and not place.is_dry}
    figures = Figures()
    with running(source, place, max_model_len=max(sizes.prompts) + 16, max_num_seqs=1, **options) as engine:
        for length in sizes.prompts:
            seconds = [
                serve(
                    engine, place, [prompt_of(engine.info.vocab_size, length, 1000 * length + run)], [greedy(1)]
                ).first_token_seconds
                for run in range(1 + sizes.num_runs)
            ][1:]
            figures[f"prompt {length}, tokens per second"] = length / median(seconds)
    return figures


def serving(place: Place, shape: str, form: str = "bf16") -> Figures:
    """Requests of random lengths that come at once, as in nano-vllm's benchmark: output tokens per second of all."""
    sizes = Sizes.of(place)
    source, chosen = RandomSource(place.shape(shape), FORMATS[form], place.device), random.Random(0)
    lengths = [
        (chosen.randint(*sizes.request_tokens), chosen.randint(*sizes.request_tokens))
        for _ in range(sizes.num_requests)
    ]
    longest = 2 * sizes.request_tokens[1] + 16
    limits = {"max_model_len": longest, "max_num_seqs": sizes.num_requests, "max_num_batched_tokens": 16384}
    with running(source, place, enable_prefix_caching=False, **limits) as engine:
        asked = [prompt_of(engine.info.vocab_size, length, number) for number, (length, _) in enumerate(lengths)]
        params = [
            SamplingParams(temperature=0.6, max_tokens=count, ignore_eos=True, seed=number)
            for number, (_, count) in enumerate(lengths)
        ]
        outcomes = [serve(engine, place, asked, params) for _ in range(1 + min(3, sizes.num_runs))][1:]
    assert all(outcome.num_tokens == sum(count for _, count in lengths) for outcome in outcomes)
    return {
        "output tokens per second": median(outcome.num_tokens / outcome.seconds for outcome in outcomes),
        "seconds": median(outcome.seconds for outcome in outcomes),
    }


def argmaxes(engine: Engine, place: Place, chunks: Sequence[Sequence[int]]) -> list[int]:
    """Return the most likely token after each token of each chunk but its last, given the tokens before it."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    outcome = serve(engine, place, chunks, [params] * len(chunks))
    found: dict[str, list[int]] = {}
    for delta in outcome.deltas:
        for one in delta.prompt_logprobs or []:
            best, _ = max(one.top, key=lambda pair: pair[1])
            found.setdefault(delta.request_id, []).append(best)
    return [token_id for number in range(len(chunks)) for token_id in found[str(number)]]


def agreement(place: Place, kv_cache_dtype: str = "auto") -> Figures:
    """The share of teacher-forced argmaxes of the built-in model in bfloat16 that equal the CPU's in float32."""
    sizes, tokenizer = Sizes.of(place), Tokenizer.from_directory(MODEL_DIR)
    tokens = tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)[: sizes.agreement_tokens]
    chunks = [tokens[first : first + sizes.chunk] for first in range(0, len(tokens) - 1, sizes.chunk)]
    found = []
    for config in (
        EngineConfig(str(MODEL_DIR), device=place.device, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype),
        EngineConfig(str(MODEL_DIR), device="cpu", dtype="float32"),
    ):
        engine = Engine(replace(config, max_model_len=sizes.chunk + 1))
        found.append(argmaxes(engine, place, chunks))
        engine.close()
    equal = sum(ours == theirs for ours, theirs in zip(*found, strict=True)) / len(found[1])
    verdict = "agrees" if equal >= LEAST_AGREEMENT else f"below {LEAST_AGREEMENT:.0%}"
    return {"equal argmaxes": equal, "tokens": len(found[1]), "verdict": verdict}


def responses(place: Place, mode: str) -> Figures:
    """The share of responses of the built-in model in float32 that equal the CPU's, by how steps are run.

    Requests have prompts and responses of different lengths. They come twice, so that sizes of steps are replayed.
    """
    number, tokenizer = Sizes.of(place).num_responses, Tokenizer.from_directory(MODEL_DIR)
    tokens = tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)
    prompts = [tokens[17 * place_of : 20 * place_of + 2] for place_of in range(number)]
    params = [
        SamplingParams(**KINDS[place_of % len(KINDS)], max_tokens=2 * place_of + 8, ignore_eos=True)
        for place_of in range(number)
    ]
    found = []
    for device, options in ((place.device, MODES[mode]), ("cpu", {})):
        engine = Engine(EngineConfig(str(MODEL_DIR), device=device, dtype="float32", swap_space=0, **options))
        said: dict[str, list[int]] = {}
        for _ in range(2):
            said.clear()
            for delta in serve(engine, place, prompts, params).deltas:
                said.setdefault(delta.request_id, []).extend(delta.token_ids)
        found.append(said)
        engine.close()
    ours, theirs = found
    equal = sum(ours[name] == theirs[name] for name in theirs) / number
    verdict = "agrees" if equal >= LEAST_RESPONSES else f"below {LEAST_RESPONSES:.0%}"
    return {"equal responses": equal, "responses": number, "verdict": verdict}


def kernels(place: Place, shape: str, form: str) -> Figures:
    """A small model with random weights on the device, beside the same weights on the CPU in float32.

    Every kernel of the shape runs with its own products and its own cache. Random weights have close runners-up, so
    the measure is the error of the log-probability of the same tokens, not argmaxes.
    """
    sizes, tiny = Sizes.of(place), Place(place.device, is_dry=True)
    config = tiny.shape(shape)
    # Made on the CPU, so that both have the same numbers.
    source = RandomSource(config, FORMATS[form], "cpu")
    tokens = [prompt_of(config["vocab_size"], length, length) for length in (1 + sizes.chunk, 2, 33)]
    params = [SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)] * len(tokens)
    found = []
    for at, dtype in ((tiny, "bfloat16"), (Place("cpu", is_dry=True), "float32")):
        with running(source, at, dtype=dtype, max_model_len=sizes.chunk + 64) as engine:
            deltas = serve(engine, at, tokens, params).deltas
            found.append(sorted(
                (delta.request_id, place_of, one.logprob)
                for delta in deltas for place_of, one in enumerate(delta.prompt_logprobs or [])
            ))  # fmt: skip
    errors = [abs(ours[2] - theirs[2]) for ours, theirs in zip(*found, strict=True)]
    worst = max(errors)
    verdict = "agrees" if median(errors) < 0.05 and math.isfinite(worst) else "differs"
    return {"median error of log-probabilities": median(errors), "largest": worst, "verdict": verdict}


def peer_transformers(place: Place, shape: str) -> Figures:
    """transformers, where it is installed: one stream, and a prompt, of the same shape with random weights."""
    if (transformers := _imported("transformers")) is None:
        return {"skipped": "transformers is not installed"}
    sizes, config = Sizes.of(place), place.shape(shape)
    kinds = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe"}
    values = {key: value for key, value in config.items() if key not in ("architectures", "torch_dtype")}
    made = transformers.AutoConfig.for_model(kinds[config["architectures"][0]], **values)
    with torch.device(place.device):
        model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16).eval()
    figures = Figures()
    for length, count in ((32, sizes.num_output), *((length, 1) for length in sizes.prompts)):
        seconds = []
        for run in range(1 + min(3, sizes.num_runs)):
            ids = torch.tensor([prompt_of(config["vocab_size"], length, run)], device=place.device)
            place.finish()
            began = time.perf_counter()
            with torch.inference_mode():
                model.generate(ids, min_new_tokens=count, max_new_tokens=count, do_sample=False, pad_token_id=0)
            place.finish()
            seconds.append(time.perf_counter() - began)
        name = "tokens per second" if count > 1 else f"prompt {length}, tokens per second"
        figures[name] = (count if count > 1 else length) / median(seconds[1:])
    return figures


def peer_vllm_rs(place: Place, shape: str) -> Figures:
    """vllm.rs, where its wheel is installed: one stream of a checkpoint with random weights, which is written first."""
    if (vllm_rs := _imported("vllm_rs")) is None:
        return {"skipped": "vllm_rs is not installed: pip install vllm_rs"}
    from pagewick.cli.random_model import cached_random_model

    sizes = Sizes.of(place)
    model = cached_random_model("qwen3-tiny" if place.is_dry else shape.lower())
    options: dict[str, Any] = {} if place.device.startswith("cuda") else {"cpu": True}
    engine = vllm_rs.Engine(vllm_rs.EngineConfig(weight_path=str(model), max_model_len=1024, **options), "bf16")
    params = vllm_rs.SamplingParams(temperature=0.0, max_tokens=sizes.num_output, ignore_eos=True)
    rates = []
    for run in range(1 + min(3, sizes.num_runs)):
        (output,) = engine.generate_sync([params], [f"{run}: What is memory bandwidth?"])
        seconds = max(1, output.decode_finish_time - output.decode_start_time) / 1000
        rates.append((output.decoded_length - 1) / seconds)
    return {"tokens per second": median(rates[1:])}


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


Item = tuple[Callable[..., Figures], Mapping[str, str]]


def _items(run: Callable[..., Figures], **choices: Sequence[str]) -> dict[str, Item]:
    """Return an item for every combination of the choices, named after them."""
    return {
        " ".join(filter(None, values)) or "all": (run, dict(zip(choices, values, strict=True)))
        for values in itertools.product(*choices.values())
    }


PARTS: Final[Mapping[str, Mapping[str, Item]]] = {
    "kernels": _items(kernels, shape=tuple(SHAPES), form=tuple(FORMATS)),
    "responses": _items(responses, mode=tuple(MODES)),
    "agreement": _items(agreement, kv_cache_dtype=("auto", "int8", "fp8_e4m3", "int4")),
    "decode-small": _items(decode, shape=("Qwen3-0.6B",), form=tuple(FORMATS)),
    "decode-8b": _items(decode, shape=("Llama-3.1-8B",), form=tuple(FORMATS)),
    "prompts": {
        **_items(prompts, shape=("Qwen3-0.6B", "Llama-3.1-8B")),
        **_items(prompts, shape=("Llama-3.1-8B",), form=("fp8",), activations=("", "fp8", "fp8 rows")),
    },
    "serving": _items(serving, shape=("Qwen3-0.6B",)),
    "experts": {
        **{f"decode {name}": item for name, item in _items(decode, shape=("Qwen3-30B-A3B",), form=("bf16",)).items()},
        **{f"prompts {name}": item for name, item in _items(prompts, shape=("Qwen3-30B-A3B",)).items()},
    },
    "peers": {
        **{f"transformers {name}": item
           for name, item in _items(peer_transformers, shape=("Qwen3-0.6B", "Llama-3.1-8B")).items()},
        **{f"vllm.rs {name}": item for name, item in _items(peer_vllm_rs, shape=("Qwen3-0.6B",)).items()},
        **{f"pagewick {name}": item for name, item in _items(decode, shape=("Qwen3-0.6B",), form=("bf16",)).items()},
    },
}  # fmt: skip
