"""How weights are stored and multiplied. Knows neither model names nor file formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from pagewick.quantization.block_formats import ORDER_LEAF, check_block_format

if TYPE_CHECKING:
    import torch

    from pagewick.quantization.method import LinearMethod

    # A torch dtype, or the name of a block format of GGUF files, such as Q4_K.
    StoredType = torch.dtype | str


def method_chooser(
    stored_types: Mapping[str, StoredType], at_load: Mapping[str, str] | None = None
) -> Callable[[str], LinearMethod]:
    """Return a function that chooses the method of a weight, given the weight's name without `.weight`.

    stored_types: types of all tensors in the checkpoint, as TensorSource.stored_type returns them. at_load: the block
    formats of those that are to be quantized now. The function raises ConfigError for a weight that is quantized in a
    way that is not supported.
    """

    def choose(prefix: str) -> LinearMethod:
        from pagewick.quantization.act_order import OrderedMethod

        method = _method(stored_types.get(f"{prefix}.weight"), (at_load or {}).get(f"{prefix}.weight"), prefix)
        return OrderedMethod(method, prefix.rpartition(".")[2]) if f"{prefix}.{ORDER_LEAF}" in stored_types else method

    return choose


def _method(stored_type: StoredType | None, at_load: str | None, prefix: str) -> LinearMethod:
    if at_load is not None:
        from pagewick.quantization.at_load import QuantizingMethod

        return QuantizingMethod(at_load)
    if isinstance(stored_type, str):
        check_block_format(stored_type, f"{prefix}.weight")
        from pagewick.quantization.ggml import GgmlMethod

        return GgmlMethod(stored_type)
    from pagewick.quantization.unquantized import UnquantizedMethod

    return UnquantizedMethod()
