"""Products of warpgroups (wgmma): where the matrices lie in shared memory and in registers.

The tables of swizzles are those of the PTX ISA, in lines of 128 bytes: which part of 16 bytes lies at each place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.kernels.triton.ptx.eight_bits import E4M3, E5M2
from tests.kernels.triton.ptx.snippets import END, FENCES, NUM_THREADS, filled, product, registers, run, stored
from tests.kernels.triton.ptx.values import Array

# By the bytes of the swizzle: the lines after which its pattern repeats, and its mode in a descriptor.
LINES = {
    16: ["01234567"],
    32: ["01234567", "10325476"],
    64: ["01234567", "10325476", "23016745", "32107654"],
    128: [
        "01234567", "10325476", "23016745", "32107654", "45670123", "54761032", "67452301", "76543210",
    ],
}  # fmt: skip
MODES = {16: 0, 128: 1, 64: 2, 32: 3}
TYPES = {
    "bf16": torch.bfloat16, "f16": torch.float16, "tf32": torch.float32, "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2, "s8": torch.int8,
}  # fmt: skip
NUM_ROWS, MATRIX_BYTES = 64, 32768


def swizzled(plain: Array, width: int) -> Array:
    """Return bytes with their parts permuted in each line."""
    lines = plain.reshape(-1, 8, 16).copy()
    for number in range(len(lines)):
        pattern = LINES[width][number % len(LINES[width])]
        lines[number] = lines[number][[int(part) for part in pattern]]
    return lines.reshape(-1)


@dataclass(frozen=True)
class Layout:
    """Where a matrix lies in shared memory: blocks of 8 lines of `width` bytes, permuted by the swizzle of that width.

    A line is a row of the matrix, or a column of K if it is transposed. leading, stride: the distances that a
    descriptor has. Those of blocks along a line and along the lines are named by PTX in another way for each layout.
    """

    width: int
    is_transposed: bool
    leading: int
    stride: int

    @property
    def along_line(self) -> int:
        return self.stride if self.width == 16 and self.is_transposed else self.leading

    @property
    def along_lines(self) -> int:
        return self.leading if self.width == 16 and self.is_transposed else self.stride

    @property
    def step(self) -> int:
        """Bytes from the begin of 32 bytes of K to the next ones."""
        if self.is_transposed:
            return 2 * self.along_lines
        return {16: 2 * self.along_line, 32: self.along_line}.get(self.width, 32)

    def image_of(self, matrix: torch.Tensor) -> Array:
        """Return the bytes of a matrix [rows, K]."""
        content = (matrix.t() if self.is_transposed else matrix).contiguous()
        image = np.zeros(MATRIX_BYTES, np.uint8)
        for line, row in enumerate(content.view(torch.uint8).reshape(len(content), -1).numpy()):
            for block, begin in enumerate(range(0, len(row), self.width)):
                place = block * self.along_line + line // 8 * self.along_lines + line % 8 * self.width
                part = row[begin : begin + self.width]
                image[place : place + len(part)] = part
        return swizzled(image, self.width)

    def descriptor(self, start: int, base: int = 0) -> int:
        distances = self.leading >> 4 << 16 | self.stride >> 4 << 32
        return start >> 4 | distances | base << 49 | MODES[self.width] << 62


def layout_of(width: int, num_rows: int, *, is_transposed: bool) -> Layout:
    """Return a layout whose blocks do not overlap, and with all distances different from each other."""
    block = 8 * width
    if not is_transposed:
        return Layout(width, is_transposed, block * 13, block)
    num_blocks = -(-num_rows * 2 // width)
    if width == 16:
        return Layout(width, is_transposed, block * (num_blocks + 1), block)
    return Layout(width, is_transposed, block, block * (num_blocks + 1))


def accumulators(found: Array, num_columns: int) -> Array:
    """Return the matrix of registers [threads, registers]: PTX ISA, "Accumulator D" of wgmma."""
    matrix = np.zeros((NUM_ROWS, num_columns))
    for thread in range(NUM_THREADS):
        warp, group, in_group = thread // 32, thread % 32 // 4, thread % 4
        for number in range(num_columns // 2):
            row = 16 * warp + group + (8 if number % 4 >= 2 else 0)
            matrix[row, number // 4 * 8 + in_group * 2 + number % 2] = found[thread, number]
    return matrix


def random_matrices(name: str, num_columns: int, num_inner: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = (NUM_ROWS, num_inner), (num_columns, num_inner)
    a, b = (torch.randint(-3, 4, size, generator=generator).to(TYPES[name]) for size in sizes)
    return a, b


def multiplied(name: str, width: int, transposed: tuple[bool, bool], *, shift: int = 0) -> tuple[Array, Array]:
    """Return a product as found and as expected. transposed: whether left and right are; shift: lines before them."""
    size, num_columns = TYPES[name].itemsize, 96
    num_steps = max(2, width // 32)
    matrices = random_matrices(name, num_columns, num_steps * 32 // size)
    layouts = [
        layout_of(width, len(matrix), is_transposed=each) for matrix, each in zip(matrices, transposed, strict=True)
    ]
    image = np.concatenate([layout.image_of(matrix) for layout, matrix in zip(layouts, matrices, strict=True)])
    options = "1" if name == "s8" else "1, 1, 1"
    if size == 2:
        options += f", {int(transposed[0])}, {int(transposed[1])}"
    instructions = []
    for step in range(num_steps):
        starts = [MATRIX_BYTES * number + 128 * shift + step * layout.step for number, layout in enumerate(layouts)]
        left, right = (layout.descriptor(start, shift) for layout, start in zip(layouts, starts, strict=True))
        instructions.append(f"mov.b64 %rd10, {left}; mov.b64 %rd11, {right};")
        instructions.append(product(name, "%rd10", "%rd11", options, num_columns))
    body = "\n".join(instructions)
    return run_product(body, np.roll(image, 128 * shift), num_columns, name), matrices[0].double() @ matrices[
        1
    ].t().double()


def run_product(instructions: str, image: Array, num_columns: int, name: str = "bf16") -> Array:
    """Run products into accumulators of zeros, over shared memory with an image."""
    count = num_columns // 2
    zeros = "\n".join(f"mov.b32 %r{1000 + number}, 0;" for number in range(count))
    body = "\n".join([filled(len(image)), zeros, FENCES, instructions, END, stored(num_columns, len(image))])
    memory = torch.cat([torch.from_numpy(image), torch.zeros(4 * NUM_ROWS * num_columns, dtype=torch.uint8)])
    result = run(body, memory, threads=NUM_THREADS, shared_bytes=len(image))[len(image) :]
    found = result.view(torch.int32 if name == "s8" else torch.float32).view(NUM_THREADS, count)
    return accumulators(found.numpy(), num_columns)


@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("width", LINES)
@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_matrices_of_halves(name: str, width: int, transposed: tuple[bool, bool]) -> None:
    found, expected = multiplied(name, width, transposed)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("width", LINES)
@pytest.mark.parametrize("name", ["tf32", "e4m3", "e5m2", "s8"])
def test_matrices_of_other_types(name: str, width: int) -> None:
    found, expected = multiplied(name, width, (False, False))
    assert np.array_equal(found, expected)


def test_a_pattern_that_begins_at_no_multiple_of_its_size() -> None:
    """The base offset says with which line of its pattern a matrix begins."""
    found, expected = multiplied("bf16", 128, (False, False), shift=3)
    assert np.array_equal(found, expected)


def test_numbers_of_8_bits() -> None:
    numbers = torch.arange(256, dtype=torch.uint8)
    for found, dtype in ((E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)):
        assert np.array_equal(found, numbers.view(dtype).double().numpy(), equal_nan=True)


@pytest.mark.parametrize("name", ["bf16", "e4m3", "tf32"])
def test_fragments_of_a_matrix_in_registers(name: str) -> None:
    """Each thread loads its fragment of a from global memory, where it lies as the PTX ISA numbers its elements."""
    size = TYPES[name].itemsize
    a, b = random_matrices(name, 8, 32 // size)
    per_register, fragments = 4 // size, np.zeros((NUM_THREADS, 16), np.uint8)
    content = a.view(torch.uint8).view(NUM_ROWS, -1, size).numpy()
    for thread in range(NUM_THREADS):
        for number in range(4 * per_register):
            register = number // per_register
            row = thread // 32 * 16 + thread % 32 // 4 + (8 if register in (1, 3) else 0)
            column = thread % 4 * per_register + number % per_register + (16 // size if register in (2, 3) else 0)
            fragments[thread, number * size : (number + 1) * size] = content[row, column]
    layout = layout_of(32, 8, is_transposed=False)
    image = np.concatenate([layout.image_of(b)[:2048], fragments.reshape(-1)])
    load = "mad.wide.u32 %rd5, %r1, 16, %rd1; ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%rd5 + 2048];"
    options = "1, 1, 1, 0" if size == 2 else "1, 1, 1"
    multiply = f"mov.b64 %rd11, {layout.descriptor(0)};" + product(name, registers(20, 4), "%rd11", options, 8)
    found = run_product(f"{load} wgmma.fence.sync.aligned; {multiply}", image, 8)
    assert np.array_equal(found, (a.double() @ b.double().t()).numpy())


def test_sums_are_rounded_towards_zero() -> None:
    a, b = torch.zeros(NUM_ROWS, 16).bfloat16(), torch.zeros(8, 16).bfloat16()
    a[:, 0], a[:, 1], b[:, 0], b[:, 1] = 1, 2**-13, 1, -(2**-13)
    layout = layout_of(32, NUM_ROWS, is_transposed=False)
    image = np.concatenate([layout.image_of(a)[:2048], layout.image_of(b)[:2048]])
    left, right = layout.descriptor(0), layout.descriptor(2048)
    multiply = product("bf16", "%rd10", "%rd11", "1, 1, 1, 0, 0", 8)
    found = run_product(f"mov.b64 %rd10, {left}; mov.b64 %rd11, {right}; {multiply}", image, 8)
    assert np.array_equal(found, np.full((NUM_ROWS, 8), 1 - 2**-24))
