"""Keys of encoders' GGUF files become entries of config.json; unsupported keys are refused."""

from __future__ import annotations

from typing import Any

import pytest

from pagewick.errors import ModelLoadError
from pagewick.models.config import ModelConfig
from pagewick.models.registry import read_config
from pagewick.weights.gguf.config import hugging_face_config
from pagewick.weights.gguf.metadata import Metadata

SIZES = {
    "block_count": 4, "context_length": 512, "embedding_length": 64, "feed_forward_length": 96,
    "attention.head_count": 4, "attention.layer_norm_epsilon": 1e-5, "attention.causal": False,
}  # fmt: skip
SHAPES = {"token_embd.weight": (50, 64)}
# Tensors and keys that files of an architecture have.
BERT = {"position_embd.weight": (300, 64), "token_types.weight": (2, 64)}
HEAD = {"cls.weight": (64, 64), "cls.bias": (64,), "cls.output.weight": (2, 64), "cls.output.bias": (2,)}
ROPE = {"rope.freq_base": 5000.0}
GEMMA = {"attention.sliding_window": 512, "attention.layer_norm_rms_epsilon": 1e-6, "attention.key_length": 16}


def config_of(kind: str, keys: dict[str, Any] | None = None, shapes: dict[str, tuple[int, ...]] | None = None) -> Any:
    values = {f"{kind}.{key}": value for key, value in {**SIZES, **(keys or {})}.items() if value is not None}
    metadata = Metadata({"general.architecture": kind, **values}, {**SHAPES, **(shapes or {})}, "m.gguf")
    return hugging_face_config(metadata, lambda name: [])


def model_of(
    kind: str, keys: dict[str, Any] | None = None, shapes: dict[str, tuple[int, ...]] | None = None
) -> ModelConfig:
    return read_config(config_of(kind, keys, shapes))


def test_bert_has_as_many_positions_as_its_table() -> None:
    model = model_of("bert", shapes=BERT)
    assert (model.architecture, model.num_position_embeddings, model.longest_context) == ("BertModel", 300, 300)
    assert model.encoder is not None
    assert (model.encoder.num_token_types, model.position_offset) == (2, 0)


def test_bert_without_types_is_distilbert() -> None:
    shapes = {"position_embd.weight": (300, 64)}
    model = model_of("bert", {"attention.layer_norm_epsilon": 9.999999960041972e-13}, shapes)
    assert model.architecture == "DistilBertModel" and model.num_layers == 4 and model.hidden_size == 64
    labelled = model_of("bert", {"attention.layer_norm_epsilon": 1e-12}, {**shapes, **HEAD})
    assert labelled.labels is not None and labelled.labels.dense is not None
    assert labelled.labels.dense.activation == "relu"


def test_names_of_labels() -> None:
    for names in (["good", "bad"], ["good"]):
        labels = model_of("bert", {"classifier.output_labels": names}, {**BERT, **HEAD}).labels
        assert labels is not None and labels.num_labels == 2
        assert labels.names == (("good", "bad") if len(names) == 2 else ())


def test_windows_of_modernbert() -> None:
    keys = {**ROPE, "attention.sliding_window": 20, "rope.freq_base_swa": 77.0}
    model = model_of("modern-bert", keys)
    assert [layer.window for layer in model.layers] == [None, 11, 11, None]
    ropes = [layer.rope.theta if layer.rope is not None else None for layer in model.layers]
    assert ropes == [5000.0, 77.0, 77.0, 5000.0]
    model = model_of("modern-bert", {**keys, "attention.sliding_window_pattern": 2})
    assert [layer.window for layer in model.layers] == [None, 11, None, 11]
    assert all(layer.window is None for layer in model_of("modern-bert", ROPE).layers)


def test_windows_of_embedding_gemma() -> None:
    model = model_of("gemma-embedding", {**GEMMA, "attention.causal": None, "block_count": 7})
    assert [layer.window for layer in model.layers] == [257] * 5 + [None, 257]
    model = model_of("gemma-embedding", {**GEMMA, "attention.sliding_window_pattern": 2})
    assert [layer.window for layer in model.layers] == [257, None] * 2


@pytest.mark.parametrize(
    "kind", ["jina-bert-v2", "jina-bert-v3", "nomic-bert-moe", "neo-bert", "eurobert", "t5encoder"]
)
def test_other_encoders_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ModelLoadError, match=f"the architecture {kind}, which is not supported\n  supported: .*bert"):
        config_of(kind, shapes=BERT)


@pytest.mark.parametrize(
    ("kind", "keys", "shapes", "complaint"),
    [
        ("bert", {"attention.causal": True}, BERT, r"bert\.attention\.causal is not false"),
        ("bert", {"attention.causal": 0}, BERT, r"bert\.attention\.causal is 0, and must be true or false"),
        ("bert", {"attention.layer_norm_epsilon": None}, BERT, r"bert\.attention\.layer_norm_epsilon is missing"),
        ("bert", {}, {"token_types.weight": (2, 64)}, r"position_embd\.weight is missing"),
        ("bert", {}, {"position_embd.weight": (300, 64)}, "a model without token_types.weight is DistilBERT"),
        ("bert", {"attention.layer_norm_epsilon": "x"}, {"position_embd.weight": (3, 64)},
         "epsilon is 'x', and must be a number"),
        ("bert", {"attention.max_alibi_bias": 8.0}, BERT, "max_alibi_bias is 8.0, which is not supported"),
        ("bert", {"pooling_type": 5}, BERT, "pooling_type is 5\n.*of the first token, of the last token or"),
        ("bert", {"pooling_type": [1]}, BERT, r"pooling_type is \[1\]"),
        ("bert", {"pooling_type": 4}, BERT, r"lacks cls\.output\.weight"),
        ("bert", {}, {**BERT, "cls.weight": (2, 64)}, r"lacks cls\.output\.weight"),
        ("bert", {}, {**BERT, **HEAD, "cls.weight": (64, 32)}, r"lacks cls\.output\.weight, or cls\.weight"),
        ("nomic-bert", {**ROPE, "pooling_type": 4}, {}, "nomic-bert.pooling_type is 4"),
        ("nomic-bert", {}, {}, r"nomic-bert\.rope\.freq_base is missing"),
        ("modern-bert", {**ROPE, "attention.sliding_window": 9, "attention.sliding_window_pattern": [True]}, {},
         "sliding_window_pattern is a list of 1"),
        ("modern-bert", {**ROPE, "classifier.pooling_type": 3}, HEAD, "classifier_pooling"),
        ("modern-bert", {**ROPE, "classifier.pooling_type": "x"}, HEAD, "is 'x', and must be a number"),
        ("modern-bert", {**ROPE, "attention.sliding_window": 9, "attention.sliding_window_pattern": 0}, {},
         "global_attn_every_n_layers"),
        ("gemma-embedding", {}, {}, r"attention\.layer_norm_rms_epsilon is missing"),
        ("gemma-embedding", GEMMA, {"dense_2.weight": (64,)}, r"dense_2\.weight is no matrix"),
        ("gemma-embedding", GEMMA, {"dense_3.weight": (64, 32)}, "3_Dense: it takes vectors of 32 numbers"),
        ("gemma-embedding", {**GEMMA, "attention.sliding_window_pattern": [True]}, {}, "is a list of 1"),
    ],
)  # fmt: skip
def test_what_would_compute_something_else_is_refused(
    kind: str, keys: dict[str, Any], shapes: dict[str, tuple[int, ...]], complaint: str
) -> None:
    with pytest.raises(ModelLoadError, match=complaint):
        model_of(kind, keys, shapes)
