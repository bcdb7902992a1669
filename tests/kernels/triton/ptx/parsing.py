"""Reads PTX, the assembly language of NVIDIA's GPUs, as Triton writes it: one kernel in a text."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.kernels.triton.ptx.values import Array, Faulty, Operand, immediate, width_of

_STATEMENT = re.compile(r"(?:@(?P<negated>!?)(?P<guard>%p\d+)\s+)?(?P<opcode>[a-z][\w.:]*)\s*(?P<operands>[^;]*);")
_PARAMETER = re.compile(r"\.param\s+\.(?P<type>\w+)\s+(?:\.ptr\s+\.global\s+\.align\s+\d+\s+)?(?P<name>\w+)\s*,?$")
_THREADS = re.compile(r"\.reqntid\s+(\d+)")
# Registers of a few instructions: "{ .reg .b32 tmp; mov.b64 {tmp, %r1}, %rd2; }", or ".reg .s8 s<4>;" for s0 to s3.
_LOCAL = re.compile(r"\.reg\s+\.(?P<type>\w+)\s+(?P<name>[a-z]\w*)(?:<\d+>)?;")
_LABEL = re.compile(r"(\$\w+):")
_MEMORY = re.compile(r"\[\s*(?P<base>[%\w$]+)\s*(?:\+\s*(?P<offset>-?\d+)\s*)?\]")
_LOCAL_CLASSES = {8: "%rs99000", 16: "%rs99000", 32: "%r99000", 64: "%rd99000"}
_DTYPES = {"p": np.bool_, "rs": np.uint16, "r": np.uint32, "rd": np.uint64}


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction. parts: its opcode, divided at dots. operands: registers, numbers, lists and places in memory."""

    parts: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: str
    is_negated: bool
    text: str

    @property
    def name(self) -> str:
        return self.parts[0]

    @property
    def type(self) -> str:
        """The last type of the opcode: that of the operands, in most instructions."""
        return self.parts[-1]


@dataclass(frozen=True, slots=True)
class Place:
    """A place in memory: the value of a register, of a name or a number, plus a number of bytes."""

    base: Operand
    offset: int


@dataclass(frozen=True, slots=True)
class Program:
    """A kernel. parameters: name and type of each. labels: the number of the instruction that follows each."""

    name: str
    parameters: tuple[tuple[str, str], ...]
    num_threads: int
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]


@dataclass
class _Reader:
    parameters: list[tuple[str, str]] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    locals: dict[str, str] = field(default_factory=dict)
    name: str = ""
    num_threads: int = 0
    is_body: bool = False

    def read(self, line: str) -> None:
        if self.is_body:
            self._read_in_body(line)
        elif found := re.match(r"\.visible \.entry (\w+)\(", line):
            self.name = found[1]
        elif found := _PARAMETER.match(line):
            self.parameters.append((found["name"], found["type"]))
        elif found := _THREADS.match(line):
            self.num_threads = int(found[1])
        elif line == "{":
            self.is_body = True

    def _read_in_body(self, line: str) -> None:
        for found in _LOCAL.finditer(line):
            self.locals[found["name"]] = _LOCAL_CLASSES[width_of(found["type"])]
            line = line.strip("{} ").replace(found[0], "").strip()
        if found := _LABEL.match(line):
            self.labels[found[1]] = len(self.instructions)
        elif not line.startswith(".") and line not in ("{", "}"):
            for found in _STATEMENT.finditer(line):
                self.instructions.append(_instruction(found, self.locals))
            if line and not _STATEMENT.match(line):
                raise Faulty(f"no instruction: {line}")


def parse(text: str) -> Program:
    """Read a kernel. What follows its body, such as debugging information, is left out."""
    reader = _Reader()
    for line in text.split(".section")[0].splitlines():
        line = line.split("//")[0].strip()
        if line:
            reader.read(line)
    if not reader.name or not reader.num_threads:
        raise Faulty("the text has no kernel")
    return Program(reader.name, tuple(reader.parameters), reader.num_threads, tuple(reader.instructions), reader.labels)


def _instruction(found: re.Match[str], names: dict[str, str]) -> Instruction:
    """Return an instruction. names: of registers that begin with no %, and what they are renamed to."""
    parts = tuple(found["opcode"].replace("::", ".").split("."))
    text = found["operands"]
    for name, renamed in names.items():
        text = re.sub(rf"(?<![%\w]){name}(\d*)\b", rf"{renamed}\1", text)
    operands = tuple(_operand(part) for part in _split(text))
    return Instruction(parts, operands, found["guard"] or "", found["negated"] == "!", found[0].strip())


def _split(text: str) -> list[str]:
    """Divide operands at the commas that are in no braces."""
    return [part.strip() for part in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]]+", text) if part.strip()]


def _operand(text: str) -> Operand:
    if text.startswith("{"):
        return tuple(_operand(part.strip()) for part in text.strip("{}").split(","))
    if found := _MEMORY.fullmatch(text):
        base = found["base"]
        return Place(immediate(base) if base.isdigit() else base, int(found["offset"] or 0))
    if text[0] in "-0123456789":
        return immediate(text)
    return text


@functools.cache
def register_dtype(name: str) -> np.dtype[Any]:
    """Return the type of a register's values, which its name tells."""
    found = re.fullmatch(r"%(p|rs|rd|r)\d+", name)
    if found is None:
        raise Faulty(f"no register: {name}")
    return np.dtype(_DTYPES[found[1]])


def blank(name: str, num_lanes: int) -> Array:
    """Return what a register holds before it is written: bits that make no sensible number."""
    dtype = register_dtype(name)
    if dtype == np.bool_:
        return np.ones(num_lanes, dtype)
    return np.full(num_lanes * dtype.itemsize, 0xFB, np.uint8).view(dtype)
