"""Weights as torchao stores them, written from its definition with no code of the package, and none of torchao's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.checkpoints import make_model, save
from tests.models.variants import VARIANTS
from tests.weights.packed import byte_writers as writers
from tests.weights.packed.harness import SIZES, Written, write_packed

NAMES = {
    ".weight": "qdata", ".weight_packed": "qdata", ".weight_scale": "scale", ".weight_zero_point": "zero_point",
    ".weight_scale_2": "per_tensor_scale",
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """kind: torchao's class. parts: tensors by the attribute's name. data: its other attributes. numbers: [N, C]."""

    kind: str
    parts: dict[str, Tensor]
    data: dict[str, Any]
    numbers: Tensor

    @property
    def description(self) -> str:
        return json.dumps({"_type": self.kind, "_data": self.data, "_tensor_data_names": list(self.parts)})


TorchaoWriter = Callable[[Tensor], Stored]


def word(kind: str, value: str) -> dict[str, str]:
    return {"_type": kind, "_data": value}


def dtype(name: str) -> dict[str, str]:
    return word("torch.dtype", name)


def _named(found: writers.Written) -> tuple[dict[str, Tensor], Tensor]:
    tensors, numbers = found
    return {NAMES[suffix]: tensor for suffix, tensor in tensors.items()}, numbers


def fp8(weight: Tensor, block: tuple[int, int] | None = None, **options: Any) -> Stored:
    """block: None is a row."""
    block = block or (1, weight.shape[1])
    parts, numbers = _named(writers.fp8(weight, block, name=".weight_scale", **options))
    data = {
        "block_size": list(block), "mm_config": None, "act_quant_kwargs": None, "dtype": dtype("bfloat16"),
        "kernel_preference": word("KernelPreference", "AUTO"),
    }  # fmt: skip
    return Stored("Float8Tensor", parts, data, numbers)


def fp8_whole(weight: Tensor) -> Stored:
    return fp8(weight, (weight.shape[0], weight.shape[1]))


def int8(weight: Tensor, *, has_zeros: bool = False) -> Stored:
    options = {"is_symmetric": not has_zeros, "scale_dtype": torch.float32}
    parts, numbers = _named(writers.integers(weight, 8, -1, is_packed=False, **options))
    parts.setdefault("zero_point", torch.zeros(len(weight), 1, dtype=torch.int8))
    data = {"block_size": [1, weight.shape[1]], "dtype": dtype("bfloat16"), "act_quant_kwargs": None}
    return Stored("Int8Tensor", parts, data, numbers)


def intx(weight: Tensor, bits: int, group_size: int = -1, *, is_symmetric: bool = True) -> Stored:
    parts, numbers = _named(writers.integers(weight, bits, group_size, is_packed=False, is_symmetric=is_symmetric))
    parts.setdefault("zero_point", torch.zeros(parts["scale"].shape, dtype=torch.int8))
    size = weight.shape[1] if group_size == -1 else group_size
    data = {
        "target_dtype": dtype(f"int{bits}"), "block_size": [1, size], "dtype": dtype("bfloat16"),
        "activation_quantization": "int8_asym_per_token",
    }  # fmt: skip
    return Stored("IntxUnpackedToInt8Tensor", parts, data, numbers)


def _levels(weight: Tensor, group_size: int, *, has_zeros: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Levels -8 .. 7 [N, C], scales and zero points [N, G] in bfloat16, and the numbers scale * level + zero."""
    groups = torch.split(weight, group_size, dim=1)
    levels, scales, zeros, numbers = [], [], [], []
    for group in groups:
        low, high = group.amin(1, keepdim=True), group.amax(1, keepdim=True)
        scale = ((high - low) / 15 if has_zeros else group.abs().amax(1, keepdim=True) / 7).bfloat16()
        zero = (low + 8 * scale.float() if has_zeros else torch.zeros_like(scale)).bfloat16()
        level = ((group - zero.float()) / scale.float()).round().clamp(-8, 7)
        levels.append(level)
        scales.append(scale)
        zeros.append(zero)
        numbers.append(level * scale.float() + zero.float())
    return torch.cat(levels, 1).int(), torch.cat(scales, 1), torch.cat(zeros, 1), torch.cat(numbers, 1)


def int4(weight: Tensor, group_size: int, *, has_zeros: bool = True) -> Stored:
    levels, scales, zeros, numbers = _levels(weight, group_size, has_zeros=has_zeros)
    halves = levels & 15
    parts = {
        "qdata": (halves[:, 0::2] + 16 * halves[:, 1::2]).to(torch.uint8).view(torch.int8),
        "scale": scales.t().contiguous(),
        "zero_point": zeros.t().contiguous(),
    }
    activations = dtype("bfloat16" if has_zeros else "float8_e4m3fn")
    data = {"block_size": [1, group_size], "shape": list(weight.shape), "activation_dtype": activations}
    return Stored("Int4Tensor", parts, data, numbers)


def tiled_int4(weight: Tensor, group_size: int) -> Stored:
    """The words of each thread of each tile, as the CUDA kernel packs them: four bytes of two numbers of a row."""
    rows, columns = weight.shape
    padded = torch.zeros(-(-rows // 8) * 8, -(-columns // 1024) * 1024)
    padded[:rows, :columns] = weight
    levels, scales, zeros, numbers = _levels(padded, group_size)
    octets = ((levels[:, 0::2] + 8) * 16 + levels[:, 1::2] + 8).tolist()
    words = torch.zeros(len(padded) // 8, padded.shape[1] // 128, 32, 4, dtype=torch.int64)
    for tile_row in range(words.shape[0]):
        for tile in range(words.shape[1]):
            for thread in range(32):
                row = octets[tile_row * 8 + thread // 4]
                for inner in range(0, 8, 2):
                    base = (tile * 8 + inner) * 8 + thread % 4
                    value = 0
                    for place, octet in enumerate(row[base + step] for step in (0, 4, 8, 12)):
                        value |= (octet >> 4) << 4 * place | (octet & 15) << 4 * place + 16
                    words[tile_row, tile, thread, inner // 2] = value
    parts = {"qdata": words.to(torch.int32), "scale_and_zero": torch.stack([scales.t(), zeros.t()], 2).contiguous()}
    data = {"block_size": [1, group_size], "shape": [rows, columns]}
    return Stored("Int4TilePackedTo4dTensor", parts, data, numbers[:rows, :columns])


def _swizzled(scales: Tensor) -> Tensor:
    """Scales of one byte in tiles of 128 x 4, number by number."""
    rows, columns = scales.shape
    high, wide = -(-rows // 128), -(-columns // 4)
    found = torch.zeros(high * wide * 512, dtype=torch.uint8)
    octets = scales.view(torch.uint8)
    for row in range(rows):
        for column in range(columns):
            tile = row // 128 * wide + column // 4
            found[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4] = octets[row, column]
    return found.view(scales.dtype).view(high * 32, wide * 16)


def _mx(kind: str, found: writers.Written, data: dict[str, Any], *, is_swizzled: bool) -> Stored:
    parts, numbers = _named(found)
    if parts["scale"].dtype == torch.uint8:
        parts["scale"] = parts["scale"].view(torch.float8_e8m0fnu)
    if is_swizzled:
        parts["scale"] = _swizzled(parts["scale"])
    return Stored(kind, parts, {**data, "orig_dtype": dtype("bfloat16"), "is_swizzled_scales": is_swizzled}, numbers)


def mxfp8(weight: Tensor, *, is_swizzled: bool = False) -> Stored:
    found = writers.fp8(weight, (1, 32), name=".weight_scale", scale_dtype=torch.float8_e8m0fnu)
    data = {"elem_dtype": dtype("float8_e4m3fn"), "block_size": 32, "act_quant_kwargs": None}
    return _mx("MXTensor", found, data, is_swizzled=is_swizzled)


def mxfp4(weight: Tensor, *, is_swizzled: bool = False) -> Stored:
    data = {"elem_dtype": dtype("float4_e2m1fn_x2"), "block_size": 32}
    return _mx("MXTensor", writers.mxfp4(weight), data, is_swizzled=is_swizzled)


def nvfp4(weight: Tensor, *, is_swizzled: bool = False) -> Stored:
    found = writers.nvfp4(weight, is_modelopt=True)
    return _mx("NVFP4Tensor", found, {"block_size": 16, "use_triton_kernel": False}, is_swizzled=is_swizzled)


def factored(weight: Tensor, write: TorchaoWriter) -> Stored:
    """A weight whose activations are multiplied by factors, as AWQ's and SmoothQuant's are."""
    found = write(weight)
    factors = (torch.arange(weight.shape[1]) % 7 / 8 + 0.5).bfloat16()
    return Stored(found.kind, {**found.parts, "act_pre_scale": factors}, found.data, found.numbers * factors.float())


def config(kind: str, **data: Any) -> dict[str, Any]:
    """The configuration of a class, as config.json has it."""
    return {"_type": kind, "_version": 2, "_data": data}


def quantization(whole: Mapping[str, Any], **entries: Any) -> dict[str, Any]:
    return {
        "quant_method": "torchao", "quant_type": {"default": dict(whole)}, "modules_to_not_convert": None,
        "include_input_output_embeddings": False, "untie_embedding_weights": False, **entries,
    }  # fmt: skip


def rewrite(path: Path, descriptions: Mapping[str, str]) -> None:
    """Write a file again with descriptions of weights, and those of all other tensors, in its header."""
    tensors = load_file(path)
    plain = {name: json.dumps({"_type": "Tensor"}) for name in tensors if not re.search(r"\._\w+_", name)}
    texts = {"format": "pt", **plain, **descriptions}
    save_file(tensors, path, {**texts, "tensor_names": json.dumps([*plain, *descriptions])})


def write_torchao(
    directory: Path, whole: Mapping[str, Any], write: TorchaoWriter | Mapping[str, TorchaoWriter], **options: Any
) -> Written:
    """Write a checkpoint as write_packed does, with descriptions. write: one for all, or for ends of prefixes."""
    descriptions: dict[str, str] = {}

    def write_one(prefix: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        one = write if callable(write) else next(one for end, one in write.items() if prefix.endswith(end))
        found = one(weight)
        descriptions[f"{prefix}.weight"] = found.description
        return {f"{prefix}._weight_{name}": part for name, part in found.parts.items()}, found.numbers

    written = write_packed(directory, whole, write_one, **{"entries": SIZES, **options})
    rewrite(directory / "model.safetensors", descriptions)
    return written


def write_stacks(directory: Path, whole: Mapping[str, Any], write: TorchaoWriter, name: str, **entries: Any) -> Written:
    """Write a model with all experts of a layer in two tensors, which torchao has quantized."""
    save(make_model(name, {**VARIANTS[name].all_entries(), **entries}), directory)
    tensors, packed, descriptions = load_file(directory / "model.safetensors"), [], {}
    stored, meant = dict(tensors), dict(tensors)
    layers = sorted({key.partition(".experts.")[0] for key in tensors if ".experts." in key})
    for owner in (f"{layer}.experts" for layer in layers):
        num_experts = sum(key.startswith(f"{owner}.") and key.endswith("down_proj.weight") for key in tensors)
        for stack, projections in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            found = []
            for expert in range(num_experts):
                names = [f"{owner}.{expert}.{projection}.weight" for projection in projections]
                found.append(write(torch.cat([stored.pop(key) for key in names]).float()))
                meant |= dict(zip(names, found[-1].numbers.contiguous().chunk(len(names)), strict=True))
                packed += names
            for part in found[0].parts:
                stored[f"{owner}._{stack}_{part}"] = torch.stack([one.parts[part] for one in found])
            block = found[0].data["block_size"]
            data = {**found[0].data, "block_size": [1, *block] if isinstance(block, list) else block}
            descriptions[f"{owner}.{stack}"] = replace(found[0], data=data).description
    save_file(stored, directory / "model.safetensors")
    rewrite(directory / "model.safetensors", descriptions)
    described = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**described, "quantization_config": quantization(whole)}))
    return Written(directory, name, meant, packed)


_INT4 = config("Int4WeightOnlyConfig", group_size=32)
CASES: dict[str, tuple[dict[str, Any], TorchaoWriter, str]] = {
    "fp8": (config("Float8WeightOnlyConfig"), fp8, "fp8_g32"),
    "fp8-whole": (config("Float8WeightOnlyConfig"), fp8_whole, "fp8_g32"),
    "fp8-blocks": (
        config("Float8DynamicActivationFloat8WeightConfig",
               granularity=[config("PerGroup", group_size=64), config("PerBlock", block_size=[8, 64])]),
        partial(fp8, block=(8, 64)), "fp8_g32",
    ),
    "int8": (config("Int8DynamicActivationInt8WeightConfig"), int8, "int8_g32"),
    "intx-8-zeros": (
        config("IntxWeightOnlyConfig", mapping_type=word("MappingType", "ASYMMETRIC"),
               granularity=config("PerAxis", axis=0)),
        partial(intx, bits=8, is_symmetric=False), "F32",
    ),
    "intx-4": (
        config("Int8DynamicActivationIntxWeightConfig", weight_dtype=dtype("int4"),
               weight_granularity=config("PerGroup", group_size=64)),
        partial(intx, bits=4, group_size=64), "int4_g64",
    ),
    "intx-2-zeros": (
        config("IntxWeightOnlyConfig", weight_dtype=dtype("int2"), granularity=config("PerGroup", group_size=32),
               mapping_type=word("MappingType", "ASYMMETRIC")),
        partial(intx, bits=2, group_size=32, is_symmetric=False), "int4_g32",
    ),
    "intx-5-zeros": (
        config("IntxWeightOnlyConfig", weight_dtype=dtype("int5"), mapping_type=word("MappingType", "ASYMMETRIC")),
        partial(intx, bits=5, is_symmetric=False), "int8_g32",
    ),
    "int4": (_INT4, partial(int4, group_size=32), "F32"),
    "int4-fp8": (
        config("Float8DynamicActivationInt4WeightConfig", int4_packing_format="plain", group_size=64),
        partial(int4, group_size=64, has_zeros=False), "int4_g64",
    ),
    "int4-tiled": (
        config("Int4WeightOnlyConfig", group_size=64, int4_packing_format=word("_", "TILE_PACKED_TO_4D")),
        partial(tiled_int4, group_size=64), "F32",
    ),
    "awq": (config("AWQConfig", base_config=_INT4), partial(factored, write=partial(int4, group_size=32)), "F32"),
    "smoothquant": (
        config("SmoothQuantConfig", base_config=config("Int8DynamicActivationInt8WeightConfig")),
        partial(factored, write=int8), "F32",
    ),
    "mxfp8": (config("MXDynamicActivationMXWeightConfig"), mxfp8, "fp8_g32"),
    "mxfp8-swizzled": (config("MXDynamicActivationMXWeightConfig"), partial(mxfp8, is_swizzled=True), "fp8_g32"),
    "mxfp4": (config("MXDynamicActivationMXWeightConfig", weight_dtype=dtype("float4_e2m1fn_x2")), mxfp4, "MXFP4"),
    "nvfp4": (config("NVFP4WeightOnlyConfig"), nvfp4, "fp4_g16"),
    "nvfp4-swizzled": (config("NVFP4WeightOnlyConfig"), partial(nvfp4, is_swizzled=True), "fp4_g16"),
}  # fmt: skip
