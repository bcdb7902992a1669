"""Gemma 1, 2 and 3, which reads images (4B and larger), and VaultGemma. Llama, except:

- Embeddings are multiplied by sqrt(hidden_size), rounded to the weights' dtype; the head is tied to them.
- RMS norms scale by 1 + weight. The MLP is gated by a tanh approximation of GELU. head_dim is given.
- Gemma 2 and 3 have norms after attention and MLP as well; scores are scaled by query_pre_attn_scalar.
- Gemma 2 has soft caps on scores and logits, and a window in every other layer. VaultGemma has all of this but norms
  after attention and MLP.
- Gemma 3 has a window in five of six layers, which are rotated with a base of their own and no scaling; queries and
  keys are normalised. In models that read images, the tokens of an image see each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.encoding import as_encoder
from pagewick.models.entries import Entries
from pagewick.models.multimodal import read_alone, read_text_part
from pagewick.models.name_map import NameMap
from pagewick.models.parts import AttentionConfig, HeadNormConfig, LayerConfig, MlpConfig, NormConfig
from pagewick.models.vision.siglip_entries import with_siglip

# Defaults of entries that files leave out, even Google's own.
_GEMMA2: Final = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
}
_GEMMA3: Final = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 26,
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
}


def read_gemma(entries: Entries) -> ModelConfig:
    entries = entries.filled({"head_dim": 256, "num_key_value_heads": 16, "max_position_embeddings": 8192})
    has_bias = entries.flag("attention_bias", False)
    attention = reading.read_attention(entries, qkv_bias=has_bias, o_bias=has_bias)
    # Files that say "gelu" mean the approximation, with which the models were trained.
    activation = reading.read_activation(entries, "gelu_pytorch_tanh")
    mlp = reading.read_mlp(entries, activation="gelu_tanh" if activation == "gelu" else activation)
    rope = reading.read_rope_of(entries, attention)
    return _model(entries, reading.same_layers(reading.read_num_layers(entries), attention, mlp, rope))


def read_gemma2(entries: Entries) -> ModelConfig:
    return _read_gemma2(entries, block="sandwich")


def read_vault_gemma(entries: Entries) -> ModelConfig:
    names = NameMap(parts=(("post_attention_layernorm", "pre_feedforward_layernorm"),))
    return _read_gemma2(entries, block="sequential", names=(names,))


def _read_gemma2(entries: Entries, **fields: Any) -> ModelConfig:
    entries = entries.filled(_GEMMA2)
    attention = _attention(entries)
    num_layers = reading.read_num_layers(entries)
    windows = reading.read_windows(entries, [layer_idx % 2 == 0 for layer_idx in range(num_layers)])
    rope = reading.read_rope_of(entries, attention)
    layers = reading.same_layers(num_layers, attention, _mlp(entries), rope, windows)
    return _model(entries, layers, logit_soft_cap=entries.optional_positive("final_logit_softcapping"), **fields)


def read_gemma3(entries: Entries) -> ModelConfig:
    return read_alone(entries, _read_gemma3, is_tied=True)


def read_gemma3_multimodal(entries: Entries) -> ModelConfig:
    return with_siglip(read_text_part(entries, _read_gemma3, is_tied=True), entries)


def read_embedding_gemma(entries: Entries) -> ModelConfig:
    """EmbeddingGemma: Gemma 3 as an encoder, whose file has no name for its being one but this entry."""
    entries.demand("use_bidirectional_attention", True, False, "other files of this name are refused")
    # The file's window counts tokens on both sides.
    size = entries.size("sliding_window", _GEMMA3["sliding_window"]) // 2 + 1
    rest = entries.replaced({"sliding_window": size, "use_bidirectional_attention": False})
    return as_encoder(read_gemma3(rest), entries)


def _read_gemma3(entries: Entries) -> ModelConfig:
    entries = entries.filled(_GEMMA3)
    entries.demand("attn_logit_softcapping", None, None, "queries and keys are normalised instead")
    attention, mlp = _attention(entries, is_normed=True), _mlp(entries)
    num_layers = reading.read_num_layers(entries)
    pattern = entries.size("sliding_window_pattern", 6)
    windows = reading.read_windows(entries, [(layer_idx + 1) % pattern != 0 for layer_idx in range(num_layers)])
    everywhere = reading.read_rope_of(entries, attention, default_theta=1e6, layer_type="full_attention")
    within = reading.read_rope_of(entries, attention, default_theta=1e4, layer_type="sliding_attention")
    layers = [
        LayerConfig(attention=attention, mlp=mlp, rope=everywhere if window is None else within, window=window)
        for window in windows
    ]
    return _model(
        entries, layers, block="sandwich", logit_soft_cap=entries.optional_positive("final_logit_softcapping")
    )


def _attention(entries: Entries, *, is_normed: bool = False) -> AttentionConfig:
    has_bias = entries.flag("attention_bias", False)
    norm = HeadNormConfig(eps=entries.positive("rms_norm_eps", 1e-6), offset=1.0) if is_normed else None
    return reading.read_attention(
        entries,
        qkv_bias=has_bias,
        o_bias=has_bias,
        head_norm=norm,
        softmax_scale=entries.positive("query_pre_attn_scalar") ** -0.5,
        logit_soft_cap=entries.optional_positive("attn_logit_softcapping"),
    )


def _mlp(entries: Entries) -> MlpConfig:
    return reading.read_mlp(
        entries, activation=reading.read_activation(entries, "gelu_pytorch_tanh", "hidden_activation")
    )


def _model(entries: Entries, layers: Sequence[LayerConfig], **fields: Any) -> ModelConfig:
    entries.demand("use_bidirectional_attention", False, False, "attention to later tokens is not supported here")
    return reading.model_config(
        entries,
        tie_word_embeddings=True,
        norm=NormConfig(eps=entries.positive("rms_norm_eps", 1e-6), offset=1.0),
        embedding_scale=float(entries.size("hidden_size")) ** 0.5,
        is_embedding_scale_rounded=True,
        layers=tuple(layers),
        **fields,
    )
