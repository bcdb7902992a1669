"""The architectures of encoders in GGUF files: tables like those in architectures.py, and what no table can say.

The converter writes BERT, RoBERTa, XLM-RoBERTa and DistilBERT as `bert`. It leaves out the rows of positions before
that of the first token, so that all of them are read as BERT, whose first token has the first row. DistilBERT is the
one without types of tokens. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pagewick.weights.gguf.architecture import (
    ENTRIES,
    HEAD_NORMS,
    LAYER,
    LAYER_NORM,
    REQUIRED,
    RMS,
    SANDWICH,
    WHOLE,
    GgufArchitecture,
)
from pagewick.weights.gguf.metadata import Metadata

_SIZES: Final = {
    key: ENTRIES[key] for key in ("context_length", "embedding_length", "feed_forward_length", "attention.head_count")
}
_ENTRIES: Final = {**_SIZES, "attention.layer_norm_epsilon": "layer_norm_eps"}
# The constant of DistilBERT's code, for which its files have a key.
_DISTILBERT_EPS: Final = 1e-12
_FULL, _SLIDING = "full_attention", "sliding_attention"
_PATTERN: Final = "attention.sliding_window_pattern"
# The layers behind the pooling of EmbeddingGemma, by the folders of sentence-transformers that hold them.
_DENSE: Final = {"dense_2": "2_Dense", "dense_3": "3_Dense"}

_BERT: Final = GgufArchitecture(
    name="BertModel",
    entries=_ENTRIES,
    required=LAYER_NORM,
    constants={"hidden_act": "gelu"},
    whole={
        "token_embd": "bert.embeddings.word_embeddings",
        "position_embd": "bert.embeddings.position_embeddings",
        "token_types": "bert.embeddings.token_type_embeddings",
        "token_embd_norm": "bert.embeddings.LayerNorm",
        # The head of RoBERTa, which computes what BERT's pooler and classifier do.
        "cls": "bert.pooler.dense",
        "cls.output": "classifier",
    },
    layer={
        "attn_q": "attention.self.query",
        "attn_k": "attention.self.key",
        "attn_v": "attention.self.value",
        "attn_output": "attention.output.dense",
        "attn_output_norm": "attention.output.LayerNorm",
        "ffn_up": "intermediate.dense",
        "ffn_down": "output.dense",
        "layer_output_norm": "output.LayerNorm",
    },
    layer_prefix="bert.encoder.layer.{}.",
    is_written=False,
    is_encoder=True,
)
DISTILBERT: Final = GgufArchitecture(
    name="DistilBertModel",
    entries=_SIZES,
    required=LAYER_NORM,
    constants={"hidden_act": "gelu"},
    whole={
        "token_embd": "distilbert.embeddings.word_embeddings",
        "position_embd": "distilbert.embeddings.position_embeddings",
        "token_embd_norm": "distilbert.embeddings.LayerNorm",
        "cls": "pre_classifier",
        "cls.output": "classifier",
    },
    layer={
        "attn_q": "attention.q_lin",
        "attn_k": "attention.k_lin",
        "attn_v": "attention.v_lin",
        "attn_output": "attention.out_lin",
        "attn_output_norm": "sa_layer_norm",
        "ffn_up": "ffn.lin1",
        "ffn_down": "ffn.lin2",
        "layer_output_norm": "output_layer_norm",
    },
    layer_prefix="distilbert.transformer.layer.{}.",
    is_written=False,
    is_encoder=True,
)
_NOMIC_BERT: Final = GgufArchitecture(
    name="NomicBertModel",
    entries=_ENTRIES,
    required=(*LAYER_NORM, "rope.freq_base"),
    whole={
        "token_embd": "embeddings.word_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "token_embd_norm": "emb_ln",
    },
    layer={
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.out_proj",
        "attn_output_norm": "norm1",
        "ffn_up": "mlp.fc11",
        "ffn_gate": "mlp.fc12",
        "ffn_down": "mlp.fc2",
        "layer_output_norm": "norm2",
    },
    layer_prefix="encoder.layers.{}.",
    is_written=False,
    is_encoder=True,
)
_MODERN_BERT: Final = GgufArchitecture(
    name="ModernBertModel",
    entries={
        **_SIZES,
        # config.json has one of two names for it, or both.
        "attention.layer_norm_rms_epsilon": "norm_eps",
        "attention.layer_norm_epsilon": "norm_eps",
        "attention.sliding_window": "local_attention",
        "hidden_activation": "hidden_activation",
        "rope.freq_base_swa": "rope_local_base_freq",
    },
    required=(*REQUIRED, "rope.freq_base"),
    has={"attention_bias": "attn_qkv.bias", "mlp_bias": "ffn_up.bias", "norm_bias": "ffn_norm.bias"},
    whole={
        "token_embd": "model.embeddings.tok_embeddings",
        "token_embd_norm": "model.embeddings.norm",
        "output_norm": "model.final_norm",
        "cls": "head.dense",
        "cls.norm": "head.norm",
        "cls.output": "classifier",
    },
    layer={
        "attn_norm": "attn_norm",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.Wo",
        "ffn_norm": "mlp_norm",
        "ffn_up": "mlp.Wi",
        "ffn_down": "mlp.Wo",
    },
    is_written=False,
    is_encoder=True,
)
_GEMMA_EMBEDDING: Final = GgufArchitecture(
    name="Gemma3TextModel",
    entries={
        **ENTRIES,
        "attention.sliding_window": "sliding_window",
        "rope.freq_base_swa": "rope_local_base_freq",
    },
    required=(*RMS, "attention.sliding_window"),
    constants={"use_bidirectional_attention": True},
    whole={**WHOLE, **{stem: f"{folder}.linear" for stem, folder in _DENSE.items()}},
    layer={**LAYER, **SANDWICH, **HEAD_NORMS},
    norm_offset=1.0,
    is_written=False,
    is_encoder=True,
)

# general.architecture -> its meaning. `bert` without types of tokens is DISTILBERT.
ENCODERS: Final[Mapping[str, GgufArchitecture]] = {
    "bert": _BERT,
    "nomic-bert": _NOMIC_BERT,
    "modern-bert": _MODERN_BERT,
    "gemma-embedding": _GEMMA_EMBEDDING,
}


def encoder_entries(metadata: Metadata, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of an encoder that its table cannot say; `found` are those that it says.

    Raises ModelLoadError for a key or tensor that is missing or not supported.
    """
    if metadata.kind == "bert":
        return _bert(metadata, found)
    if metadata.kind == "nomic-bert":
        return {"type_vocab_size": metadata.shapes.get("token_types.weight", (0,))[0]}
    if metadata.kind == "modern-bert":
        return _modern_bert(metadata, found)
    return _gemma_embedding(metadata, found)


def _bert(metadata: Metadata, found: Mapping[str, Any]) -> dict[str, Any]:
    positions = metadata.shapes.get("position_embd.weight")
    if positions is None:
        raise metadata.wrong("position_embd.weight", "missing, and without it positions are unknown")
    entries = {"max_position_embeddings": positions[0]}
    if (types := metadata.shapes.get("token_types.weight")) is not None:
        return {**entries, "type_vocab_size": types[0]}
    eps = metadata.get("attention.layer_norm_epsilon")
    if not isinstance(eps, float) or abs(eps / _DISTILBERT_EPS - 1) > 1e-5:
        problem = f"{eps!r:.80}, and a model without token_types.weight is DistilBERT, which has {_DISTILBERT_EPS}"
        raise metadata.wrong(f"{metadata.kind}.attention.layer_norm_epsilon", problem)
    return entries


def _modern_bert(metadata: Metadata, found: Mapping[str, Any]) -> dict[str, Any]:
    """The windows: every third layer sees the whole text, from the first on, unless the file says otherwise."""
    num_layers = found["num_hidden_layers"]
    if not found.get("local_attention"):
        return {"local_attention": 1, "layer_types": [_FULL] * num_layers}
    pattern = metadata.values.get(f"{metadata.kind}.{_PATTERN}", 3)
    if isinstance(pattern, list):
        slides = metadata.of_layers(_PATTERN, num_layers) or []
        return {"layer_types": [_SLIDING if slide else _FULL for slide in slides]}
    return {"global_attn_every_n_layers": pattern}


def _gemma_embedding(metadata: Metadata, found: Mapping[str, Any]) -> dict[str, Any]:
    """Layers, scale and window as in Gemma 3, and the layers behind the pooling."""
    entries: dict[str, Any] = {"query_pre_attn_scalar": found["head_dim"]}
    pattern = metadata.values.get(f"{metadata.kind}.{_PATTERN}")
    if isinstance(pattern, list):
        slides = metadata.of_layers(_PATTERN, found["num_hidden_layers"]) or []
        entries["layer_types"] = [_SLIDING if slide else _FULL for slide in slides]
    elif pattern is not None:
        entries["sliding_window_pattern"] = pattern
    dense = []
    for stem, folder in _DENSE.items():
        if (shape := metadata.shapes.get(f"{stem}.weight")) is not None:
            if len(shape) != 2:
                raise metadata.wrong(f"{stem}.weight", "no matrix")
            sizes = {"in_features": shape[1], "out_features": shape[0]}
            dense.append({"name": folder, **sizes, "bias": False, "activation": "identity"})
    return {**entries, **({"embedding_dense": dense} if dense else {})}
