"""The tensors of parts that several vision encoders have, and the dimensions of tensors. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pagewick.models.vision.config import VisionConfig


class Shared(NamedTuple):
    """A dimension of which ranks have shares: `number` is shared out among them, and each unit has `unit` elements."""

    number: int
    unit: int = 1


class KeyHeads(NamedTuple):
    """A dimension of keys or values: a rank keeps the heads that its share of `num_heads` heads of queries needs.

    Each of `num_kv_heads` heads has `unit` elements.
    """

    num_heads: int
    num_kv_heads: int
    unit: int


class AllHeads(NamedTuple):
    """A dimension of all queries, then all keys, then all values; fields and shares are those of KeyHeads."""

    num_heads: int
    num_kv_heads: int
    unit: int


Dimension = int | Shared | KeyHeads | AllHeads
"""A dimension that every rank keeps whole, or one that is shared out."""

Tensors = Iterator[tuple[str, tuple[Dimension, ...]]]


def block_tensors(path: str, config: VisionConfig, *, is_fused: bool) -> Tensors:
    size, inner, heads = config.hidden_size, Shared(config.intermediate_size), config.num_heads
    for name in ("norm1", "norm2"):
        yield from norm_tensors(f"{path}.{name}", size, has_bias=not config.is_rms)
    if is_fused:
        yield from linear_tensors(
            f"{path}.attn.qkv", AllHeads(heads, config.num_kv_heads or heads, config.head_dim), size
        )
    else:
        for name in ("q_proj", "k_proj", "v_proj"):
            yield from linear_tensors(f"{path}.attn.{name}", Shared(heads, config.head_dim), size)
    yield from linear_tensors(f"{path}.attn.proj", size, Shared(heads, config.head_dim))
    for name in config.mlp_inputs:
        yield from linear_tensors(f"{path}.mlp.{name}", inner, size)
    yield from linear_tensors(f"{path}.mlp.linear_fc2", size, inner)


def patches_tensors(path: str, config: VisionConfig, *, has_bias: bool) -> Tensors:
    yield f"{path}.weight", (config.hidden_size, *config.patch_shape)
    if has_bias:
        yield f"{path}.bias", (config.hidden_size,)


def linear_tensors(path: str, rows: Dimension, columns: Dimension, *, has_bias: bool = True) -> Tensors:
    yield f"{path}.weight", (rows, columns)
    if has_bias:
        yield f"{path}.bias", (rows,)


def norm_tensors(path: str, size: int, *, has_bias: bool = False) -> Tensors:
    yield f"{path}.weight", (size,)
    if has_bias:
        yield f"{path}.bias", (size,)
