"""The tensors of layers that keep a state. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pagewick.layers.state_config import (
    STEP_NORMS,
    ChannelScanConfig,
    ConvolutionConfig,
    DeltaConfig,
    MambaConfig,
    StateConfig,
)
from pagewick.models.tensor_sizes import Role, Size, cut, whole

Named = tuple[str, Role, tuple[Size, ...]]


def state_tensors(config: StateConfig, hidden: Size, rank: int, num_ranks: int) -> Iterator[Named]:
    """Yield the name behind the layer's, the role and the sizes of each tensor. hidden: the size of hidden states."""
    if isinstance(config, DeltaConfig):
        return _linear_attention(config, hidden, rank, num_ranks)
    if isinstance(config, MambaConfig):
        return _mamba(config, hidden, rank, num_ranks)
    if isinstance(config, ChannelScanConfig):
        return _channel_scan(config, hidden, rank, num_ranks)
    return _short_convolution(config, hidden, rank, num_ranks)


def _linear_attention(config: DeltaConfig, hidden: Size, rank: int, num_ranks: int) -> Iterator[Named]:
    ratio = config.num_value_heads // config.num_key_heads
    keys = cut(config.num_key_heads, rank, num_ranks)
    values = keys.times(ratio)
    channels, outputs = keys.times(2 * config.key_dim + ratio * config.value_dim), values.times(config.value_dim)
    kinds = {"q": keys.times(config.key_dim), "k": keys.times(config.key_dim), "v": outputs}
    rows = {"in_proj_qkv": channels, "in_proj_z": outputs}
    if config.has_parts:
        rows = {f"{kind}_proj": size for kind, size in kinds.items()} | {"in_proj_z": outputs}
    elif config.is_fused:
        rows = {"in_proj_qkvz": keys.times(2 * config.key_dim + 2 * ratio * config.value_dim)}
    decays = values.times(config.decays_per_head)
    gates = {"in_proj_ba": values.times(2)} if config.has_fused_gates else {"in_proj_b": values, "in_proj_a": decays}
    if config.gate_rank is not None:
        low = whole(config.gate_rank)
        rows, gates = {f"{kind}_proj": kinds[kind] for kind in kinds}, {"in_proj_b": values}
        gates |= {"f_a_proj": low, "g_a_proj": low}
        for name, size in (("f_b_proj", decays), ("g_b_proj", outputs)):
            yield f"linear_attn.{name}.weight", "attention", (size, low)
    yield from _products("linear_attn", rows | gates, hidden, outputs)
    constants: dict[str, tuple[Size, ...]] = {"conv1d.weight": (channels, whole(1), whole(config.conv_size))}
    if config.has_parts:
        taps = whole(1), whole(config.conv_size)
        constants = {f"{kind}_conv1d.weight": (size, *taps) for kind, size in kinds.items()}
    constants["A_log"] = (whole(1), whole(1), values, whole(1)) if config.is_decay_4d else (values,)
    constants |= {"dt_bias": (decays,), "norm.weight": (whole(config.value_dim),)}
    yield from _constants("linear_attn", constants)


def _mamba(config: MambaConfig, hidden: Size, rank: int, num_ranks: int) -> Iterator[Named]:
    heads = cut(config.num_heads, rank, num_ranks)
    values = heads.times(config.head_dim)
    first, last = config.groups_of(rank, num_ranks)
    channels = values.plus(Size(config.num_groups, last - first).times(2 * config.state_dim))
    rows = {"in_proj": channels.plus(values).plus(heads)}
    yield from _products("mamba", rows, hidden, values, has_bias=config.has_bias)
    constants: dict[str, tuple[Size, ...]] = {"conv1d.weight": (channels, whole(1), whole(config.conv_size))}
    if config.has_conv_bias:
        constants["conv1d.bias"] = (channels,)
    constants |= dict.fromkeys(("A_log", "D", "dt_bias"), (heads,))
    if config.has_norm:
        constants["norm.weight"] = (values,)
    yield from _constants("mamba", constants)


def _channel_scan(config: ChannelScanConfig, hidden: Size, rank: int, num_ranks: int) -> Iterator[Named]:
    channels, low = cut(config.num_channels, rank, num_ranks), whole(config.step_rank)
    yield from _products("mamba", {"in_proj": channels.times(2)}, hidden, channels, has_bias=config.has_bias)
    yield "mamba.x_proj.weight", "attention", (whole(config.step_rank + 2 * config.state_dim), channels)
    yield "mamba.dt_proj.weight", "attention", (channels, low)
    constants: dict[str, tuple[Size, ...]] = {"conv1d.weight": (channels, whole(1), whole(config.conv_size))}
    if config.has_conv_bias:
        constants["conv1d.bias"] = (channels,)
    if config.has_norm_weights:
        for name, size in zip(STEP_NORMS, (config.step_rank, config.state_dim, config.state_dim), strict=True):
            yield f"mamba.{name}.weight", "norm", (whole(size),)
    constants |= {"A_log": (channels, whole(config.state_dim)), "D": (channels,), "dt_proj.bias": (channels,)}
    yield from _constants("mamba", constants)


def _short_convolution(config: ConvolutionConfig, hidden: Size, rank: int, num_ranks: int) -> Iterator[Named]:
    channels = cut(config.num_channels, rank, num_ranks)
    yield from _products("short_conv", {"in_proj": channels.times(3)}, hidden, channels, has_bias=config.has_bias)
    constants: dict[str, tuple[Size, ...]] = {"conv.weight": (channels, whole(1), whole(config.conv_size))}
    if config.has_bias:
        constants["conv.bias"] = (channels,)
    yield from _constants("short_conv", constants)


def _products(
    path: str, rows: Mapping[str, Size], hidden: Size, outputs: Size, *, has_bias: bool = False
) -> Iterator[Named]:
    """Yield the input projections, by their names and rows, and the output projection."""
    for name, size in rows.items():
        yield f"{path}.{name}.weight", "attention", (size, hidden)
        if has_bias:
            yield f"{path}.{name}.bias", "attention", (size,)
    yield f"{path}.out_proj.weight", "attention", (hidden, outputs)
    if has_bias:
        yield f"{path}.out_proj.bias", "attention", (hidden,)


def _constants(path: str, sizes: Mapping[str, tuple[Size, ...]]) -> Iterator[Named]:
    return ((f"{path}.{name}", "state", dimensions) for name, dimensions in sizes.items())
