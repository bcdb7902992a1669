"""A table of functions that carry out instructions, filled by the modules of groups of instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from tests.kernels.triton.ptx.values import Faulty

if TYPE_CHECKING:
    from tests.kernels.triton.ptx.machine import Threads
    from tests.kernels.triton.ptx.parsing import Instruction

# Carries out an instruction for the active threads.
Action: TypeAlias = "Callable[[Threads, Instruction], None]"
ACTIONS: dict[str, Any] = {}


def carries_out(*names: str) -> Callable[[Action], Action]:
    """Register a function for the instructions whose opcodes begin with one of some names."""

    def register(action: Action) -> Action:
        ACTIONS.update(dict.fromkeys(names, action))
        return action

    return register


def action_of(instruction: Instruction) -> Action:
    found: Action | None = ACTIONS.get(instruction.name)
    if found is None:
        raise Faulty(f"an instruction that is not known: {instruction.text}")
    return found
