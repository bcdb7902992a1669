"""DistilBERT (arXiv:1910.01108): BERT without types of tokens, and with names of its own."""

from __future__ import annotations

from typing import Final

from pagewick.models.bert import NORM_EPS, read_like_bert
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.name_map import NameMap

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


def read_distilbert(entries: Entries) -> ModelConfig:
    entries = entries.filled(_DEFAULTS).renamed(_ALIASES)
    names = tuple(NameMap(parts=(*_NAMES, ("model", prefix))) for prefix in ("", _PREFIX))
    # The eps is a constant of transformers' code.
    return read_like_bert(entries, names, _IGNORED, NORM_EPS, head_activation="relu")
