"""How weights are stored and multiplied. Knows neither model names nor file formats."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

from pagewick.errors import ConfigError
from pagewick.quantization.block_formats import check_block_format

if TYPE_CHECKING:
    import torch

    from pagewick.quantization.method import LinearMethod

    # A torch dtype, or the name of a block format of GGUF files, such as Q4_K.
    StoredType = torch.dtype | str

# Tensor names that only quantized linear layers have: GPTQ and AWQ, bitsandbytes, FP8.
_QUANTIZED_LEAVES: Final = ("qweight", "weight.absmax", "weight_scale", "weight_scale_inv")


def method_chooser(
    config: Mapping[str, Any], stored_types: Mapping[str, StoredType], at_load: Mapping[str, str] | None = None
) -> Callable[[str], LinearMethod]:
    """Return a function that chooses the method of a weight, given the weight's name without `.weight`.

    config: the checkpoint's Hugging Face style config. stored_types: types of all tensors in the checkpoint, as
    TensorSource.stored_type returns them. at_load: the block formats of those that are to be quantized now. The
    function raises ConfigError for a weight that is quantized in a way that is not supported.
    """

    def choose(prefix: str) -> LinearMethod:
        check_supported(config, prefix, stored_types.keys())
        from pagewick.quantization.unquantized import UnquantizedMethod

        stored_type = stored_types.get(f"{prefix}.weight")
        if at_load and (name := at_load.get(f"{prefix}.weight")) is not None:
            from pagewick.quantization.at_load import QuantizingMethod

            return QuantizingMethod(name)
        if isinstance(stored_type, str):
            check_block_format(stored_type, f"{prefix}.weight")
            from pagewick.quantization.ggml import GgmlMethod

            return GgmlMethod(stored_type)
        return UnquantizedMethod()

    return choose


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
