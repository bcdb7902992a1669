"""Gemma 3n as a text model: its parts that see and hear are not loaded. Gemma 3, except:

- A token has several residual streams, of which layers compute with one (AltUp), and a learned residual connection of
  low rank (LAuReL).
- Norms scale by their weight alone. Values are normalised, too, and scores are not scaled.
- The last layers attend to the keys and values of earlier ones. Each layer has an input of its own.
- Most gates of the first layers' MLPs are 0. MLPs may differ in size from layer to layer.

Tokens that stand for images and sounds are embedded like all others, as in transformers' Gemma3nForCausalLM.
"""

from __future__ import annotations

from typing import Any, Final

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.gemma4 import LAYER_INPUT_NAMES
from pagewick.models.multimodal import read_alone, read_text_part
from pagewick.models.name_map import NameMap
from pagewick.models.parts import (
    AltUpConfig,
    AttentionConfig,
    HeadNormConfig,
    LayerConfig,
    LayerInputsConfig,
    MlpConfig,
    NormConfig,
)

_DEFAULTS: Final[dict[str, Any]] = {
    "vocab_size": 262400,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 15,
    "altup_num_inputs": 4,
    "laurel_rank": 64,
}
# Without activation_sparsity_pattern, as many first layers are sparse, unless there are no others.
_NUM_SPARSE_LAYERS: Final = 10
_SPARSITY: Final = 0.95
_NAMES: Final = NameMap(
    parts=(
        *LAYER_INPUT_NAMES,
        ("altup.projections", "altup_projections"),
        ("altup.unembed_projections", "altup_unembed_projections"),
        ("correct_output_scale.weight", "correct_output_scale"),
    )
)


def read_gemma3n(entries: Entries) -> ModelConfig:
    return read_alone(entries, _read_gemma3n, is_tied=True)


def read_gemma3n_multimodal(entries: Entries) -> ModelConfig:
    return read_text_part(entries, _read_gemma3n, is_tied=True)


def _read_gemma3n(entries: Entries) -> ModelConfig:
    entries = entries.filled(_DEFAULTS)
    entries.demand("use_bidirectional_attention", False, False, "attention to later tokens is not supported here")
    entries.demand("altup_active_idx", 0, 0, "layers compute with the first stream")
    entries.demand("altup_correct_scale", True, True, "the corrected stream is always scaled")
    num_layers = reading.read_num_layers(entries)
    windows = reading.read_windows(entries, [(layer_idx + 1) % 5 != 0 for layer_idx in range(num_layers)])
    lenders = reading.read_lenders(entries, windows)
    eps = entries.positive("rms_norm_eps", 1e-6)
    activation = reading.read_activation(entries, "gelu_pytorch_tanh", "hidden_activation")
    own, borrowed = (_attention(entries, eps, has_keys=has_keys) for has_keys in (True, False))
    everywhere = reading.read_rope_of(entries, own, default_theta=1e6, layer_type="full_attention")
    within = reading.read_rope_of(entries, own, default_theta=1e4, layer_type="sliding_attention")
    mlps = _mlps(entries, num_layers, activation)
    layers = tuple(
        LayerConfig(
            attention=own if lender is None else borrowed,
            mlp=mlp,
            rope=everywhere if window is None else within,
            window=window,
            lender=lender,
        )
        for mlp, window, lender in zip(mlps, windows, lenders, strict=True)
    )
    return reading.model_config(
        entries,
        tie_word_embeddings=True,
        block="altup",
        norm=NormConfig(eps=eps),
        embedding_scale=float(entries.size("hidden_size")) ** 0.5,
        is_embedding_scale_rounded=True,
        logit_soft_cap=entries.optional_positive("final_logit_softcapping"),
        layer_inputs=LayerInputsConfig(
            vocab_size=entries.size("vocab_size_per_layer_input"),
            size=entries.size("hidden_size_per_layer_input"),
            activation=activation,
            eps=eps,
        ),
        altup=_altup(entries),
        layers=layers,
        names=(_NAMES,),
        ignored=reading.borrowers_tensors(lenders),
    )


def _altup(entries: Entries) -> AltUpConfig:
    num_streams = entries.size("altup_num_inputs")
    if num_streams < 2:
        raise entries.wrong("altup_num_inputs", "at least 2: one stream is no AltUp")
    return AltUpConfig(num_streams=num_streams, laurel_rank=entries.size("laurel_rank"))


def _attention(entries: Entries, eps: float, *, has_keys: bool) -> AttentionConfig:
    has_bias = entries.flag("attention_bias", False)
    return reading.read_attention(
        entries,
        softmax_scale=1.0,
        qkv_bias=has_bias,
        o_bias=has_bias,
        layout="parts" if has_keys else "queries",
        head_norm=HeadNormConfig(eps=eps),
        has_value_norm=True,
    )


def _mlps(entries: Entries, num_layers: int, activation: str) -> list[MlpConfig]:
    name = "intermediate_size"
    are_listed = isinstance(entries.get(name), list)
    sizes = entries.sizes(name) or () if are_listed else (entries.size(name),) * num_layers
    if len(sizes) != num_layers:
        raise entries.wrong(name, f"a number, or a list of num_hidden_layers ({num_layers}) numbers")
    name = "activation_sparsity_pattern"
    num_sparse = _NUM_SPARSE_LAYERS if num_layers > _NUM_SPARSE_LAYERS else 0
    shares = entries.numbers(name)
    if shares is None:
        shares = (_SPARSITY,) * num_sparse + (0.0,) * (num_layers - num_sparse)
    if len(shares) != num_layers or not all(0.0 <= share < 1.0 for share in shares):
        raise entries.wrong(name, f"a list of num_hidden_layers ({num_layers}) numbers from 0 to below 1")
    return [
        MlpConfig(intermediate_size=size, activation=activation, sparsity=share)
        for size, share in zip(sizes, shares, strict=True)
    ]
