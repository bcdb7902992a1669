"""Nemotron-H, Nemotron Nano 2 and Nemotron 3: each layer has one part with one norm, which is one of four.

- Mamba-2, whose groups are normalised each by itself.
- Attention as in Llama, whose heads are not rotated.
- An MLP without a gate; its activation is the square of a ReLU.
- Experts of that kind, chosen by sigmoid and a learned bias, with a shared one (Nemotron 3). Those of the larger models
  read and write latents.

Two further layers of a file of Nemotron 3, one with attention and one with experts, predict later tokens, and serve
--speculative-method mtp. Their last norm is an RMSNorm, as in vLLM and TensorRT-LLM; llama.cpp also subtracts the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pagewick.layers.config import MoeConfig
from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import MAX_LAYERS, Entries
from pagewick.models.mamba_entries import read_kinds, read_mamba
from pagewick.models.mtp_offers import mtp_in_halves, offer
from pagewick.models.name_map import NameMap
from pagewick.models.parts import LayerConfig, MlpConfig, NormConfig

_MLP: Final = "mlp"
_MOE: Final = "moe"
# The letters of hybrid_override_pattern, and what transformers 5 calls these kinds of layers.
_LETTERS: Final = {"M": reading.LINEAR, "*": reading.FULL, "-": _MLP, "E": _MOE}
_PARTS: Final = (
    ("mlp.shared_expert", "mixer.shared_experts"),
    ("self_attn", "mixer"),
    ("mamba", "mixer"),
    ("mlp", "mixer"),
    ("input_layernorm", "norm"),
    ("post_attention_layernorm", "norm"),
    ("model.norm", "model.norm_f"),
    ("embed_tokens", "embeddings"),
)
# Published files, and those that transformers writes as it computes.
_NAMES: Final = (NameMap(parts=(*_PARTS, ("model", "backbone"))), NameMap(parts=_PARTS))
# The names of read_mamba, and those of these files.
_ALIASES: Final = {
    "mamba_n_heads": "mamba_num_heads",
    "mamba_d_head": "mamba_head_dim",
    "mamba_n_groups": "n_groups",
    "mamba_d_state": "ssm_state_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "hidden_act": "mamba_hidden_act",
    "layer_types": "layers_block_type",
}
_DEFAULTS: Final = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "n_groups": 8,
    "ssm_state_size": 128,
    "intermediate_size": 21504,
}
_LATER_TOKENS: Final = r"mtp\..*"
# Those that are one layer together, with attention and experts.
_LATER_KINDS: Final = [reading.FULL, _MOE]

# vLLM's entries of such layers that are narrower than the model, are rotated, predict several tokens at once, or have
# another attention; and what the others have.
_OTHER_LATER_LAYERS: Final = {
    **dict.fromkeys(("mtp_bottleneck_hidden_size", "mtp_use_rope", "mtp_naive_parallel_enabled"), (None, False)),
    "mtp_softmax_type": (None, "vanilla"),
}


def read_nemotron_h(entries: Entries) -> ModelConfig:
    entries = entries.renamed(_ALIASES).filled(_DEFAULTS)
    entries.demand("residual_in_fp32", False, False, "residuals have the model's data type")
    for name in ("attention_bias", "sliding_window"):
        entries.demand(name, False, False)
    eps = entries.positive("layer_norm_epsilon", 1e-5)
    attention = reading.read_attention(entries)
    num_values = entries.size("mamba_n_heads", 128) * entries.size("mamba_d_head", 64)
    mamba = read_mamba(entries, norm_eps=eps, num_values=num_values, has_bias=entries.flag("use_bias", False))
    kinds = _read_kinds(entries)
    makers = {
        reading.LINEAR: lambda: LayerConfig(attention=mamba, mlp=None, rope=None),
        reading.FULL: lambda: LayerConfig(attention=attention, mlp=None, rope=None),
        _MLP: lambda: LayerConfig(attention=None, mlp=_read_mlp(entries), rope=None),
        _MOE: lambda: LayerConfig(attention=None, mlp=_read_experts(entries), rope=None),
    }
    made = {kind: makers[kind]() for kind in dict.fromkeys(kinds)}
    config = reading.model_config(
        entries.replaced(dict.fromkeys(("layer_types", "layers_block_type"))),
        norm=NormConfig(eps=eps),
        layers=tuple(made[kind] for kind in kinds),
        names=_NAMES,
        ignored=(_LATER_TOKENS,),
    )
    if not entries.count("num_nextn_predict_layers", 0, most=MAX_LAYERS) or _later_kinds(entries) != _LATER_KINDS:
        return config
    if any(entries.get(name) not in usual for name, usual in _OTHER_LATER_LAYERS.items()):
        return config
    return offer(config, mtp_in_halves(LayerConfig(attention=attention, mlp=_read_experts(entries), rope=None)))


def _later_kinds(entries: Entries) -> Sequence[str]:
    """Return the kinds of the layers that predict later tokens."""
    kinds = entries.texts("mtp_layers_block_type")
    if kinds is not None:
        return [reading.FULL if kind == "attention" else kind for kind in kinds]
    return [_LETTERS.get(letter, letter) for letter in entries.text("mtp_hybrid_override_pattern", "*E")]


def _read_kinds(entries: Entries) -> Sequence[str]:
    """Return the kind of each layer: by layer_types, or by the letters of old files."""
    kinds = entries.texts("layer_types")
    if kinds is None:
        pattern = entries.text("hybrid_override_pattern", "ME*-")
        if unknown := set(pattern) - set(_LETTERS):
            expected = f"a letter of {', '.join(_LETTERS)} for each layer; {sorted(unknown)[0]!r} is none"
            raise entries.wrong("hybrid_override_pattern", expected)
        kinds = tuple(_LETTERS[letter] for letter in pattern)
    if len(kinds) != entries.size("num_hidden_layers", len(kinds), most=MAX_LAYERS):
        raise entries.wrong("num_hidden_layers", f"the number of kinds of layers, {len(kinds)}")
    return read_kinds(entries, kinds, tuple(_LETTERS.values()))


def _read_mlp(entries: Entries) -> MlpConfig:
    activation = reading.read_activation(entries, "relu2", "mlp_hidden_act")
    return reading.read_mlp(entries, activation=activation, is_gated=False, bias=entries.flag("mlp_bias", False))


def _read_experts(entries: Entries) -> MoeConfig:
    entries.demand("mlp_bias", False, False, "experts have no biases")
    entries.demand("n_shared_experts", 1, 1, "moe_shared_expert_intermediate_size is the size of one")
    num_experts, num_groups = entries.size("n_routed_experts", 8), entries.size("n_group", 1)
    return reading.make_moe(
        {
            "top_k": entries.size("num_experts_per_tok", 2, most=num_experts),
            "scoring": "sigmoid",
            "renormalize": entries.flag("norm_topk_prob", True),
            "num_groups": num_groups,
            "top_k_groups": entries.size("topk_group", 1, most=num_groups),
            "group_score": "sum_of_two",
            "scaling": entries.positive("routed_scaling_factor", 1.0),
        },
        num_experts=num_experts,
        intermediate_size=entries.size("moe_intermediate_size", 7688),
        activation=reading.read_activation(entries, "relu2", "mlp_hidden_act"),
        is_gated=False,
        latent_size=entries.optional_size("moe_latent_size"),
        has_router_bias=True,
        shared_intermediate_size=entries.size("moe_shared_expert_intermediate_size", 7688),
    )
