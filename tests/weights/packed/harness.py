"""Tiny checkpoints in a packed format, and what they must compute.

A Writer is independent code that quantizes one weight as its format's definition says. Reference is transformers on the
numbers that the writer's tensors stand for.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pagewick.config import EngineConfig
from pagewick.engine.cache.kv_cache import allocate_cache, cache_groups
from pagewick.engine.preflight import check_models
from pagewick.layers.context import LayerContext
from pagewick.models.decoder import Decoder
from pagewick.models.registry import build_model, read_config
from pagewick.quantization import method_chooser
from pagewick.weights.loader import load_weights
from pagewick.weights.opening import open_source
from tests.layers.ranks import on_ranks
from tests.models.answers import make_prompts
from tests.models.by_hand import logits_of
from tests.models.checkpoints import make_model, save
from tests.models.variants import VARIANTS
from tests.weights.gguf.test_quantized_models import RoundedActivations, key_of

# Sizes that whole groups of 128 columns fit, for two ranks, too.
SIZES: dict[str, Any] = {
    "vocab_size": 192, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
PROMPTS = make_prompts((1, 33, 150), vocab_size=192)

Writer = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]
"""(prefix, weight [N, C] float32) -> the tensors of the file by name, and the numbers [N, C] that they stand for."""


@dataclass(frozen=True)
class Written:
    """directory: the packed checkpoint. meant: its weights as numbers, by name."""

    directory: Path
    name: str
    meant: Mapping[str, Tensor]
    packed: Sequence[str]


def write_packed(
    directory: Path,
    quantization: Mapping[str, Any],
    write: Writer,
    *,
    name: str = "llama",
    entries: Mapping[str, Any] = SIZES,
    is_packed: Callable[[str], object] = lambda prefix: "_proj" in prefix,
) -> Written:
    """Write the model `name` of VARIANTS with packed weights. quantization: the quantization_config of config.json.

    entries: entries of config.json in place of the variant's own. is_packed: chooses weights by their prefix.
    """
    save(make_model(name, {**VARIANTS[name].all_entries(), **entries}), directory)
    meant, packed = pack(directory, quantization, write, is_packed)
    return Written(directory, name, meant, packed)


def pack(
    directory: Path, quantization: Mapping[str, Any], write: Writer, is_packed: Callable[[str], object]
) -> tuple[dict[str, Tensor], list[str]]:
    """Pack weights of a checkpoint. Returns the numbers of all tensors, and the names of those that are packed."""
    tensors, meant, packed = load_file(directory / "model.safetensors"), {}, []
    stored = {}
    for tensor_name, tensor in tensors.items():
        prefix = tensor_name.removesuffix(".weight")
        if prefix == tensor_name or tensor.ndim != 2 or not is_packed(prefix):
            stored[tensor_name] = meant[tensor_name] = tensor
            continue
        parts, numbers = write(prefix, tensor.float())
        assert numbers.shape == tensor.shape
        stored |= parts
        meant[tensor_name] = numbers.contiguous()
        packed.append(tensor_name)
    save_file({key: tensor.contiguous() for key, tensor in stored.items()}, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": dict(quantization)}))
    return meant, packed


def write_zeros(model: Path, method: str, directory: Path) -> Path:
    """Write a copy of a model whose projections are zeros in gptq, awq or marlin, in groups of 32 columns."""
    shutil.copytree(model, directory)
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors.pop(name).shape
        prefix, scales = name.removesuffix(".weight"), torch.zeros(columns // 32, rows, dtype=torch.float16)
        words = {"gptq": (columns // 8, rows), "awq": (columns, rows // 8), "marlin": (columns // 16, rows * 2)}[method]
        leaves = ("B", "s") if method == "marlin" else ("qweight", "scales")
        tensors[f"{prefix}.{leaves[0]}"] = torch.zeros(words, dtype=torch.int32)
        tensors[f"{prefix}.{leaves[1]}"] = scales
        if method != "marlin":
            tensors[f"{prefix}.qzeros"] = torch.zeros(columns // 32, rows // 8, dtype=torch.int32)
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 32}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def reference(written: Written, tmp_path: Path) -> nn.Module:
    """Return the transformers model with the numbers of a checkpoint, in float32."""
    directory = tmp_path / "reference"
    directory.mkdir()
    config = json.loads((written.directory / "config.json").read_text())
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))
    save_file(dict(written.meant), directory / "model.safetensors", {"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    VARIANTS[written.name].patch(model)
    return model  # type: ignore[no-any-return]


def load(context: LayerContext, directory: Path) -> Decoder:
    """Build and load this rank's share, with room for one batch in its cache."""
    with open_source(directory) as source:
        types = {name: source.stored_type(name) for name in source.names()}
        context = replace(context, choose_method=method_chooser(types))
        model = build_model(context, read_config(source.config()), list(types))
        load_weights(model, source)
    groups = cache_groups(model)
    allocate_cache(groups, [128] * len(groups), torch.device("cpu"))
    return model


def logits_on(directory: Path, num_ranks: int = 1, num_offloaded: int = 0) -> Tensor:
    """Return our logits for all tokens of PROMPTS: [T, vocab_size]. num_offloaded: experts in host memory per rank."""

    def act(context: LayerContext) -> Tensor:
        return logits_of(load(replace(context, num_experts_offload_per_rank=num_offloaded), directory), PROMPTS)

    return on_ranks(num_ranks, act)[0]


def check_logits(written: Written, tmp_path: Path, columns_per_scale: int = 32) -> Tensor:
    """Compare our logits with transformers', and those of a batch with those of each prompt alone; return ours.

    columns_per_scale: how many columns of activations share a scale in the reference whose activations are rounded.
    """
    check_models(EngineConfig(model=str(written.directory)))
    (model,) = on_ranks(1, lambda context: load(context, written.directory))
    ours = logits_of(model, PROMPTS)
    alone = torch.cat([logits_of(model, [prompt]) for prompt in PROMPTS])
    assert torch.equal(ours, alone)
    theirs = reference(written, tmp_path)
    exact = _logits(theirs)
    with RoundedActivations({key_of(written.meant[name][0]): columns_per_scale for name in written.packed}):
        rounded = _logits(theirs)
    errors, allowed = (ours - exact).abs(), (rounded - exact).abs()
    assert exact.std() > 0.3
    assert errors.max() <= 2e-2 or errors.mean() <= 1.25 * allowed.mean(), (errors.mean(), allowed.mean())
    return ours


@torch.inference_mode()
def _logits(model: nn.Module) -> Tensor:
    return torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS])


def check_two_ranks(written: Written, alone: Tensor) -> None:
    """Compare the logits of two ranks with those of one.

    They differ by the order of two sums, after which few activations are rounded to another level. Where one token is
    clearly the best, it is the same.
    """
    shared = logits_on(written.directory, 2)
    assert (shared - alone).abs().mean() < 2e-3
    best = alone.topk(2, dim=-1).values
    is_clear = best[:, 0] - best[:, 1] > 0.1
    assert is_clear.float().mean() > 0.5
    assert torch.equal(shared.argmax(-1)[is_clear], alone.argmax(-1)[is_clear])
