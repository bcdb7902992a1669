"""The scans of Mamba-2 and Mamba-1 and convolutions against transformers. Tests of all operations: test_states.py."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from pagewick.kernels.reference_scan import split_scan_states
from tests.kernels.conftest import NativeKernels, required_library
from tests.kernels.scan import make_channel_scan, make_convolution, make_scan
from tests.kernels.states import assert_is_expected


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
@pytest.mark.parametrize("has_gates", [False, True])
def test_channels_and_widths(
    operations: ModuleType | NativeKernels, num_channels: int, width: int, has_bias: bool, has_gates: bool
) -> None:
    convolution = make_convolution(
        [1, 6, 2], [3, 0, 1], num_channels=num_channels, width=width, has_bias=has_bias, has_gates=has_gates
    )
    assert_is_expected(convolution.run(operations.short_convolution), convolution)


@pytest.mark.parametrize(("num_channels", "state_dim"), [(1, 1), (17, 3), (130, 16), (40, 33)])
def test_states_of_channels(operations: ModuleType | NativeKernels, num_channels: int, state_dim: int) -> None:
    scan = make_channel_scan([1, 6, 2], [3, 0, 1], num_channels=num_channels, state_dim=state_dim)
    assert_is_expected(scan.run(operations.channel_scan), scan)


def test_large_numbers_of_channels_give_no_infinities(operations: ModuleType | NativeKernels) -> None:
    scan = make_channel_scan([9], [4])
    large = replace(scan, gate=100 * scan.gate, dt=100 * scan.dt)
    out, _ = large.run(operations.channel_scan)
    torch.testing.assert_close(out, large.expected()[0], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("num_norm_groups", "is_norm_first"), [(None, False), (1, False), (4, True), (1, True)])
def test_norms(operations: ModuleType | NativeKernels, num_norm_groups: int | None, is_norm_first: bool) -> None:
    scan = make_scan([1, 2, 33, 0, 1], [0, 7, 2, 3, 40], num_norm_groups=num_norm_groups, is_norm_first=is_norm_first)
    assert_is_expected(scan.run(operations.selective_scan), scan)


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
    source, target, _ = scan.batch.block_tables[0].tolist()
    _, memories = split_scan_states(scan.run(operations.selective_scan)[1], scan.options)
    assert torch.equal(memories[source], memories[target])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
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
    scan = make_scan([3], [4]).changed(changes)
    with pytest.raises(ValueError, match=message):
        scan.in_place(NativeKernels(required_library()).selective_scan)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bcx": torch.zeros(3, 80)}, r"bcx torch.float32 \[3, 80\] must be \[3, 120\]"),
        ({"bcx": torch.zeros(3, 120).double()}, "bcx torch.float64"),
        ({"bcx": torch.zeros(3, 240)[:, ::2]}, "rows in one piece"),
        ({"weight": torch.zeros(40)}, r"weight must be \[D, K\]"),
        ({"weight": torch.zeros(40, 3).half()}, "weight must be contiguous float32"),
        ({"bias": torch.zeros(39)}, "bias must be contiguous float32"),
    ],
)
def test_what_does_not_fit_a_convolution_is_refused(changes: dict[str, Any], message: str) -> None:
    convolution = make_convolution([3], [4]).changed(changes)
    with pytest.raises(ValueError, match=message):
        convolution.in_place(NativeKernels(required_library()).short_convolution)
