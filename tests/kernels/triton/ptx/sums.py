"""Finds sums over the threads of a warp of which every thread may get another one.

Two threads that exchange a number and add it to their own get the same sum, since additions commute. If the number is a
product, and the compiler fuses the addition with it, one adds its exact product to the other's rounded one, and the
other the other way round: threads that should hold the same number, and decide by it, differ in its last bits.
"""

from __future__ import annotations

from tests.kernels.triton.ptx.parsing import Program
from tests.kernels.triton.ptx.values import Faulty


def check_sums(program: Program) -> None:
    """Raise for an addition of another thread's number that is fused with a multiplication."""
    exchanged = set()
    for each in program.instructions:
        if each.name == "shfl":
            exchanged.add(each.operands[0].split("|")[0])
        elif each.name == "fma" and str(each.operands[3]) in exchanged:
            raise Faulty(f"threads get different sums ({each.text} in {program.name})")
