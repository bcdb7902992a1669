"""`python -m benchmarks.quantized_products`: products with quantized weights, beside dequantizing and multiplying.

For every format, weights of the shape of a model's layer that together are larger than any cache are multiplied one
after the other, as in a decode step. In each round one weight is dequantized to float32 and multiplied by PyTorch right
after that. Before and after a format's rounds, machine.c measures how fast this machine reads memory.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from torch import Tensor

from benchmarks.machine import MachineProbe
from pagewick import kernels
from pagewick.devices import num_cores
from pagewick.kernels import cpu
from pagewick.kernels.cpu.quantized import BLOCKS
from pagewick.kernels.quantized import QuantizedMatrix

NUM_OUTPUTS, NUM_INPUTS = 3072, 1024
TOTAL_BYTES = 192 << 20


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of each round. native, dequantized: of one product."""

    native: list[float]
    dequantized: list[float]


def random_matrix(name: str) -> QuantizedMatrix:
    """A weight of random bits; all of its scales are finite."""
    columns, num_bytes = BLOCKS[name]
    rows = torch.randint(0, 64, (NUM_OUTPUTS, NUM_INPUTS // columns * num_bytes), dtype=torch.uint8)
    matrix = QuantizedMatrix.empty(NUM_OUTPUTS, NUM_INPUTS, name, rows.shape[1], torch.bfloat16, "cpu")
    matrix.load(rows, 0)
    return matrix


def measure(name: str, num_rows: int, num_rounds: int) -> Times:
    """Measure products of num_rows rows with weights in a format."""
    first = random_matrix(name)
    weights = [first, *(random_matrix(name) for _ in range(TOTAL_BYTES // first.data.numel() - 1))]
    x, row_ids = torch.randn(num_rows, NUM_INPUTS).bfloat16(), torch.arange(NUM_OUTPUTS)

    def multiply_all() -> None:
        for weight in weights:
            weight.linear(x)

    def dequantize_and_multiply() -> Tensor:
        return torch.nn.functional.linear(x.float(), kernels.gather_quantized_rows(row_ids, first, torch.float32))

    multiply_all()
    times = Times([], [])
    for _ in range(num_rounds):
        times.native.append(_seconds(multiply_all) / len(weights))
        times.dequantized.append(_seconds(dequantize_and_multiply))
    return times


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def row(name: str, num_rows: int, times: Times, bandwidth: float) -> str:
    """Return a line of the table; bandwidth in bytes per second."""
    columns, num_bytes = BLOCKS[name]
    size = NUM_OUTPUTS * NUM_INPUTS // columns * num_bytes
    native = statistics.median(times.native)
    gain = statistics.median(slow / fast for fast, slow in zip(times.native, times.dequantized, strict=True))
    rate = 2 * num_rows * NUM_OUTPUTS * NUM_INPUTS / native
    return (
        f"{name:10}{8 * num_bytes / columns:8.2f}{native * 1e6:10.0f}{size / native / 1e9:10.1f}"
        f"{size / native / bandwidth:12.0%}{rate / 1e9:10.0f}{gain:10.1f}"
    )


@click.command()
@click.option("--formats", default=",".join(BLOCKS), help="Formats, separated by commas.", show_default=True)
@click.option("--isa", "isas", multiple=True, help="Instruction set; may be given again. Default: the best one.")
@click.option("--rows", "num_rows", default=1, show_default=True, help="Rows of activations.")
@click.option("--rounds", default=7, show_default=True)
@click.option("--threads", default=num_cores(), show_default=True)
def main(formats: str, isas: tuple[str, ...], num_rows: int, rounds: int, threads: int) -> None:
    """Print medians of the rounds."""
    library = cpu.library()
    if library is None:
        raise click.ClickException(cpu.status())
    kernels.set_num_threads(threads)
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as directory:
        probe = MachineProbe(Path(directory), TOTAL_BYTES, threads)
        for isa in isas or (library.isa,):
            library.select_isa(isa)
            print(f"{isa}, {threads} threads, weights [{NUM_OUTPUTS}, {NUM_INPUTS}], rows of activations: {num_rows}")
            print("format     bits a        us      GB/s     of read    GFLOP/s     times as fast as")
            print("           weight                       bandwidth             dequantize-and-multiply")
            for name in formats.split(","):
                before = probe.measure().read
                times = measure(name, num_rows, rounds)
                print(row(name, num_rows, times, (before + probe.measure().read) / 2), flush=True)


if __name__ == "__main__":
    main()
