"""BERT (arXiv:1810.04805), RoBERTa (arXiv:1907.11692), XLM-RoBERTa and CamemBERT: encoders with learned positions.

RoBERTa and its kin have the positions behind that of padding: the first token has row pad_token_id + 1 of the table.
"""

from __future__ import annotations

from typing import Final

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.encoding import ENCODER_DTYPE, as_encoder, read_labels
from pagewick.models.entries import Entries
from pagewick.models.labels import LabelDense
from pagewick.models.name_map import NameMap
from pagewick.models.parts import EncoderConfig, NormConfig

# An entry of our own, of files whose table of positions begins with the first token's.
_OFFSET: Final = "position_offset"
_LAYERS: Final = (
    ("model.embed_tokens", "model.embeddings.word_embeddings"),
    ("model.embed_positions", "model.embeddings.position_embeddings"),
    ("model.embed_types", "model.embeddings.token_type_embeddings"),
    ("model.embed_norm", "model.embeddings.LayerNorm"),
    ("model.layers", "model.encoder.layer"),
    ("self_attn.q_proj", "attention.self.query"),
    ("self_attn.k_proj", "attention.self.key"),
    ("self_attn.v_proj", "attention.self.value"),
    ("self_attn.o_proj", "attention.output.dense"),
    ("post_attention_layernorm", "attention.output.LayerNorm"),
    ("mlp.up_proj", "intermediate.dense"),
    ("mlp.down_proj", "output.dense"),
    ("post_feedforward_layernorm", "output.LayerNorm"),
)
# The first checkpoints were converted from TensorFlow, with its names of a norm's parameters.
_OLD: Final = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
# A file may hold numbers of positions, the pooler, and heads of other tasks.
_IGNORED: Final = (
    r"(.*\.)?embeddings\.(position_ids|token_type_ids)",
    r"(.*\.)?pooler\..*",
    r"(cls|lm_head)\..*",
)
_BERT: Final = {
    "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "hidden_act": "gelu", "max_position_embeddings": 512, "type_vocab_size": 2,
    "pad_token_id": 0,
}  # fmt: skip
_ROBERTA: Final = {**_BERT, "vocab_size": 50265, "pad_token_id": 1}
_XLM_ROBERTA: Final = {**_ROBERTA, "vocab_size": 30522}
# The default of all these classes.
NORM_EPS: Final = 1e-12
# Where the head of labels has its layers.
_BERT_HEAD: Final = (("score_dense", "bert.pooler.dense"), ("score", "classifier"))
_ROBERTA_HEAD: Final = (("score_dense", "classifier.dense"), ("score", "classifier.out_proj"))


def read_bert(entries: Entries) -> ModelConfig:
    return _read(entries.filled(_BERT), "bert", entries.count(_OFFSET, 0), _BERT_HEAD)


def read_roberta(entries: Entries) -> ModelConfig:
    return _read_behind_padding(entries.filled(_ROBERTA))


def read_xlm_roberta(entries: Entries) -> ModelConfig:
    return _read_behind_padding(entries.filled(_XLM_ROBERTA))


def _read_behind_padding(entries: Entries) -> ModelConfig:
    return _read(entries, "roberta", entries.count("pad_token_id") + 1, _ROBERTA_HEAD)


def _read(entries: Entries, prefix: str, offset: int, head: tuple[tuple[str, str], ...]) -> ModelConfig:
    """prefix: of the encoder's tensors in files with a head. offset: the row of the first token's position."""
    entries.demand("position_embedding_type", "absolute", "absolute", "others need the distance between two tokens")
    entries.demand("is_decoder", False, False, "only encoders of this kind are supported")
    entries.demand("add_cross_attention", False, False, "only encoders of this kind are supported")
    plain = (*head, *_LAYERS)
    names = tuple(NameMap(parts=(*plain, ("model", name), *old)) for name in ("", prefix) for old in ((), _OLD))
    types = entries.size("type_vocab_size")
    eps = entries.positive("layer_norm_eps", NORM_EPS)
    return read_like_bert(entries, names, _IGNORED, eps, position_offset=offset, num_token_types=types)


def read_like_bert(
    entries: Entries,
    names: tuple[NameMap, ...],
    ignored: tuple[str, ...],
    eps: float,
    *,
    head_activation: str = "tanh",
    position_offset: int = 0,
    **fields: int,
) -> ModelConfig:
    """Read an encoder with BERT's layers and learned positions; `fields` are others of EncoderConfig.

    eps: of the norms. head_activation: of the layer before that of the labels.
    """
    num_positions = entries.size("max_position_embeddings")
    if num_positions <= position_offset:
        rows = f"more than {position_offset}, the rows before the first token's"
        raise entries.wrong("max_position_embeddings", rows)
    longest = num_positions - position_offset
    attention = reading.read_attention(entries, qkv_bias=True, o_bias=True)
    mlp = reading.read_mlp(entries, activation=reading.read_activation(entries, "gelu"), is_gated=False, bias=True)
    model = reading.model_config(
        entries,
        dtype=reading.read_dtype(entries, ENCODER_DTYPE),
        max_position_embeddings=longest,
        longest_context=longest,
        num_position_embeddings=num_positions,
        position_offset=position_offset,
        has_embedding_norm=True,
        block="post_ln",
        norm=NormConfig(kind="layer", eps=eps, has_bias=True),
        layers=reading.same_layers(reading.read_num_layers(entries), attention, mlp, None),
        names=names,
        ignored=ignored,
        labels=read_labels(entries, LabelDense(head_activation)),
    )
    encoder = EncoderConfig(has_final_norm=False, **fields)
    return as_encoder(model, entries, encoder)
