"""Falcon 7B, 40B, 180B and 11B (Falcon). Llama, except:

- Layer norms with biases; no other biases; an MLP without a gate; the head is tied to the embedding.
- One tensor has, for each key head, its queries, its key and its value. 7B has one key head.
- Attention and MLP of a layer are added together. They read one norm (7B, 11B), or one each (40B, 180B).
- Falcon-RW, which has slopes for distances (alibi) in place of rotation, is refused.
"""

from __future__ import annotations

from typing import Final

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.name_map import NameMap
from pagewick.models.parts import Block, MlpConfig, NormConfig

_ENTRIES: Final = {"hidden_act": "activation", "intermediate_size": "ffn_hidden_size"}
_PARTS: Final = (
    ("model.embed_tokens", "transformer.word_embeddings"),
    ("model.layers", "transformer.h"),
    ("model.norm", "transformer.ln_f"),
    ("self_attn.qkv_proj", "self_attention.query_key_value"),
    ("self_attn.o_proj", "self_attention.dense"),
    ("mlp.up_proj", "mlp.dense_h_to_4h"),
    ("mlp.down_proj", "mlp.dense_4h_to_h"),
)
_NAMES: Final = NameMap(parts=_PARTS)
_NAMES_OF_TWO_NORMS: Final = NameMap(
    parts=(*_PARTS, ("input_layernorm", "ln_attn"), ("post_attention_layernorm", "ln_mlp"))
)


def read_falcon(entries: Entries) -> ModelConfig:
    entries = entries.filled({"max_position_embeddings": 2048}).renamed(_ENTRIES)
    entries.demand("alibi", False, False, "slopes for distances are not supported")
    # 40B and its successors, which ignore multi_query.
    is_new = entries.flag("new_decoder_architecture", False)
    num_kv_heads, has_bias = _read_kv_heads(entries, is_new=is_new), entries.flag("bias", False)
    attention = reading.read_attention(
        entries, num_kv_heads=num_kv_heads, qkv_bias=has_bias, o_bias=has_bias, layout="by_head"
    )
    mlp = MlpConfig(
        intermediate_size=entries.size("intermediate_size", 4 * entries.size("hidden_size")),
        activation=reading.read_activation(entries, "gelu"),
        is_gated=False,
        bias=has_bias,
    )
    block = _read_block(entries, is_new=is_new)
    rope = reading.read_rope_of(entries, attention)
    return reading.model_config(
        entries,
        tie_word_embeddings=True,
        norm=NormConfig(kind="layer", eps=entries.positive("layer_norm_epsilon", 1e-5), has_bias=True),
        block=block,
        layers=reading.same_layers(reading.read_num_layers(entries), attention, mlp, rope),
        names=(_NAMES_OF_TWO_NORMS if block == "parallel_norms" else _NAMES,),
    )


def _read_kv_heads(entries: Entries, *, is_new: bool) -> int:
    if not is_new:
        entries.demand("multi_query", True, True)
        # 7B's num_kv_heads is not their number.
        return 1
    num_heads = entries.size("num_attention_heads")
    num_kv_heads = entries.size("num_kv_heads", num_heads)
    if num_heads % num_kv_heads:
        raise entries.wrong("num_kv_heads", f"a divisor of num_attention_heads ({num_heads})")
    return num_kv_heads


def _read_block(entries: Entries, *, is_new: bool) -> Block:
    entries.demand("parallel_attn", True, True)
    most = 2 if is_new else 1
    return "parallel_norms" if entries.size("num_ln_in_parallel_attn", most, most=most) == 2 else "parallel"
