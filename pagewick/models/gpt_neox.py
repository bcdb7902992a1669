"""GPT-NeoX-20B and Pythia (GPTNeoX). Llama, except:

- Layer norms, biases everywhere but in the head, and an MLP without a gate.
- use_parallel_residual: attention and MLP of a layer read the same hidden states, each through a norm of its own, and
  both are added.
- One tensor has each head's query, key and value, one after the other. A quarter of each head is rotated.
"""

from __future__ import annotations

from typing import Final

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.name_map import NameMap
from pagewick.models.parts import NormConfig

_PARTS: Final = (
    ("model.embed_tokens", "gpt_neox.embed_in"),
    ("model.layers", "gpt_neox.layers"),
    ("model.norm", "gpt_neox.final_layer_norm"),
    ("self_attn.qkv_proj", "attention.query_key_value"),
    ("self_attn.o_proj", "attention.dense"),
    ("mlp.up_proj", "mlp.dense_h_to_4h"),
    ("mlp.down_proj", "mlp.dense_4h_to_h"),
)
_NAMES: Final = NameMap(parts=(*_PARTS, ("lm_head", "embed_out")))


def read_gpt_neox(entries: Entries) -> ModelConfig:
    entries = entries.filled({"max_position_embeddings": 2048}).renamed({"rope_theta": "rotary_emb_base"})
    has_bias = entries.flag("attention_bias", True)
    num_heads = entries.size("num_attention_heads")
    attention = reading.read_attention(
        entries, num_kv_heads=num_heads, qkv_bias=has_bias, o_bias=has_bias, layout="by_head"
    )
    activation = reading.read_activation(entries, "gelu")
    mlp = reading.read_mlp(entries, activation=activation, is_gated=False, bias=True)
    rope = reading.read_rope_of(entries, attention, default_partial_rotary_factor=0.25)
    return reading.model_config(
        entries,
        norm=NormConfig(kind="layer", eps=entries.positive("layer_norm_eps", 1e-5), has_bias=True),
        block="parallel_norms" if entries.flag("use_parallel_residual", True) else "sequential",
        layers=reading.same_layers(reading.read_num_layers(entries), attention, mlp, rope),
        names=(_NAMES,),
        # Old files hold masks as tensors, and the frequencies of rotation below this name.
        ignored=(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    )
