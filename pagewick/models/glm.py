"""GLM-4-9B-chat-hf (Glm) and GLM-4 0414 (Glm4). Llama, except:

- Half of each head is rotated, in pairs of neighbours; queries, keys and values have biases; gate and up are one.
- Glm4 has norms after attention and MLP as well.
"""

from __future__ import annotations

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.parts import Block, NameMap, NormConfig

# Glm4 files call the norm before the MLP post_attention_layernorm, and have names of their own for the others.
_GLM4_NAMES = NameMap(
    parts=(
        ("post_attention_layernorm", "post_self_attn_layernorm"),
        ("pre_feedforward_layernorm", "post_attention_layernorm"),
        ("post_feedforward_layernorm", "post_mlp_layernorm"),
    )
)


def read_glm(entries: Entries) -> ModelConfig:
    return _read(entries, "sequential", NameMap())


def read_glm4(entries: Entries) -> ModelConfig:
    return _read(entries, "sandwich", _GLM4_NAMES)


def _read(entries: Entries, block: Block, names: NameMap) -> ModelConfig:
    entries = entries.filled({"head_dim": 128, "num_key_value_heads": 2, "max_position_embeddings": 131072})
    attention = reading.read_attention(entries, qkv_bias=entries.flag("attention_bias", True))
    rope = reading.read_rope_of(entries, attention, interleaved=True, default_partial_rotary_factor=0.5)
    mlp = reading.read_mlp(entries, is_fused=True)
    return reading.model_config(
        entries,
        norm=NormConfig(eps=entries.positive("rms_norm_eps", 1.5625e-7)),
        block=block,
        layers=reading.same_layers(reading.read_num_layers(entries), attention, mlp, rope),
        names=(names,),
    )
