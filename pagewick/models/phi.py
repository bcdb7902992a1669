"""Phi-1, 1.5 and 2 (Phi), and Phi-3, 3.5, Phi-4 and Phi-4-mini (Phi3).

Phi, unlike Llama: attention and MLP of a layer read the same layer norm and are added together; an MLP without a gate;
biases everywhere, also in the vocabulary head; a part of each head is rotated; queries and keys may have a layer norm.

Phi3: Llama with one tensor for queries, keys and values and one for gate and up. If there is a window, it is in all
layers. longrope has its original length beside rope_scaling; Phi-4-mini rotates a part of each head.
"""

from __future__ import annotations

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.parts import HeadNormConfig, LayerConfig, NameMap, NormConfig

_PHI_NAMES = NameMap(
    parts=(
        ("o_proj", "dense"),
        ("q_norm", "q_layernorm"),
        ("k_norm", "k_layernorm"),
        ("mlp.up_proj", "mlp.fc1"),
        ("mlp.down_proj", "mlp.fc2"),
        ("model.norm", "model.final_layernorm"),
    )
)


def read_phi(entries: Entries) -> ModelConfig:
    entries = entries.filled({"max_position_embeddings": 2048})
    entries.demand("tie_word_embeddings", False, False, "a tied head has no bias")
    eps = entries.positive("layer_norm_eps", 1e-5)
    head_norm = HeadNormConfig(kind="layer", eps=eps, has_bias=True) if entries.flag("qk_layernorm", False) else None
    attention = reading.read_attention(entries, qkv_bias=True, o_bias=True, head_norm=head_norm)
    activation = reading.read_activation(entries, "gelu_new")
    mlp = reading.read_mlp(entries, activation=activation, is_gated=False, bias=True)
    rope = reading.read_rope_of(entries, attention, default_partial_rotary_factor=0.5)
    return reading.model_config(
        entries,
        norm=NormConfig(kind="layer", eps=eps, has_bias=True),
        block="parallel",
        layers=reading.same_layers(reading.read_num_layers(entries), attention, mlp, rope),
        head_bias=True,
        names=(_PHI_NAMES,),
    )


def read_phi3(entries: Entries) -> ModelConfig:
    entries = entries.filled({"max_position_embeddings": 4096})
    attention = reading.read_attention(entries, layout="fused")
    layer = LayerConfig(
        attention=attention,
        mlp=reading.read_mlp(entries, is_fused=True),
        rope=reading.read_rope_of(entries, attention),
        window=entries.optional_size("sliding_window"),
    )
    return reading.model_config(
        entries,
        norm=NormConfig(eps=entries.positive("rms_norm_eps", 1e-5)),
        layers=(layer,) * reading.read_num_layers(entries),
    )
