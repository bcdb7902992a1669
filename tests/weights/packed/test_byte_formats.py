"""Formats of numbers with a byte or half a byte each, and of HQQ, against tests/weights/packed/byte_writers.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from pagewick.errors import ModelLoadError, PagewickError
from pagewick.weights.packed.config import packed_rules
from pagewick.weights.packed.layout import NUMBERS, PackedWeight
from pagewick.weights.tensor_headers import TensorInfo
from tests.weights.packed import byte_writers as writers
from tests.weights.packed.byte_writers import Writer

PREFIX = "model.layers.0.mlp.up_proj"
_DTYPES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32",
    torch.int8: "I8", torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0", torch.bool: "BOOL",
}  # fmt: skip


class Case(NamedTuple):
    """config: the quantization_config. kinds: the block format for each number of columns."""

    config: Mapping[str, Any]
    write: Writer
    kinds: Mapping[int, str]


def _fp8(**entries: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", **entries}


def _compressed(kind: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, "dynamic": False, **weights}}
    return {
        "quant_method": "compressed-tensors", "format": kind, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"],
    }  # fmt: skip


def _integers(
    kind: str, kinds: Mapping[int, str], bits: int, group_size: int = -1, *, is_symmetric: bool = True, **options: Any
) -> Case:
    """compressed-tensors' whole numbers. options: of the writer."""
    strategy = "group" if group_size > 0 else "tensor" if "scale_shape" in options else "channel"
    entries: dict[str, Any] = {"num_bits": bits, "strategy": strategy, "symmetric": is_symmetric}
    entries |= {"group_size": group_size} if group_size > 0 else {}
    entries |= {"actorder": "group"} if "order" in options else {}
    options |= {"bits": bits, "group_size": group_size, "is_symmetric": is_symmetric, "is_packed": kind == _PACKED}
    return Case(_compressed(kind, **entries), partial(writers.integers, **options), kinds)


def _hqq(bits: int, group_size: int, axis: int) -> dict[str, Any]:
    params = {"nbits": bits, "group_size": group_size, "axis": axis, "view_as_float": False, "channel_wise": True}
    whole = {"weight_quant_params": params, "scale_quant_params": None, "zero_quant_params": None}
    return {"quant_method": "hqq", "quant_config": whole, "skip_modules": ["lm_head"]}


def _bnb4(kind: str, *, is_nested: bool) -> dict[str, Any]:
    return {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": is_nested,
    }  # fmt: skip


_FP8_KINDS = {256: "fp8_g128", 160: "fp8_g32", 33: NUMBERS}
_PACKED = "pack-quantized"
_INT8 = {"num_bits": 8, "strategy": "channel"}
_ORDER = torch.randperm(128, generator=torch.Generator().manual_seed(3))
_FLOAT = {"type": "float", "num_bits": 8}
_E5M2 = torch.float8_e5m2

CASES = {
    "fp8-blocks": Case(_fp8(weight_block_size=[128, 128], fmt="e4m3"), writers.fp8, _FP8_KINDS),
    "fp8-blocks-qscale": Case(
        _fp8(weight_block_size=[128, 128]), partial(writers.fp8, name=".qscale_weight"), {128: "fp8_g128"}
    ),
    "fp8-blocks-bf16": Case(
        _fp8(weight_block_size=[128, 128]), partial(writers.fp8, scale_dtype=torch.bfloat16), {128: "fp8_g128"}
    ),
    "fp8-blocks-e8m0": Case(
        _fp8(weight_block_size=[128, 128], scale_fmt="ue8m0"),
        partial(writers.fp8, scale_dtype=torch.float8_e8m0fnu),
        {128: "fp8_g128"},
    ),
    "fp8-blocks-bytes": Case(
        _fp8(weight_block_size=[1, 32], scale_fmt="ue8m0"),
        partial(writers.fp8, block=(1, 32), scale_dtype=torch.uint8),
        {128: "fp8_g32"},
    ),
    "fp8-small-blocks": Case(
        _fp8(weight_block_size=[7, 64]), partial(writers.fp8, block=(7, 64)), {128: "fp8_g32", 96: "fp8_g32"}
    ),
    "fp8-unnamed-blocks": Case(_fp8(), writers.fp8, {256: "fp8_g128"}),
    "fp8-tensor": Case(_fp8(activation_scheme="static"), writers.fp8_whole, _FP8_KINDS),
    "fp8-tensor-inv": Case(_fp8(weight_block_size=None), partial(writers.fp8, block=None, shape=()), {64: "fp8_g32"}),
    "fp8-rows": Case(_fp8(), writers.fp8_rows, {384: "fp8_g128"}),
    "fp8-e5m2": Case(_fp8(fmt="e5m2"), partial(writers.fp8_whole, shape=(1,), dtype=_E5M2), {64: NUMBERS}),
    "fbgemm": Case(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        writers.fp8_rows,
        {128: "fp8_g128"},
    ),
    "modelopt-fp8": Case(
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        writers.fp8_whole,
        {128: "fp8_g128"},
    ),
    "modelopt-nvfp4": Case(
        {"quant_method": "modelopt_fp4", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]},
        partial(writers.nvfp4, is_modelopt=True),
        {64: "fp4_g16", 48: NUMBERS},
    ),
    "packed-int4": _integers(_PACKED, {256: "int4_g128"}, 4, 128),
    "packed-int4-zeros": _integers(_PACKED, {96: "int4_g32"}, 4, 32, is_symmetric=False),
    "packed-int4-rows": _integers(_PACKED, {192: "int4_g64"}, 4, scale_dtype=torch.float16),
    "packed-int4-order": _integers(_PACKED, {128: "int4_g32"}, 4, 32, order=_ORDER),
    "packed-int4-small-groups": _integers(_PACKED, {64: NUMBERS}, 4, 16),
    "packed-int3": _integers(_PACKED, {64: "int4_g64"}, 3, 64),
    "packed-int3-loose": _integers(
        _PACKED, {64: "int4_g64", 192: "int4_g64"}, 3, 64, is_symmetric=False, pack=writers.loose_int
    ),
    "packed-int2-zeros": _integers(_PACKED, {64: "int4_g32"}, 2, 32, is_symmetric=False),
    "packed-int8": _integers(_PACKED, {128: "int8_g32"}, 8, 64),
    "packed-int8-zeros": _integers(_PACKED, {64: NUMBERS}, 8, is_symmetric=False),
    "w8a8": _integers("int-quantized", {64: "int8_g32", 33: NUMBERS}, 8),
    "w8a8-half": _integers("naive-quantized", {64: "Q8_0"}, 8, scale_dtype=torch.float16),
    "w8a8-tensor": _integers("int-quantized", {64: "int8_g32"}, 8, scale_shape=(1,)),
    "w8a8-zeros": _integers("int-quantized", {64: NUMBERS}, 8, is_symmetric=False),
    "w4-bytes": _integers("int-quantized", {64: "int4_g64"}, 4),
    "w4-bytes-zeros": _integers("int-quantized", {64: "int4_g32"}, 4, 32, is_symmetric=False),
    "float-tensor": Case(
        _compressed("float-quantized", **_FLOAT, strategy="tensor"),
        partial(writers.fp8_whole, shape=(1,), scale_dtype=torch.bfloat16),
        {128: "fp8_g128"},
    ),
    "float-rows": Case(
        _compressed("float-quantized", **_FLOAT, strategy="channel"),
        partial(writers.fp8_rows, scale_dtype=torch.bfloat16),
        {128: "fp8_g128"},
    ),
    "float-blocks": Case(
        _compressed("float-quantized", **_FLOAT, strategy="block", block_structure=[128, 128]),
        partial(writers.fp8, name=".weight_scale"),
        {160: "fp8_g32"},
    ),
    "mxfp8": Case(
        _compressed("mxfp8-quantized", **_FLOAT, strategy="group", group_size=32),
        partial(writers.fp8, block=(1, 32), name=".weight_scale", scale_dtype=torch.uint8),
        {64: "fp8_g32"},
    ),
    "nvfp4": Case(
        _compressed("nvfp4-pack-quantized", type="float", num_bits=4, strategy="tensor_group", group_size=16),
        writers.nvfp4,
        {64: "fp4_g16", 48: NUMBERS},
    ),
    "mxfp4": Case(
        _compressed("mxfp4-pack-quantized", type="float", num_bits=4, strategy="group", group_size=32),
        writers.mxfp4,
        {96: "MXFP4"},
    ),
    "bnb-int8": Case(
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False},
        writers.int8_bitsandbytes,
        {64: "int8_g32", 50: NUMBERS},
    ),
    "bnb-nf4": Case(_bnb4("nf4", is_nested=False), writers.four_bit, {64: NUMBERS, 50: NUMBERS}),
    "bnb-nf4-nested": Case(_bnb4("nf4", is_nested=True), partial(writers.four_bit, is_nested=True), {64: NUMBERS}),
    "bnb-fp4": Case(_bnb4("fp4", is_nested=False), partial(writers.four_bit, kind="fp4"), {64: NUMBERS}),
    **{
        f"hqq-{bits}-{axis}": Case(
            _hqq(bits, 32, axis), partial(writers.hqq, bits=bits, group_size=32, axis=axis), {64: NUMBERS}
        )
        for bits in (8, 4, 3, 2, 1)
        for axis in (0, 1)
    },
}
# A prime number of rows, unless several rows share a word.
_EVEN_ROWS = ("packed-int4-zeros", "packed-int2-zeros", "bnb", "hqq")


def weight_of(case: str, columns: int) -> Tensor:
    rows = 64 if case.startswith(_EVEN_ROWS) else 131
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns)) / 8


def headers(tensors: Mapping[str, Tensor]) -> dict[str, TensorInfo]:
    return {
        suffix: TensorInfo(f"{PREFIX}{suffix}", _DTYPES[tensor.dtype], tuple(tensor.shape), tensor.nbytes)
        for suffix, tensor in tensors.items()
    }


def described(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[PackedWeight, Callable[[str], Tensor]]:
    """The weight that the tensors of PREFIX store, and a reader of tensors by full name."""
    rules = packed_rules({"quantization_config": dict(config)})
    assert rules is not None
    form = rules.format_of(PREFIX)
    assert form is not None
    assert set(tensors) <= set(rules.suffixes)
    weight = form.weight(PREFIX, headers(tensors))

    def get(name: str) -> Tensor:
        return tensors[name.removeprefix(PREFIX)]

    return form.resolved(weight, get), get


@pytest.mark.parametrize(
    ("name", "columns"), [(name, columns) for name, case in CASES.items() for columns in case.kinds]
)
def test_a_weight_is_read_as_the_numbers_that_its_tensors_stand_for(name: str, columns: int) -> None:
    case = CASES[name]
    tensors, numbers = case.write(weight_of(name, columns))
    weight, get = described(case.config, tensors)
    assert not weight.is_flat
    assert (weight.shape, weight.stored_type) == (tuple(numbers.shape), case.kinds[columns])
    assert torch.equal(weight.format.numbers(weight, get), numbers)
    planned = weight.format.planned("name", *weight.shape)
    assert (planned.shape, planned.label) == (weight.shape, weight.info.label)
    if len(case.kinds) > 1:
        assert planned.dtype == weight.stored_type


# Parts that only repeat what others say, and those whose size only other parts say.
_OPTIONAL = (".weight_shape", ".weight_format", ".nbits", ".group_size", ".axis", ".packing")


@pytest.mark.parametrize("name", CASES)
def test_damaged_parts_are_errors(name: str) -> None:
    case = CASES[name]
    tensors, _ = case.write(weight_of(name, next(iter(case.kinds))))
    for suffix in set(tensors).difference(_OPTIONAL):
        for damaged in ({}, {suffix: tensors[suffix].bool()}):
            with pytest.raises(ModelLoadError, match=PREFIX):
                described(case.config, {**{key: value for key, value in tensors.items() if key != suffix}, **damaged})
        with pytest.raises(ModelLoadError):
            weight, get = described(case.config, {**tensors, suffix: tensors[suffix].flatten()[:-1]})
            weight.format.read(weight, get)


def test_numbers_that_are_not_finite_are_errors() -> None:
    for name, suffix in (("fp8-blocks", ".weight"), ("fp8-e5m2", ".weight"), ("fp8-rows", ".weight_scale")):
        case = CASES[name]
        tensors, _ = case.write(weight_of(name, 64))
        tensors[suffix].view(torch.uint8)[3] = 0x7F if suffix == ".weight" else 0xFF
        weight, get = described(case.config, tensors)
        with pytest.raises(ModelLoadError, match="infinite or NaN"):
            weight.format.read(weight, get)


def test_contents_that_contradict_each_other_are_errors() -> None:
    def read(name: str, suffix: str, value: Tensor, pattern: str) -> None:
        tensors, _ = CASES[name].write(weight_of(name, next(iter(CASES[name].kinds))))
        with pytest.raises(ModelLoadError, match=pattern):
            weight, get = described(CASES[name].config, {**tensors, suffix: value})
            weight.format.read(weight, get)

    read("packed-int4", ".weight_shape", torch.tensor([3, 256]), "weight_shape")
    read("packed-int4-order", ".weight_g_idx", torch.zeros(128, dtype=torch.int32), "g_idx")
    read("packed-int4", ".weight_g_idx", torch.zeros(256, dtype=torch.int32), "g_idx")
    read("float-rows", ".weight_zero_point", torch.ones(131, 1), "symmetric")
    read("nvfp4", ".weight_zero_point", torch.ones(131, 1), "symmetric")
    read("w8a8", ".weight_zero_point", torch.ones(131, 1, dtype=torch.int8), "symmetric")
    read("bnb-int8", ".weight_format", torch.tensor(2, dtype=torch.uint8), "weight_format")
    read("hqq-4-1", ".nbits", torch.tensor(3, dtype=torch.int32), "nbits")
    read("hqq-4-1", ".shape", torch.tensor([3, 4]), "shape")
    for text in (b"{", b"[]", b"{}", b'{"shape": [64, 3], "blocksize": 64, "quant_type": "nf4"}'):
        read(
            "bnb-nf4",
            ".weight.quant_state.bitsandbytes__nf4",
            torch.tensor(list(text), dtype=torch.uint8),
            "quant_state",
        )


_W4 = _compressed("pack-quantized", num_bits=4, group_size=32)


@pytest.mark.parametrize("name", ["float-rows", "nvfp4", "w8a8", "w4-bytes"])
def test_symmetric_weights_may_have_zero_points(name: str) -> None:
    config, write, _ = CASES[name]
    tensors, numbers = write(weight_of(name, 64))
    weight, get = described(config, {**tensors, ".weight_zero_point": torch.zeros(131, 1, dtype=torch.int8)})
    assert torch.equal(weight.format.numbers(weight, get), numbers)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (_fp8(fmt="e3m4"), "fmt"),
        (_fp8(weight_block_size=[128]), "weight_block_size"),
        (_fp8(weight_block_size=[128, 0]), "weight_block_size"),
        (_fp8(activation_scheme="magic"), "activation_scheme"),
        (_fp8(expert_dtype="fp4"), "expert_dtype"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo"),
        ({"quant_method": "modelopt"}, "quant_algo"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        (_compressed("marlin-24", num_bits=4), "format"),
        (_compressed("mxfp6-pack-quantized", num_bits=6), "format"),
        (_compressed("pack-quantized", num_bits=5, strategy="channel"), "num_bits"),
        (_compressed("pack-quantized", num_bits=4, strategy="group"), "group_size"),
        (_compressed("pack-quantized", num_bits=4, strategy="block"), "strategy"),
        ({**_W4, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({**_W4, "transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        ({**_compressed("int-quantized", **_INT8), "ignore": ["LlamaMLP"]}, "LlamaMLP"),
        ({**_compressed("int-quantized", **_INT8), "ignore": ["re:("]}, "regular expression"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, "config_groups"),
        ({"quant_method": "bitsandbytes"}, "load_in_8bit"),
        (_bnb4("int4", is_nested=False), "bnb_4bit_quant_type"),
        ({**_bnb4("nf4", is_nested=False), "bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage"),
        (_hqq(5, 64, 1), "nbits"),
        (_hqq(4, 64, 2), "axis"),
        ({"quant_method": "hqq"}, "quant_config"),
    ],
)  # fmt: skip
def test_a_variant_that_is_not_supported_is_refused_by_name(config: Mapping[str, Any], word: str) -> None:
    with pytest.raises(PagewickError, match=word):
        packed_rules({"quantization_config": dict(config)})


def test_names_regular_expressions_and_classes_decide_which_layers_are_packed() -> None:
    group = {"weights": {"type": "int", "symmetric": True, **_INT8}}
    four = {
        "weights": {"type": "int", "num_bits": 4, "group_size": 32, "strategy": "group"},
        "format": "pack-quantized",
    }
    rules = packed_rules(
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "mixed-precision",
                "config_groups": {
                    "a": {**group, "targets": ["Linear"], "format": "int-quantized"},
                    "b": {**four, "targets": ["re:.*down_proj$"]},
                    "c": {**group, "targets": ["model.layers.1.mlp.down_proj"], "format": "int-quantized"},
                },
                "ignore": ["lm_head", "re:.*gate$"],
            }
        }
    )
    assert rules is not None
    labels = {
        prefix: form and form.label
        for prefix in ("lm_head", "model.layers.0.mlp.gate", "model.layers.0.mlp.up_proj", "model.embed_tokens")
        for form in [rules.format_of(prefix)]
    }
    assert labels == {
        "lm_head": None, "model.layers.0.mlp.gate": None, "model.layers.0.mlp.up_proj": "int8 per row",
        "model.embed_tokens": None,
    }  # fmt: skip
    kinds = [rules.format_of(f"model.layers.{layer}.mlp.down_proj") for layer in (0, 1)]
    assert [kind and kind.label for kind in kinds] == ["int4 g32", "int8 per row"]


def test_patterns_of_modelopt_and_tags_of_hqq_decide_which_layers_are_packed() -> None:
    excluded = {"quant_algo": "FP8", "exclude_modules": ["lm_head", "model.layers.0.self_attn*"]}
    rules = packed_rules({"quantization_config": {"quant_method": "modelopt", **excluded}})
    assert rules is not None
    names = ("lm_head", "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj")
    assert [rules.format_of(name) is not None for name in names] == [False, False, True]
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {names[2]: {"quant_algo": "NVFP4", "group_size": 16}}}
    rules = packed_rules({"quantization_config": {"quant_method": "modelopt", **mixed}})
    assert rules is not None
    assert [rules.format_of(name) is not None for name in names] == [False, False, True]
    by_tag = {"quant_config": {"self_attn.q_proj": _hqq(4, 64, 1)["quant_config"]}, "skip_modules": ["lm_head"]}
    rules = packed_rules({"quantization_config": {"quant_method": "hqq", **by_tag}})
    assert rules is not None
    assert [rules.format_of(name) is not None for name in (*names, "model.layers.1.mlp.up_proj")] == [
        False, True, True, False,
    ]  # fmt: skip
