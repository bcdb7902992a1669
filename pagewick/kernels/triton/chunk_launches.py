"""Variants of the kernels of chunks.py and channel_chunks.py, and their launches. Dimensions are those of chunks.py.

Which sequences are taken in chunks is decided by their own number of new tokens, on the GPU; the host starts these
kernels where a sequence may be long enough. Those with draft tokens are not: their state is stored before these.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewick.kernels import batch_invariance
from pagewick.kernels.options import AttentionMetadata
from pagewick.kernels.triton import windows
from pagewick.kernels.triton.channel_chunks import relate_channels
from pagewick.kernels.triton.chunks import advance_chunks, relate_tokens
from pagewick.kernels.triton.online_softmax import dot_type
from pagewick.kernels.triton.variant import TARGETS, TYPE_NAMES, Variant, target_of

# New tokens from which a sequence is taken in chunks: on paper, as many take as long one by one as a chunk does.
LONG: Final = 32
# No sequence has as many.
NEVER: Final = 2**31 - 1
# Tensor cores have no float32: its sequences are taken token by token.
DTYPES: Final = (torch.bfloat16, torch.float16)
# Rows of a triangle that is inverted row by row; larger ones are put together of such.
_TRIANGLE: Final = 16
# Numbers of keys that are multiplied at once.
_PIECE: Final = 64
# DV is a multiple of this.
_COLUMNS: Final = 32
_SAMPLE: Final = ("sm_90", torch.bfloat16, 128)
_PLACES: Final = dict.fromkeys(("starts_ptr", "tables_ptr"), "*i32")


class Rule(StrEnum):
    """The rule by which a token changes a state: gated delta, the same with decays of channels, or Mamba-2's scan."""

    DELTA = "delta"
    CHANNEL_DELTA = "channel_delta"
    SCAN = "scan"


class Tile(NamedTuple):
    """tokens: C. columns: of a state in a program of advance_chunks, which has num_warps.

    Chosen so that registers and shared memory suffice; no GPU was there to measure. bfloat16 is multiplied as it is.
    Numbers of a state may be too large for float16, so that it is multiplied in tf32, which has as many digits and
    float32's range (AMD: in float32).
    """

    tokens: int
    columns: int
    num_warps: int


class Heads(NamedTuple):
    """H, G, DK and DV, and the channels of `mixed` at which queries, keys and values begin."""

    num_heads: int
    num_groups: int
    key_dim: int
    value_dim: int
    first_query: int
    first_key: int
    first_value: int


@dataclass(frozen=True, eq=False)
class Chunks:
    """The kernels of a rule, by target, dtype and DK."""

    rule: Rule
    key_dims: tuple[int, ...]
    relates: Mapping[tuple[str, torch.dtype, int], Variant]
    advances: Mapping[tuple[str, torch.dtype, int], Variant]

    @classmethod
    def of(cls, key_dims: tuple[int, ...], rule: Rule) -> Chunks:
        keys = list(itertools.product(TARGETS, DTYPES, key_dims))
        make = _relate_channels if rule == Rule.CHANNEL_DELTA else _relate
        relates = {key: make(*key, rule) for key in keys}
        return cls(rule, key_dims, relates, {key: _advance(*key, rule) for key in keys})

    @property
    def variants(self) -> tuple[Variant, ...]:
        return (*self.relates.values(), *self.advances.values())

    def least(self, dtype: torch.dtype, heads: Heads, batch: AttentionMetadata, num_tokens: int) -> int:
        """Return the number of new tokens from which `advance` takes a sequence; NEVER if it takes none."""
        longest = num_tokens if batch.max_query_len is None else batch.max_query_len
        is_served = (TARGETS[0], dtype, heads.key_dim) in self.advances and heads.value_dim % _COLUMNS == 0
        return LONG if is_served and longest >= LONG and not batch_invariance.is_required() else NEVER

    def advance(
        self,
        heads: Heads,
        mixed: Tensor,
        places: Mapping[str, Any],
        gates: Mapping[str, Any],
        skip: Tensor | None = None,
    ) -> None:
        """Take the sequences with at least LONG new tokens through their states.

        mixed: [T, C] float32, results of the convolution; results replace its values. places: the result of
        windows.where. gates: decay_ptr, decay_stride, log_decay_ptr, dt_bias_ptr and dt_scale (decay_bound in place of
        that where channels decay by themselves), and beta_ptr, beta_stride and strength for the delta rule. skip: [H],
        for Mamba-2.
        """
        key = target_of(mixed.device), gates["decay_ptr"].dtype, heads.key_dim
        tile, num_seqs = _tile(*key, self.rule), len(places["lengths_ptr"])
        num_slots = _most_chunks(len(mixed), num_seqs, tile.tokens)
        operand = torch.float32 if _operand(key[1]) == tl.float32 else torch.bfloat16

        def scratch(*shape: int, dtype: torch.dtype = operand) -> Tensor:
            return torch.empty(num_slots, *shape, dtype=dtype, device=mixed.device)

        by_channel, groups = self.rule == Rule.CHANNEL_DELTA, {"num_groups": heads.num_groups}
        factors = (heads.key_dim,) if by_channel else (2, tile.tokens)
        related = {
            "rows_ptr": scratch(heads.num_groups, 3 if by_channel else 2, tile.tokens, heads.key_dim),
            "pairs_ptr": scratch(heads.num_heads, tile.tokens, tile.tokens),
            "factors_ptr": scratch(heads.num_heads, *factors, dtype=torch.float32),
        }
        if self.rule != Rule.SCAN:
            related["inverse_ptr"] = scratch(heads.num_heads, tile.tokens, tile.tokens)
        shared = {"mixed_ptr": mixed, "num_heads": heads.num_heads, "least": LONG, **related}
        self.relates[key].launch(
            (num_slots, heads.num_heads), num_seqs=num_seqs, first_query=heads.first_query, first_key=heads.first_key,
            **{name: places[name] for name in ("starts_ptr", "tables_ptr", "table_stride", "num_channels")},
            **shared, **gates, **({} if by_channel else groups),
        )  # fmt: skip
        self.advances[key].launch(
            (num_seqs, heads.num_heads, heads.value_dim // tile.columns), value_dim=heads.value_dim,
            first_value=heads.first_value, **({} if skip is None else {"skip_ptr": skip}), **shared, **groups, **places,
        )  # fmt: skip


def _most_chunks(num_tokens: int, num_seqs: int, size: int) -> int:
    """Return the most chunks of `size` tokens that sequences with at least LONG tokens each can have together."""
    # One more chunk for a rest of tokens in each sequence; and never more than one for half as many tokens.
    num_long = min(num_seqs, num_tokens // LONG)
    return min(num_tokens // size + num_long, num_tokens // min(size // 2, LONG))


def _tile(target: str, dtype: torch.dtype, key_dim: int, rule: Rule) -> Tile:
    # Where channels decay by themselves, a program has a third matrix of the size of the keys.
    is_large = key_dim > (64 if rule == Rule.CHANNEL_DELTA and target == "gfx942" else 128)
    if dtype == torch.float16:
        return Tile(16 if is_large and target == "gfx942" else 32, 16, 8 if is_large else 4)
    if target == "sm_90":
        return Tile(64, _COLUMNS, 8 if is_large else 4)
    return Tile(32 if is_large else 64, _COLUMNS, 4 if target == "gfx942" else 8)


def _operand(dtype: torch.dtype) -> tl.dtype:
    return dot_type(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)


def _constants(target: str, dtype: torch.dtype, key_dim: int, rule: Rule) -> dict[str, Any]:
    return {
        "KEY_DIM": key_dim, "CHUNK": _tile(target, dtype, key_dim, rule).tokens, "DOT": _operand(dtype),
        "PRECISION": "ieee" if target == "gfx942" else "tf32", "BLOCK_B": windows.BLOCK_B,
    }  # fmt: skip


def _pointers(dtype: torch.dtype, rule: Rule) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the types of what one kernel leaves for advance_chunks, and what it does not leave."""
    is_delta = rule != Rule.SCAN
    operand = f"*{'fp32' if _operand(dtype) == tl.float32 else 'bf16'}"
    names = ("rows_ptr", "pairs_ptr", *(("inverse_ptr",) if is_delta else ()))
    return {**dict.fromkeys(names, operand), "factors_ptr": "*fp32"}, {} if is_delta else {"inverse_ptr": None}


def _relate(target: str, dtype: torch.dtype, key_dim: int, rule: Rule) -> Variant:
    is_delta, (related, absent) = rule == Rule.DELTA, _pointers(dtype, rule)
    number = f"*{TYPE_NAMES[dtype]}"
    gates = {"decay_ptr": number, "beta_ptr": number, "beta_stride": "i32", "strength": "fp32"}
    floats = dict.fromkeys(("mixed_ptr", "log_decay_ptr", "dt_bias_ptr"), "*fp32")
    counts = dict.fromkeys(("num_seqs", "num_heads", "num_groups", "decay_stride", "table_stride", "least"), "i32")
    sizes = dict.fromkeys(("first_query", "first_key", "num_channels"), "i32:16")
    if not is_delta:
        absent |= {"beta_ptr": None, "beta_stride": 0, "strength": 1.0}
        gates = {"decay_ptr": number}
    return Variant(
        name=f"relate_{TYPE_NAMES[dtype]}_{key_dim} {target}",
        kernel=relate_tokens,
        signature={**gates, **floats, **_PLACES, **related, **counts, **sizes, "dt_scale": "fp32"},
        constexprs={
            **_constants(target, dtype, key_dim, rule), **absent, "PIECE": _PIECE if key_dim % _PIECE == 0 else 32,
            "TRIANGLE": _TRIANGLE,
        },
        num_warps=4 if target == "gfx942" else 8,
        uses_tensor_cores=True,
        in_sample=is_delta and (target, dtype, key_dim) == _SAMPLE,
        targets=(target,),
        fuses=False,
    )  # fmt: skip


def _relate_channels(target: str, dtype: torch.dtype, key_dim: int, rule: Rule) -> Variant:
    related, _ = _pointers(dtype, rule)
    constants = _constants(target, dtype, key_dim, rule)
    gates = dict.fromkeys(("decay_ptr", "beta_ptr"), f"*{TYPE_NAMES[dtype]}")
    floats = dict.fromkeys(("mixed_ptr", "log_decay_ptr", "dt_bias_ptr"), "*fp32")
    factors = dict.fromkeys(("decay_bound", "strength"), "fp32")
    counts = dict.fromkeys(("num_seqs", "num_heads", "decay_stride", "beta_stride", "table_stride", "least"), "i32")
    sizes = dict.fromkeys(("first_query", "first_key", "num_channels"), "i32:16")
    return Variant(
        name=f"relate_channels_{TYPE_NAMES[dtype]}_{key_dim} {target}",
        kernel=relate_channels,
        signature={**gates, **floats, **_PLACES, **related, **counts, **sizes, **factors},
        constexprs={
            **constants, "PIECE": min(key_dim, _PIECE), "LEVELS": constants["CHUNK"].bit_length() - 1,
            "TRIANGLE": _TRIANGLE,
        },
        num_warps=4 if target == "gfx942" else 8,
        uses_tensor_cores=True,
        in_sample=(target, dtype, key_dim) == _SAMPLE,
        targets=(target,),
        fuses=False,
    )  # fmt: skip


def _advance(target: str, dtype: torch.dtype, key_dim: int, rule: Rule) -> Variant:
    related, absent = _pointers(dtype, rule)
    by_channel, is_scan = rule == Rule.CHANNEL_DELTA, rule == Rule.SCAN
    skip: dict[str, str] = {"skip_ptr": "*fp32"} if is_scan else {}
    tile = _tile(target, dtype, key_dim, rule)
    counts = dict.fromkeys(("num_heads", "num_groups", "width", "table_stride", "least"), "i32")
    sizes = dict.fromkeys(("value_dim", "first_value", "num_channels", "block_floats"), "i32:16")
    return Variant(
        name=f"advance_{'channel_' if by_channel else ''}chunks_{TYPE_NAMES[dtype]}_{key_dim} {target}",
        kernel=advance_chunks,
        signature={"mixed_ptr": "*fp32", **related, **skip, **windows.BATCH, **counts, **sizes},
        constexprs={
            **_constants(target, dtype, key_dim, rule), **absent, **({} if is_scan else {"skip_ptr": None}),
            "ROWS": triton.next_power_of_2(key_dim), "BLOCK_V": tile.columns, "BY_CHANNEL": by_channel,
        },
        num_warps=tile.num_warps,
        uses_tensor_cores=True,
        in_sample=not is_scan and (target, dtype, key_dim) == _SAMPLE,
        targets=(target,),
        fuses=False,
    )  # fmt: skip
