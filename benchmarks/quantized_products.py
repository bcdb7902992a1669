"""`python -m benchmarks.quantized_products`: products with quantized weights, beside dequantizing and multiplying.

For every format, weights of the shape of a model's layer that together are larger than any cache are multiplied one
after the other, as in a decode step. In each round one weight is dequantized to float32 and multiplied by PyTorch right
after that. Before and after a format's rounds, machine.c measures how fast this machine reads memory.

With --compare, two formats are multiplied in turn, and processor time is compared, which other programs change least.
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
from pagewick.kernels.matrix import Matrix
from pagewick.kernels.quantized import QuantizedMatrix

NUM_OUTPUTS, NUM_INPUTS = 3072, 1024
TOTAL_BYTES = 192 << 20
# The number of float32 scales with which a block begins, and the byte of a block of an int4 format with its zero point.
FLOAT32_SCALES = {name: 2 if name.endswith("_g16") else 1 for name in BLOCKS if "_g" in name}
ZERO_POINT_AT = 4


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of each round. native, dequantized: of one product."""

    native: list[float]
    dequantized: list[float]


def random_matrix(name: str) -> Matrix | QuantizedMatrix:
    """A weight of random bits, with scales and zero points as trained weights have them. bf16: of numbers."""
    if name == "bf16":
        numbers = Matrix.empty(NUM_OUTPUTS, NUM_INPUTS, torch.bfloat16, "cpu")
        numbers.load(torch.randn(NUM_OUTPUTS, NUM_INPUTS).bfloat16(), 0)
        return numbers
    columns, num_bytes = BLOCKS[name]
    # Bytes below 64 are finite scales in float16, none of them subnormal after its conversion to float32.
    blocks = torch.randint(0, 64, (NUM_OUTPUTS, NUM_INPUTS // columns, num_bytes), dtype=torch.uint8)
    if name in FLOAT32_SCALES:
        scales = 0.001 + 0.01 * torch.rand(*blocks.shape[:2], FLOAT32_SCALES[name])
        blocks[..., : 4 * FLOAT32_SCALES[name]] = scales.view(torch.uint8)
    if name == "MXFP4":
        blocks[..., 0] = 118 + blocks[..., 0] % 4  # exponents
    if name.startswith("int4"):
        blocks[..., ZERO_POINT_AT] %= 16
    rows = blocks.flatten(1)
    matrix = QuantizedMatrix.empty(NUM_OUTPUTS, NUM_INPUTS, name, rows.shape[1], torch.bfloat16, "cpu")
    matrix.load(rows, 0)
    return matrix


def random_matrices(name: str) -> list[Matrix | QuantizedMatrix]:
    """Weights that together have TOTAL_BYTES."""
    first = random_matrix(name)
    return [first, *(random_matrix(name) for _ in range(TOTAL_BYTES // first.data.nbytes - 1))]


def measure(name: str, num_rows: int, num_rounds: int) -> Times:
    """Measure products of num_rows rows with weights in a format."""
    first, *_ = weights = random_matrices(name)
    assert isinstance(first, QuantizedMatrix)
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


def compare(pair: str, num_rows: int, num_rounds: int) -> str:
    """Return a line: microseconds of processor time for a product in each of two formats, and the median of ratios."""
    x = torch.randn(num_rows, NUM_INPUTS).bfloat16()
    weights = [random_matrices(name) for name in pair.split("/")]
    rounds = []
    for _ in range(num_rounds + 1):
        times = []
        for same_format in weights:
            started = time.process_time()
            for weight in same_format:
                weight.linear(x)
            times.append((time.process_time() - started) / len(same_format) * 1e6)
        rounds.append(times)
    first, second = (statistics.median(times) for times in zip(*rounds[1:], strict=True))
    ratio = statistics.median(two / one for one, two in rounds[1:])
    return f"{pair:24}{num_rows:6}{first:12.0f}{second:12.0f}{ratio:12.2f}"


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
@click.option("--compare", "pairs", help="Pairs of formats, separated by commas, such as int4_g128/Q4_0,fp8_g128/bf16.")
def main(formats: str, isas: tuple[str, ...], num_rows: int, rounds: int, threads: int, pairs: str | None) -> None:
    """Print medians of the rounds."""
    library = cpu.library()
    if library is None:
        raise click.ClickException(cpu.status())
    kernels.set_num_threads(threads)
    torch.set_num_threads(threads)
    if pairs:
        print("formats                   rows    first us   second us   times as fast")
        for pair in pairs.split(","):
            print(compare(pair, num_rows, rounds), flush=True)
        return
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
