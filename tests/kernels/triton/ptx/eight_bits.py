"""Floating-point numbers of 8 bits: their values, and roundings to them."""

from __future__ import annotations

import numpy as np

from tests.kernels.triton.ptx.values import Array


def _values(num_fraction_bits: int, bias: int) -> Array:
    """Return the numbers of all bytes, as float64, as if no byte were special."""
    bytes_ = np.arange(256)
    fraction = bytes_ & ((1 << num_fraction_bits) - 1)
    exponent = bytes_ >> num_fraction_bits & ((1 << (7 - num_fraction_bits)) - 1)
    leading = np.where(exponent == 0, 0, 1 << num_fraction_bits)
    sizes = (leading + fraction) * 2.0 ** (np.maximum(exponent, 1) - bias - num_fraction_bits)
    found: Array = np.where(bytes_ < 128, sizes, -sizes)
    return found


E4M3 = _values(3, 7)
E4M3[[0x7F, 0xFF]] = np.nan
E5M2 = _values(2, 15)
E5M2[[0x7C, 0xFC]] = np.inf, -np.inf
E5M2[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
