"""MPNet (arXiv:2004.09297): RoBERTa without types of tokens, whose scores also depend on the distance of two tokens."""

from __future__ import annotations

from typing import Final

from pagewick.models.bert import NORM_EPS, read_like_bert
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.name_map import NameMap

_PREFIX: Final = "mpnet"
_NAMES: Final = (
    ("score_dense", "classifier.dense"),
    ("score", "classifier.out_proj"),
    ("model.embed_tokens", "model.embeddings.word_embeddings"),
    ("model.embed_positions", "model.embeddings.position_embeddings"),
    ("model.embed_norm", "model.embeddings.LayerNorm"),
    ("model.distance_bias", "model.encoder.relative_attention_bias"),
    ("model.layers", "model.encoder.layer"),
    ("self_attn.q_proj", "attention.attn.q"),
    ("self_attn.k_proj", "attention.attn.k"),
    ("self_attn.v_proj", "attention.attn.v"),
    ("self_attn.o_proj", "attention.attn.o"),
    ("post_attention_layernorm", "attention.LayerNorm"),
    ("mlp.up_proj", "intermediate.dense"),
    ("mlp.down_proj", "output.dense"),
    ("post_feedforward_layernorm", "output.LayerNorm"),
)
_IGNORED: Final = (r"(.*\.)?embeddings\.position_ids", r"(.*\.)?pooler\..*")
_DEFAULTS: Final = {
    "vocab_size": 30527, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "hidden_act": "gelu", "max_position_embeddings": 512,
}  # fmt: skip
# transformers' constants: the first token has the row behind that of padding, token 1, and it ignores other numbers of
# buckets.
_FIRST_ROW: Final = 2
_NUM_BUCKETS: Final = 32


def read_mpnet(entries: Entries) -> ModelConfig:
    entries = entries.filled(_DEFAULTS)
    entries.demand("relative_attention_num_buckets", _NUM_BUCKETS, _NUM_BUCKETS)
    names = tuple(NameMap(parts=(*_NAMES, ("model", prefix))) for prefix in ("", _PREFIX))
    eps = entries.positive("layer_norm_eps", NORM_EPS)
    return read_like_bert(entries, names, _IGNORED, eps, position_offset=_FIRST_ROW, num_distance_buckets=_NUM_BUCKETS)
