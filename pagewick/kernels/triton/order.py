"""Order of floating-point numbers with ids as that of single integers, so that a maximum is exact in any grouping."""

import triton
import triton.language as tl


@triton.jit
def ordered(x, ids):
    """Return int64 that rise with x (float32), and among equal x fall with ids (int32, not negative).

    A NaN comes after every number; NaNs are equal, and so are both zeros.
    """
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    rising = tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return (rising.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def id_of(number):
    """Return the id of an integer that `ordered` made."""
    return 0x7FFFFFFF - (number & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def value_of(number):
    """Return x of an integer that `ordered` made."""
    rising = (number >> 32).to(tl.int32)
    return (rising ^ ((rising >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
