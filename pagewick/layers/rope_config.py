"""RopeConfig: the rotary embedding of a model. Imports no torch, so that a config.json can be checked without it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """A rotary embedding. Names are Hugging Face's; most numbers belong to one scaling `kind`.

    theta: base of the frequencies.
    rotary_dim: number of values of a head that are rotated, an even number; the rest stay as they are.
    interleaved: pairs are neighbours (0, 1), (2, 3), ...; otherwise value i turns with value i + rotary_dim / 2.
    original_max_position_embeddings: the length before the scaling; `dynamic` changes only longer sequences.
    attention_factor: multiplies cos and sin, and so every score by its square.
    mscale_all_dim: yarn's; models with a latent cache scale their scores by it too. 0 if there is none.
    short_factor, long_factor: longrope's divisors, one for each frequency.
    mrope_section: in models that see images, the numbers of pairs that turn with a token's position in time, its row
    and its column; they add up to rotary_dim / 2. Empty: all pairs turn with the token's only position.
    """

    theta: float
    kind: RopeKind
    rotary_dim: int
    interleaved: bool = False
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    mscale_all_dim: float = 0.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    # Not in the repr, which is a part of the names of KV blocks on disk: blocks of text models keep their names.
    mrope_section: tuple[int, ...] = field(default=(), repr=False)
