"""StarCoder and SantaCoder (GPTBigCode), and StarCoder2.

Unlike Llama, both: layer norms, an MLP without a gate, biases, a head tied to the embedding.

- GPTBigCode: a learned table of positions in place of rotation; one key and value head for all queries (multi_query),
  in one tensor with them. Its entries and tensors have GPT-2's names.
- StarCoder2: if there is a window, it is in all layers.
"""

from __future__ import annotations

from typing import Final

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.gpt2 import GPT2_ENTRIES, GPT2_MASKS, GPT2_NAMES, read_gpt2_mlp
from pagewick.models.name_map import NameMap
from pagewick.models.parts import LayerConfig, NormConfig

_STARCODER2_NAMES: Final = NameMap(parts=(("mlp.up_proj", "mlp.c_fc"), ("mlp.down_proj", "mlp.c_proj")))


def read_gpt_bigcode(entries: Entries) -> ModelConfig:
    entries = entries.filled({"n_positions": 1024}).renamed(GPT2_ENTRIES)
    entries.demand("add_cross_attention", False, False)
    is_multi_query = entries.flag("multi_query", True)
    attention = reading.read_attention(
        entries,
        num_kv_heads=1 if is_multi_query else entries.size("num_attention_heads"),
        qkv_bias=True,
        o_bias=True,
        layout="fused" if is_multi_query else "by_head",
        softmax_scale=None if entries.flag("scale_attn_weights", True) else 1.0,
    )
    mlp = read_gpt2_mlp(entries, "gelu_pytorch_tanh")
    return reading.model_config(
        entries,
        tie_word_embeddings=True,
        norm=NormConfig(kind="layer", eps=entries.positive("layer_norm_epsilon", 1e-5), has_bias=True),
        layers=reading.same_layers(reading.read_num_layers(entries), attention, mlp, None),
        num_position_embeddings=entries.size("max_position_embeddings"),
        names=(GPT2_NAMES,),
        ignored=(GPT2_MASKS,),
    )


def read_starcoder2(entries: Entries) -> ModelConfig:
    entries = entries.filled({"num_key_value_heads": 2, "max_position_embeddings": 4096})
    has_bias = entries.flag("use_bias", True)
    attention = reading.read_attention(entries, qkv_bias=has_bias, o_bias=has_bias)
    activation = reading.read_activation(entries, "gelu_pytorch_tanh")
    layer = LayerConfig(
        attention=attention,
        mlp=reading.read_mlp(entries, activation=activation, is_gated=False, bias=has_bias),
        rope=reading.read_rope_of(entries, attention),
        window=entries.optional_size("sliding_window"),
    )
    return reading.model_config(
        entries,
        tie_word_embeddings=True,
        norm=NormConfig(kind="layer", eps=entries.positive("norm_epsilon", 1e-5), has_bias=True),
        layers=(layer,) * reading.read_num_layers(entries),
        names=(_STARCODER2_NAMES,),
    )
