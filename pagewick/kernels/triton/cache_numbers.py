"""Rounding of vectors to numbers of 8 and 4 bits as a KV cache stores them: reference_kv.py defines it.

Bytes are made by integer operations, because not every GPU converts to these formats: an A100 has none of them, and
AMD's CDNA 3 has others of the same size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagewick.kernels.kv_cache import INT4

# The value of FORMAT in the functions below, for the dtypes that are stored as bytes with a scale.
FORMATS = {torch.int8: "int8", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


# The values for keys and values of heads, which may also be stored in 4 bits.
HEAD_FORMATS = {**FORMATS, INT4: "int4"}


@triton.jit
def rotate_rows(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr):
    """Return rows x [ROWS, COLUMNS] float32, each SIZE successive numbers multiplied by a Hadamard matrix.

    Sums are made in the order of reference_kv.rotate_vectors. SIZE divides COLUMNS; both are powers of two.
    """
    for step in tl.static_range(10):
        if SIZE >> (step + 1):
            x = _added_and_subtracted(x, ROWS, COLUMNS, SIZE >> (step + 1))
    return x * tl.math.sqrt_rn(tl.full((1, 1), 1.0 / SIZE, tl.float32))


@triton.jit
def _added_and_subtracted(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DISTANCE: tl.constexpr):
    """Replace numbers that are DISTANCE apart, in parts of twice that size, by their sums and their differences."""
    pairs = tl.reshape(x, (ROWS, COLUMNS // (2 * DISTANCE), 2, DISTANCE))
    first, second = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
    pairs = tl.permute(tl.join(first + second, first - second), (0, 1, 3, 2))
    return tl.reshape(pairs, (ROWS, COLUMNS))


@triton.jit
def quantize_rows(x, constants, FORMAT: tl.constexpr):
    """Return the bytes of rows x [rows, D] float32, which are 0 beyond D, and their scales [rows] float32.

    Numbers of 4 bits are returned one in a byte; x is rotated then.
    constants: [rows] float32, scales that are given; 0: the row has its own.
    """
    # The magnitudes as integers, because a maximum of floating-point numbers passes over a NaN.
    magnitudes = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest_bits = tl.max(magnitudes, axis=1)
    is_finite = largest_bits < 0x7F800000
    largest = largest_bits.to(tl.float32, bitcast=True)
    scales = tl.where(constants > 0, constants, tl.math.div_rn(largest, _best_targets(x, largest, FORMAT)))
    divisors = tl.where(is_finite & (scales > 0), scales, 1.0)
    whole: tl.constexpr = 127.0 if FORMAT == "int8" else 7.0
    bound: tl.constexpr = (448.0 if FORMAT == "e4m3" else 57344.0) if FORMAT[0] == "e" else whole
    numbers = tl.math.div_rn(x, tl.broadcast_to(divisors[:, None], x.shape))
    numbers = tl.where(is_finite[:, None], tl.minimum(tl.maximum(numbers, -bound), bound), 0.0)
    if FORMAT == "int8" or FORMAT == "int4":
        result = _whole(numbers).to(tl.int32) & (0xFF if FORMAT == "int8" else 0xF)
    elif FORMAT == "e4m3":
        result = fp8_bits(numbers, 3, 7)
    else:
        result = fp8_bits(numbers, 2, 15)
    return result.to(tl.uint8), tl.where(is_finite, scales, float("nan"))


@triton.jit
def _best_targets(x, largest, FORMAT: tl.constexpr):
    """Return the number that the largest magnitude of each row becomes: the first target of the least squared error."""
    targets = tl.full(largest.shape, 127.0, tl.float32)
    if FORMAT != "int8":
        num_targets: tl.constexpr = 8 if FORMAT == "e4m3" else (4 if FORMAT == "e5m2" else 3)
        shift: tl.constexpr = 20 if FORMAT == "e4m3" else 21
        divisors = tl.where((largest > 0) & (largest < float("inf")), largest, 1.0)
        parts = tl.math.div_rn(x, tl.broadcast_to(divisors[:, None], x.shape))
        least = tl.full(largest.shape, float("inf"), tl.float32)
        for i in tl.static_range(num_targets):
            if FORMAT == "int4":
                target = 7.0 + 0.75 * i
                wanted = parts * target
                rounded = _whole(tl.minimum(tl.maximum(wanted, -7.0), 7.0))
            else:
                # For e4m3 448, 416 and so on in steps of 32, and at last 240, because 224 has the same numbers as 448.
                target = (448.0 - 32.0 * i if i < 7 else 240.0) if FORMAT == "e4m3" else 57344.0 - 8192.0 * i
                wanted = parts * target
                rounded = _rounded(wanted, shift)
            error = tl.sum(_square(rounded - wanted), axis=1) / (target * target)
            targets = tl.where(error < least, target, targets)
            least = tl.minimum(least, error)
    return targets


@triton.jit
def _whole(x):
    """Round to the nearest whole numbers, ties to even: numbers from 2^23 to 2^24 are whole."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _square(x):
    return x * x


@triton.jit
def _rounded(x, shift: tl.constexpr):
    """Round float32 to a significand that is `shift` bits shorter, ties to even, as if there were no least exponent."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    magnitude = (magnitude + ((1 << (shift - 1)) - 1) + ((magnitude >> shift) & 1)) >> shift << shift
    size = magnitude.to(tl.float32, bitcast=True)
    return tl.where(bits < 0, -size, size)


@triton.jit
def fp8_bits(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Return float32 numbers within the format's largest as bits of the nearest fp8 numbers, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    shift: tl.constexpr = 23 - MANTISSA
    rounded = (magnitude + ((1 << (shift - 1)) - 1) + ((magnitude >> shift) & 1)) >> shift
    normal = rounded - ((127 - BIAS) << MANTISSA)
    # Numbers below the least normal one are multiples of 2^(1 - BIAS - MANTISSA); 12582912 is 0x4B400000.
    unit: tl.constexpr = 2.0 ** (BIAS - 1 + MANTISSA)
    multiple = magnitude.to(tl.float32, bitcast=True) * unit + 12582912.0
    small = multiple.to(tl.int32, bitcast=True) - 0x4B400000
    return tl.where(magnitude < ((128 - BIAS) << 23), small, normal) | ((bits >> 24) & 0x80)
