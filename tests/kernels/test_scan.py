"""Mamba-2's scan and short convolutions against transformers, and the same bits in any company and in any chunks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from pagewick import kernels as dispatched
from pagewick.kernels import reference
from pagewick.kernels.options import AttentionMetadata
from pagewick.kernels.recorded_steps import NextInputs, RecordedStep, StepMemory, record
from pagewick.kernels.reference_scan import split_scan_states
from tests.kernels.conftest import FULL_ISAS_HERE, NativeKernels, required_library, with_isa
from tests.kernels.delta import ROUNDING, metadata
from tests.kernels.scan import ConvolutionBatch, ScanBatch, assert_is_expected, make_convolution, make_scan

Batch = ScanBatch | ConvolutionBatch
MAKERS: list[Callable[..., Batch]] = [make_scan, make_convolution]
Q_LENS, EARLIER = [1, 2, 3, 5, 33, 0, 1], [0, 7, 0, 1, 2, 3, 40]


@pytest.fixture(params=["reference", *FULL_ISAS_HERE])
def operations(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "reference":
        yield reference
    else:
        yield from with_isa(request.param)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_a_ragged_batch(operations: ModuleType | NativeKernels, dtype: torch.dtype, in_place: bool) -> None:
    scan = make_scan(Q_LENS, EARLIER, dtype=dtype, in_place=in_place)
    assert_is_expected(scan.run(operations.selective_scan), scan)
    convolution = make_convolution(Q_LENS, EARLIER, dtype=dtype, in_place=in_place)
    assert_is_expected(convolution.run(operations.short_convolution), convolution)


@pytest.mark.parametrize(
    ("heads", "dims", "width"),
    [
        ((1, 1), (1, 1), 1), ((3, 1), (24, 40), 2), ((3, 3), (7, 16), 3), ((6, 2), (64, 33), 4), ((2, 1), (150, 24), 5),
        ((2, 1), (64, 256), 4),
    ],
)  # fmt: skip
def test_heads_dimensions_and_widths(
    operations: ModuleType | NativeKernels, heads: tuple[int, int], dims: tuple[int, int], width: int
) -> None:
    scan = make_scan([1, 6, 2], [3, 0, 1], heads=heads, dims=dims, width=width, num_norm_groups=heads[0])
    assert_is_expected(scan.run(operations.selective_scan), scan)


@pytest.mark.parametrize(("num_channels", "width"), [(1, 1), (17, 2), (70, 4), (1030, 3), (5, 5)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_channels_and_widths(
    operations: ModuleType | NativeKernels, num_channels: int, width: int, has_bias: bool
) -> None:
    convolution = make_convolution([1, 6, 2], [3, 0, 1], num_channels=num_channels, width=width, has_bias=has_bias)
    assert_is_expected(convolution.run(operations.short_convolution), convolution)


@pytest.mark.parametrize(("num_norm_groups", "is_norm_first"), [(None, False), (1, False), (4, True), (1, True)])
def test_norms(operations: ModuleType | NativeKernels, num_norm_groups: int | None, is_norm_first: bool) -> None:
    scan = make_scan(Q_LENS, EARLIER, num_norm_groups=num_norm_groups, is_norm_first=is_norm_first)
    assert_is_expected(scan.run(operations.selective_scan), scan)


@pytest.mark.parametrize("make", MAKERS)
def test_a_sequence_has_the_same_bits_alone_and_in_chunks(
    operations: ModuleType | NativeKernels, make: Callable[..., Batch]
) -> None:
    batch = make([1, 2, 3, 150, 1], [0, 7, 0, 1, 40], dtype=torch.bfloat16)
    together, states = batch.run(operation_of(operations, batch))
    for seq, cuts in ((1, [0, 2]), (2, [0, 1, 2, 3]), (3, [0, 1, 3, 20, 21, 150]), (4, [0, 1])):
        current, parts = batch.states.clone(), []
        for begin, end in itertools.pairwise(cuts):
            chunk = replace(batch.only(seq, begin, end), states=current)
            out, current = chunk.run(operation_of(operations, batch))
            parts.append(out)
        assert torch.equal(torch.cat(parts), together[batch.of(seq)])
        target = batch.batch.block_tables[seq, 1]
        assert torch.equal(current[target], states[target])


@pytest.mark.parametrize("make", MAKERS)
def test_padding_changes_nothing_but_its_own_block(
    operations: ModuleType | NativeKernels, make: Callable[..., Batch]
) -> None:
    """Sequences of one token into the null block, and sequences without tokens."""
    batch = make([2, 1, 1, 1], [5, 0, 0, 0])
    blocks = batch.batch.block_tables.clone()
    blocks[1:] = 0
    padded = replace(batch, batch=metadata([*blocks.tolist(), [0, 0], [0, 1]], [7, 1, 1, 1, 1, 3], [2, 1, 1, 1, 0, 0]))
    out, states = padded.run(operation_of(operations, batch))
    alone, left = batch.only(0).run(operation_of(operations, batch))
    assert torch.equal(out[:2], alone)
    assert not out.isnan().any()
    assert torch.equal(states[1:], left[1:])


def test_large_numbers_give_no_infinities(operations: ModuleType | NativeKernels) -> None:
    scan = make_scan([9], [4])
    large = replace(scan, gate=100 * scan.gate, dt=100 * scan.dt)
    large = replace(large, options=replace(scan.options, log_decay=100 * scan.options.log_decay))
    out, states = large.run(operations.selective_scan)
    assert out.isfinite().all()
    assert states[large.batch.block_tables[0, 1]].view(torch.float32).isfinite().all()
    torch.testing.assert_close(out, large.expected()[0], rtol=1e-4, atol=1e-4)


def test_steps_far_below_zero_leave_a_state(operations: ModuleType | NativeKernels) -> None:
    """Softplus of such a step is 0: nothing is forgotten, and nothing added."""
    scan = make_scan([3], [4])
    scan = replace(scan, dt=torch.full_like(scan.dt, -1000.0))
    source, target = scan.batch.block_tables[0].tolist()
    _, memories = split_scan_states(scan.run(operations.selective_scan)[1], scan.options)
    assert torch.equal(memories[source], memories[target])


def test_blocks_that_are_larger_give_the_same(operations: ModuleType | NativeKernels) -> None:
    for make in MAKERS:
        batch = make([1, 3], [0, 2])
        operation = operation_of(operations, batch)
        larger = replace(batch, states=torch.cat((batch.states, batch.states[:, :8]), dim=1))
        assert torch.equal(larger.run(operation)[0], batch.run(operation)[0])


@pytest.mark.parametrize("heads", [(4, 2), (3, 1)])
@pytest.mark.parametrize("dims", [(24, 40), (150, 16)])
def test_any_number_of_threads_gives_the_same_bits_of_a_scan(
    native: NativeKernels, heads: tuple[int, int], dims: tuple[int, int]
) -> None:
    """The tokens of a long prompt are in several slices."""
    scan = make_scan([1, 270, 2], [9, 0, 3], heads=heads, dims=dims, dtype=torch.bfloat16, in_place=True)
    assert_same_bits_on_threads(native, scan)


def test_any_number_of_threads_gives_the_same_bits_of_a_convolution(native: NativeKernels) -> None:
    convolution = make_convolution([1, 150, 2], [9, 4, 3], num_channels=2050, dtype=torch.bfloat16, in_place=True)
    assert_same_bits_on_threads(native, convolution)


def assert_same_bits_on_threads(native: NativeKernels, batch: Batch) -> None:
    operation = operation_of(native, batch)
    one = batch.run(operation)
    assert_is_expected(one, batch)
    for threads in (2, 4, 7):
        native.set_num_threads(threads)
        assert all(map(torch.equal, batch.run(operation), one))


@pytest.mark.parametrize("make", MAKERS)
def test_it_goes_to_the_library_and_can_be_recorded(make: Callable[..., Batch]) -> None:
    library = required_library()
    batch = make([1, 1], [5, 0], in_place=True)
    operation = operation_of(dispatched, batch)
    out, states = batch.run(operation)
    assert torch.equal(out, batch.run(operation_of(NativeKernels(library), batch))[0])
    current = batch.states.clone()

    def step() -> list[Tensor]:
        return [replace(batch, states=current).in_place(operation)]

    (result,), recorded = record(step, StepMemory())
    assert isinstance(recorded, RecordedStep)
    assert torch.equal(current, states)
    rows = batch.xbc if isinstance(batch, ScanBatch) else batch.bcx
    rows.copy_(rows.flip(0))
    batch.batch.context_lens.add_(1)
    expected, left = replace(batch, states=current).run(operation)
    recorded.replay()
    assert torch.equal(result, expected)
    assert torch.equal(current, left)


@pytest.mark.parametrize("make", MAKERS)
def test_a_state_never_runs_ahead(make: Callable[..., Batch]) -> None:
    """It would be advanced once more for tokens that then do not come."""
    required_library()
    batch = make([1, 1], [5, 3], in_place=True)
    operation = operation_of(dispatched, batch)
    current = batch.states.clone()
    _, recorded = record(lambda: [replace(batch, states=current).in_place(operation)], StepMemory())
    assert isinstance(recorded, RecordedStep)
    dispatched.set_num_threads(2)
    recorded.replay(next_inputs=NextInputs([], [batch.batch.context_lens.numpy()]))
    after = current.clone()
    time.sleep(0.01)
    assert torch.equal(current, after)
    _, expected = replace(batch, states=after).run(operation)
    recorded.resume()
    assert torch.equal(current, expected)


BAD_BATCHES: list[tuple[dict[str, Any], str]] = [
    ({"context_lens": torch.tensor([2], dtype=torch.int32)}, "contradict each other"),
    ({"cu_seqlens_q": torch.tensor([0, 2], dtype=torch.int32)}, "contradict each other"),
    ({"block_tables": torch.tensor([[9, 2]], dtype=torch.int32)}, "outside the 4 blocks"),
    ({"block_tables": torch.tensor([[2, -1]], dtype=torch.int32)}, "outside the 4 blocks"),
    ({"block_tables": torch.zeros(1, 2)}, "block_tables must be int32"),
    ({"block_tables": torch.zeros(1, 1).int()}, r"must be \[B, 2\]"),
    ({"states": torch.zeros(4, 32, dtype=torch.uint8)}, "are too few"),
    ({"states": torch.zeros(4, 65536, dtype=torch.uint8)[:, 4:32772]}, "contiguous"),
]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *BAD_BATCHES,
        ({"dt": torch.zeros(3, 3)}, r"dt torch.float32 \[3, 3\] must be \[3, 4\]"),
        ({"gate": torch.zeros(3, 96).half()}, "gate torch.float16"),
        ({"xbc": torch.zeros(3, 512)[:, ::2]}, "rows in one piece"),
        ({"num_groups": 3}, "must be|no multiple"),
        ({"num_norm_groups": 5}, "5 equal parts"),
        ({"dt_bias": torch.zeros(4).double()}, "dt_bias must be contiguous float32"),
        ({"skip": torch.zeros(8)[::2]}, "skip must be contiguous float32"),
        ({"norm_weight": torch.zeros(24)}, r"norm_weight must be contiguous float32 \[96\]"),
        ({"conv_bias": torch.zeros(96)}, "conv_bias must be"),
    ],
)
def test_what_does_not_fit_a_scan_is_refused(changes: dict[str, Any], message: str) -> None:
    scan = changed(make_scan([3], [4]), changes)
    with pytest.raises(ValueError, match=message):
        scan.in_place(NativeKernels(required_library()).selective_scan)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *BAD_BATCHES,
        ({"bcx": torch.zeros(3, 80)}, r"bcx torch.float32 \[3, 80\] must be \[3, 120\]"),
        ({"bcx": torch.zeros(3, 120).double()}, "bcx torch.float64"),
        ({"bcx": torch.zeros(3, 240)[:, ::2]}, "rows in one piece"),
        ({"weight": torch.zeros(40)}, r"weight must be \[D, K\]"),
        ({"weight": torch.zeros(40, 3).half()}, "weight must be contiguous float32"),
        ({"bias": torch.zeros(39)}, "bias must be contiguous float32"),
    ],
)
def test_what_does_not_fit_a_convolution_is_refused(changes: dict[str, Any], message: str) -> None:
    convolution = changed(make_convolution([3], [4]), changes)
    with pytest.raises(ValueError, match=message):
        convolution.in_place(NativeKernels(required_library()).short_convolution)


def changed(batch: Batch, changes: dict[str, Any]) -> Batch:
    for name, value in changes.items():
        if name in AttentionMetadata._fields:
            batch = replace(batch, batch=batch.batch._replace(**{name: value}))
        elif hasattr(batch.options, name):
            options: Any = batch.options
            batch = replace(batch, options=replace(options, **{name: value}))
        else:
            batch = replace(batch, **{name: value})
    return batch


def operation_of(operations: Any, batch: Batch) -> Callable[..., Tensor]:
    found: Callable[..., Tensor] = (
        operations.selective_scan if isinstance(batch, ScanBatch) else operations.short_convolution
    )
    return found
