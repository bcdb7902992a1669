"""Log-probabilities of quantized files: rounding activations costs no more than it costs transformers.

Both are compared with transformers on the numbers that the file's blocks stand for, in float32. The reference is that
model with the inputs of all quantized weights rounded to 8 bits, as the types' definition rounds them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pagewick.weights.gguf.source import GgufSource
from pagewick.weights.opening import open_source
from pagewick.weights.tensor_headers import file_tensors
from pagewick.weights.transposed import transposed_names
from tests.deep import IS_DEEP
from tests.models.answers import answers, judge, make_prompts, running
from tests.models.checkpoints import save
from tests.models.variants import VARIANTS
from tests.weights.gguf.mixes import MIXES, quantize
from tests.weights.gguf.models import DIFFERENT, MODELS, VOCAB_SIZE, fill, original, write_file

# Experts, and latents with a dense layer; the others with mixes in the deep run.
SOME_MODELS = ("qwen3-moe", "deepseek-v2-lite")
SOME_MIXES = ("Q4_K_M",)
CASES = [
    (name, mix)
    for mix in MIXES
    for name in MODELS
    # transformers does not compute the products of experts by F.linear in these; the first is in
    # tests/weights/packed/test_stacked_experts.py.
    if name not in {"gpt-oss", "llama4-scout", *DIFFERENT}
    and (IS_DEEP or mix == "Q8_0" or (mix in SOME_MIXES and name in SOME_MODELS))
]
PROMPTS = make_prompts((1, 33, 40), vocab_size=VOCAB_SIZE)
KEY_COLUMNS = 16


def rounded(x: Tensor, num_columns: int) -> Tensor:
    """Round numbers to 8 bits, with a scale for every `num_columns` of a row."""
    blocks = x.unflatten(-1, (-1, num_columns))
    largest = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return ((blocks * (127 / largest)).round() * (largest / 127)).flatten(-2)


def key_of(row: Tensor) -> bytes:
    return row[:KEY_COLUMNS].float().contiguous().numpy().tobytes()


class RoundedActivations(TorchFunctionMode):
    """Rounds the inputs of products with quantized weights, which are known by their first rows."""

    def __init__(self, num_columns_of: Mapping[bytes, int]) -> None:
        super().__init__()
        self._num_columns_of = num_columns_of

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.addmm:
            # GPT-2's layers compute rest + x @ weight.
            rest, x, weight = args
            if (num_columns := self._num_columns_of.get(key_of(weight[:, 0]))) is not None:
                args = (rest, rounded(x, num_columns), weight)
        elif func is torch.Tensor.matmul or func is torch.Tensor.__matmul__:
            # Falcon's compute x @ weight.T.
            x, weight = args
            if weight.dim() == 2 and (num_columns := self._num_columns_of.get(key_of(weight[:, 0]))) is not None:
                args = (rounded(x, num_columns), weight)
            elif x.dim() == 2 and (num_columns := self._num_columns_of.get(key_of(x[0]))) is not None:
                # Jamba's compute weight @ x.T.
                args = (x, rounded(weight.mT, num_columns).mT)
        elif func is F.linear:
            x, weight, *rest = args
            if (num_columns := self._num_columns_of.get(key_of(weight[0]))) is not None:
                args = (rounded(x, num_columns), weight, *rest)
        return func(*args, **(kwargs or {}))


def dequantized(source: GgufSource) -> Iterator[tuple[str, Tensor, int | None]]:
    """Yield the checkpoint's tensors in float32, and the columns that activations share a scale for; None: exact."""
    for name in source.names():
        stored, tensor = source.stored_type(name), source.get(name)
        if isinstance(stored, torch.dtype):
            yield name, tensor.float(), None
            continue
        kind = gguf.GGMLQuantizationType[stored]
        numbers = torch.from_numpy(gguf.quants.dequantize(tensor.flatten(0, -2).numpy(), kind))
        yield name, numbers.reshape(*tensor.shape[:-1], -1), gguf.GGML_QUANT_SIZES[kind][0]


def transformers_model(name: str, path: Path, directory: Path) -> tuple[nn.Module, RoundedActivations]:
    """The model in a file, as transformers computes it. directory: that of the original's checkpoint."""
    file, num_columns_of = directory / "model.safetensors", {}
    weights = load_file(file)
    lying = transposed_names(json.loads((directory / "config.json").read_text()), file_tensors(file))
    with GgufSource(path) as source:
        for tensor_name, numbers, num_columns in dequantized(source):
            upright = numbers.T if tensor_name in lying else numbers
            weights[tensor_name] = upright.reshape(weights[tensor_name].shape).contiguous()
            if num_columns is not None:
                num_columns_of[key_of(numbers[0])] = num_columns
    assert len(num_columns_of) > 5
    save_file(weights, file, {"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    state = {key: value.clone() for key, value in model.state_dict().items()}
    VARIANTS[name].patch(model.eval())
    model.load_state_dict(state)  # which the patch may have changed
    return model, RoundedActivations(num_columns_of)


# Cases whose random router decides so closely that other last bits of a product change its choices.
CLOSE_CHOICES = {("qwen3-moe", "Q8_0")} if torch.backends.cpu.get_cpu_capability() == "AVX2" else set()


@pytest.mark.parametrize(("name", "mix"), [case for case in CASES if case not in CLOSE_CHOICES])
def test_rounding_of_activations_costs_no_more_than_its_definition(name: str, mix: str, tmp_path: Path) -> None:
    is_wide = mix != "Q8_0"
    save(original(name, is_wide=is_wide), tmp_path)
    path = write_file(f"wide/{name}" if is_wide else name, tmp_path)
    if is_wide:
        with open_source(tmp_path) as source:
            fill(path, {tensor_name: source.get(tensor_name) for tensor_name in source.names()})
    path = quantize(path, tmp_path / "quantized.gguf", mix)
    model, rounding = transformers_model(name, path, tmp_path)
    with running(path, **VARIANTS[name].engine) as engine:
        found = answers(engine, PROMPTS, num_tokens=16)
    one_by_one = VARIANTS[name].one_by_one
    exact = torch.cat(judge(model, PROMPTS, found, one_by_one=one_by_one)).log_softmax(-1)
    with rounding:
        reference = torch.cat(judge(model, PROMPTS, found, one_by_one=one_by_one)).log_softmax(-1)
    ours = torch.cat([answer.logits for answer in found]).log_softmax(-1)
    errors, allowed = (ours - exact).abs(), (reference - exact).abs()
    assert 0 < errors.mean() <= 1.25 * allowed.mean()
    assert p90(errors) <= 1.25 * p90(allowed)


def p90(errors: Tensor) -> Tensor:
    return errors.flatten().quantile(0.9)
