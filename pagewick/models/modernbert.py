"""ModernBERT (arXiv:2412.13663): an encoder with rotary embedding, in which two of three layers have a window."""

from __future__ import annotations

from typing import Final

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.encoding import ENCODER_DTYPE, as_encoder, read_labels
from pagewick.models.entries import Entries
from pagewick.models.labels import LabelDense, LabelHead
from pagewick.models.name_map import NameMap
from pagewick.models.parts import LayerConfig, NormConfig

_NAMES: Final = (
    ("score_dense", "head.dense"),
    ("score_norm", "head.norm"),
    ("score", "classifier"),
    ("model.embed_tokens", "model.embeddings.tok_embeddings"),
    ("model.embed_norm", "model.embeddings.norm"),
    ("self_attn.qkv_proj", "attn.Wqkv"),
    ("self_attn.o_proj", "attn.Wo"),
    ("input_layernorm", "attn_norm"),
    ("mlp.gate_up_proj", "mlp.Wi"),
    ("mlp.down_proj", "mlp.Wo"),
    ("post_attention_layernorm", "mlp_norm"),
    ("model.norm", "model.final_norm"),
)
# The head and the output layer of a model that fills gaps.
_IGNORED: Final = (r"head\..*", r"decoder\..*")
_DEFAULTS: Final = {
    "vocab_size": 50368, "hidden_size": 768, "intermediate_size": 1152, "num_hidden_layers": 22,
    "num_attention_heads": 12, "max_position_embeddings": 8192,
}  # fmt: skip
_ALIASES: Final = {"rope_theta": "global_rope_theta", "rope_local_base_freq": "local_rope_theta"}


def read_modernbert(entries: Entries) -> ModelConfig:
    entries = entries.filled(_DEFAULTS).renamed(_ALIASES)
    has_bias = entries.flag("attention_bias", False)
    attention = reading.read_attention(entries, qkv_bias=has_bias, o_bias=has_bias, layout="fused")
    mlp = reading.read_mlp(
        entries,
        activation=reading.read_activation(entries, "gelu", "hidden_activation"),
        bias=entries.flag("mlp_bias", False),
        is_fused=True,
    )
    everywhere = reading.read_rope_of(entries, attention, default_theta=160_000.0, layer_type=reading.FULL)
    within = reading.read_rope_of(entries, attention, default_theta=10_000.0, layer_type=reading.SLIDING)
    layers = tuple(
        LayerConfig(
            attention=attention,
            mlp=mlp,
            rope=everywhere if window is None else within,
            window=window,
            has_input_norm=layer_idx > 0,
        )
        for layer_idx, window in enumerate(_windows(entries))
    )
    has_head = (labels := _labels(entries)) is not None
    model = reading.model_config(
        entries,
        dtype=reading.read_dtype(entries, ENCODER_DTYPE),
        norm=NormConfig(
            kind="layer", eps=entries.positive("norm_eps", 1e-5), has_bias=entries.flag("norm_bias", False)
        ),
        has_embedding_norm=True,
        layers=layers,
        names=(NameMap(parts=_NAMES),),
        ignored=() if has_head else _IGNORED,
        labels=labels,
    )
    return as_encoder(model, entries)


def _windows(entries: Entries) -> tuple[int | None, ...]:
    """Return each layer's window: the file gives the tokens before and behind the one that looks, together."""
    size = entries.size("local_attention", 128) // 2 + 1
    every = entries.size("global_attn_every_n_layers", 3)
    slides = [layer_idx % every != 0 for layer_idx in range(reading.read_num_layers(entries))]
    return reading.read_windows(entries.replaced({"sliding_window": size}), slides)


def _labels(entries: Entries) -> LabelHead | None:
    activation = reading.read_activation(entries, "gelu", "classifier_activation")
    dense = LabelDense(activation, has_bias=entries.flag("classifier_bias", False), has_norm=True)
    return read_labels(entries, dense, pooling=entries.choice("classifier_pooling", ("cls", "mean"), "cls"))
