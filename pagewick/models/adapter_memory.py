"""The memory that the layers of a rank need for LoRA adapters. Imports no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from pagewick.layers.config import padded_rank
from pagewick.models.tensor_sizes import DTYPE_BYTES, ModelTensor

# Projections of the same module that one layer multiplies together, by the beginnings of their names.
_FUSED: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# A module whose projections are multiplied together, but for these.
_FUSED_MODULE: Final = "linear_attn"
_ALONE: Final = ("out_proj", "f_b_proj", "g_b_proj")
# Modules that multiply these two together.
_WITH_ROWS: Final = ("compressor", "indexer")
_ROWS: Final = ("kv_proj", "gate_proj")


def adapter_bytes(tensors: Iterable[ModelTensor], num_adapters: int, max_rank: int, dtype: str) -> int:
    """Return the bytes of a rank's room for adapters, and for the one that stands for none.

    In a fused layer, the factors of all parts lie beside each other; see layers/lora.py.
    """
    layers: defaultdict[str, list[tuple[int, ...]]] = defaultdict(list)
    for tensor in tensors:
        if tensor.is_linear and tensor.role != "expert":
            layers[_layer_of(tensor)].append(tensor.kept)
    widths = (len(parts) * (parts[0][1] + sum(part[0] for part in parts)) for parts in layers.values())
    return (num_adapters + 1) * sum(widths) * padded_rank(max_rank) * DTYPE_BYTES[dtype]


def _layer_of(tensor: ModelTensor) -> str:
    module, _, name = tensor.path.removesuffix(".weight").rpartition(".")
    if module.endswith(_FUSED_MODULE) and name not in _ALONE:
        return module
    if module.endswith(_WITH_ROWS) and name in _ROWS:
        return module
    return next((f"{module}.{one[0]}" for one in _FUSED if name.startswith(one)), f"{module}.{name}")
