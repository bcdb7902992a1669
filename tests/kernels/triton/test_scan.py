"""The scans of Mamba-2 and Mamba-1 and convolutions in Triton, interpreted: against transformers and themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pagewick.kernels import batch_invariance, reference
from tests.deep import IS_DEEP
from tests.kernels.scan import make_channel_scan, make_convolution, make_plain_convolution, make_scan
from tests.kernels.states import (
    ROUNDING,
    StateBatch,
    assert_is_expected,
    assert_padding_changes_nothing,
    assert_same_bits_in_chunks,
    assert_states_stop_before_draft_tokens,
    metadata,
)
from tests.kernels.triton.harness import IS_COMPILED

from pagewick.kernels.triton import scan as kernels  # isort: skip  (the harness skips this module without Triton)
from pagewick.kernels.triton import channel_scan as channels  # isort: skip
from pagewick.kernels.triton import short_convolution as short  # isort: skip
from pagewick.kernels.triton.chunk_launches import LONG  # isort: skip

DIMS = (32, 16)
MODULES = {"selective_scan": kernels, "short_convolution": short, "channel_scan": channels}


@pytest.fixture
def roughly(monkeypatch: pytest.MonkeyPatch) -> None:
    # The interpreter cuts off what does not fit into bfloat16: twice the error of a rounding.
    monkeypatch.setitem(ROUNDING, torch.bfloat16, 2 * ROUNDING[torch.bfloat16])


@pytest.mark.usefixtures("roughly")
@pytest.mark.parametrize("dtype", ROUNDING)
def test_a_ragged_batch(dtype: torch.dtype) -> None:
    is_exact = dtype == torch.float32
    lengths = [1, 2, 5, 1], [0, 7, 1, 2]
    scan = make_scan(*lengths, heads=(4, 2), dims=DIMS, dtype=dtype, in_place=is_exact)
    assert_is_expected(scan.run(kernels.selective_scan), scan)


@pytest.mark.usefixtures("roughly")
@pytest.mark.parametrize("dtype", ROUNDING)
def test_a_ragged_batch_of_short_convolutions(dtype: torch.dtype) -> None:
    is_exact = dtype == torch.float32
    lengths = [1, 2, 5, 1], [0, 7, 1, 2]
    # One program has all of its channels, the last one few.
    convolution = make_convolution(*lengths, num_channels=272, dtype=dtype, in_place=is_exact, has_bias=is_exact)
    assert_is_expected(convolution.run(short.short_convolution), convolution)


@pytest.mark.usefixtures("roughly")
@pytest.mark.parametrize("dtype", ROUNDING)
def test_a_ragged_batch_of_mamba_1(dtype: torch.dtype) -> None:
    """The convolution without gates, and the scan behind it; the last program has few channels."""
    is_exact = dtype == torch.float32
    lengths = [1, 2, 5, 1], [0, 7, 1, 2]
    convolution = make_plain_convolution(*lengths, num_channels=272, width=4, dtype=dtype, has_bias=is_exact)
    assert_is_expected(convolution.run(short.short_convolution), convolution)
    scan = make_channel_scan(*lengths, num_channels=80, dtype=dtype, in_place=is_exact)
    assert_is_expected(scan.run(channels.channel_scan), scan)


def test_channels_have_the_same_bits_alone_and_in_chunks() -> None:
    scan = make_channel_scan([1, 6, 2], [4, 0, 1], num_channels=48, in_place=True)
    assert_same_bits_in_chunks(scan, channels, {0: [0, 1], 1: [0, 1, 3, 6]})
    assert_padding_changes_nothing(make_channel_scan([2, 1, 1, 1], [5, 0, 0, 0], num_channels=16), channels)
    other = make_channel_scan([2, 1], [1, 0], num_channels=17)
    assert all(map(torch.equal, other.run(channels.channel_scan), other.run(reference.channel_scan)))


def test_draft_tokens_change_no_state() -> None:
    lengths: tuple[list[int], list[int]] = [1, 6, 4], [4, 0, 1]
    batches: tuple[StateBatch, ...] = (
        make_scan(*lengths, heads=(2, 1), dims=DIMS, in_place=True),
        make_convolution(*lengths, num_channels=32),
        make_plain_convolution(*lengths, num_channels=32, width=4),
        make_channel_scan(*lengths, num_channels=16, in_place=True),
    )
    for batch in batches:
        assert_states_stop_before_draft_tokens(batch, MODULES[batch.OPERATION], {1: 5, 2: 1})


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 4 tokens for sequences with 6 or more; two sequences are compared at once."""
    changes = {"CHUNK": 4, "BLOCK_B": 2}
    for name in ("_LEAVES", "_JOINS", "_READS"):
        changed = {
            key: replace(each, constexprs=each.constexprs | changes) for key, each in getattr(channels, name).items()
        }
        monkeypatch.setattr(channels, name, changed)
    monkeypatch.setattr(channels, "CHUNK", 4)
    monkeypatch.setattr(channels, "LONG", 6)


@pytest.mark.usefixtures("roughly", "short_chunks")
@pytest.mark.parametrize("dtype", channels.DTYPES if IS_DEEP else [torch.float16], ids=str)
def test_prompts_of_mamba_1_are_taken_in_chunks(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole chunks and halves, with an earlier state and without, beside sequences that are not taken in chunks."""
    scan = make_channel_scan([1, 8, 0, 5, 11, 6], [2, 3, 0, 1, 0, 7], num_channels=48, dtype=dtype, in_place=True)
    found = scan.run(channels.channel_scan)
    assert_is_expected(found, scan)
    out, states = scan.only(4).run(channels.channel_scan)
    assert torch.equal(out, found[0][scan.of(4)])
    target = scan.batch.block_tables[4, 1]
    assert torch.equal(states[target], found[1][target])
    with monkeypatch.context() as patch:
        patch.setattr(batch_invariance, "is_required", lambda: True)
        one_by_one = scan.run(channels.channel_scan)
    is_same = (found[1] == one_by_one[1]).all(1)[scan.batch.block_tables[:, 1]]
    assert is_same.tolist() == [True, False, True, True, False, False]
    # Sequences with draft tokens are taken token by token, beside others.
    tables = scan.batch.block_tables.clone()
    tables[1, 2] = 7
    drafts = scan.changed({"block_tables": tables}).run(channels.channel_scan)
    assert torch.equal(drafts[0][scan.of(1)], one_by_one[0][scan.of(1)])
    assert torch.equal(drafts[0][scan.of(4)], found[0][scan.of(4)])
    assert torch.equal(drafts[1][scan.batch.block_tables[4, 1]], found[1][scan.batch.block_tables[4, 1]])


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.usefixtures("short_chunks")
def test_chunks_of_channels_that_forget_everything_and_nothing() -> None:
    scan = make_channel_scan([12], [3], num_channels=16, dtype=torch.float16)
    dt, log_decay = scan.dt.clone(), scan.options.log_decay.clone()
    dt[:, ::3], dt[::5, 1::3] = -40, 40
    log_decay[3:6], log_decay[7:9] = 9, -30
    scan = scan.changed({"dt": dt, "log_decay": log_decay})
    assert_is_expected(scan.run(channels.channel_scan), scan)


@pytest.mark.parametrize(
    ("heads", "dims", "width"),
    [
        ((1, 1), (64, 16), 2),
        ((3, 1), (32, 128), 3),
        ((3, 3), (32, 32), 4),
        ((4, 2), (32, 256), 1),
        *([((2, 1), (128, 64), 4), ((8, 1), (64, 128), 4), ((8, 8), (64, 256), 8)] if IS_DEEP else []),
    ],
)
def test_heads_dimensions_and_widths(heads: tuple[int, int], dims: tuple[int, int], width: int) -> None:
    scan = make_scan([1, 3], [3, 0], heads=heads, dims=dims, width=width, num_norm_groups=1)
    assert_is_expected(scan.run(kernels.selective_scan), scan)


def test_prompts_are_taken_in_chunks() -> None:
    """Beside sequences that are not; test_chunks.py has the details."""
    scan = make_scan([2, LONG, 1], [7, 9, 0], heads=(2, 1), dims=(32, 64), width=2, dtype=torch.float16)
    # Products of tensor cores have tf32's digits.
    assert_is_expected(scan.run(kernels.selective_scan), scan, error=2**-7 if IS_COMPILED else 0.0)


@pytest.mark.parametrize("width", [2, 3, 7, 8])
def test_widths_of_short_convolutions(width: int) -> None:
    convolution = make_convolution([1, 3, 9], [3, 0, 2], num_channels=16, width=width)
    assert_is_expected(convolution.run(short.short_convolution), convolution)


@pytest.mark.parametrize(("num_norm_groups", "is_norm_first"), [(None, False), (1, True), (4, False), (4, True)])
def test_gates_and_norms(num_norm_groups: int | None, is_norm_first: bool) -> None:
    # Rows of 640 numbers are more than one piece without a norm.
    scan = make_scan(
        [1, 2], [0, 7], heads=(20, 1), dims=DIMS, num_norm_groups=num_norm_groups, is_norm_first=is_norm_first
    )
    assert_is_expected(scan.run(kernels.selective_scan), scan)


@pytest.mark.parametrize("is_norm_first", [False, True])
def test_norms_of_several_pieces(monkeypatch: pytest.MonkeyPatch, is_norm_first: bool) -> None:
    monkeypatch.setattr(kernels, "_PIECES", (512,))
    scan = make_scan([1, 2], [0, 7], heads=(35, 1), dims=DIMS, num_norm_groups=1, is_norm_first=is_norm_first)
    assert_is_expected(scan.run(kernels.selective_scan), scan)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_sequence_has_the_same_bits_alone_and_in_chunks(in_place: bool) -> None:
    lengths = [1, 6, 2], [4, 0, 1]
    batches: tuple[StateBatch, ...] = (
        make_scan(*lengths, heads=(2, 1), dims=DIMS, in_place=in_place),
        make_convolution(*lengths, num_channels=48, in_place=in_place),
    )
    for batch in batches:
        assert_same_bits_in_chunks(batch, MODULES[batch.OPERATION], {0: [0, 1], 1: [0, 1, 3, 6]})


def test_padding_changes_nothing_but_its_own_block() -> None:
    lengths = [2, 1, 1, 1], [5, 0, 0, 0]
    assert_padding_changes_nothing(make_scan(*lengths, heads=(2, 1), dims=DIMS), kernels)
    assert_padding_changes_nothing(make_convolution(*lengths, num_channels=16), short)


def test_more_sequences_than_a_program_compares_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kernels, short):
        few = {
            key: replace(each, constexprs=each.constexprs | {"BLOCK_B": 2})
            for key, each in module._CONVOLUTIONS.items()
        }
        monkeypatch.setattr(module, "_CONVOLUTIONS", few)
    lengths = [1, 2, 1, 2, 1], [3, 0, 1, 2, 0]
    scan = make_scan(*lengths, heads=(2, 1), dims=DIMS, width=2)
    assert_is_expected(scan.run(kernels.selective_scan), scan)
    convolution = make_convolution(*lengths, num_channels=16)
    assert_is_expected(convolution.run(short.short_convolution), convolution)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_large_numbers_give_no_infinities() -> None:
    scan = make_scan([5], [4], heads=(2, 1), dims=DIMS)
    for name in ("gate", "dt"):
        scan = replace(scan, **{name: 100 * getattr(scan, name)})
    out, states = scan.run(kernels.selective_scan)
    expected, left = scan.run(reference.selective_scan)
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=1e-4)
    targets = scan.batch.block_tables[:, 1]
    found, numbers = (each.view(torch.float32)[targets] for each in (states, left))
    torch.testing.assert_close(found, numbers, rtol=2e-5, atol=1e-4)


def test_unsupported_calls_go_to_the_definition() -> None:
    scan = make_scan([2, 1], [1, 0])
    assert all(map(torch.equal, scan.run(kernels.selective_scan), scan.run(reference.selective_scan)))
    convolution = make_convolution([2, 1], [1, 0])
    expected = convolution.run(reference.short_convolution)
    assert all(map(torch.equal, convolution.run(short.short_convolution), expected))


def test_a_step_without_tokens() -> None:
    batches: tuple[StateBatch, ...] = (
        make_scan([1], [2], heads=(2, 1), dims=DIMS),
        make_convolution([1], [2], num_channels=64),
    )
    for batch in batches:
        empty = replace(batch.only(0, 0, 0), batch=metadata([[0, 0]], [0], [0]))
        out, states = empty.run(batch.of_module(MODULES[batch.OPERATION]))
        assert out.shape == (0, 64) and torch.equal(states, batch.states)
