"""DistilBERT (arXiv:1910.01108): BERT without types of tokens, and with names of its own."""

from __future__ import annotations

from typing import Final

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.encoding import ENCODER_DTYPE, as_encoder, read_labels
from pagewick.models.entries import Entries
from pagewick.models.labels import LabelDense
from pagewick.models.parts import EncoderConfig, NameMap, NormConfig

_PREFIX: Final = "distilbert"
_NAMES: Final = (
    ("score_dense", "pre_classifier"),
    ("score", "classifier"),
    ("model.embed_tokens", "model.embeddings.word_embeddings"),
    ("model.embed_positions", "model.embeddings.position_embeddings"),
    ("model.embed_norm", "model.embeddings.LayerNorm"),
    ("model.layers", "model.transformer.layer"),
    ("self_attn.q_proj", "attention.q_lin"),
    ("self_attn.k_proj", "attention.k_lin"),
    ("self_attn.v_proj", "attention.v_lin"),
    ("self_attn.o_proj", "attention.out_lin"),
    ("post_attention_layernorm", "sa_layer_norm"),
    ("mlp.up_proj", "ffn.lin1"),
    ("mlp.down_proj", "ffn.lin2"),
    ("post_feedforward_layernorm", "output_layer_norm"),
)
_IGNORED: Final = (r"vocab_(transform|layer_norm|projector)\..*", r"(.*\.)?embeddings\.position_ids")
_DEFAULTS: Final = {
    "vocab_size": 30522, "dim": 768, "n_layers": 6, "n_heads": 12, "hidden_dim": 3072, "activation": "gelu",
    "max_position_embeddings": 512,
}  # fmt: skip
_ALIASES: Final = {
    "hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim", "hidden_act": "activation",
}  # fmt: skip
# transformers' constant.
_NORM_EPS: Final = 1e-12


def read_distilbert(entries: Entries) -> ModelConfig:
    entries = entries.filled(_DEFAULTS).renamed(_ALIASES)
    attention = reading.read_attention(entries, qkv_bias=True, o_bias=True)
    mlp = reading.read_mlp(entries, activation=reading.read_activation(entries, "gelu"), is_gated=False, bias=True)
    model = reading.model_config(
        entries,
        dtype=reading.read_dtype(entries, ENCODER_DTYPE),
        num_position_embeddings=entries.size("max_position_embeddings"),
        block="post_ln",
        norm=NormConfig(kind="layer", eps=_NORM_EPS, has_bias=True),
        layers=reading.same_layers(reading.read_num_layers(entries), attention, mlp, None),
        names=tuple(NameMap(parts=(*_NAMES, ("model", prefix))) for prefix in ("", _PREFIX)),
        ignored=_IGNORED,
        labels=read_labels(entries, LabelDense("relu")),
    )
    return as_encoder(model, entries, EncoderConfig(has_embedding_norm=True, has_final_norm=False))
