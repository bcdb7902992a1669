"""The common part of encoders: attention to later tokens, pooling, and the layers behind it. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pagewick.errors import ModelLoadError
from pagewick.models.config import ModelConfig, architecture_of
from pagewick.models.entries import Entries
from pagewick.models.labels import ENDING, LabelDense, LabelHead, read_label_head
from pagewick.models.name_map import NameMap
from pagewick.models.parts import AttentionConfig, DenseConfig, EncoderConfig

# Entries of our own, which say how embeddings are made; the package weights adds them to those of a model's file.
POOLING_ENTRY: Final = "embedding_pooling"
_DENSE_ENTRY: Final = "embedding_dense"
# sentence-transformers takes the mean for a model without such files.
_DEFAULT_POOLING: Final = "mean"
# Old files of encoders, which do not name a data type, hold these numbers.
ENCODER_DTYPE: Final = "float32"
# Heads of other tasks: of labels, of answers in a text, of BGE-M3's other vectors.
_OTHER_HEADS: Final = (r"(classifier|pre_classifier|qa_outputs|score|sparse_linear|colbert_linear)\..*",)
_HEAD: Final = r"(.*\.)?lm_head\..*"
POOLINGS: Final = ("cls", "last", "mean")


def as_encoder(model: ModelConfig, entries: Entries, encoder: EncoderConfig | None = None) -> ModelConfig:
    """Return a model whose tokens see those behind them, too, and which makes embeddings unless it has labels.

    Raises ModelLoadError for a model with attention of another kind.
    """
    for layer in model.layers:
        if not isinstance(layer.attention, AttentionConfig) or layer.lender is not None:
            raise ModelLoadError(f"{model.architecture}: its attention cannot see later tokens")
    return replace(
        model,
        encoder=encoder or EncoderConfig(),
        layers=tuple(layer.seeing_all() for layer in model.layers),
        # Nothing multiplies by the table of embeddings, nor by a head that was trained before.
        tie_word_embeddings=True,
        ignored=(*model.ignored, _HEAD, *(() if model.labels is not None else _OTHER_HEADS)),
        head_bias=False,
        embedding="" if model.labels is not None else entries.choice(POOLING_ENTRY, POOLINGS, _DEFAULT_POOLING),
    )


def read_labels(entries: Entries, dense: LabelDense | None, *, pooling: str = "cls") -> LabelHead | None:
    """Return the head of labels, whose last layer has a bias; None for an architecture without one."""
    if not architecture_of(entries.values).endswith(ENDING):
        return None
    return read_label_head(entries, pooling=pooling, dense=dense, has_bias=True)


def with_dense(model: ModelConfig, entries: Entries) -> ModelConfig:
    """Return a model with the layers that change its embeddings, if the entries name some. Raises ModelLoadError."""
    listed = entries.get(_DENSE_ENTRY)
    if listed is None or model.labels is not None:
        return model
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise entries.wrong(_DENSE_ENTRY, "a list of objects")
    layers, size = [], model.hidden_size
    for place, one in enumerate(listed):
        dense = _read_dense(Entries(one, f"{_DENSE_ENTRY}[{place}]"))
        if dense.in_features != size:
            raise ModelLoadError(
                f"{dense.name}: it takes vectors of {dense.in_features} numbers, and those before it have {size}"
            )
        layers.append(dense)
        size = dense.out_features
    parts = tuple((f"dense.{place}", f"{layer.name}.linear") for place, layer in enumerate(layers))
    names = tuple(NameMap(parts=(*parts, *known.parts)) for known in model.names)
    return replace(model, dense=tuple(layers), names=names)


def _read_dense(entries: Entries) -> DenseConfig:
    return DenseConfig(
        name=entries.text("name"),
        in_features=entries.size("in_features"),
        out_features=entries.size("out_features"),
        bias=entries.flag("bias", True),
        activation=entries.choice("activation", DENSE_ACTIVATIONS, "identity"),
    )


# Those of layers.label_head, which imports torch; a test compares the two.
DENSE_ACTIVATIONS: Final = ("identity", "tanh", "sigmoid", "relu", "gelu", "gelu_tanh", "silu")
