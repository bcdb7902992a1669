"""DeepSeek V4. DeepSeek-V3, except:

- Attention has one key for all heads, which is its own value, in a window of sliding_window tokens, with sinks. The
  last numbers of heads rotate, and outputs are rotated back. Two matrices project outputs, of which the first has a
  part for each of o_groups groups of heads.
- Most layers also see one compressed entry for each window of compress_rates tokens: all of them, or, in layers of the
  other kind, the index_topk that an indexer selects. These layers have a rotary embedding of their own.
- Hyper-connections: a token has hc_mult residual streams.
- All layers have experts, and an expert for every token. Experts are chosen by the square root of the softplus of their
  logits plus a learned bias; in the first layers by a table of token ids. Both factors of their gated products are
  bounded.
- V4's files may hold further layers that predict later tokens; these are not used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from pagewick.errors import ModelLoadError
from pagewick.layers.compressed_config import CompressorConfig, WindowConfig
from pagewick.layers.config import HyperConfig, IndexerConfig, MoeConfig, RopeConfig
from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.name_map import NameMap
from pagewick.models.parts import LayerConfig, NormConfig
from pagewick.models.rope_entries import read_rope

_DEFAULTS: Final = {
    "vocab_size": 129280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "max_position_embeddings": 1048576,
    "num_experts_per_tok": 6,
    "n_routed_experts": 256,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "sliding_window": 128,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
}
# Entries of which only one value is implemented, which is the default.
_ONLY: Final = {
    "attention_bias": False, "hidden_act": "silu", "mlp_bias": False, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_key_value_heads": 1, "scoring_func": "sqrtsoftplus", "swiglu_limit": 10.0, "topk_method": "noaux_tc",
}  # fmt: skip
# Each takes time in each layer and step; after 20, matrices no longer change.
_MOST_ITERATIONS: Final = 1000
_SLIDING, _SPARSE, _HEAVY = reading.ROW_KINDS
_RATES: Final = {_SPARSE: 4, _HEAVY: 128}
# Published files have compress_ratios, a number for each layer.
_KIND_OF_RATIO: Final = {0: _SLIDING, 4: _SPARSE, 128: _HEAVY}
_ROPE_KINDS: Final = ("default", "linear", "llama3", "yarn")
_HASH, _SCORED = "hash_moe", "moe"
_NUM_HASH_LAYERS: Final = 3

_PUBLISHED: Final = NameMap(
    parts=(
        ("self_attn.indexer.q_b_proj", "attn.indexer.wq_b"),
        ("self_attn.indexer.weights_proj", "attn.indexer.weights_proj"),
        ("self_attn.indexer", "attn.indexer.compressor"),
        ("self_attn", "attn"),
        ("compressor.gate_proj", "compressor.wgate"),
        ("compressor.kv_norm", "compressor.norm"),
        ("compressor.position_bias", "compressor.ape"),
        ("q_a_proj", "wq_a"),
        ("q_b_proj", "wq_b"),
        ("q_a_norm", "q_norm"),
        ("kv_proj", "wkv"),
        ("o_a_proj", "wo_a"),
        ("o_b_proj", "wo_b"),
        ("sinks.weight", "attn_sink"),
        ("mlp.gate.e_score_correction_bias", "mlp.gate.bias"),
        ("mlp.expert_table.weight", "mlp.gate.tid2eid"),
        ("mlp", "ffn"),
        ("shared_expert", "shared_experts"),
        ("gate_proj", "w1"),
        ("down_proj", "w2"),
        ("up_proj", "w3"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        *((f"{part}_hc.{leaf}", f"hc_{part}_{leaf}") for part in ("attn", "ffn") for leaf in ("fn", "base", "scale")),
        *((f"model.hc_head.{leaf}", f"hc_head_{leaf}") for leaf in ("fn", "base", "scale")),
        ("model.embed_tokens", "embed"),
        ("lm_head", "head"),
        ("model", ""),
    )
)
# As transformers computes with them.
_CONVERTED: Final = NameMap(
    parts=(
        ("self_attn.indexer.weights_proj", "self_attn.compressor.indexer.scorer.weights_proj"),
        ("self_attn.indexer", "self_attn.compressor.indexer"),
        ("sinks.weight", "sinks"),
        ("mlp.expert_table.weight", "mlp.gate.tid2eid"),
        ("shared_expert", "shared_experts"),
        *((f"hc_head.{leaf}", f"hc_head.hc_{leaf}") for leaf in ("fn", "base", "scale")),
    )
)


def read_deepseek_v4(entries: Entries) -> ModelConfig:
    entries = entries.filled(_DEFAULTS)
    for name, value in _ONLY.items():
        entries.demand(name, value, value)
    kinds = _layer_kinds(entries)
    ropes = _ropes(entries)
    windows = {kind: _attention(entries, kind, ropes[kind == _SLIDING].rotary_dim) for kind in set(kinds)}
    widest = max((window.indexer.head_dim for window in windows.values() if window.indexer), default=0)
    attentions = [windows[kind] for kind in kinds]
    of_layers = [
        replace(ropes[kind == _SLIDING], num_still=max(window.head_dim, widest) - window.rope_dim)
        for kind, window in zip(kinds, attentions, strict=True)
    ]
    layers = tuple(
        # A layer without entries sees no farther than its window.
        LayerConfig(attention=window, mlp=mlp, rope=rope, window=window.window if window.compressor is None else None)
        for window, mlp, rope in zip(attentions, _mixtures(entries), of_layers, strict=True)
    )
    eps = entries.positive("rms_norm_eps", 1e-6)
    return reading.model_config(
        entries,
        block="hyper",
        norm=NormConfig(eps=eps),
        hyper=HyperConfig(
            num_streams=entries.size("hc_mult"),
            num_iterations=entries.size("hc_sinkhorn_iters", most=_MOST_ITERATIONS),
            eps=entries.positive("hc_eps", 1e-6),
            norm_eps=eps,
        ),
        layers=layers,
        names=(_PUBLISHED, _CONVERTED),
        ignored=(r"(model\.)?mtp\..*",),
    )


def _layer_kinds(entries: Entries) -> list[str]:
    """Return the kind of attention of each layer, one of reading.ROW_KINDS."""
    num_layers = reading.read_num_layers(entries)
    kinds: Sequence[str] | None = entries.texts("layer_types")
    if kinds is not None:
        if len(kinds) != num_layers or set(kinds) - set(reading.ROW_KINDS):
            expected = f"a list of num_hidden_layers ({num_layers}) times {', '.join(reading.ROW_KINDS)}"
            raise entries.wrong("layer_types", expected)
        return list(kinds)
    ratios = entries.sizes("compress_ratios", least=0)
    if ratios is not None:
        # Published files count the layers that predict later tokens, too.
        if len(ratios) < num_layers or set(ratios) - set(_KIND_OF_RATIO):
            raise entries.wrong("compress_ratios", f"a list of at least {num_layers} times 0, 4 or 128")
        return [_KIND_OF_RATIO[ratio] for ratio in ratios[:num_layers]]
    return [_SPARSE if layer_idx > 2 and layer_idx % 2 else _HEAVY for layer_idx in range(num_layers)]


def _attention(entries: Entries, kind: str, rope_dim: int) -> WindowConfig:
    head_dim, num_heads = entries.size("head_dim"), entries.size("num_attention_heads")
    num_groups = entries.size("o_groups")
    if head_dim % 2:
        raise entries.wrong("head_dim", "an even number")
    if num_heads % num_groups:
        raise entries.wrong("o_groups", f"a divisor of num_attention_heads ({num_heads})")
    compressor: CompressorConfig | None = None
    if kind != _SLIDING:
        is_sparse = kind == _SPARSE
        indexer = _indexer(entries, rope_dim) if is_sparse else None
        compressor = CompressorConfig(ratio=_rate(entries, kind), overlaps=is_sparse, indexer=indexer)
    return WindowConfig(
        num_heads=num_heads,
        head_dim=head_dim,
        rope_dim=rope_dim,
        window=entries.size("sliding_window"),
        q_lora_rank=entries.size("q_lora_rank"),
        num_groups=num_groups,
        group_rank=entries.size("o_lora_rank"),
        softmax_scale=head_dim**-0.5,
        norm_eps=entries.positive("rms_norm_eps", 1e-6),
        compressor=compressor,
    )


def _rate(entries: Entries, kind: str) -> int:
    """Return the tokens of a window in layers of a kind."""
    name = "compress_rate_csa" if kind == _SPARSE else "compress_rate_hca"
    if name in entries:
        return entries.size(name)
    rates = entries.child("compress_rates")
    return _RATES[kind] if rates is None else rates.size(kind)


def _indexer(entries: Entries, rope_dim: int) -> IndexerConfig:
    dim = entries.size("index_head_dim")
    if dim < rope_dim or dim % 2:
        raise entries.wrong("index_head_dim", f"an even number, at least the {rope_dim} values that rotate")
    return IndexerConfig(
        num_heads=entries.size("index_n_heads"), head_dim=dim, top_k=entries.size("index_topk"), is_interleaved=True
    )


def _mixtures(entries: Entries) -> list[MoeConfig]:
    """Return the experts of each layer."""
    num_layers, num_experts = reading.read_num_layers(entries), entries.size("n_routed_experts")
    kinds: Sequence[str] | None = entries.texts("mlp_layer_types")
    if kinds is None:
        num_hash = entries.count("num_hash_layers", _NUM_HASH_LAYERS)
        kinds = [_HASH if layer_idx < num_hash else _SCORED for layer_idx in range(num_layers)]
    if len(kinds) != num_layers or set(kinds) - {_HASH, _SCORED}:
        raise entries.wrong("mlp_layer_types", f"a list of num_hidden_layers ({num_layers}) times {_HASH} or {_SCORED}")
    size = entries.size("moe_intermediate_size")
    scored = reading.make_moe(
        {
            "top_k": entries.size("num_experts_per_tok", most=num_experts),
            "renormalize": True,
            "scaling": entries.positive("routed_scaling_factor", 1.5),
        },
        num_experts=num_experts,
        intermediate_size=size,
        activation="clamped_silu10",
        shared_intermediate_size=size,
        has_root_scores=True,
        has_router_bias=True,
    )
    by_table = replace(scored, has_router_bias=False, has_expert_table=True, vocab_size=entries.size("vocab_size"))
    return [by_table if kind == _HASH else scored for kind in kinds]


def _ropes(entries: Entries) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotary embeddings of layers with entries, and of those without."""
    if not _is_nested(entries.get("rope_parameters")):
        entries = entries.replaced({"rope_parameters": _nested(entries), "rope_scaling": None})
    compress, main = (
        read_rope(
            entries,
            head_dim=entries.size("head_dim"),
            max_position_embeddings=reading.read_max_position(entries),
            interleaved=True,
            layer_type=name,
        )
        for name in ("compress", "main")
    )
    for rope in (compress, main):
        if rope.kind not in _ROPE_KINDS or rope.attention_factor != 1.0:
            raise ModelLoadError(
                f"config.json: a rope scaling of type {rope.kind} with an attention_factor of {rope.attention_factor} "
                f"is not supported here; the types {', '.join(_ROPE_KINDS)} are, with a factor of 1"
            )
    return compress, main


def _is_nested(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(value.get(name), Mapping) for name in ("main", "compress"))


def _nested(entries: Entries) -> dict[str, dict[str, Any]]:
    """Return both rotary embeddings where the file has one object for them: its scaling is that of layers with entries.

    YaRN's factor of scores is then left out, as in the published code.
    """
    found = entries.child("rope_parameters") or entries.child("rope_scaling")
    flat = {} if found is None else {name: found.get(name) for name in found if name not in ("main", "compress")}
    part = 64 / 512
    if "partial_rotary_factor" in entries:
        part = entries.positive("partial_rotary_factor")
    elif "qk_rope_head_dim" in entries:
        part = entries.size("qk_rope_head_dim") / entries.size("head_dim")
    theta = entries.positive("rope_theta", flat.get("rope_theta") or 10000.0)
    compress = {**flat, "rope_theta": entries.positive("compress_rope_theta", 160000.0), "partial_rotary_factor": part}
    if "type" not in compress:
        compress.setdefault("rope_type", "default")
    if "yarn" in (compress.get("rope_type"), compress.get("type")):
        compress.setdefault("attention_factor", 1.0)
    return {
        "main": {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": part},
        "compress": compress,
    }
