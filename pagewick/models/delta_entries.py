"""Entries of config.json that describe layers with the gated delta rule, and which layers those are. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagewick.layers.state_config import DeltaConfig
from pagewick.models import reading
from pagewick.models.entries import Entries


def read_delta(entries: Entries, defaults: Mapping[str, int], **fields: Any) -> DeltaConfig:
    """Read the sizes of a layer, under the names of Qwen3-Next.

    defaults: of the numbers and sizes of heads, by their entries' names. `fields` are other fields of DeltaConfig.
    """
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    num_key_heads, num_value_heads, key_dim, value_dim = (entries.size(name, defaults[name]) for name in names)
    if num_value_heads % num_key_heads:
        raise entries.wrong("linear_num_value_heads", f"a multiple of linear_num_key_heads ({num_key_heads})")
    conv_size = entries.size("linear_conv_kernel_dim", 4)
    if conv_size < 2:
        raise entries.wrong("linear_conv_kernel_dim", "a whole number above 1")
    # The convolution's activation and the gates' are the MLP's.
    entries.demand("hidden_act", "silu", "silu")
    return DeltaConfig(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_size=conv_size,
        **fields,
    )


def linear_layers(entries: Entries, default: Sequence[bool]) -> list[bool]:
    """Return which layers have linear attention: as layer_types says, or `default` without it.

    Raises ModelLoadError unless layer_types has a known kind for each layer, and some layer has full attention.
    """
    kinds = entries.texts("layer_types")
    if kinds is None:
        return list(default)
    if len(kinds) != len(default) or set(kinds) - {reading.LINEAR, reading.FULL} or reading.FULL not in kinds:
        raise entries.wrong(
            "layer_types",
            f"a list of num_hidden_layers ({len(default)}) kinds, {reading.LINEAR} or {reading.FULL}, at least one of "
            "these",
        )
    return [kind == reading.LINEAR for kind in kinds]
