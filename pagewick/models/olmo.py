"""OLMo 1, 2 and 3, OLMo Hybrid, OLMoE and FlexOlmo. Llama, except:

- OLMo 1: layer norms without weights and biases; clip_qkv limits queries, keys and values (the models of 2024).
- The others: queries and keys are normalised, each over all heads together.
- OLMo 2 and 3, FlexOlmo: the norms of a layer come after attention and MLP, not before them.
- OLMo 3: a window in three of four layers, which are rotated without the scaling of the others.
- OLMo Hybrid: three layers of four have linear attention by the gated delta rule, with norms before both parts; the
  others are those of OLMo 3 without a window. Published files rotate nothing: they have a null in place of the
  rotation's entries or of its theta.
- OLMoE, FlexOlmo: experts in all layers, the best of a softmax over all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pagewick.layers.state_config import DeltaConfig
from pagewick.models import delta_entries, reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.name_map import NameMap
from pagewick.models.parts import AttentionConfig, Block, HeadNormConfig, LayerConfig, NormConfig

# The norm behind a state has this eps in every file; rms_norm_eps is that of the others.
_STATE_NORM_EPS: Final = 1e-5


def read_olmo(entries: Entries) -> ModelConfig:
    entries = entries.filled({"max_position_embeddings": 2048})
    has_bias = entries.flag("attention_bias", False)
    attention = reading.read_attention(
        entries, qkv_bias=has_bias, o_bias=has_bias, qkv_limit=entries.optional_positive("clip_qkv")
    )
    mlp, rope = reading.read_mlp(entries), reading.read_rope_of(entries, attention)
    return reading.model_config(
        entries,
        norm=NormConfig(kind="layer", eps=1e-5, has_weight=False),
        layers=reading.same_layers(reading.read_num_layers(entries), attention, mlp, rope),
    )


def read_olmo2(entries: Entries) -> ModelConfig:
    entries = entries.filled({"max_position_embeddings": 2048})
    attention = _attention(entries)
    rope = reading.read_rope_of(entries, attention)
    num_layers = reading.read_num_layers(entries)
    layers = reading.same_layers(num_layers, attention, reading.read_mlp(entries), rope)
    return _model(entries, layers=layers, block="post_norm")


def read_olmo3(entries: Entries) -> ModelConfig:
    # In the old spelling, one rope_theta is that of all layers.
    entries = entries.renamed({"rope_local_base_freq": "rope_theta"})
    entries = entries.filled({"max_position_embeddings": 2048, "sliding_window": 4096})
    attention, mlp = _attention(entries), reading.read_mlp(entries)
    num_layers = reading.read_num_layers(entries)
    windows = reading.read_windows(entries, [(layer_idx + 1) % 4 != 0 for layer_idx in range(num_layers)])
    everywhere, within = (
        reading.read_rope_of(entries, attention, default_theta=5e5, layer_type=layer_type)
        for layer_type in ("full_attention", "sliding_attention")
    )
    layers = [
        LayerConfig(attention=attention, mlp=mlp, rope=everywhere if window is None else within, window=window)
        for window in windows
    ]
    return _model(entries, layers=tuple(layers), block="post_norm")


def read_olmo_hybrid(entries: Entries) -> ModelConfig:
    entries = entries.filled({"max_position_embeddings": 65536, "rms_norm_eps": 1e-6})
    attention, mlp = _attention(entries), reading.read_mlp(entries)
    rope = reading.read_rope_of(entries, attention) if _rotates(entries) else None
    linear, num_layers = _linear_attention(entries), reading.read_num_layers(entries)
    # Every fourth layer has the usual attention, or the last one of fewer.
    kinds = delta_entries.linear_layers(entries, [(idx + 1) % min(4, num_layers) != 0 for idx in range(num_layers)])
    layers = [
        LayerConfig(attention=linear, mlp=mlp, rope=None, block="sequential")
        if is_linear
        else LayerConfig(attention=attention, mlp=mlp, rope=rope)
        for is_linear in kinds
    ]
    return _model(entries, layers=tuple(layers), block="post_norm", names=(_hybrid_names(kinds),))


def _rotates(entries: Entries) -> bool:
    """Whether heads are rotated: the entries that say how, the kind of scaling and theta are not null."""
    values = entries.values
    scaling = values.get("rope_parameters", {})
    if not isinstance(scaling, Mapping):
        return scaling is not None or "rope_theta" in entries
    nulls = [name for name in ("rope_type", "rope_theta") if name in scaling and scaling[name] is None]
    return not nulls and ("rope_theta" in scaling or values.get("rope_theta", 1.0) is not None)


def _linear_attention(entries: Entries) -> DeltaConfig:
    num_heads = entries.size("num_attention_heads")
    num_key_heads = entries.size("linear_num_key_heads", num_heads)
    key_dim = entries.size("linear_key_head_dim", max(1, int(0.75 * entries.size("hidden_size") / num_key_heads)))
    sizes = {
        "linear_num_key_heads": num_key_heads, "linear_num_value_heads": num_heads, "linear_key_head_dim": key_dim,
        "linear_value_head_dim": 2 * key_dim,
    }  # fmt: skip
    delta = delta_entries.read_delta(
        entries,
        sizes,
        norm_eps=_STATE_NORM_EPS,
        has_parts=True,
        # States may be reflected at a key, not only shortened there.
        strength=2.0 if entries.flag("linear_allow_neg_eigval", True) else 1.0,
    )
    if delta.num_value_heads != delta.num_key_heads:
        raise entries.wrong("linear_num_value_heads", f"linear_num_key_heads ({delta.num_key_heads})")
    return delta


def _hybrid_names(kinds: Sequence[bool]) -> NameMap:
    """Return the names of published files. kinds: which layers have linear attention."""
    parts = [(f"linear_attn.in_proj_{ours}", f"linear_attn.{theirs}_proj") for ours, theirs in ("zg", "bb", "aa")]
    parts += [("linear_attn.out_proj", "linear_attn.o_proj"), ("linear_attn.norm", "linear_attn.o_norm")]
    parts.append(("input_layernorm", "attention_layer_norm"))
    for idx, is_linear in enumerate(kinds):
        if is_linear:
            parts.append((f"layers.{idx}.post_attention_layernorm", f"layers.{idx}.feedforward_layer_norm"))
    return NameMap(parts=tuple(parts))


def read_olmoe(entries: Entries) -> ModelConfig:
    return _read_experts(entries.filled({"num_experts_per_tok": 8}), block="sequential", num_experts=64)


def read_flex_olmo(entries: Entries) -> ModelConfig:
    entries = entries.filled({"num_experts_per_tok": 5, "rms_norm_eps": 1e-6})
    return _read_experts(entries, block="post_norm", num_experts=7, default_theta=5e5)


def _read_experts(entries: Entries, *, block: Block, num_experts: int, default_theta: float = 1e4) -> ModelConfig:
    """num_experts: the family's default."""
    entries = entries.renamed({"num_experts": "num_local_experts"}).filled({"max_position_embeddings": 4096})
    for name in ("clip_qkv", "sliding_window"):
        entries.demand(name, None, None)
    num_experts = entries.size("num_experts", num_experts)
    moe = reading.make_moe(
        {
            "top_k": entries.size("num_experts_per_tok", most=num_experts),
            "renormalize": entries.flag("norm_topk_prob", False),
        },
        num_experts=num_experts,
        intermediate_size=entries.size("intermediate_size"),
        activation=reading.read_activation(entries),
    )
    attention = _attention(entries)
    rope = reading.read_rope_of(entries, attention, default_theta=default_theta)
    layers = reading.same_layers(reading.read_num_layers(entries), attention, moe, rope)
    return _model(entries, layers=layers, block=block)


def _attention(entries: Entries) -> AttentionConfig:
    has_bias = entries.flag("attention_bias", False)
    norm = HeadNormConfig(eps=entries.positive("rms_norm_eps", 1e-5), is_joint=True)
    return reading.read_attention(entries, qkv_bias=has_bias, o_bias=has_bias, head_norm=norm)


def _model(entries: Entries, **fields: Any) -> ModelConfig:
    return reading.model_config(entries, norm=NormConfig(eps=entries.positive("rms_norm_eps", 1e-5)), **fields)
