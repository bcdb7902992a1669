"""Runs a kernel: all threads of several programs at once, each with a place of its own in the kernel.

An instruction is carried out for all threads that are at it. Those at the earliest instruction come first, so that
threads that went apart come together again. A thread waits at a barrier for its program, and at an instruction of a
warp for its warp.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.kernels.triton.ptx import (  # noqa: F401
    arithmetic,
    conversions,
    floats,
    memory_access,
    warps,
)
from tests.kernels.triton.ptx.copies import Copies
from tests.kernels.triton.ptx.device_memory import DeviceMemory
from tests.kernels.triton.ptx.memory import Memory
from tests.kernels.triton.ptx.parsing import Instruction, Program, blank, register_dtype
from tests.kernels.triton.ptx.products import Products, is_product
from tests.kernels.triton.ptx.proxies import Proxies
from tests.kernels.triton.ptx.races import WARP, stamp
from tests.kernels.triton.ptx.semantics import action_of
from tests.kernels.triton.ptx.values import Array, Faulty, as_bits, as_type
from tests.kernels.triton.ptx.warpgroups import WARPGROUP

# More passes through blocks of instructions than any test needs: a loop without an end.
_MAX_BLOCKS = 2_000_000


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with its arguments. parameters: bits by name. grid: the number of programs in three dimensions.

    units: bytes of the smallest access to global and to shared memory.
    """

    program: Program
    grid: tuple[int, int, int]
    parameters: dict[str, Array]
    memory: DeviceMemory
    shared_bytes: int
    units: dict[str, int]


@dataclass(frozen=True, slots=True)
class Block:
    """Instructions that follow each other: all threads that begin them carry out all of them.

    together: how many threads can only begin them at once: 1, or a warp or a warpgroup.
    """

    begin: int
    end: int
    together: int


class Threads:
    """The threads of some programs. mask: which of them carry out the current instruction (None: all).

    special: values of the registers that hardware sets, such as %tid.x. shared: memory of all programs, one after the
    other.
    """

    def __init__(self, launch: Launch, programs: range) -> None:
        program = launch.program
        num_programs, size = len(programs), program.num_threads
        self.program, self.memory, self.num_lanes = program, launch.memory, num_programs * size
        self.parameters, self.shared_bytes = launch.parameters, launch.shared_bytes
        # The shared memory of a program begins where rows of it would lie in the same banks.
        self._shared_step = -(-launch.shared_bytes // 128) * 128
        data = np.full(num_programs * self._shared_step, 0xFF, np.uint8)
        self.products = Products(program, self.num_lanes)
        unit = launch.units["shared"]
        has_products = any(is_product(each) for each in program.instructions)
        self.proxies = Proxies(len(data) // unit, self.num_lanes) if has_products else None
        self.shared = Memory(data, 0, unit, name="shared memory", proxies=self.proxies)
        self.thread = np.tile(np.arange(size, dtype=np.int64), num_programs)
        self.program_index = np.repeat(np.arange(num_programs, dtype=np.int64), size)
        self.numbers = self.program_index + programs.start
        self.epochs, self.warp_epochs = np.zeros((2, self.num_lanes), np.int64)
        self.registers: dict[str, Array] = {}
        self.copies = Copies(self.num_lanes)
        self.mask: Array | None = None
        x, y, z = launch.grid
        self.special = {
            "%tid.x": self.thread, "%ntid.x": np.array([size]), "%laneid": self.thread % WARP,
            "%ctaid.x": self.numbers % x, "%ctaid.y": self.numbers // x % y, "%ctaid.z": self.numbers // (x * y),
            "%nctaid.x": np.array([x]), "%nctaid.y": np.array([y]), "%nctaid.z": np.array([z]),
            "global_smem": np.array([0]),
        }  # fmt: skip

    def bits(self, operand: object) -> Array:
        """Return an operand's bits: of a register for all threads, of a number one element."""
        if isinstance(operand, np.ndarray):
            return operand
        if isinstance(operand, str):
            if operand in self.special:
                return self.special[operand].astype(np.uint32)
            if operand in self.products.registers:
                self.products.note_access(operand, self.mask)
            return self.register(operand)
        raise Faulty(f"no value: {operand}")

    def register(self, name: str) -> Array:
        """Return a register's bits, also while a product still writes it."""
        if name not in self.registers:
            self.registers[name] = blank(name, self.num_lanes)
        return self.registers[name]

    def read(self, operand: object, kind: str) -> Array:
        return as_type(self.bits(operand), kind)

    def write(self, register: str, numbers: Array) -> None:
        """Set a register of the active threads."""
        if register == "_":
            return
        if register in self.products.registers:
            self.products.note_access(register, self.mask)
        bits = self._for_all(as_bits(numbers, register_dtype(register)))
        if self.mask is not None:
            bits = np.where(self.mask, bits, self.register(register))
        self.registers[register] = bits

    def _for_all(self, values: Array) -> Array:
        """Return one element for each thread."""
        return values if len(values) == self.num_lanes else np.broadcast_to(values, (self.num_lanes,))

    def of(self, operand: object, kind: str, lanes: Array) -> Array:
        """Return an operand as numbers of a type, for some threads."""
        found: Array = self._for_all(self.read(operand, kind))[lanes]
        return found

    def active(self) -> Array:
        """Return the numbers of the active threads."""
        return np.arange(self.num_lanes) if self.mask is None else np.flatnonzero(self.mask)

    def check_shared(self, addresses: Array, num_bytes: int) -> None:
        if bool(((addresses < 0) | (addresses + num_bytes > self.shared_bytes)).any()):
            raise Faulty(f"an access beyond the {self.shared_bytes} bytes of shared memory")

    def shared_address(self, addresses: Array, lanes: Array) -> Array:
        """Return where addresses of each thread's own program lie in the shared memory of all programs."""
        return addresses + self.program_index[lanes] * self._shared_step

    def stamps(self, lanes: Array) -> Array:
        return stamp(self.numbers[lanes], self.thread[lanes], self.epochs[lanes], self.warp_epochs[lanes])


def run_launch(launch: Launch, num_lanes: int = 4096) -> None:
    """Run a kernel: some programs after the others, num_lanes threads at once."""
    count, at_once = int(np.prod(launch.grid)), max(1, num_lanes // launch.program.num_threads)
    for start in range(0, count, at_once):
        Machine(Threads(launch, range(start, min(start + at_once, count)))).run()


class Machine:
    """Runs some programs of a launch to their end."""

    def __init__(self, threads: Threads) -> None:
        self.threads = threads
        self.instructions = threads.program.instructions
        self.actions: list[Callable[[Threads, Instruction], None] | None] = [
            None if _ends_block(each) else action_of(each) for each in self.instructions
        ]
        self.blocks = _blocks(threads.program)
        self.places = np.zeros(threads.num_lanes, np.int64)
        self.is_waiting = np.zeros(threads.num_lanes, np.bool_)
        self.is_done = np.zeros(threads.num_lanes, np.bool_)

    def run(self) -> None:
        with np.errstate(all="ignore"):
            for _ in range(_MAX_BLOCKS):
                if bool(self.is_done.all()):
                    return
                self._run_block()
        raise Faulty("the kernel does not end")

    def _run_block(self) -> None:
        ready = ~(self.is_waiting | self.is_done)
        lanes = self._next_lanes(ready)
        block = self.blocks[int(self.places[lanes][0])]
        self.threads.mask = base = None if bool(lanes.all()) else lanes
        for number in range(block.begin, block.end):
            action = self.actions[number]
            if action is None:
                self._end_block(self.instructions[number], number, lanes)
                return
            self._carry_out(action, self.instructions[number], base)
        self.places[lanes] = block.end

    def _carry_out(self, action: Callable[[Threads, Instruction], None], each: Instruction, base: Array | None) -> None:
        threads = self.threads
        threads.mask = base
        if each.guard:
            guard = self._guard(each)
            threads.mask = guard if base is None else guard & base
            if not bool(threads.mask.any()):
                return
        try:
            action(threads, each)
        except Faulty as fault:
            raise Faulty(f"{fault} ({each.text} in {threads.program.name})") from None

    def _guard(self, each: Instruction) -> Array:
        holds = self.threads.bits(each.guard)
        return ~holds if each.is_negated else holds

    def _next_lanes(self, ready: Array) -> Array:
        """Return the threads at the earliest block that threads can begin: whole warps only where it needs them."""
        waiting = np.zeros_like(ready)
        while bool((ready & ~waiting).any()):
            place = self.places[ready & ~waiting].min()
            lanes = ready & ~waiting & (self.places == place)
            together = self.blocks[int(place)].together
            if together == 1:
                return lanes
            whole = np.repeat(lanes.reshape(-1, together).all(axis=1), together)
            if bool((lanes & whole).any()):
                return lanes & whole
            waiting |= lanes
        raise Faulty(f"threads of {self.threads.program.name} wait for others that never come")

    def _end_block(self, end: Instruction, number: int, lanes: Array) -> None:
        taken = lanes & self._guard(end) if end.guard else lanes
        self.places[lanes] = number + 1
        if end.name == "ret":
            self.is_done |= taken
            self._open_barriers()
        elif end.name == "bra":
            self.places[taken] = self.threads.program.labels[end.operands[0]]
        else:
            self.is_waiting |= taken
            self._open_barriers()

    def _open_barriers(self) -> None:
        """Let programs go on whose threads have all come to a barrier."""
        size = self.threads.program.num_threads
        has_come = (self.is_waiting | self.is_done).reshape(-1, size).all(axis=1)
        opened = np.repeat(has_come, size) & self.is_waiting
        self.threads.epochs[opened] += 1
        self.threads.warp_epochs[opened] = 0
        if self.threads.proxies is not None:
            self.threads.proxies.pass_barrier(opened)
        self.is_waiting &= ~opened


def _ends_block(each: Instruction) -> bool:
    """Whether threads may go apart or wait after an instruction."""
    return each.name in ("bra", "ret") or each.parts[:2] == ("bar", "sync")


def _blocks(program: Program) -> dict[int, Block]:
    """Divide a kernel into blocks, by where they begin."""
    count = len(program.instructions)
    begins = {0, *program.labels.values()} | {
        number + 1 for number, each in enumerate(program.instructions) if _ends_block(each)
    }
    ordered = [*sorted(begin for begin in begins if begin < count), count]
    blocks = {
        begin: Block(begin, end, max(_together(each) for each in program.instructions[begin:end]))
        for begin, end in itertools.pairwise(ordered)
    }
    if any(program.num_threads % block.together for block in blocks.values()):
        raise Faulty(f"{program.name} has warps or a warpgroup that is not whole")
    return blocks


def _together(each: Instruction) -> int:
    """Return how many threads an instruction needs at once."""
    if each.name == "wgmma":
        return WARPGROUP
    return WARP if warps.needs_warp(each) else 1
