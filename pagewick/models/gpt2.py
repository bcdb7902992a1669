"""GPT-2 and DistilGPT2 (GPT2LMHeadModel). Llama, except:

- Learned positions in place of rotation; layer norms; biases everywhere but in the head, which is tied to the
  embedding; an MLP without a gate. Entries and tensors have names of their own.
- One tensor has all queries, then all keys, then all values. Weights lie transposed in the files
  (weights/transposed.py).
- scale_attn_by_inverse_layer_idx divides the scores of each layer by its number.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.name_map import NameMap
from pagewick.models.parts import AttentionConfig, LayerConfig, MlpConfig, NormConfig

GPT2_ENTRIES: Final = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
}
_IN_LAYERS: Final = (
    ("input_layernorm", "ln_1"),
    ("post_attention_layernorm", "ln_2"),
    ("self_attn.qkv_proj", "attn.c_attn"),
    ("self_attn.o_proj", "attn.c_proj"),
    ("mlp.up_proj", "mlp.c_fc"),
    ("mlp.down_proj", "mlp.c_proj"),
)
_ENDS: Final = (
    ("model.embed_tokens", "wte"),
    ("model.embed_positions", "wpe"),
    ("model.layers", "h"),
    ("model.norm", "ln_f"),
)
GPT2_NAMES: Final = NameMap(parts=(*((ours, f"transformer.{theirs}") for ours, theirs in _ENDS), *_IN_LAYERS))
# OpenAI's own files have these.
_BARE_NAMES: Final = NameMap(parts=(*_ENDS, *_IN_LAYERS))
# Old files hold masks as tensors.
GPT2_MASKS: Final = r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)"


def read_gpt2(entries: Entries) -> ModelConfig:
    entries = entries.filled({"n_positions": 1024}).renamed(GPT2_ENTRIES)
    entries.demand("add_cross_attention", False, False)
    attention = reading.read_attention(
        entries,
        num_kv_heads=entries.size("num_attention_heads"),
        qkv_bias=True,
        o_bias=True,
        layout="fused",
        softmax_scale=None if entries.flag("scale_attn_weights", True) else 1.0,
    )
    falls = entries.flag("scale_attn_by_inverse_layer_idx", False)
    mlp = read_gpt2_mlp(entries, "gelu_new")
    layers = [
        LayerConfig(attention=_scaled(attention, layer_idx if falls else 0), mlp=mlp, rope=None)
        for layer_idx in range(reading.read_num_layers(entries))
    ]
    return reading.model_config(
        entries,
        tie_word_embeddings=True,
        norm=NormConfig(kind="layer", eps=entries.positive("layer_norm_epsilon", 1e-5), has_bias=True),
        layers=tuple(layers),
        num_position_embeddings=entries.size("max_position_embeddings"),
        names=(GPT2_NAMES, _BARE_NAMES),
        ignored=(GPT2_MASKS,),
    )


def _scaled(attention: AttentionConfig, layer_idx: int) -> AttentionConfig:
    return replace(attention, softmax_scale=attention.softmax_scale / (layer_idx + 1))


def read_gpt2_mlp(entries: Entries, default_activation: str) -> MlpConfig:
    """Read the MLP, which is four times as large as hidden states if the file does not say its size."""
    return MlpConfig(
        intermediate_size=entries.size("intermediate_size", 4 * entries.size("hidden_size")),
        activation=reading.read_activation(entries, default_activation),
        is_gated=False,
        bias=True,
    )
