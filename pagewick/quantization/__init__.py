"""How weights are stored and multiplied. Knows neither model names nor file formats."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

from pagewick.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from pagewick.quantization.method import LinearMethod

    # A torch dtype, or the name of a block format of GGUF files, such as Q4_K.
    StoredType = torch.dtype | str

# Signed bytes with a float32 scale for each 32 or 16 of them: no types of ggml's.
_INT8_FORMATS: Final[Mapping[str, tuple[int, int]]] = {"int8_g32": (32, 36), "int8_g16": (32, 40)}
# Block formats that can be multiplied (ggml.py): name -> numbers and bytes of a block.
BLOCK_FORMATS: Final[Mapping[str, tuple[int, int]]] = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    **_INT8_FORMATS,
}
# ggml's types that are kept in another of these formats, with the same numbers (expansion.py).
EXPANSIONS: Final[Mapping[str, str]] = {
    "IQ1_S": "int8_g32",
    "IQ1_M": "int8_g16",
    "IQ2_XXS": "int8_g32",
    "IQ2_XS": "int8_g16",
    "IQ2_S": "int8_g16",
    "IQ3_XXS": "int8_g32",
    "IQ3_S": "int8_g32",
    "IQ4_NL": "Q8_0",
    "IQ4_XS": "int8_g32",
    "TQ1_0": "Q8_0",
    "TQ2_0": "Q8_0",
    "MXFP4": "int8_g32",
    "NVFP4": "int8_g16",
}
# Tensor names that only quantized linear layers have: GPTQ and AWQ, bitsandbytes, FP8.
_QUANTIZED_LEAVES: Final = ("qweight", "weight.absmax", "weight_scale", "weight_scale_inv")


def method_chooser(config: Mapping[str, Any], stored_types: Mapping[str, StoredType]) -> Callable[[str], LinearMethod]:
    """Return a function that chooses the method of a weight, given the weight's name without `.weight`.

    config: the checkpoint's Hugging Face style config. stored_types: types of all tensors in the checkpoint, as
    TensorSource.stored_type returns them. The function raises ConfigError for a weight that is quantized.
    """

    def choose(prefix: str) -> LinearMethod:
        check_supported(config, prefix, stored_types.keys())
        from pagewick.quantization.unquantized import UnquantizedMethod

        stored_type = stored_types.get(f"{prefix}.weight")
        if isinstance(stored_type, str):
            check_block_format(stored_type, f"{prefix}.weight")
            from pagewick.quantization.ggml import GgmlMethod

            return GgmlMethod(stored_type, *BLOCK_FORMATS[stored_type])
        return UnquantizedMethod()

    return choose


def kept_format(name: str) -> str:
    """Return the format that weights in a block format have in memory."""
    return EXPANSIONS.get(name, name)


def check_block_format(name: str, tensor_name: str) -> None:
    """Raise ConfigError unless weights in the block format `name` can be multiplied or expanded. Imports no torch."""
    if name not in BLOCK_FORMATS and name not in EXPANSIONS:
        known = [*(format for format in BLOCK_FORMATS if format not in _INT8_FORMATS), *EXPANSIONS]
        raise ConfigError(
            f"{tensor_name} is stored as {name}, which is not supported\n"
            f"  supported: F32, F16, BF16, {', '.join(known)}\n"
            "  use another file of this model, such as one in Q4_K_M"
        )


def check_supported(config: Mapping[str, Any], prefix: str, tensor_names: Collection[str]) -> None:
    """Raise ConfigError if that linear layer is quantized, because no such method exists yet. Imports no torch."""
    quantization = config.get("quantization_config") or config.get("compression_config")
    if quantization is None and not any(f"{prefix}.{leaf}" in tensor_names for leaf in _QUANTIZED_LEAVES):
        return
    described = f"({prefix})"
    if isinstance(quantization, Mapping):
        bits = quantization.get("bits")
        described = f"with {quantization.get('quant_method') or 'an unnamed method'}{f' ({bits} bits)' if bits else ''}"
    raise ConfigError(
        f"this checkpoint is quantized {described}, which is not supported yet\n"
        "  supported: unquantized checkpoints (bfloat16, float16, float32)\n"
        "  use the model's original, unquantized checkpoint instead"
    )
