"""How linear layers store and multiply their weights. Knows neither model names nor file formats."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

from pagewick.errors import ConfigError

if TYPE_CHECKING:
    from pagewick.quantization.method import LinearMethod

# Tensor names that only quantized linear layers have: GPTQ and AWQ, bitsandbytes, FP8.
_QUANTIZED_LEAVES: Final = ("qweight", "weight.absmax", "weight_scale", "weight_scale_inv")


def choose_method(config: Mapping[str, Any], prefix: str, tensor_names: Collection[str]) -> LinearMethod:
    """The method for the linear layer whose tensors are called `prefix`.weight and so on.

    `config` is the checkpoint's Hugging Face style config, `tensor_names` all names in the checkpoint (a set:
    it is searched per layer). Raises as check_supported does.
    """
    check_supported(config, prefix, tensor_names)
    from pagewick.quantization.unquantized import UnquantizedMethod

    return UnquantizedMethod()


def check_supported(config: Mapping[str, Any], prefix: str, tensor_names: Collection[str]) -> None:
    """Raises ConfigError if that linear layer is quantized: no such method is supported yet. Imports no torch."""
    quantization = config.get("quantization_config") or config.get("compression_config")
    if quantization is None and not any(f"{prefix}.{leaf}" in tensor_names for leaf in _QUANTIZED_LEAVES):
        return
    described = f"with {_describe(quantization)}" if isinstance(quantization, Mapping) else f"({prefix})"
    raise ConfigError(
        f"this checkpoint is quantized {described}, which is not supported yet\n"
        "  supported: unquantized checkpoints (bfloat16, float16, float32)\n"
        "  use the model's original, unquantized checkpoint instead"
    )


def _describe(quantization: Mapping[str, Any]) -> str:
    """Such as `gptq (4 bits)`."""
    method = quantization.get("quant_method") or "an unnamed method"
    bits = quantization.get("bits")
    return f"{method} ({bits} bits)" if bits else str(method)
