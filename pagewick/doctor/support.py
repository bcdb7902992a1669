"""Whether Pagewick runs a model, by asking the parts that would: nothing is decided twice. Imports torch, late."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pagewick.errors import PagewickError
from pagewick.weights import gguf_header

# What checkpoints of each format say in their quantization_config, and a tensor that only they have.
_QUANTIZED: Final[Mapping[str, tuple[dict[str, Any], str]]] = {
    "fp8": ({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}, "weight_scale"),
    "int8": (
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
                }
            },
        },
        "weight_scale",
    ),
    "gptq-int4": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
        "qweight",
    ),
    "awq-int4": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
        "qweight",
    ),
}
_LAYER: Final = "model.layers.0.mlp.gate_proj"
_UNQUANTIZED: Final = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Verdict:
    """reason: why it does not run; empty if it does. fix: what to do then; empty if nothing helps.

    nearest: the supported architecture that is called most alike.
    """

    runs: bool
    reason: str = ""
    nearest: str = ""
    fix: str = ""


def judge(config: Mapping[str, Any], tensor_names: Collection[str]) -> Verdict:
    """Whether the engine would take a checkpoint of safetensors with this config.json."""
    from pagewick.models.config import architecture_of
    from pagewick.models.registry import ARCHITECTURES, nearest_to, read_config
    from pagewick.quantization import choose_method

    try:
        architecture = architecture_of(config)
        if architecture not in ARCHITECTURES:
            return Verdict(False, f"{architecture} is not supported yet", nearest_to(architecture))
        read_config(config)
        names = frozenset(tensor_names)
        for prefix in _linear_layers(names):
            choose_method(config, prefix, names)
    except PagewickError as error:
        return refusal(error)
    return Verdict(True)


def refusal(error: PagewickError) -> Verdict:
    """By what loading it raises: its first line says why, its last one, if it has more, what to do."""
    reason, *more = str(error).splitlines()
    return Verdict(False, reason, fix=more[-1].strip() if more else "")


def loadable_formats() -> frozenset[str]:
    """Names of parameters.stored_formats that can be loaded today."""
    from pagewick.quantization import choose_method

    found = set(_UNQUANTIZED)
    for name, (quantization, leaf) in _QUANTIZED.items():
        try:
            choose_method({"quantization_config": quantization}, _LAYER, frozenset({f"{_LAYER}.{leaf}"}))
        except PagewickError:
            continue
        found.add(name)
    if gguf_header.IS_LOADABLE:
        found |= {"Q8_0", "Q6_K", "Q4_K_M"}
    return frozenset(found)


def _linear_layers(names: Collection[str]) -> list[str]:
    """Every module that a quantization could concern, once."""
    leaves = (".weight", ".qweight")
    found = {name.removesuffix(leaf) for name in names for leaf in leaves if name.endswith(f"_proj{leaf}")}
    return sorted(found) or [_LAYER]
