"""Calls that no variant of a kernel serves: their definition computes them, which is logged once for each kind."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from pagewick.errors import ConfigError
from pagewick.kernels import batch_invariance
from pagewick.log import get_logger

P = ParamSpec("P")
R = TypeVar("R")

_logger = get_logger(__name__)
# Operations whose results depend on no order of additions, or whose definition takes one token after the other, so that
# PyTorch may compute them in any batch. An image is attended (full_attention) without anything else of its batch.
_EXACT = frozenset({
    "activation", "argmax_rows", "block_attention", "channel_scan", "collapse_streams", "compress_rows",
    "edit_tokens", "expand_streams", "full_attention", "gated_activation", "gated_delta_net", "gather_blocks",
    "gather_quantized_rows", "limit", "mask_rows", "philox_uniform", "root_logits", "rotate_heads", "scale",
    "scatter_blocks", "select_blocks", "selective_scan", "short_convolution", "sigmoid_gate", "soft_cap",
    "store_index_keys", "stream_weights", "window_attention",
})  # fmt: skip


def by_definition(definition: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call the definition of an operation with arguments that no kernel serves.

    Raises ConfigError if results must not depend on the batch, which PyTorch does not promise.
    """
    _note(getattr(definition, "__name__", ""), ", ".join(filter(None, map(_kind, args))))
    return definition(*args, **kwargs)


@functools.cache
def _note(name: str, kinds: str) -> None:
    """Log that an operation has no kernel for arguments of these kinds."""
    if batch_invariance.is_required() and name not in _EXACT:
        raise ConfigError(
            f"--batch-invariant: no kernel serves {name} of {kinds}, and PyTorch may add in an order that depends on "
            "the batch; leave the flag out, or run the model with --device cpu"
        )
    _logger.warning("no kernel serves %s of %s: it runs in plain PyTorch (docs/gpu.md)", name, kinds)


def _kind(argument: Any) -> str:
    """Describe a tensor, weight or cache by its dtype and all sizes but the first; nothing for other arguments."""
    data = getattr(argument, "data", None)
    if not isinstance(data, torch.Tensor):
        return ""
    sizes = ["*", *map(str, data.shape[1:])]
    return f"{str(data.dtype).removeprefix('torch.')} [{', '.join(sizes)}]"
