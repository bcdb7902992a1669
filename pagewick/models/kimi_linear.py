"""Kimi Linear. DeepSeek-V3, except:

- Three layers of four have linear attention (Kimi Delta Attention): the gated delta rule with a decay for each number
  of a key. Decays and the gates of outputs, which are sigmoids, come from two small vectors.
- The others have latent attention that rotates nothing.
- Entries have names of their own, and linear_attn_config lists the layers of each kind, counted from 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from pagewick.layers.config import MlaConfig, MoeConfig
from pagewick.layers.state_config import DeltaConfig
from pagewick.models import deepseek, delta_entries, reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.name_map import NameMap
from pagewick.models.parts import LayerConfig, NormConfig

_NAMES: Final = {
    "max_position_embeddings": "model_max_length", "n_shared_experts": "num_shared_experts",
    "num_experts_per_tok": "num_experts_per_token",
}  # fmt: skip
# Entries of Kimi K3, whose text part has the same type, and of what else no published file of this model has.
_ONLY: Final = {
    "mla_use_nope": True, "mla_use_output_gate": False, "moe_router_activation_func": "sigmoid",
    "use_grouped_topk": True, "num_nextn_predict_layers": 0, "routed_expert_hidden_size": None,
    "latent_moe_use_norm": False, "attn_res_block_size": None, "sliding_window": None,
}  # fmt: skip
_ONLY_LINEAR: Final = {"gate_lower_bound": None, "use_full_rank_gate": False}
_PROJECTIONS: Final = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def read_kimi_linear(entries: Entries) -> ModelConfig:
    entries = entries.renamed(_NAMES).filled({"model_max_length": 1048576})
    for name, value in _ONLY.items():
        entries.demand(name, value, value)
    eps, num_experts = entries.positive("rms_norm_eps", 1e-5), entries.size("num_experts", 256)
    moe = deepseek.read_experts(entries, _routing(entries, num_experts), num_experts=num_experts, default_shared=1)
    mlps = deepseek.layers_by_kind(entries, moe, default_dense=1)
    latent, linear = _latent_attention(entries), _linear_attention(entries, eps)
    layers = [
        LayerConfig(attention=linear if is_linear else latent, mlp=mlp, rope=None)
        for is_linear, mlp in zip(_linear_layers(entries), mlps, strict=True)
    ]
    names = (_names([isinstance(mlp, MoeConfig) for mlp in mlps]),)
    return reading.model_config(entries, norm=NormConfig(eps=eps), layers=tuple(layers), names=names)


def _routing(entries: Entries, num_experts: int) -> dict[str, Any]:
    """V3's way to choose experts, under this model's names."""
    return {
        "top_k": entries.size("num_experts_per_tok", 8, most=num_experts),
        "scoring": "sigmoid",
        "renormalize": entries.flag("moe_renormalize", True),
        "num_groups": entries.size("num_expert_group", 1),
        "top_k_groups": entries.size("topk_group", 1),
        "group_score": "sum_of_two",
        "scaling": entries.positive("routed_scaling_factor", 2.446),
    }


def _latent_attention(entries: Entries) -> MlaConfig:
    nope_dim, rope_dim = entries.size("qk_nope_head_dim", 128), entries.size("qk_rope_head_dim", 64)
    if rope_dim % 2:
        raise entries.wrong("qk_rope_head_dim", "an even number")
    return MlaConfig(
        num_heads=entries.size("num_attention_heads"),
        q_lora_rank=entries.optional_size("q_lora_rank"),
        kv_lora_rank=entries.size("kv_lora_rank", 512),
        qk_nope_head_dim=nope_dim,
        qk_rope_head_dim=rope_dim,
        v_head_dim=entries.size("v_head_dim", 128),
        softmax_scale=(nope_dim + rope_dim) ** -0.5,
        attention_bias=entries.flag("attention_bias", False),
    )


def _linear_attention(entries: Entries, eps: float) -> DeltaConfig:
    config = entries.child("linear_attn_config") or Entries({})
    for name, value in _ONLY_LINEAR.items():
        config.demand(name, value, value)
    size = config.size("head_dim", entries.size("linear_head_dim", 128))
    num_heads = config.size("num_heads", entries.size("linear_num_heads", 32))
    conv_size = config.size("short_conv_kernel_size", entries.size("linear_conv_kernel_dim", 4))
    delta = delta_entries.read_delta(
        entries.replaced({"linear_conv_kernel_dim": conv_size}),
        {
            "linear_num_key_heads": num_heads, "linear_num_value_heads": num_heads, "linear_key_head_dim": size,
            "linear_value_head_dim": size,
        },
        norm_eps=eps,
        has_parts=True,
        has_channel_decay=True,
        has_sigmoid_gate=True,
        gate_rank=size,
        is_decay_4d=True,
    )  # fmt: skip
    return delta


def _linear_layers(entries: Entries) -> list[bool]:
    """Return which layers have linear attention: as layer_types says, or else linear_attn_config."""
    num_layers = reading.read_num_layers(entries)
    config = entries.child("linear_attn_config")
    if config is None or "layer_types" in entries or not {"kda_layers", "full_attn_layers"} & set(config):
        return delta_entries.linear_layers(entries, [idx == 0 or idx % 4 != 0 for idx in range(num_layers)])
    linear, full = config.sizes("kda_layers") or (), config.sizes("full_attn_layers") or ()
    if sorted((*linear, *full)) != list(range(1, num_layers + 1)) or not full:
        raise config.wrong(
            "kda_layers",
            f"a list of layers from 1 to {num_layers}, and full_attn_layers the list of all others, at least one",
        )
    return [layer in linear for layer in range(1, num_layers + 1)]


def _names(sparse: Sequence[bool]) -> NameMap:
    """Return the names of published files. sparse: which layers have experts, whose projections have numbers.

    Those of the shared expert and of other MLPs have not, and get a name for a moment under which they are passed over.
    """
    dense = [f"layers.{idx}.mlp" for idx, is_sparse in enumerate(sparse) if not is_sparse]
    parts = [(f"shared_expert.{name}", f"shared_experts.kept {name}") for name in _PROJECTIONS]
    parts += [(f"{mlp}.{name}", f"{mlp}.kept {name}") for mlp in dense for name in _PROJECTIONS]
    parts += [*_PROJECTIONS.items(), *((f"kept {name}", name) for name in _PROJECTIONS)]
    parts += [
        (f"layers.{idx}.mlp", f"layers.{idx}.block_sparse_moe") for idx, is_sparse in enumerate(sparse) if is_sparse
    ]
    parts += [("linear_attn.in_proj_b", "linear_attn.b_proj"), ("linear_attn.out_proj", "linear_attn.o_proj")]
    parts += [("linear_attn.norm", "linear_attn.o_norm"), ("linear_attn", "self_attn")]
    return NameMap(parts=tuple(parts))
