"""Measure what quantization costs the built-in model: python -m tests.weights.gguf.quality [TYPE ...] [--tokens N]

Prints the table of docs/quantization.md, for formats that --quantization takes, for int4 in smaller groups, and for FP8
as checkpoints of hubs have it. The model continues held-out chats,
whose tokens are given (teacher forcing), and every prediction of a token of an answer is compared with that of the
unquantized model: perplexity, the mean Kullback-Leibler divergence from the unquantized model, and how often the most
likely token is the same one. Each format is measured with products as Pagewick computes them, from activations in
8 bits, and with its weights alone: as the numbers that the blocks stand for, multiplied by unquantized activations.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from pagewick.demo import MODEL_DIR
from pagewick.engine.messages import EngineRequest
from pagewick.kernels import quantize_weight
from pagewick.models.registry import read_config
from pagewick.quantization import mixes as mixes_module
from pagewick.quantization.ggml import dequantize
from pagewick.quantization.plan import plan_quantization
from pagewick.sampling_params import SamplingParams
from pagewick.weights.opening import open_source
from tests.models.answers import running
from tests.weights.packed.byte_writers import Written, fp8, fp8_rows, fp8_whole
from training.batches import UNLEARNT, Example
from training.corpus import build_documents, held_out_questions
from training.corpus.document import chat
from training.encoding import encode_documents

NUM_TOKENS: Final = 13_000
# The seed of the other chats, beside the wordings that training never sees. Trainings have smaller seeds.
SEED: Final = 20_261_123
MAX_LENGTH: Final = 2048
MAX_LOSS: Final = 2.0
MIXES: Final = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_k", "q4_0", "int4", "q3_k_m", "q2_k")
# The mix int4 with another format for most weights.
INT4: Final = ("int4_g64", "int4_g32")
# FP8 checkpoints: the quantization_config, and the writer of a weight. The embedding and the head are not in FP8.
FP8: Final[Mapping[str, tuple[Mapping[str, Any], Callable[[Tensor], Written]]]] = {
    "fp8_blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8),
    "fp8_rows": ({"quant_method": "fbgemm_fp8"}, fp8_rows),
    "fp8_tensor": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, fp8_whole),
}
DTYPES: Final = ("float32", "bfloat16")


def held_out_chats(num_tokens: int = NUM_TOKENS) -> list[Example]:
    """Return chats with at least num_tokens tokens in their answers: first the wordings that no training sees.

    Answers that the model finds absurd are left out: the corpus has changed since the model was trained.
    """
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    documents = [chat("fact", question.text, question.answer) for question in held_out_questions()]
    documents += build_documents(1 + num_tokens // 8, SEED)
    examples = encode_documents(tokenizer, documents, MAX_LENGTH)
    found: list[Example] = []
    for example, predicted in zip(examples, predictions(MODEL_DIR, examples, "float32"), strict=True):
        if losses(example, predicted).mean() < MAX_LOSS:
            found.append(example)
            num_tokens -= len(predicted)
        if num_tokens <= 0:
            return found
    raise AssertionError("there are too few documents")


def learnt(example: Example) -> list[int]:
    """Return the positions whose next token belongs to an answer."""
    return [position for position, target in enumerate(example.targets) if target != UNLEARNT]


def predictions(path: Path, examples: Sequence[Example], dtype: str, **options: Any) -> Iterator[Tensor]:
    """Yield, for each chat, the log-probabilities [positions, vocabulary] of the tokens in its answers."""
    options |= {"dtype": dtype, "max_num_batched_tokens": MAX_LENGTH, "enable_prefix_caching": False, "num_threads": 1}
    options |= {"quantized_cache": False}
    with running(path, num_kv_blocks=MAX_LENGTH // 16 + 2, **options) as engine:
        runner = engine._ranks.runner
        forward, hidden_states = runner._forward, torch.empty(0)

        def recorded(*given: object) -> object:
            nonlocal hidden_states
            output = forward(*given)
            hidden_states = output.hidden_states.clone()
            return output

        runner._forward = recorded
        for index, example in enumerate(examples):
            params = SamplingParams(temperature=0, max_tokens=1)
            engine.add(
                EngineRequest(request_id=str(index), prompt_token_ids=example.token_ids, params=params, seed=index)
            )
            while engine.has_work:
                engine.step()
            assert len(hidden_states) >= len(example.token_ids)
            with torch.inference_mode():
                logits = runner.model.compute_logits(hidden_states[learnt(example)])
            yield logits.float().log_softmax(-1)


def losses(example: Example, predicted: Tensor) -> Tensor:
    """Return the negative log-probabilities of the tokens in a chat's answers."""
    targets = torch.tensor([example.targets[position] for position in learnt(example)])
    return -predicted.gather(1, targets.unsqueeze(1)).squeeze(1).double()


@dataclass(frozen=True)
class Quality:
    """divergence: the mean of KL(unquantized || this). agreement: the share of equal most likely tokens."""

    perplexity: float
    divergence: float
    agreement: float


def quality(expected: Sequence[Tensor], found: Iterator[Tensor], examples: Sequence[Example]) -> Quality:
    """Compare predictions with those of the unquantized model."""
    lost, divergences, equal = [], [], []
    for example, reference, other in zip(examples, expected, found, strict=True):
        lost.append(losses(example, other))
        divergences.append((reference.exp() * (reference - other)).sum(-1, dtype=torch.float64))
        equal.append(reference.argmax(-1) == other.argmax(-1))
    return Quality(
        perplexity=torch.cat(lost).mean().exp().item(),
        divergence=torch.cat(divergences).mean().item(),
        agreement=torch.cat(equal).double().mean().item(),
    )


def formats_of(mix: str) -> Mapping[str, str]:
    """Return the block formats of the built-in model's weights in a mix, by name."""
    with open_source(MODEL_DIR) as source:
        shapes = {name: source.shape(name) for name in source.names()}
        return plan_quantization(mix, shapes, {}, read_config(source.config())).formats


def write_expanded(directory: Path, formats: Mapping[str, str]) -> Path:
    """Write the built-in model with the numbers that its weights' blocks stand for, in float32."""
    tensors = {name: tensor.float() for name, tensor in load_file(MODEL_DIR / "model.safetensors").items()}
    for name, kind in formats.items():
        tensors[name] = dequantize(kind, quantize_weight(tensors[name], kind), tensors[name].shape[1])
    save_file(tensors, directory / "model.safetensors")
    shutil.copy(MODEL_DIR / "config.json", directory)
    return directory


def write_fp8(name: str, directory: Path) -> tuple[Path, Path]:
    """Write the built-in model in FP8, and with the numbers that its weights stand for; return both directories."""
    config, write = FP8[name]
    packed, exact = {}, {}
    for key, tensor in load_file(MODEL_DIR / "model.safetensors").items():
        exact[key], parts = tensor.float(), {".weight": tensor}
        if key.endswith("_proj.weight"):
            parts, exact[key] = write(tensor.float())
        packed |= {key.removesuffix(".weight") + suffix: part.contiguous() for suffix, part in parts.items()}
    entries = json.loads((MODEL_DIR / "config.json").read_text())
    for kind, tensors, added in (("packed", packed, {"quantization_config": dict(config)}), ("exact", exact, {})):
        (directory / kind).mkdir()
        save_file(tensors, directory / kind / "model.safetensors")
        (directory / kind / "config.json").write_text(json.dumps({**entries, **added}))
    return directory / "packed", directory / "exact"


@contextmanager
def written(name: str, directory: Path) -> Iterator[tuple[Path, dict[str, Any], Path]]:
    """Give the model in a format, options with which it has it, and the model with the numbers of its weights."""
    if name in FP8:
        packed, exact = write_fp8(name, directory)
        yield packed, {}, exact
        return
    mix = "int4" if name in INT4 else name
    with patch.dict(mixes_module.MIXES, {"int4": name} if name in INT4 else {}):
        yield MODEL_DIR, {"quantization": mix}, write_expanded(directory, formats_of(mix))


def measure(mixes: Sequence[str], examples: Sequence[Example], dtype: str) -> Iterator[str]:
    """Yield the rows of the table for a data type of activations."""
    expected = list(predictions(MODEL_DIR, examples, dtype))
    base = quality(expected, iter(expected), examples)
    yield row("none", f"{base.perplexity:.4f}", *" " * 4)
    for mix in mixes:
        with tempfile.TemporaryDirectory() as directory, written(mix, Path(directory)) as (model, options, exact):
            ours = quality(expected, predictions(model, examples, dtype, **options), examples)
            plain = quality(expected, predictions(exact, examples, dtype), examples)
            divergences = (f"{one.divergence:.1e}" for one in (ours, plain))
            agreements = (f"{one.agreement:.2%}" for one in (ours, plain))
            yield row(mix, f"{ours.perplexity:.4f}", *divergences, *agreements)


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mixes", nargs="*", default=(*MIXES, *INT4, *FP8), metavar="TYPE", help="formats")
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help="tokens in the answers")
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES, help="of activations")
    given = parser.parse_args()
    examples = held_out_chats(given.tokens)
    for dtype in given.dtypes:
        print(f"\nactivations in {dtype}, {sum(map(len, map(learnt, examples))):,} tokens\n")
        print(row("format", "perplexity", "divergence", "weights alone", "same token", "weights alone"))
        print(row(*["---"] * 6), flush=True)
        for line in measure(given.mixes, examples, dtype):
            print(line, flush=True)


if __name__ == "__main__":
    main()
