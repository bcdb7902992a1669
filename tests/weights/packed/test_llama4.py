"""Llama 4 with experts in FP8, each in tensors of its own, as compressed-tensors checkpoints of it are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagewick.config import EngineConfig
from pagewick.engine.preflight import check_models
from tests.models.checkpoints import make_model, save
from tests.models.variants import VARIANTS
from tests.weights.packed import byte_writers
from tests.weights.packed.harness import PROMPTS, SIZES, logits_on

ENTRIES: dict[str, Any] = {
    **SIZES, "intermediate_size": 64, "intermediate_size_mlp": 256, "num_local_experts": 3, "num_experts_per_tok": 2,
}  # fmt: skip
LEFT_OUT = ["re:.*lm_head", "re:.*self_attn", "re:.*router", "re:.*vision_model", "re:.*shared_expert"]
QUANTIZATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {
                "num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True,
            },
        }
    },
    "ignore": LEFT_OUT,
}  # fmt: skip


def write(directory: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Write the checkpoint; return the numbers of transformers' model by its names, and the file's tensors."""
    save(make_model("llama4-scout", {**VARIANTS["llama4-scout"].all_entries(), **ENTRIES}), directory)
    stored, meant = {}, {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if tensor.ndim != 3:
            stored[name] = meant[name] = tensor
            continue
        owner, _, projection = name.rpartition(".")
        numbers = torch.empty_like(tensor)
        for expert, matrix in enumerate(tensor):
            parts, numbers[expert] = _experts(f"{owner}.{expert}", projection, matrix)
            stored |= parts
        meant[name] = numbers
    save_file(stored, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTIZATION}))
    return meant, stored


def _experts(owner: str, projection: str, matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Quantize one expert's part [inputs, outputs] of a stack: the file's tensors, and the numbers they stand for."""
    parts, rows = {}, []
    names = ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)
    for name, weight in zip(names, matrix.T.chunk(len(names)), strict=True):
        tensors, numbers = byte_writers.fp8_rows(weight.contiguous())
        parts |= {f"{owner}.{name}{leaf}": tensor.contiguous() for leaf, tensor in tensors.items()}
        rows.append(numbers)
    return parts, torch.cat(rows).T


def test_experts_in_fp8(tmp_path: Path) -> None:
    meant, stored = write(tmp_path)
    assert not any(name.endswith("gate_up_proj") for name in stored)
    check_models(EngineConfig(model=str(tmp_path)))
    ours = logits_on(tmp_path)
    model = make_model("llama4-scout", {**VARIANTS["llama4-scout"].all_entries(), **ENTRIES})
    model.load_state_dict(meant)
    with torch.inference_mode():
        expected = torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS])
    assert expected.std() > 0.3
    # Activations are rounded to 8 bits. A wrong part of an expert changes logits by as much as they vary.
    assert (ours - expected).abs().mean() < 0.005 * expected.std()
    # Experts whose inputs are weighed trade places with those in host memory.
    torch.testing.assert_close(logits_on(tmp_path, num_offloaded=1), ours, atol=1e-4, rtol=0)


def test_experts_in_host_memory(tmp_path: Path) -> None:
    save(make_model("llama4-scout"), tmp_path)
    torch.testing.assert_close(logits_on(tmp_path, num_offloaded=2), logits_on(tmp_path), atol=1e-4, rtol=0)
