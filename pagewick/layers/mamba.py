"""Mamba-2 (arXiv:2405.21060): a convolution, and a state for each head in place of keys and values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pagewick import kernels
from pagewick.attention.backend import AttentionBatch
from pagewick.errors import ConfigError
from pagewick.kernels.options import ScanOptions
from pagewick.layers.context import LayerContext
from pagewick.layers.linear import Linear, RowParallelLinear
from pagewick.layers.norm import JointHeadNorm, norm_jointly
from pagewick.layers.rotary import Angles
from pagewick.layers.state import Constant, StateLayer, constant, times
from pagewick.layers.state_config import MambaConfig
from pagewick.parallel.sharding import check_tensor_parallel, shard_bounds
from pagewick.quantization.share import Part, Range, Share

# Raise the number whenever the layout of a state changes.
_LAYOUT = "mamba 2"


class MambaMixer(StateLayer):
    """[T, hidden_size] -> [T, hidden_size].

    Each rank has some of the heads, and the groups that they use; all ranks have a model's only group. Raises
    ConfigError unless all ranks get as many heads and groups.
    """

    def __init__(self, context: LayerContext, prefix: str, hidden_size: int, config: MambaConfig) -> None:
        rank, num_ranks = context.tp_rank, context.tp_size
        _check_ranks(config, num_ranks)
        super().__init__(config.state_bytes(num_ranks), _LAYOUT)
        heads = shard_bounds(config.num_heads, rank, num_ranks)
        groups = config.groups_of(rank, num_ranks)
        num_heads, num_groups = heads[1] - heads[0], groups[1] - groups[0]
        rows = _input_rows(config, heads, groups)
        num_rows = config.num_values + config.num_channels + config.num_heads
        share = Share((Part("in_proj", num_rows, rows),), hidden_size, (0, hidden_size))
        self.in_proj = Linear(context, prefix, share, bias=config.has_bias)
        self.out_proj = RowParallelLinear(
            context, f"{prefix}.out_proj", config.num_values, hidden_size, bias=config.has_bias,
            multiple=config.head_dim,
        )  # fmt: skip
        size, keys = num_heads * config.head_dim, num_groups * config.state_dim
        num_channels = size + 2 * keys
        self._widths = [size, num_channels, num_heads]
        self.conv_weight = constant(context, num_channels, config.conv_size)
        conv_bias = torch.zeros(num_channels, device=context.device)
        self.log_decay = constant(context, num_heads)
        self.skip = constant(context, num_heads)
        self.dt_bias = constant(context, num_heads)
        scales = _channel_scales(config, context.device, size, keys)
        # The channels of the convolution are the rows of the input projection behind the gates.
        channels = tuple((start - config.num_values, stop - config.num_values) for start, stop in rows[1:4])
        of_heads: tuple[tuple[int, ...], tuple[Range, ...]] = ((config.num_heads,), (heads,))
        self._constants = {
            "conv1d.weight": Constant((config.num_channels, 1, config.conv_size), channels, self.conv_weight, scales),
            "A_log": Constant(*of_heads, self.log_decay),
            "D": Constant(*of_heads, self.skip),
            "dt_bias": Constant(*of_heads, self.dt_bias),
        }
        if config.has_conv_bias:
            conv_bias = self.conv_bias = constant(context, num_channels)
            self._constants["conv1d.bias"] = Constant((config.num_channels,), channels, conv_bias)
        # Where several ranks have heads of a group, the norm follows the scan, and the ranks add their squares.
        self.norm: JointHeadNorm | None = None
        norm_weight: nn.Parameter | None = None
        self._collectives = context.collectives
        if config.has_norm and num_ranks > config.num_groups:
            ids, total = range(*heads), config.num_heads
            self.norm = JointHeadNorm(
                context, config.head_dim, config.norm_eps, heads=ids, total_num_heads=total, earlier=()
            )
        elif config.has_norm:
            norm_weight = self.norm_weight = constant(context, size)
            kept = (times(heads, config.head_dim),)
            self._constants["norm.weight"] = Constant((config.num_values,), kept, norm_weight)
        self.options = ScanOptions(
            num_heads=num_heads, num_groups=num_groups, head_dim=config.head_dim, state_dim=config.state_dim,
            conv_weight=self.conv_weight, conv_bias=conv_bias, log_decay=self.log_decay, skip=self.skip,
            dt_bias=self.dt_bias, norm_weight=norm_weight, norm_eps=config.norm_eps, num_norm_groups=num_groups,
            is_norm_first=config.is_norm_first, gate_scale=config.scales[0], dt_scale=config.scales[4],
        )  # fmt: skip

    def forward(self, hidden_states: Tensor, angles: Angles | None, batch: AttentionBatch) -> Tensor:
        """angles: not used; the order of the tokens is in the state."""
        states, metadata = self.states(batch, len(hidden_states))
        gate, xbc, dt = self.in_proj(hidden_states, batch).split(self._widths, dim=1)
        mixed = kernels.selective_scan(xbc, gate, dt, states, metadata, self.options)
        if self.norm is not None:
            norm_jointly((self.norm,), (mixed,), self._collectives)
        return self.out_proj(mixed, batch)  # type: ignore[no-any-return]


def _check_ranks(config: MambaConfig, num_ranks: int) -> None:
    check_tensor_parallel(config.num_heads, num_ranks, parts="heads of Mamba")
    if config.num_groups > 1:
        check_tensor_parallel(config.num_groups, num_ranks, parts="groups of Mamba")
    elif num_ranks > 1 and config.has_norm and config.is_norm_first:
        raise ConfigError(
            f"--tensor-parallel-size {num_ranks} does not fit the model: its layers of Mamba normalise all heads "
            "before their gates\n  use 1"
        )


def _input_rows(config: MambaConfig, heads: Range, groups: Range) -> tuple[Range, ...]:
    """Return the rows of gates, values, keys, queries and steps in the file's input projection."""
    values, keys = times(heads, config.head_dim), times(groups, config.state_dim)
    starts = [0, config.num_values, 2 * config.num_values]
    starts += [starts[2] + config.num_groups * config.state_dim, config.num_values + config.num_channels]
    return tuple(
        (start + kept[0], start + kept[1])
        for start, kept in zip(starts, (values, values, keys, keys, heads), strict=True)
    )


def _channel_scales(config: MambaConfig, device: torch.device, size: int, keys: int) -> Tensor | None:
    """Return the factors of a rank's channels, which its weights of the convolution take; None if all are 1."""
    scales = config.scales[1:4]
    if scales == (1.0, 1.0, 1.0):
        return None
    parts = zip((size, keys, keys), scales, strict=True)
    return torch.cat([torch.full((count,), factor, device=device) for count, factor in parts])
