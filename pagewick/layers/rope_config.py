"""RopeConfig: which rotary embedding a model has. Imports no torch, so that a config.json can be judged without it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """theta: base of the frequencies. The other numbers belong to the scaling `kind`; names are Hugging Face's.

    rotary_dim: how many values of a head are rotated, an even number; the rest are left as they are.
    interleaved: pairs are neighbours (0, 1), (2, 3), ...; otherwise value i turns with value i + rotary_dim / 2.
    original_max_position_embeddings: the length before the scaling; with `dynamic` the longest one it leaves alone.
    attention_factor: multiplies cos and sin, and so every score by its square.
    mscale_all_dim: yarn's; models with a latent cache scale their scores by it too. 0 if there is none.
    short_factor, long_factor: longrope's divisors, one for each frequency.
    mrope_section: of models that see images: how many pairs turn with each of a token's three positions (time, height,
    width), in this order; they add up to rotary_dim / 2. Empty: all pairs turn with the one position there is.
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
    # Not in the repr, which names KV blocks on disk: those of text models keep their names.
    mrope_section: tuple[int, ...] = field(default=(), repr=False)
