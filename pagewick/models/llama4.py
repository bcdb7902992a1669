"""Llama 4 (Scout, Maverick), which reads images as well. Llama, except:

- Three of four layers are rotated, in interleaved pairs. They see the tokens of their own chunk of the sequence.
- The others rotate nothing, see everything, and scale queries by their position.
- Rotated queries and keys are divided by their root mean square (Scout).
- Experts chosen by sigmoid, whose weights multiply their inputs, and a shared one; in every layer (Scout), or in every
  other one (Maverick), where the MLPs between have a size of their own.

transformers normalises heads after it has rotated them, and the decoder does so before: a rotation changes no length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from pagewick.layers.config import MoeConfig, QueryScaleConfig, RopeConfig
from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import MAX_LAYERS, Entries
from pagewick.models.multimodal import read_alone, read_text_part
from pagewick.models.name_map import NameMap
from pagewick.models.parts import HeadNormConfig, LayerConfig, MlpConfig, NormConfig
from pagewick.models.vision.llama4_entries import with_llama4_vision

_DEFAULTS: Final[dict[str, Any]] = {
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "attention_chunk_size": 8192,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
}
_NAMES: Final = (NameMap(parts=(("mlp", "feed_forward"), ("gate", "router"))),)


def read_llama4(entries: Entries) -> ModelConfig:
    return read_alone(entries, _read)


def read_llama4_multimodal(entries: Entries) -> ModelConfig:
    return with_llama4_vision(read_text_part(entries, _read), entries)


def _read(entries: Entries) -> ModelConfig:
    entries = entries.filled(_DEFAULTS)
    num_layers, eps = reading.read_num_layers(entries), entries.positive("rms_norm_eps", 1e-5)
    has_bias = entries.flag("attention_bias", False)
    attention = reading.read_attention(entries, qkv_bias=has_bias, o_bias=has_bias)
    rope = reading.read_rope_of(entries, attention, default_theta=5e5, interleaved=True)
    # In the other layers, transformers normalises nothing.
    rotated = attention
    if entries.flag("use_qk_norm", True):
        _check_length(entries, rope)
        rotated = replace(attention, head_norm=HeadNormConfig(eps=eps, has_weight=False))
    rotates = reading.read_rotating_layers(entries, num_layers, may_be_empty=True)
    chunks = _chunks(entries, rotates)
    scale = _query_scale(entries)
    mixed = _layers_with_experts(entries, num_layers)
    mlp, mixture = _mlp(entries), _experts(entries)
    layers = [
        LayerConfig(
            attention=rotated if turns else attention,
            mlp=mixture if layer_idx in mixed else mlp,
            rope=rope if turns else None,
            query_scale=None if turns else scale,
            window=chunk,
            is_chunked=chunk is not None,
        )
        for layer_idx, (turns, chunk) in enumerate(zip(rotates, chunks, strict=True))
    ]
    return reading.model_config(entries, norm=NormConfig(eps=eps), layers=tuple(layers), names=_NAMES)


def _check_length(entries: Entries, rope: RopeConfig) -> None:
    """Raise ModelLoadError if the rotation changes the length of a head: then its norm would have to come after it."""
    if rope.attention_factor != 1.0:
        raise entries.wrong("use_qk_norm", f"false with a rotary scaling of type {rope.kind}")


def _chunks(entries: Entries, rotates: Sequence[bool]) -> list[int | None]:
    """Return the size of each layer's chunks; None: it sees everything."""
    kinds = entries.texts("layer_types")
    if kinds is None:
        kinds = tuple(reading.CHUNKED if turns else reading.FULL for turns in rotates)
    if len(kinds) != len(rotates) or set(kinds) - {reading.CHUNKED, reading.FULL}:
        expected = f"a list of num_hidden_layers ({len(rotates)}) times {reading.CHUNKED} or {reading.FULL}"
        raise entries.wrong("layer_types", expected)
    if reading.CHUNKED not in kinds:
        return [None] * len(kinds)
    size = entries.size("attention_chunk_size")
    return [size if kind == reading.CHUNKED else None for kind in kinds]


def _query_scale(entries: Entries) -> QueryScaleConfig | None:
    name = "attn_temperature_tuning"
    # Published files have 4, which means true.
    is_number = isinstance(entries.get(name), int) and not isinstance(entries.get(name), bool)
    if not (entries.count(name) if is_number else entries.flag(name, True)):
        return None
    return QueryScaleConfig(beta=entries.number("attn_scale", 0.1), length=entries.size("floor_scale", 8192))


def _layers_with_experts(entries: Entries, num_layers: int) -> frozenset[int]:
    layers, step = entries.sizes("moe_layers", least=0), entries.size("interleave_moe_layer_step", 1, most=MAX_LAYERS)
    if layers is None:
        return frozenset(range(step - 1, num_layers, step))
    if any(layer_idx >= num_layers for layer_idx in layers):
        raise entries.wrong("moe_layers", f"a list of numbers of layers, below num_hidden_layers ({num_layers})")
    return frozenset(layers)


def _mlp(entries: Entries) -> MlpConfig:
    return MlpConfig(
        intermediate_size=entries.size("intermediate_size_mlp"), activation=reading.read_activation(entries)
    )


def _experts(entries: Entries) -> MoeConfig:
    num_experts, size = entries.size("num_local_experts"), entries.size("intermediate_size")
    return reading.make_moe(
        {
            "top_k": entries.size("num_experts_per_tok", most=num_experts),
            "scoring": "sigmoid",
            "weighs_inputs": True,
        },
        num_experts=num_experts,
        intermediate_size=size,
        shared_intermediate_size=size,
        activation=reading.read_activation(entries),
    )
