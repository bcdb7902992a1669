"""Entries of config.json that describe layers of Mamba-2, and which layers those are. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from pagewick.layers.state_config import MambaConfig
from pagewick.models import reading
from pagewick.models.entries import Entries

# Old names of kinds of layers, and those of transformers 5.
KINDS: Final = {"mamba": reading.LINEAR, "attention": reading.FULL}

# How files write infinity: as Python does, as a text, and as transformers 5 does.
_INFINITIES: Final = (math.inf, "Infinity", {"__float__": "Infinity"})


def read_mamba(entries: Entries, *, norm_eps: float, num_values: int | None = None, **fields: Any) -> MambaConfig:
    """Read the sizes of a layer, under the names of Bamba; `fields` are other fields of MambaConfig.

    num_values: of all heads together; by default mamba_expand times the hidden size.
    """
    _check_limits(entries)
    # The convolution's activation is the MLP's.
    entries.demand("hidden_act", "silu", "silu")
    if num_values is None:
        num_values = entries.size("mamba_expand", 2) * entries.size("hidden_size")
    num_heads = entries.size("mamba_n_heads", 128)
    if num_values % num_heads:
        raise entries.wrong("mamba_n_heads", f"a divisor of {num_values}, the numbers of all heads together")
    head_dim = num_values // num_heads
    if entries.get("mamba_d_head") not in (None, "auto", head_dim):
        raise entries.wrong(
            "mamba_d_head", f'"auto" or {head_dim}, by which {num_heads} heads have {num_values} numbers'
        )
    num_groups = entries.size("mamba_n_groups", 1)
    if num_heads % num_groups:
        raise entries.wrong("mamba_n_groups", f"a divisor of mamba_n_heads ({num_heads})")
    conv_size = entries.size("mamba_d_conv", 4)
    if conv_size < 2:
        raise entries.wrong("mamba_d_conv", "a whole number above 1")
    return MambaConfig(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=num_groups,
        state_dim=entries.size("mamba_d_state", 256),
        conv_size=conv_size,
        norm_eps=norm_eps,
        has_conv_bias=entries.flag("mamba_conv_bias", True),
        **{"has_bias": entries.flag("mamba_proj_bias", False), **fields},
    )


def _check_limits(entries: Entries) -> None:
    """Raise ModelLoadError if steps have limits: nothing here applies them."""
    limits = entries.get("time_step_limit")
    if limits is None:
        return
    if not isinstance(limits, list) or len(limits) != 2 or limits[0] != 0 or limits[1] not in _INFINITIES:
        raise entries.wrong("time_step_limit", "[0, Infinity]: limits of steps are not supported")


def read_kinds(entries: Entries, kinds: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """Return the kind of each layer, in the words of transformers 5, of which some must be in `known`.

    kinds: as the file has them; None: it has none. Raises ModelLoadError unless all are known, and one layer has full
    attention.
    """
    found = [KINDS.get(kind, kind) for kind in kinds or ()]
    if not found or set(found) - set(known) or reading.FULL not in found:
        expected = f"a list with a kind for each layer, {', '.join(known)}, and {reading.FULL} for at least one of them"
        raise entries.wrong("layer_types", expected)
    return found
