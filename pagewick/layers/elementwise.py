"""Operations on each number by itself, for models: sums, multiples, and caps (Gemma 2's, arXiv:2408.00118)."""

from pagewick.kernels import add, scale, soft_cap

__all__ = ["add", "scale", "soft_cap"]
