"""Models in FP8, compressed-tensors, ModelOpt, bitsandbytes and HQQ against transformers on the same numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagewick.config import EngineConfig
from pagewick.engine.preflight import check_models
from pagewick.errors import PagewickError
from pagewick.layers.attention import Attention
from pagewick.weights.description import describe
from pagewick.weights.opening import open_source
from pagewick.weights.packed.config import packing_entries, with_rules
from tests.deep import IS_DEEP
from tests.layers.ranks import on_ranks
from tests.models.variants import VARIANTS
from tests.weights.packed import byte_writers
from tests.weights.packed.harness import SIZES, Writer, check_logits, check_two_ranks, load, logits_on, write_packed
from tests.weights.packed.test_byte_formats import CASES

LINEAR = re.compile(r"_proj|\.w[123]$|c_fc$")
NUM_MUTATIONS = 1000 if IS_DEEP else 12
# Others run with PAGEWICK_DEEP=1.
SOME = ("fp8-rows", "packed-int4-zeros", "w8a8", "nvfp4", "bnb-nf4-nested", "hqq-4-1")
# Those whose weights have other sizes there.
TOO_NARROW = ("packed-int4-order", "w8a8-tensor")
# With two ranks, an activation of the 41st token is rounded to another level: the logits of the tokens before it differ
# by less than 1e-6, and those of the tokens after it by 0.01, which is too much for `check_two_ranks`.
UNSTEADY = ("w4-bytes",)
# No size is a multiple of 128, but half of each row that ranks share is one of 32.
DEEPSEEK: dict[str, Any] = {
    "vocab_size": 192, "hidden_size": 160, "intermediate_size": 320, "moe_intermediate_size": 192, "kv_lora_rank": 64,
    "q_lora_rank": 96, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "num_attention_heads": 4,
    "num_key_value_heads": 4, "num_hidden_layers": 2, "n_routed_experts": 8,
}  # fmt: skip


def writer(write: byte_writers.Writer, *, has_input_scales: bool = False) -> Writer:
    """Name the tensors by the weight's prefix. has_input_scales: as static rounding of activations has them."""

    def write_one(prefix: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        tensors, numbers = write(weight)
        if has_input_scales:
            tensors[".input_scale"] = torch.tensor(0.02)
        return {f"{prefix}{suffix}": tensor for suffix, tensor in tensors.items()}, numbers

    return write_one


@pytest.mark.parametrize("case", [name for name in CASES if name in SOME or (IS_DEEP and name not in TOO_NARROW)])
def test_logits(case: str, tmp_path: Path) -> None:
    config, write, _ = CASES[case]
    written = write_packed(tmp_path, config, writer(write))
    alone = check_logits(written, tmp_path)
    if case not in UNSTEADY and (IS_DEEP or case in SOME[:2]):
        check_two_ranks(written, alone)


def test_rules_in_the_config_of_the_text_model(tmp_path: Path) -> None:
    """Kimi K2.5 and K2.6 have them there, and pack their experts alone."""
    config, write, _ = CASES["packed-int4-zeros"]
    text = VARIANTS["kimi-k2.5"].all_entries()["text_config"] | DEEPSEEK
    packed = re.compile(r"experts\.\d").search
    entries = {"text_config": text}
    written = write_packed(tmp_path, config, writer(write), name="kimi-k2.5", entries=entries, is_packed=packed)
    assert len(written.packed) == 8 * 3
    expected = logits_on(tmp_path)
    entries = json.loads((tmp_path / "config.json").read_text())
    entries["text_config"]["quantization_config"] = entries.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(entries))
    check_models(EngineConfig(model=str(tmp_path)))
    assert {tensor.label for tensor in describe(tmp_path).tensors} == {"", "int4 g32"}
    assert torch.equal(logits_on(tmp_path), expected)
    assert packing_entries(entries) == {"quantization_config": config}
    changed = with_rules(entries, {"quant_method": "hqq"})
    assert changed["quantization_config"] == {"quant_method": "hqq"}
    assert "quantization_config" not in changed["text_config"] and "quantization_config" in entries["text_config"]


def test_a_model_of_the_shape_of_deepseek_v3_in_blocks_of_fp8(tmp_path: Path) -> None:
    """Blocks at edges are smaller; kv_b_proj is unpacked; experts trade places with those in host memory."""
    config, write, _ = CASES["fp8-blocks"]
    written = write_packed(tmp_path, config, writer(write), name="deepseek-v3", entries=DEEPSEEK)
    assert {tensor.label for tensor in describe(tmp_path).tensors} == {"", "FP8 128x128"}
    alone = check_logits(written, tmp_path)
    torch.testing.assert_close(logits_on(tmp_path, num_offloaded=3), alone, atol=1e-4, rtol=0)
    check_two_ranks(written, alone)


def test_an_embedding_and_a_head_may_be_packed(tmp_path: Path) -> None:
    config, write, _ = CASES["packed-int4-zeros"]
    (group,) = config["config_groups"].values()
    targets = {"targets": ["Linear", "re:.*embed_tokens$"]}
    config = {**config, "config_groups": {"group_0": {**group, **targets}}, "ignore": []}
    is_packed = ("embed_tokens", "lm_head", "_proj")
    written = write_packed(
        tmp_path, config, writer(write), is_packed=lambda prefix: any(name in prefix for name in is_packed)
    )
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(written.packed)
    check_two_ranks(written, check_logits(written, tmp_path))


@pytest.mark.skipif(not IS_DEEP, reason="PAGEWICK_DEEP=1 runs more architectures")
@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("phi-3-mini-4k", "fp8-blocks"), ("mixtral", "w8a8"), ("gemma-2", "packed-int4"),
        ("starcoder2-3b", "bnb-int8"), ("glm-4-0414", "hqq-4-1"),
    ],
)  # fmt: skip
def test_fused_weights_and_experts_of_other_names(name: str, case: str, tmp_path: Path) -> None:
    config, write, _ = CASES[case]
    entries = {key: value for key, value in SIZES.items() if key in VARIANTS[name].all_entries()}
    written = write_packed(tmp_path, config, writer(write), name=name, entries=entries, is_packed=LINEAR.search)
    assert len(written.packed) >= 8
    check_logits(written, tmp_path)


def test_constant_scales_of_activations_and_of_the_cache(tmp_path: Path) -> None:
    """Scales of activations are not needed; those of keys and values are for an FP8 cache, wherever they are named."""
    config = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": []}
    write_packed(tmp_path, config, writer(byte_writers.fp8_whole, has_input_scales=True))
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(2):
        for name, scale in (("k", 0.5), ("v", 0.25)):
            tensors[f"model.layers.{layer}.self_attn.{name}_proj.{name}_scale"] = torch.tensor(scale + layer)
    save_file(tensors, tmp_path / "model.safetensors")
    described = json.loads((tmp_path / "config.json").read_text())
    entries = described.pop("quantization_config")
    del entries["quant_method"]
    (tmp_path / "config.json").write_text(json.dumps(described))
    side = {"producer": {"name": "modelopt", "version": "0.41.0"}, "quantization": entries}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(side))
    check_models(EngineConfig(model=str(tmp_path)))
    (model,) = on_ranks(1, lambda context: load(context, tmp_path))
    scales = [module.kv_scales for module in model.modules() if isinstance(module, Attention)]
    assert scales == [[0.5, 0.25], [1.5, 1.25]]


def changed(directory: Path, tensors: dict[str, Tensor], config: dict[str, Any], random: Random) -> None:
    """Write a checkpoint with one mistake: in a tensor, or in the entries that say how weights are packed."""
    tensors, config = dict(tensors), json.loads(json.dumps(config))
    name = random.choice([name for name in tensors if ".layers." in name])
    tensor = tensors[name]
    match random.randrange(8):
        case 0:
            del tensors[name]
        case 1:
            tensors[name] = tensor.flatten()[: random.randrange(tensor.numel() + 1)].clone()
        case 2:
            tensors[name] = tensor.view(torch.uint8) if tensor.ndim else tensor.int()
        case 3:
            octets = tensor.clone().flatten().view(torch.uint8)
            octets[random.randrange(len(octets))] = random.randrange(256)
            tensors[name] = octets.view(tensor.dtype).view(tensor.shape)
        case 4:
            tensors[f"{name}_{random.randrange(9)}"] = tensors.pop(name)
        case 5:
            tensors[name] = tensor.reshape(-1, *[1] * random.randrange(3)).contiguous()
        case _:
            entries = config["quantization_config"]
            while True:
                key = random.choice(list(entries))
                inner = entries[key]
                if not isinstance(inner, dict) or not inner or random.random() < 0.2:
                    break
                entries = inner
            values = [None, 0, -1, 3, 64, 2**40, "x", "", [], {}, [1, 2], True, False, 0.5, ["Linear"], "group", [7, 7]]
            entries[key] = random.choice(values)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("case", ["fp8-blocks", "packed-int4-zeros", "nvfp4", "bnb-nf4-nested", "bnb-int8", "hqq-4-1"])
def test_changed_checkpoints_are_errors_or_models(case: str, tmp_path: Path) -> None:
    config, write, _ = CASES[case]
    check_changed(config, write, tmp_path, Random(case))


def check_changed(config: Mapping[str, Any], write: byte_writers.Writer, tmp_path: Path, random: Random) -> None:
    """Read changed copies of a checkpoint: each is an error of a few lines, or as its headers say."""
    write_packed(tmp_path, config, writer(write), entries=TINY)
    tensors = load_file(tmp_path / "model.safetensors")
    described = json.loads((tmp_path / "config.json").read_text())
    num_errors = 0
    for _ in range(NUM_MUTATIONS):
        changed(tmp_path, tensors, described, random)
        try:
            check_models(EngineConfig(model=str(tmp_path)))
            with open_source(tmp_path) as source:
                for name in source.names():
                    found = source.get(name)
                    assert found.shape == source.shape(name) and found.dtype == source.dtype(name)
        except PagewickError as error:
            assert len(str(error).splitlines()) <= 6, error
            num_errors += 1
    assert num_errors > NUM_MUTATIONS // 3


TINY: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
