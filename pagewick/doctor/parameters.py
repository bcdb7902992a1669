"""How many parameters a checkpoint has, and how many bytes they take in each format. Imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from pagewick.weights.tensor_headers import TensorInfo

# Tensors that only say how others are to be read, or that are computed anew.
_HELPERS: Final = re.compile(
    r".*\.(qzeros|scales|g_idx|weight_scale|weight_scale_inv|weight_scale_2|input_scale|weight_zero_point|weight_shape"
    r"|weight_g_idx|k_scale|v_scale|inv_freq|masked_bias|absmax|nested_absmax|quant_map|nested_quant_map"
    r"|quant_state\..*)|.*\.weight\.(absmax|nested_absmax|quant_map|nested_quant_map|quant_state\..*)"
    r"|.*_blocks_scales|.*_scales|rope_freqs\.weight|rope_factors_(long|short)\.weight"
)
_EMBEDDINGS: Final = ("embed_tokens.weight", "lm_head.weight", "token_embd.weight", "output.weight", "wte.weight")
_HEADS: Final = ("lm_head.weight", "output.weight")
_LAYER: Final = re.compile(r"(?:^|\.)(?:layers|h|blk)\.(\d+)\.")
_GPTQ_GROUP: Final = 128

Kind = Literal["linear", "embedding", "head", "other"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor as it is computed with, however its file packs it. shape of a linear one: [..., out, in]."""

    name: str
    kind: Kind
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_rows(self) -> int:
        """Rows over all the matrices that the tensor holds."""
        return math.prod(self.shape[:-1])


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """A way of storing weights. num_bytes: of the whole model. is_gguf: GGUF files have it."""

    name: str
    num_bytes: int
    is_gguf: bool = False


def parameters_of(tensors: Sequence[TensorInfo], config: Mapping[str, Any], *, is_tied: bool) -> list[Parameter]:
    """The parameters that a checkpoint holds. A head that is tied to the embedding does not count again."""
    names = {tensor.name for tensor in tensors}
    bits = _bits(config)
    has_embedding = any(name.endswith(("embed_tokens.weight", "token_embd.weight", "wte.weight")) for name in names)
    found = []
    for tensor in tensors:
        if _HELPERS.fullmatch(tensor.name) or (is_tied and has_embedding and tensor.name.endswith(_HEADS)):
            continue
        found.append(_logical(tensor, names, bits))
    return found


def count(parameters: Iterable[Parameter]) -> int:
    """All numbers of a model."""
    return sum(parameter.num_elements for parameter in parameters)


def stored_formats(parameters: Sequence[Parameter]) -> list[StoredFormat]:
    """What a model takes in each of the usual formats.

    fp8 and int8: linear layers in 8 bits with a float32 scale per output row. gptq-int4 and awq-int4: linear layers in
    4 bits in groups of 128 with a 16-bit scale and a 4-bit zero each. All of these leave the rest in 16 bits. The GGUF
    formats are those of llama.cpp's quantize, which keeps vectors in float32.
    """
    total = count(parameters)
    linear = [parameter for parameter in parameters if parameter.kind == "linear"]
    rest = 2 * (total - count(linear))
    eight = rest + sum(parameter.num_elements + 4 * parameter.num_rows for parameter in linear)
    return [
        StoredFormat("float32", 4 * total),
        StoredFormat("bfloat16", 2 * total),
        StoredFormat("float16", 2 * total),
        StoredFormat("fp8", eight),
        StoredFormat("int8", eight),
        StoredFormat("gptq-int4", rest + sum(_int4_bytes(parameter, has_order=True) for parameter in linear)),
        StoredFormat("awq-int4", rest + sum(_int4_bytes(parameter, has_order=False) for parameter in linear)),
        *(StoredFormat(name, gguf_bytes(parameters, name), is_gguf=True) for name in ("Q8_0", "Q6_K", "Q4_K_M")),
    ]


def gguf_bytes(parameters: Sequence[Parameter], name: str) -> int:
    """Bytes of the tensors of a GGUF file in a format that llama.cpp's quantize offers: Q8_0, Q6_K or Q4_K_M."""
    num_layers = 1 + max(
        (layer for parameter in parameters if (layer := layer_of(parameter.name)) is not None), default=0
    )
    has_head = any(parameter.kind == "head" for parameter in parameters)
    return sum(_gguf_tensor_bytes(parameter, name, num_layers, has_head=has_head) for parameter in parameters)


def _gguf_tensor_bytes(parameter: Parameter, name: str, num_layers: int, *, has_head: bool) -> int:
    if parameter.kind == "other":
        return 4 * parameter.num_elements
    columns = parameter.shape[-1] if parameter.shape else 1
    block = _q4_k_m(parameter, num_layers, has_head=has_head) if name == "Q4_K_M" else name
    if columns % 256 and block != "Q8_0":  # the K formats need whole blocks of 256
        block = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}[block]
    if columns % 32:
        return 2 * parameter.num_elements
    elements, num_bytes = {"Q8_0": (32, 34), "Q5_0": (32, 22), "Q6_K": (256, 210), "Q4_K": (256, 144)}[block]
    return parameter.num_elements // elements * num_bytes


def _q4_k_m(parameter: Parameter, num_layers: int, *, has_head: bool) -> str:
    """Q6_K for the head, and for values and down projections of some layers: first and last eighth, and each third."""
    if parameter.kind == "head" or (parameter.kind == "embedding" and not has_head):
        return "Q6_K"
    layer = layer_of(parameter.name)
    is_sensitive = re.search(r"\.(v_proj|down_proj|attn_v|ffn_down)\b", parameter.name) is not None
    if layer is None or not is_sensitive:
        return "Q4_K"
    eighth = num_layers // 8
    more = layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2
    return "Q6_K" if more else "Q4_K"


def _int4_bytes(parameter: Parameter, *, has_order: bool) -> int:
    """Weights, a scale and a zero per group of input columns; with GPTQ also each column's group, in 4 bytes."""
    columns = parameter.shape[-1]
    matrices = math.prod(parameter.shape[:-2])
    num_groups = -(-columns // _GPTQ_GROUP)
    num_bytes = parameter.num_elements // 2 + num_groups * parameter.num_rows * 2 + num_groups * parameter.num_rows // 2
    return num_bytes + (4 * columns * matrices if has_order else 0)


def _logical(tensor: TensorInfo, names: Collection[str], bits: int) -> Parameter:
    """A tensor with the shape that it stands for. An unusual or damaged file may give it any shape."""
    name = tensor.name
    if not name.endswith((".qweight", ".weight_packed", "_blocks")) and f"{name}.absmax" not in names:
        return Parameter(name, _kind(name, tensor.shape), tensor.shape)
    # Two dimensions at least: what is packed is a matrix.
    shape = (1,) * (2 - len(tensor.shape)) + tensor.shape
    if name.endswith(".qweight"):
        # GPTQ packs the input columns of a transposed weight, AWQ its output rows: the elements are as many.
        packed = 32 // bits
        return Parameter(name, "linear", (*shape[:-1], shape[-1] * packed))
    if name.endswith(".weight_packed"):
        return Parameter(name, "linear", (*shape[:-1], shape[-1] * (32 // bits)))
    if name.endswith("_blocks"):  # MXFP4: two in a byte, in blocks of 16 bytes
        return Parameter(name, "linear", (*shape[:-2], shape[-2] * shape[-1] * 2))
    # bitsandbytes: two in a byte, as one column
    return Parameter(name, "linear", (2 * math.prod(shape[:-1]), shape[-1]))


def _kind(name: str, shape: tuple[int, ...]) -> Kind:
    if name.endswith(_HEADS):
        return "head"
    if name.endswith(_EMBEDDINGS):
        return "embedding"
    return "linear" if len(shape) >= 2 and name.endswith((".weight", "_proj")) else "other"


def _bits(config: Mapping[str, Any]) -> int:
    quantization = config.get("quantization_config")
    bits = quantization.get("bits") if isinstance(quantization, Mapping) else None
    return bits if bits in (2, 4, 8) else 4


def layer_of(name: str) -> int | None:
    """The layer that a tensor belongs to; None if to none."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None
