"""Mistral (v0.1 to v0.3, Nemo; Small 3.1 and 3.2, which read images), Ministral, Mixtral. Llama, except:

- Ministral 3 scales queries by their position.
- Attention may be limited to a window, in all layers (Mistral v0.1), or in those that layer_types names (Ministral 8B).
- Mixtral has experts in place of each MLP: the best of a softmax over all, with normalised weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from pagewick.layers.config import MoeConfig
from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.mistral4 import read_mistral4_text
from pagewick.models.multimodal import read_alone, read_text_part, text_entries
from pagewick.models.name_map import NameMap
from pagewick.models.parts import MlpConfig, NormConfig
from pagewick.models.vision.pixtral_entries import with_pixtral

# Defaults of entries that files leave out; if num_key_value_heads is null, there are as many as query heads.
_SIZES: Final = {"num_key_value_heads": 8, "max_position_embeddings": 131072}
# Where a file has no entry about rotation at all.
_MINISTRAL_ROPE: Final = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
# These names are older than the ones that other families use, which some files have as well.
_MIXTRAL_NAMES = NameMap(
    parts=(("mlp", "block_sparse_moe"), ("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3"))
)


def read_mistral(entries: Entries) -> ModelConfig:
    return read_alone(entries, read_mistral_text)


def read_ministral(entries: Entries) -> ModelConfig:
    entries = entries.filled({**_SIZES, "sliding_window": 4096})
    slides = [entries.optional_size("sliding_window") is not None] * reading.read_num_layers(entries)
    windows = reading.read_windows(entries, slides)
    return _read(entries, reading.read_mlp(entries), default_eps=1e-6, windows=windows)


def read_ministral3(entries: Entries) -> ModelConfig:
    return read_alone(entries, _read_ministral3)


def read_mistral_text(entries: Entries) -> ModelConfig:
    entries = entries.filled({**_SIZES, "sliding_window": 4096})
    return _read(entries, reading.read_mlp(entries), default_eps=1e-6)


def _read_ministral3(entries: Entries) -> ModelConfig:
    defaults: dict[str, Any] = {"head_dim": 128, **_SIZES, "max_position_embeddings": 262144}
    if "rope_scaling" not in entries:
        entries, defaults = entries.without_null(("rope_parameters",)), {**defaults, "rope_parameters": _MINISTRAL_ROPE}
    entries = entries.filled(defaults)
    return _read(entries, reading.read_mlp(entries), default_theta=1e6, has_query_scaling=True)


_TEXT_PARTS: Final = {"mistral": read_mistral_text, "ministral3": _read_ministral3, "mistral4": read_mistral4_text}


def read_mistral3(entries: Entries) -> ModelConfig:
    text = text_entries(entries)
    kind = text.choice("model_type", tuple(_TEXT_PARTS), "mistral")
    read = _TEXT_PARTS[kind]
    return with_pixtral(read_text_part(entries, read, is_tied=text.flag("tie_word_embeddings", False)), entries)


def read_mixtral(entries: Entries) -> ModelConfig:
    entries = entries.filled(_SIZES)
    num_experts = entries.size("num_local_experts", 8)
    top_k = entries.size("num_experts_per_tok", 2, most=num_experts)
    moe = reading.make_moe(
        {"top_k": top_k, "renormalize": True},
        num_experts=num_experts,
        intermediate_size=entries.size("intermediate_size"),
        activation=reading.read_activation(entries),
    )
    return _read(entries, moe, names=(_MIXTRAL_NAMES, NameMap()), default_theta=1e6)


def _read(
    entries: Entries,
    mlp: MlpConfig | MoeConfig,
    *,
    names: tuple[NameMap, ...] = (NameMap(),),
    default_theta: float = 10000.0,
    default_eps: float = 1e-5,
    has_query_scaling: bool = False,
    windows: Sequence[int | None] | None = None,
) -> ModelConfig:
    """Read all but the MLP. windows: of each layer; None: all have the one that the file says, if any."""
    attention = reading.read_attention(entries)
    num_layers = reading.read_num_layers(entries)
    seen = windows or [entries.optional_size("sliding_window")] * num_layers
    rope = reading.read_rope_of(entries, attention, default_theta=default_theta, has_query_scaling=has_query_scaling)
    return reading.model_config(
        entries,
        norm=NormConfig(eps=entries.positive("rms_norm_eps", default_eps)),
        layers=reading.same_layers(num_layers, attention, mlp, rope, seen),
        names=names,
    )
