"""MiniMax-M3. Llama, except:

- Norms multiply by 1 + their weight; queries and keys are normalised per head. A part of each head is rotated.
- Most layers attend to blocks of tokens, which an indexer selects for each KV head.
- Most layers have experts, chosen by sigmoid and a learned bias, with normalised weights, and a shared one. Activations
  are those of gpt-oss, in MLPs, too.
- Files have an encoder of images, which is not read, and layers that predict later tokens, which are not used.

rotary_dim changes nothing in transformers, where partial_rotary_factor says what is rotated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from pagewick.layers.config import HeadBlockConfig, MoeConfig
from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.multimodal import read_text_part
from pagewick.models.name_map import NameMap
from pagewick.models.parts import HeadNormConfig, LayerConfig, MlpConfig, NormConfig

_DEFAULTS: Final = {
    "vocab_size": 200064,
    "hidden_size": 6144,
    "intermediate_size": 3072,
    "num_hidden_layers": 60,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 524288,
}
# Entries of the published file of which only one value is implemented.
_ONLY: Final = {
    "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_head",
    "use_gemma_norm": True, "attention_output_gate": False, "n_shared_experts": 1, "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}  # fmt: skip
_ONLY_SPARSE: Final = {"use_sparse_attention": True, "sparse_score_type": "max", "sparse_init_block": 0}
# Entries of the indexer within sparse_attention_config, and their names and defaults outside of it.
_INDEXER: Final = {
    "index_n_heads": ("sparse_num_index_heads", 4),
    "index_head_dim": ("sparse_index_dim", 128),
    "index_block_size": ("sparse_block_size", 128),
    "index_topk_blocks": ("sparse_topk_blocks", 16),
    "index_local_blocks": ("sparse_local_block", 1),
}
_ACTIVATION: Final = "clamped_swish"
_BLOCKS: Final = "minimax_m3_sparse"
_PROJECTIONS: Final = (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3"))
_INDEX_NAMES: Final = tuple(
    (f"self_attn.indexer.{name}", f"self_attn.index_{name}") for name in ("q_proj", "k_proj", "q_norm", "k_norm")
)


def read_minimax_m3(entries: Entries) -> ModelConfig:
    config = read_text_part(entries, _read_text)
    return replace(config, ignored=(*config.ignored, r"patch_merge_mlp\..*"))


def _read_text(entries: Entries) -> ModelConfig:
    entries = entries.filled(_DEFAULTS)
    for name, value in _ONLY.items():
        entries.demand(name, value, value)
    entries.choice("hidden_act", ("silu", "swigluoai"), "silu")
    eps, num_layers = entries.positive("rms_norm_eps", 1e-6), reading.read_num_layers(entries)
    head_norm = HeadNormConfig(eps=eps, offset=1.0)
    attention = reading.read_attention(entries, head_norm=head_norm)
    rope = reading.read_rope_of(entries, attention, default_theta=5e6)
    blocks = _read_indexer(entries, attention.num_kv_heads, eps)
    if blocks.head_dim < rope.rotary_dim:
        raise entries.wrong("index_head_dim", f"at least the {rope.rotary_dim} numbers of a head that rotate")
    sparse, mlps = _read_sparse_layers(entries, num_layers), _read_mlps(entries, num_layers)
    layers = tuple(
        LayerConfig(attention=replace(attention, head_blocks=blocks if is_sparse else None), mlp=mlp, rope=rope)
        for is_sparse, mlp in zip(sparse, mlps, strict=True)
    )
    return reading.model_config(
        entries.replaced({"layer_types": None}),
        norm=NormConfig(eps=eps, offset=1.0),
        layers=layers,
        names=(_names(mlps),),
        ignored=(r"(.*\.)?mtp\..*",),
    )


def _names(mlps: Sequence[MlpConfig | MoeConfig]) -> NameMap:
    """Return the names of published files, in which only routed experts have Mixtral's."""
    parts: list[tuple[str, str]] = [("shared_expert", "shared_experts"), *_INDEX_NAMES, *_PROJECTIONS]
    parts += [(f"shared_experts.{theirs}", f"shared_experts.{ours}") for ours, theirs in _PROJECTIONS]
    for idx, mlp in enumerate(mlps):
        module, moe = f"layers.{idx}.mlp", f"layers.{idx}.block_sparse_moe"
        if isinstance(mlp, MoeConfig):
            parts += [(f"{module}.gate.e_score_correction_bias", f"{moe}.e_score_correction_bias"), (module, moe)]
        else:
            parts += [(f"{module}.{theirs}", f"{module}.{ours}") for ours, theirs in _PROJECTIONS]
    return NameMap(parts=tuple(parts))


def _read_indexer(entries: Entries, num_kv_heads: int, eps: float) -> HeadBlockConfig:
    within = entries.child("sparse_attention_config")
    if within is not None:
        for name, value in _ONLY_SPARSE.items():
            within.demand(name, value, value)
    sizes = {}
    for name, (inner, default) in _INDEXER.items():
        is_within = within is not None and inner in within
        sizes[name] = within.size(inner) if is_within and within is not None else entries.size(name, default)
    if num_kv_heads % sizes["index_n_heads"]:
        raise entries.wrong("index_n_heads", f"a divisor of num_key_value_heads ({num_kv_heads})")
    if sizes["index_local_blocks"] > sizes["index_topk_blocks"]:
        raise entries.wrong("index_local_blocks", f"at most index_topk_blocks ({sizes['index_topk_blocks']})")
    return HeadBlockConfig(
        num_heads=sizes["index_n_heads"],
        head_dim=sizes["index_head_dim"],
        block_size=sizes["index_block_size"],
        top_k=sizes["index_topk_blocks"],
        num_local=sizes["index_local_blocks"],
        norm_eps=eps,
    )


def _read_sparse_layers(entries: Entries, num_layers: int) -> list[bool]:
    """Return which layers select blocks."""
    within = entries.child("sparse_attention_config")
    flags = None if within is None else _flags(within, "sparse_attention_freq", num_layers)
    if (kinds := entries.texts("layer_types")) is not None:
        if len(kinds) != num_layers or set(kinds) - {reading.FULL, _BLOCKS}:
            expected = f"a list of num_hidden_layers ({num_layers}) times {reading.FULL} or {_BLOCKS}"
            raise entries.wrong("layer_types", expected)
        flags = [kind == _BLOCKS for kind in kinds]
    if flags is None:
        return [False] * num_layers
    without = None if within is None else _flags(within, "sparse_disable_index_value", num_layers)
    if within is not None and without is not None and any(map(_has_value, flags, without)):
        raise within.wrong("sparse_disable_index_value", "1 for each layer that selects: values are not supported")
    return flags


def _has_value(selects: bool, has_none: bool) -> bool:
    return selects and not has_none


def _read_mlps(entries: Entries, num_layers: int) -> list[MlpConfig | MoeConfig]:
    flags = _flags(entries, "moe_layer_freq", num_layers)
    if (kinds := entries.texts("mlp_layer_types")) is not None:
        if len(kinds) != num_layers or set(kinds) - {"dense", "sparse"}:
            expected = f"a list of num_hidden_layers ({num_layers}) times dense or sparse"
            raise entries.wrong("mlp_layer_types", expected)
        flags = [kind == "sparse" for kind in kinds]
    num_experts = entries.size("num_local_experts", 128)
    moe = reading.make_moe(
        {
            "top_k": entries.size("num_experts_per_tok", 4, most=num_experts),
            "scoring": "sigmoid",
            "renormalize": True,
            "scaling": entries.positive("routed_scaling_factor", 2.0),
        },
        num_experts=num_experts,
        intermediate_size=entries.size("intermediate_size"),
        activation=_ACTIVATION,
        has_router_bias=True,
        shared_intermediate_size=entries.size("shared_intermediate_size", 3072),
    )
    dense = MlpConfig(intermediate_size=entries.size("dense_intermediate_size", 12288), activation=_ACTIVATION)
    return [moe if has_experts else dense for has_experts in flags or [True] * num_layers]


def _flags(entries: Entries, name: str, num_layers: int) -> list[bool] | None:
    """Return a flag for each layer; None: the entry is missing."""
    found = entries.sizes(name, least=0)
    if found is None:
        return None
    if len(found) != num_layers or set(found) - {0, 1}:
        raise entries.wrong(name, f"a list of num_hidden_layers ({num_layers}) times 0 or 1")
    return [flag == 1 for flag in found]
