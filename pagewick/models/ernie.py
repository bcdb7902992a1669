"""ERNIE 4.5, ERNIE 4.5 with experts, and PaddleOCR-VL, which reads images. Llama, except:

- Heads are rotated in pairs of neighbours; in PaddleOCR-VL as Llama's, by three positions of a token.
- With experts: chosen by softmax plus a learned bias, with normalised weights; shared experts for every token. The
  first layers have none. Further tensors of a file, which predict later tokens, are not used.
"""

from __future__ import annotations

from typing import Final

from pagewick.layers.config import MoeConfig
from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import MAX_LAYERS, Entries
from pagewick.models.multimodal import read_text_part, text_entries
from pagewick.models.name_map import NameMap
from pagewick.models.parts import MlpConfig, NormConfig
from pagewick.models.vision.paddle_entries import with_paddle

_NAMES: Final = NameMap(
    parts=(
        ("gate.e_score_correction_bias", "moe_statics.e_score_correction_bias"),
        ("shared_expert", "shared_experts"),
    )
)
# These are in files that transformers writes as it computes.
_NEW_NAMES: Final = NameMap(
    parts=(
        ("gate.e_score_correction_bias", "gate.moe_statics.e_score_correction_bias"),
        ("shared_expert", "shared_experts"),
    )
)
# Defaults of entries that files leave out.
_DENSE_SIZES: Final = {"head_dim": 128, "num_key_value_heads": 2, "max_position_embeddings": 131072}
_LATER_TOKENS: Final = r"model\.mtp_.*"


def read_ernie(entries: Entries) -> ModelConfig:
    entries, has_bias = entries.filled(_DENSE_SIZES), entries.flag("use_bias", False)
    return _read(entries, reading.read_mlp(entries, bias=has_bias), has_bias=has_bias)


def read_paddleocr_vl(entries: Entries) -> ModelConfig:
    """Published files have the entries of the text part among the others."""
    text = text_entries(entries)
    text.choice("model_type", ("paddleocr_vl_text",), "paddleocr_vl_text")
    if "text_config" in entries and text.flag("tie_word_embeddings", True):
        # As in transformers, each of two entries ties the head.
        entries = entries.replaced({"tie_word_embeddings": True})
    return with_paddle(read_text_part(entries, _read_paddleocr_text, is_tied=True), entries)


def _read_paddleocr_text(entries: Entries) -> ModelConfig:
    for name in ("use_3d_rope", "rope_is_neox_style"):
        entries.demand(name, True, True, "the family has no other rotation")
    entries, has_bias = entries.filled(_DENSE_SIZES), entries.flag("use_bias", False)
    return _read(entries, reading.read_mlp(entries, bias=has_bias), has_bias=has_bias, is_mrope=True)


def read_ernie_moe(entries: Entries) -> ModelConfig:
    entries = entries.renamed({"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"})
    entries = entries.filled({"num_key_value_heads": 4, "max_position_embeddings": 131072})
    entries.demand("use_bias", False, False, "experts have no biases")
    entries.demand("moe_norm_min", 1e-12, 1e-12)
    num_experts, size = entries.size("moe_num_experts", 64), entries.size("moe_intermediate_size", 1536)
    num_shared = entries.count("moe_num_shared_experts", 2)
    moe = reading.make_moe(
        {"top_k": entries.size("moe_k", 6, most=num_experts), "renormalize": True},
        num_experts=num_experts,
        intermediate_size=size,
        activation=reading.read_activation(entries),
        has_router_bias=True,
        is_router_bias_matrix=True,
        shared_intermediate_size=size * num_shared if num_shared else None,
    )
    return _read(entries, _mlps(entries, moe), has_bias=False)


def _mlps(entries: Entries, moe: MoeConfig) -> list[MlpConfig | MoeConfig]:
    """Experts in every moe_layer_interval-th layer from the first to the last that may have some."""
    num_layers = reading.read_num_layers(entries)
    start, interval = entries.count("moe_layer_start_index", 1), entries.size("moe_layer_interval", 1)
    end = num_layers - 1
    if entries.get("moe_layer_end_index") not in (None, -1):
        end = entries.count("moe_layer_end_index", most=MAX_LAYERS)
    is_sparse = [start <= layer_idx <= end and (layer_idx + 1) % interval == 0 for layer_idx in range(num_layers)]
    dense = None if all(is_sparse) else reading.read_mlp(entries)
    return [moe if sparse or dense is None else dense for sparse in is_sparse]


def _read(
    entries: Entries, mlps: MlpConfig | list[MlpConfig | MoeConfig], *, has_bias: bool, is_mrope: bool = False
) -> ModelConfig:
    """is_mrope: whether heads are rotated as in PaddleOCR-VL."""
    entries.demand("compression_ratio", 1.0, 1.0, "positions that are compressed are not supported")
    attention = reading.read_attention(entries, qkv_bias=has_bias, o_bias=has_bias)
    rope = reading.read_rope_of(entries, attention, default_theta=5e5, interleaved=not is_mrope, is_mrope=is_mrope)
    return reading.model_config(
        entries,
        tie_word_embeddings=True,
        norm=NormConfig(eps=entries.positive("rms_norm_eps", 1e-5)),
        layers=reading.same_layers(reading.read_num_layers(entries), attention, mlps, rope),
        names=(_NAMES, _NEW_NAMES),
        ignored=(_LATER_TOKENS,),
    )
