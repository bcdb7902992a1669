"""Checkpoints of AMD's Quark, written from its definition with no code of the package."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagewick.errors import ModelLoadError
from pagewick.weights.packed.config import packed_rules
from tests.deep import IS_DEEP
from tests.weights.packed import byte_writers as writers
from tests.weights.packed.harness import check_logits, check_two_ranks, logits_on, write_packed
from tests.weights.packed.test_byte_formats import described
from tests.weights.packed.test_byte_models import check_changed, writer

ORDERS = {"reorder": (0, 2, 4, 6, 1, 3, 5, 7), "order": (0, 1, 2, 3, 4, 5, 6, 7)}


def quark(weight: Mapping[str, Any] | None, pack_method: str = "reorder", **entries: Any) -> dict[str, Any]:
    """A quantization_config as Quark 0.13 writes it, without entries that say nothing about weights."""
    spec = None if weight is None else {"is_dynamic": False, "symmetric": True, "scale_format": "float32", **weight}
    layer = {"input_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, "output_tensors": None, "bias": None}
    return {
        "quant_method": "quark", "quant_mode": "eager_mode", "algo_config": None, "exclude": ["lm_head"],
        "export": {"kv_cache_group": [], "pack_method": pack_method, "weight_format": "real_quantized"},
        "global_quant_config": {**layer, "weight": spec}, "layer_quant_config": {}, "layer_type_quant_config": {},
        "kv_cache_quant_config": {}, "softmax_quant_spec": None, **entries,
    }  # fmt: skip


def mxfp4(weight: Tensor) -> writers.Written:
    tensors, numbers = writers.mxfp4(weight)
    return {".weight": tensors[".weight_packed"], ".weight_scale": tensors[".weight_scale"]}, numbers


def int8(weight: Tensor, *, is_whole: bool = False, is_symmetric: bool = True) -> writers.Written:
    """A scale and a zero point for each row, or one of both."""
    rows = weight.flatten().expand(1, -1) if is_whole else weight
    low, high = rows.amin(1), rows.amax(1)
    scale = rows.abs().amax(1) / 127 if is_symmetric else (high - low) / 255
    zero = torch.zeros_like(scale) if is_symmetric else (-128 - low / scale).round()
    levels = (weight / scale[:, None] + zero[:, None]).round().clamp(-128, 127)
    shape = () if is_whole else (len(weight),)
    tensors = {".weight": levels.to(torch.int8), ".weight_scale": scale.reshape(shape)}
    return {**tensors, ".weight_zero_point": zero.to(torch.int8).reshape(shape)}, (levels - zero[:, None]) * scale[
        :, None
    ]


def words_of(levels: Tensor, order: tuple[int, ...]) -> Tensor:
    """Levels [n, N] as words [n, N / 8] int32, each of which is the sum of eight levels in their places."""
    return torch.tensor(
        [
            [
                sum((row[first + order[place]] & 15) << 4 * place for place in range(8))
                for first in range(0, len(row), 8)
            ]
            for row in levels.int().tolist()
        ],
        dtype=torch.int64,
    ).to(torch.int32)


def int4(weight: Tensor, group_size: int, order: str = "reorder", *, is_signed: bool = False) -> writers.Written:
    num_rows, num_columns = weight.shape
    groups = weight.reshape(num_rows, -1, group_size)
    if is_signed:
        scale = groups.abs().amax(2) / 7
        zero = torch.zeros_like(scale)
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scale = (high - low) / 15
        zero = (-low / scale).round()
    bounds = (-8, 7) if is_signed else (0, 15)
    levels = (groups / scale[..., None] + zero[..., None]).round().clamp(*bounds)
    numbers = ((levels - zero[..., None]) * scale[..., None]).reshape(weight.shape)
    levels = levels.reshape(num_rows, num_columns)
    tensors = {
        ".weight": words_of(levels.t(), ORDERS[order]),
        ".weight_scale": scale.t().contiguous(),
        ".weight_zero_point": words_of(zero.t(), ORDERS[order]),
    }
    return tensors, numbers


def fp8_rows(weight: Tensor) -> writers.Written:
    return writers.fp8_rows(weight, shape=(len(weight),))


FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}
MXFP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1, "scale_format": "e8m0"}
INT8 = {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0}
INT4 = {"dtype": "int4", "qscheme": "per_group", "group_size": 64, "ch_axis": 1}
UINT4 = {**INT4, "dtype": "uint4", "symmetric": False}
CASES: dict[str, tuple[dict[str, Any], Callable[[Tensor], writers.Written], str]] = {
    "fp8": (quark(FP8), writers.fp8_whole, "fp8_g32"),
    "fp8-rows": (
        quark({**FP8, "qscheme": "per_channel", "ch_axis": 0}),
        fp8_rows,
        "fp8_g32",
    ),
    "fp8-blocks": (
        quark({**FP8, "qscheme": "per_block", "block_size": [8, 64]}),
        partial(writers.fp8, block=(8, 64), name=".weight_scale"),
        "fp8_g32",
    ),
    "mxfp4": (quark(MXFP4), mxfp4, "MXFP4"),
    "int8": (quark(INT8), int8, "int8_g32"),
    "int8-whole": (quark({"dtype": "int8", "qscheme": "per_tensor"}), partial(int8, is_whole=True), "int8_g32"),
    "int8-zeros": (quark({**INT8, "symmetric": False}), partial(int8, is_symmetric=False), "F32"),
    "int4": (quark(INT4), partial(int4, group_size=64, is_signed=True), "int4_g64"),
    "uint4": (quark(UINT4), partial(int4, group_size=64), "int4_g64"),
    "uint4-order": (quark(UINT4, "order"), partial(int4, group_size=64, order="order"), "int4_g64"),
}


@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str) -> None:
    config, write, kind = CASES[name]
    tensors, numbers = write(torch.randn(136, 192, generator=torch.Generator().manual_seed(2)) / 8)
    weight, get = described(config, tensors)
    assert (weight.stored_type, weight.shape) == (kind, (136, 192))
    assert torch.equal(weight.format.numbers(weight, get), numbers)
    for suffix in (".weight", ".weight_scale"):
        with pytest.raises(ModelLoadError, match=suffix):
            described(config, {key: value for key, value in tensors.items() if key != suffix})


def test_signed_numbers_without_zero_points() -> None:
    config, write, _ = CASES["int4"]
    tensors, numbers = write(torch.randn(64, 64, generator=torch.Generator().manual_seed(3)))
    del tensors[".weight_zero_point"]
    weight, get = described(config, tensors)
    assert torch.equal(weight.format.numbers(weight, get), numbers)


@pytest.mark.parametrize("name", ["uint4", "mxfp4"])
def test_logits(name: str, tmp_path: Path) -> None:
    config, write, _ = CASES[name]
    written = write_packed(tmp_path, config, writer(write))
    alone = check_logits(written, tmp_path)
    if name == "uint4":
        check_two_ranks(written, alone)


@pytest.mark.parametrize("name", CASES if IS_DEEP else ["fp8-rows", "uint4"])
def test_changed_checkpoints_are_errors_or_models(name: str, tmp_path: Path) -> None:
    config, write, _ = CASES[name]
    check_changed(config, write, tmp_path, Random(name))


def test_scales_of_activations_and_of_the_cache(tmp_path: Path) -> None:
    """As in amd/Llama-3.1-8B-Instruct-FP8-KV."""
    kept = {"weight": FP8, "output_tensors": FP8}
    layers = dict.fromkeys(("*k_proj", "*v_proj", "*q_proj"), kept)
    config = quark(FP8, export={"kv_cache_group": ["*k_proj", "*v_proj"]}, layer_quant_config=layers)
    write_packed(tmp_path, config, writer(writers.fp8_whole))
    expected = logits_on(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name.replace(".weight", ".input_scale")] = torch.tensor(0.02)
        if re.search(r"[qkv]_proj", name):
            tensors[name.replace(".weight", ".output_scale")] = torch.tensor(0.03)
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(logits_on(tmp_path), expected)


def test_layers_with_formats_of_their_own() -> None:
    layers = {"*.mlp.down_proj": {"weight": INT8}, "model.layers.1.mlp.up_proj": {"weight": MXFP4}}
    exclude = ["lm_head", "*.gate", "re:.*layers\\.2\\."]
    rules = packed_rules({"quantization_config": quark(FP8, layer_quant_config=layers, exclude=exclude)})
    assert rules is not None
    found = {
        name: form and form.label
        for name in ("lm_head", "model.layers.0.gate", "model.layers.2.mlp.down_proj", "model.layers.0.mlp.down_proj",
                     "model.layers.1.mlp.up_proj", "model.layers.0.mlp.up_proj", "model.layers.0.gate.up_proj")
        for form in [rules.format_of(name)]
    }  # fmt: skip
    assert list(found.values()) == [None, None, None, "int8 per row", "MXFP4", "FP8", "FP8"]


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (quark({**FP8, "dtype": "fp6_e2m3"}), "weight.dtype"),
        (quark({**FP8, "is_dynamic": True}), "is_dynamic"),
        (quark({**FP8, "qscheme": "per_channel", "ch_axis": 1}), "ch_axis"),
        (quark({**MXFP4, "scale_format": "float32"}), "scale_format"),
        (quark({**MXFP4, "group_size": 16}), "group_size"),
        (quark({**INT4, "qscheme": "per_channel"}), "qscheme"),
        (quark({**UINT4, "zero_point_type": "float32"}), "zero_point_type"),
        (quark(FP8, "shuffle"), "pack_method"),
        (quark(FP8, export={"weight_format": "fake_quantized"}), "weight_format"),
        (quark(FP8, layer_type_quant_config={"Linear": {}}), "layer_type_quant_config"),
        (quark(FP8, algo_config=[{"name": "svdquant"}]), "algo_config.name"),
        (quark(FP8, algo_config=[{"name": "rotation", "r1": True, "r4": True}]), "algo_config.r4"),
        (quark(FP8, global_quant_config={"weight": [FP8, INT4]}), "global_quant_config.weight"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config: dict[str, Any], word: str) -> None:
    with pytest.raises(ModelLoadError, match=re.escape(word)):
        packed_rules({"quantization_config": config})
