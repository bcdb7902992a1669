"""StableLM: 3B, Zephyr, 2 1.6B and 2 12B. Llama, except:

- Layer norms, with biases; a quarter of each head is rotated; queries, keys and values may have biases.
- use_parallel_residual: attention and MLP of a layer read the output of one norm, and both are added.
- qk_layernorm: every query and key head has a layer norm with a weight of its own, and no bias.
"""

from __future__ import annotations

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.name_map import NameMap
from pagewick.models.parts import HeadNormConfig, NormConfig


def read_stablelm(entries: Entries) -> ModelConfig:
    entries = entries.filled({"num_key_value_heads": 32, "max_position_embeddings": 4096})
    eps = entries.positive("layer_norm_eps", 1e-5)
    head_norm = None
    if entries.flag("qk_layernorm", False):
        head_norm = HeadNormConfig(kind="layer", eps=eps, is_per_head=True)
    attention = reading.read_attention(entries, qkv_bias=entries.flag("use_qkv_bias", False), head_norm=head_norm)
    rope = reading.read_rope_of(entries, attention, default_partial_rotary_factor=0.25)
    return reading.model_config(
        entries,
        norm=NormConfig(kind="layer", eps=eps, has_bias=True),
        block="parallel" if entries.flag("use_parallel_residual", False) else "sequential",
        layers=reading.same_layers(reading.read_num_layers(entries), attention, reading.read_mlp(entries), rope),
        names=(NameMap(parts=(("q_norm", "q_layernorm"), ("k_norm", "k_layernorm"))),),
    )
