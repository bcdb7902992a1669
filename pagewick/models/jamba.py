"""Jamba. Llama, except:

- Most layers have Mamba-1 in place of attention, with norms of steps, keys and queries. Nothing is rotated.
- Every other layer has experts in place of its MLP: the best of a softmax over all. Some models have no experts.
"""

from __future__ import annotations

from typing import Final

from pagewick.layers.config import MoeConfig
from pagewick.layers.state_config import ChannelScanConfig
from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.name_map import NameMap
from pagewick.models.parts import LayerConfig, MlpConfig, NormConfig

_NAMES: Final = NameMap(
    parts=(
        ("mlp.gate", "mlp.router"),
        ("mlp", "feed_forward"),
        ("post_attention_layernorm", "pre_ff_layernorm"),
        ("model.norm", "model.final_layernorm"),
    )
)
_DEFAULTS: Final = {"num_key_value_heads": 8, "max_position_embeddings": 262144}


def read_jamba(entries: Entries) -> ModelConfig:
    entries = entries.filled(_DEFAULTS)
    # The convolution's activation and the gates' is the MLP's.
    entries.demand("hidden_act", "silu", "silu")
    entries.demand("mamba_inner_layernorms", True, True)
    entries.demand("sliding_window", None, None)
    eps = entries.positive("rms_norm_eps", 1e-6)
    attention, scan = reading.read_attention(entries), _read_scan(entries, eps)
    has_attention = _periodic(entries, "attn_layer", period=8, offset=4)
    layers = [
        LayerConfig(attention=attention if is_full else scan, mlp=mlp, rope=None)
        for is_full, mlp in zip(has_attention, _read_mlps(entries), strict=True)
    ]
    return reading.model_config(entries, norm=NormConfig(eps=eps), layers=tuple(layers), names=(_NAMES,))


def _read_scan(entries: Entries, eps: float) -> ChannelScanConfig:
    hidden_size, conv_size = entries.size("hidden_size"), entries.size("mamba_d_conv", 4)
    if conv_size < 2:
        raise entries.wrong("mamba_d_conv", "a whole number above 1")
    if entries.get("mamba_dt_rank") in (None, "auto"):
        entries = entries.replaced({"mamba_dt_rank": -(-hidden_size // 16)})
    return ChannelScanConfig(
        num_channels=entries.size("mamba_expand", 2) * hidden_size,
        state_dim=entries.size("mamba_d_state", 16),
        step_rank=entries.size("mamba_dt_rank"),
        conv_size=conv_size,
        has_bias=entries.flag("mamba_proj_bias", False),
        has_conv_bias=entries.flag("mamba_conv_bias", True),
        norm_eps=eps,
        has_norm_weights=True,
    )


def _read_mlps(entries: Entries) -> list[MlpConfig | MoeConfig]:
    mlp: MlpConfig = reading.read_mlp(entries)
    is_sparse = _periodic(entries, "expert_layer", period=2, offset=1)
    num_experts = entries.size("num_experts", 16)
    if num_experts == 1:
        return [mlp] * len(is_sparse)
    moe = reading.make_moe(
        {"top_k": entries.size("num_experts_per_tok", 2, most=num_experts)},
        num_experts=num_experts,
        intermediate_size=mlp.intermediate_size,
        activation=mlp.activation,
    )
    return [moe if sparse else mlp for sparse in is_sparse]


def _periodic(entries: Entries, name: str, *, period: int, offset: int) -> list[bool]:
    """Return whether each layer is one of those that `name`_period and `name`_offset mean. period, offset: defaults."""
    period = entries.size(f"{name}_period", period)
    offset = entries.count(f"{name}_offset", offset)
    if offset >= period:
        raise entries.wrong(f"{name}_offset", f"a whole number below {name}_period ({period})")
    return [layer_idx % period == offset for layer_idx in range(reading.read_num_layers(entries))]
