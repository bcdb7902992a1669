"""The machine of a comparison: its description, and its rates as machine.c measures them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import psutil

from benchmarks.compiled import compile_program
from benchmarks.limits import MachineLimits
from pagewick.errors import ConfigError

SOURCE = Path(__file__).with_name("machine.c")
READ_REPEATS = 7
PEAK_MS = 300
# Processor flags that kernels of these engines look for.
NOTABLE_FLAGS = (
    "avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8", "asimd", "i8mm",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class MachineRates:
    """The machine's rates at one moment.

    read: bytes per second. The others: operations per second; None if the processor has no such instruction.
    """

    read: float
    fp32: float
    bf16_dot: float | None
    bf16_tile: float | None
    # Older results lack these.
    int8_dot: float | None = None
    int8_tile: float | None = None

    def peak(self, *, is_quantized: bool = False) -> tuple[str, float]:
        """Return the fastest way to multiply numbers, and its rate. For bf16 that is fp32 on some processors.

        is_quantized: weights and activations can be multiplied as 8-bit numbers.
        """
        rates = {"AMX tiles": self.bf16_tile, "bf16 dot products": self.bf16_dot, "fp32 multiply-add": self.fp32}
        if is_quantized:
            rates |= {"AMX tiles of bytes": self.int8_tile, "byte dot products": self.int8_dot}
        return max(((name, rate) for name, rate in rates.items() if rate is not None), key=lambda pair: pair[1])

    def limits(self, *, is_quantized: bool = False) -> MachineLimits:
        return MachineLimits(self.read, self.peak(is_quantized=is_quantized)[1])


class MachineProbe:
    """machine.c, compiled for this processor into a directory. Raises ConfigError without a C compiler.

    num_bytes: what it reads; as large as the weights, so that a cache holds the same part of both.
    """

    def __init__(self, directory: Path, num_bytes: int, num_threads: int) -> None:
        options = ["-march=native", "-ffp-contract=fast", "-pthread"]
        self._program = compile_program(SOURCE, directory / "machine", options, "measuring the machine's limits")
        self._arguments = [str(num_threads), str(max(num_bytes >> 20, 1)), str(READ_REPEATS), str(PEAK_MS)]

    def measure(self) -> MachineRates:
        """Measure the rates, which takes some seconds. Raises ConfigError for more threads than processors."""
        done = subprocess.run([self._program, *self._arguments], capture_output=True, text=True)
        if done.returncode:
            raise ConfigError(f"the machine's limits cannot be measured: {done.stderr.strip() or done.returncode}")
        found = json.loads(done.stdout)
        return MachineRates(**{field.name: found[field.name] for field in fields(MachineRates)})


def describe_machine() -> dict[str, Any]:
    """Return processor, cores, memory and system, which a reader needs to judge the figures."""
    name, flags = _processor()
    return {
        "processor": name,
        "instructions": [flag for flag in NOTABLE_FLAGS if flag in flags],
        "cores": psutil.cpu_count(logical=False),
        "processors": len(os.sched_getaffinity(0)),
        "memory": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def busy_part(seconds: float) -> float:
    """Wait for `seconds`, and return the part of all processors, 0 to 1, that was in use by any program meanwhile."""
    return float(psutil.cpu_percent(seconds)) / 100


def _processor() -> tuple[str, set[str]]:
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    name = fields.get("model name") or platform.machine()
    kind = " ".join(f"{key} {fields[key]}" for key in ("cpu family", "model") if key in fields)
    return f"{name} ({kind})" if kind else name, set((fields.get("flags") or fields.get("Features") or "").split())
