"""Instructions of a warpgroup, four warps: products of matrices that lie in shared memory, and their fences."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from tests.kernels.triton.ptx.eight_bits import E4M3, E5M2
from tests.kernels.triton.ptx.matrix_descriptors import PART, decoded, parts_along_k, parts_along_rows
from tests.kernels.triton.ptx.products import Read, is_product
from tests.kernels.triton.ptx.races import NOBODY, several_threads, thread_of
from tests.kernels.triton.ptx.semantics import carries_out
from tests.kernels.triton.ptx.values import Array, Faulty, Operand, float_of_bfloat16, tf32_of_float, towards_zero

if TYPE_CHECKING:
    from tests.kernels.triton.ptx.machine import Threads
    from tests.kernels.triton.ptx.parsing import Instruction
    from tests.kernels.triton.ptx.proxies import Proxies

WARPGROUP = 128
_SHAPE = re.compile(r"m64n(\d+)k(\d+)")
_HALVES = ("f16", "bf16")
# Bytes of the elements. A product has 32 bytes of each row along K.
_SIZES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
_ROW_BYTES = 32
# Types that may meet in a product.
_FAMILIES = ({"f16"}, {"bf16"}, {"tf32"}, {"e4m3", "e5m2"}, {"s8", "u8"})
_COLUMNS = range(8, 257, 8)
_LANES = np.arange(WARPGROUP)
# The row and the place in it of a thread: PTX ISA, "Register Fragments" of wgmma.
_ROW, _IN_ROW = _LANES // 32 * 16 + _LANES % 32 // 4, _LANES % 4


def _warpgroups(threads: Threads) -> Array:
    """Return the numbers of the active threads, a row for each warpgroup."""
    lanes = threads.active()
    if threads.program.num_threads % WARPGROUP or len(lanes) % WARPGROUP:
        raise Faulty("a warpgroup is not whole")
    rows = lanes.reshape(-1, WARPGROUP)
    if bool((rows != rows[:, :1] + _LANES).any() | (rows[:, 0] % WARPGROUP).any()):
        raise Faulty("a warpgroup is not whole")
    return rows


def _proxies(threads: Threads) -> Proxies:
    if threads.proxies is None:
        raise Faulty("a kernel without products of warpgroups")
    return threads.proxies


@carries_out("fence")
def _fence(threads: Threads, each: Instruction) -> None:
    if each.parts[1:] not in (("proxy", "async"), ("proxy", "async", "shared", "cta")):
        raise Faulty("a fence that is not known")
    if threads.proxies is not None:
        threads.proxies.fence(threads.active())


@carries_out("wgmma")
def _work(threads: Threads, each: Instruction) -> None:
    lanes = _warpgroups(threads)
    if is_product(each):
        _multiply(threads, each, lanes)
    elif each.parts[1] == "fence":
        threads.products.fence(lanes)
    elif each.parts[1] == "commit_group":
        threads.products.commit(lanes)
    elif each.parts[1] == "wait_group":
        for read in threads.products.wait(threads, lanes, int(each.operands[0][0])):
            _end_read(threads, read)
    else:
        raise Faulty("an instruction of warpgroups that is not known")


class _Product:
    """A product of warpgroups. kinds: types of the elements; scale: whether it adds to accumulators, or sets them."""

    def __init__(self, each: Instruction) -> None:
        shape = _SHAPE.fullmatch(each.parts[4])
        self.kinds, self.shape = each.parts[6:], each.parts[4:]
        is_known = any(set(self.kinds) <= family for family in _FAMILIES)
        if shape is None or not is_known or each.parts[5] != ("s32" if self._is_whole else "f32"):
            raise Faulty("a product that is not known")
        self.num_columns, num_inner = (int(number) for number in shape.groups())
        self.is_half = self.kinds[0] in _HALVES
        if num_inner * _SIZES[self.kinds[0]] != _ROW_BYTES or self.num_columns not in _COLUMNS:
            raise Faulty("a product that is not known")
        self.target, self.left, self.right, self.scale, *options = each.operands
        if len(self.target) != self.num_columns // 2:
            raise Faulty("a product whose accumulators do not fit its shape")
        numbers = [int(option.view(np.int64)[0]) for option in options]
        num_signs = 0 if self._is_whole else 2
        self.signs, transposed = numbers[:num_signs] or [1, 1], numbers[num_signs:]
        in_registers = isinstance(self.left, tuple)
        expected = (1 if in_registers else 2) if self.is_half else 0
        if len(transposed) != expected or set(self.signs) - {1, -1} or set(transposed) - {0, 1}:
            raise Faulty("a product whose options are not known")
        self.is_left_transposed, self.is_right_transposed = (
            bool(each) for each in ([0] * (2 - expected) + transposed if self.is_half else [0, 0])
        )

    @property
    def _is_whole(self) -> bool:
        return self.kinds[0] in ("s8", "u8")

    def rounded(self, total: Array) -> Array:
        """Return sums as bits: exact but for one rounding towards zero, or cut off to 32 bits."""
        if self._is_whole:
            return total.astype(np.int64).astype(np.uint32)
        return towards_zero(total).view(np.uint32)

    def numbers_of(self, bits: Array) -> Array:
        return bits.view(np.int32 if self._is_whole else np.float32).astype(np.float64)


def _multiply(threads: Threads, each: Instruction, lanes: Array) -> None:
    product, products = _Product(each), threads.products
    products.check_accumulators(product.target, lanes, product.shape)
    since = _proxies(threads).now()
    fragments = product.left if isinstance(product.left, tuple) else ()
    if fragments:
        products.check_fragments(fragments, lanes)
        left = _fragment(threads, fragments, lanes, product.kinds[0])
    else:
        left = _from_shared(threads, product.left, lanes, 64, product.kinds[0], product.is_left_transposed, since)
    right = _from_shared(
        threads, product.right, lanes, product.num_columns, product.kinds[1], product.is_right_transposed, since
    )
    total = left @ right.swapaxes(1, 2) * (product.signs[0] * product.signs[1])
    adds = threads.of(product.scale, "pred", lanes)
    results = {}
    for number, name in enumerate(product.target):
        rows, columns = _ROW + number // 2 % 2 * 8, number // 4 * 8 + 2 * _IN_ROW + number % 2
        before = products.accumulated(name, lanes, threads.register(name))
        results[name] = product.rounded(total[:, rows, columns] + np.where(adds, product.numbers_of(before), 0.0))
    products.begin(lanes, results, fragments)


def _fragment(threads: Threads, names: tuple[str, ...], lanes: Array, kind: str) -> Array:
    """Return the matrices [warpgroups, 64, K] of registers."""
    per_register = 4 // _SIZES[kind]
    matrix = np.zeros((len(lanes), 64, _ROW_BYTES // _SIZES[kind]))
    for number, name in enumerate(names):
        numbers = _numbers(threads.register(name)[lanes][..., None].view(np.uint8), kind)
        for place in range(per_register):
            columns = _IN_ROW * per_register + place + number // 2 * 4 * per_register
            matrix[:, _ROW + number % 2 * 8, columns] = numbers[..., place]
    return matrix


def _from_shared(
    threads: Threads, operand: Operand, lanes: Array, num_rows: int, kind: str, is_transposed: bool, since: int
) -> Array:
    """Return the matrices [warpgroups, rows, K] that a descriptor names."""
    numbers = threads.of(operand, "u64", lanes)
    if bool((numbers != numbers[:, :1]).any()):
        raise Faulty("threads of a warpgroup have different matrix descriptors")
    place_parts = parts_along_rows if is_transposed else parts_along_k
    addresses = place_parts(decoded(numbers[:, 0]), num_rows)
    parts = _read(threads, lanes, addresses.reshape(len(lanes), -1), since).reshape(*addresses.shape, PART)
    elements = _numbers(parts, kind)
    if is_transposed:
        elements = elements.swapaxes(2, 3)
    return elements.reshape(len(lanes), num_rows, -1)


def _numbers(content: Array, kind: str) -> Array:
    """Read bytes [..., n] as numbers of a type."""
    content = np.ascontiguousarray(content)
    if kind in ("e4m3", "e5m2"):
        found: Array = (E4M3 if kind == "e4m3" else E5M2)[content]
        return found
    if kind in ("s8", "u8"):
        return content.view(np.int8 if kind == "s8" else np.uint8).astype(np.float64)
    if kind == "tf32":
        return tf32_of_float(content.view(np.float32)).astype(np.float64)
    bits = content.view(np.uint16)
    return (float_of_bfloat16(bits) if kind == "bf16" else bits.view(np.float16)).astype(np.float64)


def _read(threads: Threads, lanes: Array, addresses: Array, since: int) -> Array:
    """Begin to read parts [warpgroups, parts] of shared memory, and return their bytes."""
    threads.check_shared(addresses, PART)
    places, units = _places(threads, lanes, addresses)
    last = threads.shared.history.writers(units)
    first = lanes[:, :1] - threads.thread[lanes[:, :1]]
    writers = first + np.where(last == NOBODY, 0, thread_of(last))
    is_unfenced = (last != NOBODY) & _proxies(threads).is_unfenced(units, writers, lanes)
    found = threads.shared.read_parts(places, units, _stamps(threads, lanes))
    if bool(is_unfenced.any()):
        before = threads.shared.before(int(units[is_unfenced][0]))
        raise Faulty(f"no proxy fence between a write and a product's read of {before}")
    threads.products.note_read(lanes, addresses, since)
    return found


def _end_read(threads: Threads, read: Read) -> None:
    """Check that no thread has written memory that a product reads. Later writes come after the product."""
    places, units = _places(threads, read.lanes, read.addresses)
    is_late = _proxies(threads).is_written_since(units, read.since)
    if bool(is_late.any()):
        before = threads.shared.before(int(units[is_late][0]))
        raise Faulty(f"a race: a write during a product's read of {before}")
    threads.shared.read_parts(places, units, _stamps(threads, read.lanes))


def _places(threads: Threads, lanes: Array, addresses: Array) -> tuple[Array, Array]:
    """Return where parts lie in the shared memory of all programs, and the units of each warpgroup's parts."""
    places = threads.shared_address(addresses, lanes[:, :1])
    return places, threads.shared.units_of_parts(places)


def _stamps(threads: Threads, lanes: Array) -> Array:
    """Return stamps of all threads of a warpgroup together: any of them may read any part."""
    return several_threads(threads.stamps(lanes[:, :1]))
