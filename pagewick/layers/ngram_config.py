"""The numbers in config.json that describe layers which add what they know of n-grams (Qwen4-Exp). Imports no torch.

Source of the formulas: transformers' qwen4_exp; there is no publication.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_MASK = 2**64 - 1
# SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
_GOLDEN_GAMMA, _FIRST_FACTOR, _SECOND_FACTOR = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# From the seed of a layer to that of the next.
_SEED_STEP = 10007
# Numbers among which primes are looked for at once.
_INTERVAL = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramConfig:
    """A table of embeddings of hashed n-grams, which a layer adds to its streams before its attention.

    num_orders: lengths of n-grams, from 2 tokens on. head_sizes: rows of the table that each head has, heads of the
    same order together. num_rows: of the table, which the file has in num_shards parts. embed_dim: numbers of all heads
    together. multipliers: those of kernels.options.NgramOptions, for ids below vocab_size. end_id: the token that no
    n-gram reaches beyond.
    num_streams, stream_size: of the streams. conv_size: inputs of a channel's convolution, each as many tokens before
    the next one as the longest n-gram has. norm_eps: of all norms.
    """

    num_orders: int
    head_sizes: tuple[int, ...]
    num_rows: int
    vocab_size: int
    num_shards: int
    embed_dim: int
    multipliers: tuple[int, ...]
    end_id: int
    num_streams: int
    stream_size: int
    conv_size: int
    norm_eps: float

    @property
    def num_channels(self) -> int:
        """Numbers of all streams together."""
        return self.num_streams * self.stream_size

    @property
    def head_dim(self) -> int:
        """Numbers of a row of the table."""
        return self.embed_dim // len(self.head_sizes)

    @property
    def conv_width(self) -> int:
        """Tokens from the first to the last input of the convolution."""
        return (self.conv_size - 1) * (self.num_orders + 1) + 1

    @property
    def shard_rows(self) -> tuple[int, ...]:
        """Rows of each part of the table: all have as many, but for the last one."""
        most = -(-self.num_rows // self.num_shards)
        return tuple(min(most, self.num_rows - start) for start in range(0, self.num_rows, most))

    @property
    def products_width(self) -> int:
        """Numbers of a token in the layer's products."""
        return 2 * self.embed_dim + 8 * self.num_channels

    @property
    def state_sizes(self) -> tuple[int, int]:
        """The bytes of what is kept of a sequence, float32: tokens before the next one, inputs of convolutions."""
        return 4 * self.num_orders**2, 4 * (self.conv_width - 1) * self.num_channels


def multipliers_of(layer: int, *, num_places: int, vocab_size: int, seed: int) -> tuple[int, ...]:
    """Return the multipliers of the tokens of an n-gram, the last one's first. layer: its index among such layers."""
    bound = max(1, (2**63 - 1) // max(vocab_size, 1) // 2)
    start = seed + _SEED_STEP * layer
    return tuple(2 * (_mixed(start + _GOLDEN_GAMMA * place) % bound) + 1 for place in range(1, num_places + 1))


def _mixed(value: int) -> int:
    value = (value + _GOLDEN_GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * _FIRST_FACTOR) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND_FACTOR) & _MASK
    return value ^ (value >> 31)


def primes_from(start: int, count: int) -> tuple[int, ...]:
    """Return the first primes that are at least `start`, by sieving one interval after the other."""
    found: list[int] = []
    begin = max(start, 2)
    while len(found) < count:
        end = begin + _INTERVAL
        found += _sieved(begin, end, _sieved(2, math.isqrt(end) + 1, range(2, math.isqrt(math.isqrt(end)) + 1)))
        begin = end
    return tuple(found[:count])


def _sieved(begin: int, end: int, divisors: Iterable[int]) -> list[int]:
    """Return the numbers of an interval that are multiples of no other divisor than themselves."""
    is_left = bytearray(b"\1") * (end - begin)
    for divisor in divisors:
        first = max(divisor * divisor, -(-begin // divisor) * divisor)
        is_left[first - begin :: divisor] = bytes(len(range(first, end, divisor)))
    return [begin + place for place, left in enumerate(is_left) if left]
