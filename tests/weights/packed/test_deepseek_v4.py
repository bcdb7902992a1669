"""DeepSeek V4 as published: FP8 in blocks, and experts in FP4 or FP8, with scales under names of their own."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagewick.quantization.ggml import dequantize
from pagewick.weights.description import describe
from pagewick.weights.opening import open_source
from tests.models.answers import answers, running
from tests.models.checkpoints import VARIANTS, write_checkpoint
from tests.weights.packed import byte_writers

# Sizes that are multiples of a block's columns.
SIZES = {
    "hidden_size": 64, "head_dim": 64, "partial_rotary_factor": 0.25, "q_lora_rank": 64, "o_lora_rank": 32,
    "index_head_dim": 32, "moe_intermediate_size": 32,
}  # fmt: skip
EXPERT = re.compile(r"\.ffn\.experts\.\d+\.w[123]\.weight")
PACKED = re.compile(r"\.ffn\.(shared_)?experts\.|\.attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)\.weight")
PROMPTS = [[5, 9, 2, 31, 77, 180], list(range(3, 40))]


def pack(directory: Path, expert_dtype: str) -> dict[str, Tensor]:
    """Pack a checkpoint in place; return the numbers that it then stands for."""
    file = directory / "model.safetensors"
    written: dict[str, Tensor] = {}
    meant = load_file(file)
    for name, tensor in load_file(file).items():
        written[name] = tensor
        if not PACKED.search(name):
            continue
        del written[name]
        if expert_dtype == "fp4" and EXPERT.search(name):
            parts, meant[name] = byte_writers.mxfp4(tensor)
            parts = {
                ".weight": parts[".weight_packed"].view(torch.int8),
                ".scale": parts[".weight_scale"].view(torch.float8_e8m0fnu),
            }
        else:
            parts, meant[name] = byte_writers.fp8(tensor, name=".scale", scale_dtype=torch.float8_e8m0fnu)
        written |= {name.removesuffix(".weight") + suffix: part for suffix, part in parts.items()}
    save_file(written, file, metadata={"format": "pt"})
    rules = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "ue8m0"}
    config = json.loads((directory / "config.json").read_text())
    config |= {"expert_dtype": expert_dtype, "quantization_config": {**rules, "weight_block_size": [128, 128]}}
    (directory / "config.json").write_text(json.dumps(config))
    return meant


@pytest.mark.parametrize("expert_dtype", ["fp4", "fp8"])
def test_numbers_and_logits(expert_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = VARIANTS["deepseek-v4"]
    monkeypatch.setitem(VARIANTS, "deepseek-v4", replace(variant, entries={**variant.entries, **SIZES}))
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    write_checkpoint("deepseek-v4", packed)
    meant = pack(packed, expert_dtype)
    experts = "MXFP4" if expert_dtype == "fp4" else "FP8 128x128"
    assert {tensor.label for tensor in describe(packed).tensors} == {"", "FP8 128x128", experts}
    with open_source(packed) as source:
        for name, numbers in meant.items():
            stored = source.get(name)
            if PACKED.search(name):
                kind = source.stored_type(name)
                assert isinstance(kind, str)
                stored = stored if kind == "F32" else dequantize(kind, stored, numbers.shape[1])
            assert torch.equal(stored, numbers), name
    # The numbers of the packed tensors, stored unquantized.
    write_checkpoint("deepseek-v4", plain)
    save_file(meant, plain / "model.safetensors", metadata={"format": "pt"})
    with running(packed) as engine:
        found = answers(engine, PROMPTS, num_tokens=3)
    with running(plain) as engine:
        expected = answers(engine, PROMPTS, num_tokens=3)
    for ours, theirs in zip(found, expected, strict=True):
        # Products with packed weights round activations to 8 bits.
        assert (ours.logits[0] - theirs.logits[0]).abs().mean() < 0.05 < theirs.logits[0].std()
