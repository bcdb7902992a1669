"""Granite 3, dense or with experts (1B-A400M, 3B-A800M), and Granite 4 without Mamba: Llama, except for four factors.

embedding_multiplier scales the embeddings, residual_multiplier the outputs of attention and MLP, attention_multiplier
the products of queries and keys (in place of 1 / sqrt(head_dim)); logits are divided by logits_scaling.
The experts of a layer are the best of a softmax over all, with normalised weights. Granite 4 calls an MLP without
experts beside it shared_mlp, and may rotate nothing.
"""

from __future__ import annotations

from typing import Final

from pagewick.layers.config import MoeConfig
from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.parts import MlpConfig, NameMap, NormConfig

_NAMES: Final = NameMap()
# Experts are stacked in the file: weights/stacked.py.
_MOE_NAMES: Final = NameMap(parts=(("mlp.gate", "block_sparse_moe.router.layer"), ("mlp.experts", "block_sparse_moe")))

_NEW_MOE_NAMES: Final = NameMap(
    parts=(("mlp.gate", "block_sparse_moe.router"), ("mlp.experts", "block_sparse_moe.experts"))
)
_SHARED_NAMES: Final = NameMap(
    parts=(("mlp.gate_up_proj", "shared_mlp.input_linear"), ("mlp.down_proj", "shared_mlp.output_linear"))
)
_ATTENTION: Final = ("attention", reading.FULL)


def read_granite(entries: Entries) -> ModelConfig:
    return _read(entries, reading.read_mlp(entries, bias=entries.flag("mlp_bias", False)))


def read_granite_moe(entries: Entries) -> ModelConfig:
    num_experts = entries.size("num_local_experts", 8)
    moe = reading.make_moe(
        {"top_k": entries.size("num_experts_per_tok", 2, most=num_experts), "renormalize": True},
        num_experts=num_experts,
        intermediate_size=entries.size("intermediate_size"),
        activation=reading.read_activation(entries),
    )
    return _read(entries, moe, _MOE_NAMES, _NEW_MOE_NAMES)


def read_granite_hybrid(entries: Entries) -> ModelConfig:
    entries = entries.renamed({"layer_types": "layers_block_type"})
    entries.demand("num_local_experts", 0, 8, "experts beside an MLP are not supported")
    num_layers = reading.read_num_layers(entries)
    kinds = entries.texts("layer_types") or ()
    if len(kinds) != num_layers or set(kinds) - set(_ATTENTION):
        expected = f"a list of num_hidden_layers ({num_layers}) times {_ATTENTION[0]}: Mamba is not supported"
        raise entries.wrong("layer_types", expected)
    is_rotated = entries.choice("position_embedding_type", ("rope", "nope"), "nope") == "rope"
    mlp = MlpConfig(
        intermediate_size=entries.size("shared_intermediate_size", 1024),
        activation=reading.read_activation(entries),
        is_fused=True,
    )
    entries = entries.replaced(dict.fromkeys(("layer_types", "layers_block_type")))
    return _read(entries, mlp, _SHARED_NAMES, is_rotated=is_rotated)


def _read(entries: Entries, mlp: MlpConfig | MoeConfig, *names: NameMap, is_rotated: bool = True) -> ModelConfig:
    entries = entries.filled({"max_position_embeddings": 2048})
    has_bias = entries.flag("attention_bias", False)
    attention = reading.read_attention(
        entries, qkv_bias=has_bias, o_bias=has_bias, softmax_scale=entries.positive("attention_multiplier", 1.0)
    )
    rope = reading.read_rope_of(entries, attention) if is_rotated else None
    return reading.model_config(
        entries,
        norm=NormConfig(eps=entries.positive("rms_norm_eps", 1e-6)),
        layers=reading.same_layers(reading.read_num_layers(entries), attention, mlp, rope),
        embedding_scale=entries.positive("embedding_multiplier", 1.0),
        residual_scale=entries.positive("residual_multiplier", 1.0),
        logit_scale=1.0 / entries.positive("logits_scaling", 1.0),
        names=names or (_NAMES,),
    )
