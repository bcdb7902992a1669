"""The gated delta rule against transformers, and the same bits in any company, in any chunks, on any threads."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from pagewick import kernels as dispatched
from pagewick.kernels import reference
from pagewick.kernels.options import AttentionMetadata, DeltaOptions
from pagewick.kernels.recorded_steps import NextInputs, RecordedStep, StepMemory, record
from pagewick.kernels.reference_delta import split_states
from tests.kernels.conftest import FULL_ISAS_HERE, NativeKernels, required_library, with_isa
from tests.kernels.delta import ROUNDING, DeltaBatch, assert_is_expected, make_delta, metadata

Q_LENS, EARLIER = [1, 2, 3, 5, 33, 1], [0, 7, 0, 1, 2, 40]


@pytest.fixture(params=["reference", *FULL_ISAS_HERE])
def operations(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "reference":
        yield reference
    else:
        yield from with_isa(request.param)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_a_ragged_batch(operations: ModuleType | NativeKernels, dtype: torch.dtype, in_place: bool) -> None:
    delta = make_delta(Q_LENS, EARLIER, dtype=dtype, in_place=in_place)
    assert_is_expected(delta.run(operations.gated_delta_net), delta)


@pytest.mark.parametrize(
    ("heads", "dims", "width"),
    [((1, 1), (1, 1), 1), ((1, 3), (24, 40), 2), ((3, 3), (16, 7), 3), ((2, 6), (33, 128), 4), ((1, 2), (128, 128), 4)],
)
def test_heads_dimensions_and_widths(
    operations: ModuleType | NativeKernels, heads: tuple[int, int], dims: tuple[int, int], width: int
) -> None:
    delta = make_delta([1, 6, 2], [3, 0, 1], heads=heads, dims=dims, width=width)
    assert_is_expected(delta.run(operations.gated_delta_net), delta)


def test_a_sequence_has_the_same_bits_alone_and_in_chunks(operations: ModuleType | NativeKernels) -> None:
    delta = make_delta(Q_LENS, EARLIER, dtype=torch.bfloat16)
    together, states = delta.run(operations.gated_delta_net)
    for seq, cuts in ((1, [0, 2]), (2, [0, 1, 2, 3]), (4, [0, 1, 3, 20, 33]), (5, [0, 1])):
        current, parts = delta.states.clone(), []
        for begin, end in itertools.pairwise(cuts):
            out, current = replace(delta.only(seq, begin, end), states=current).run(operations.gated_delta_net)
            parts.append(out)
        assert torch.equal(torch.cat(parts), together[delta.of(seq)])
        target = delta.batch.block_tables[seq, 1]
        assert torch.equal(current[target], states[target])


def test_padding_changes_nothing_but_its_own_block(operations: ModuleType | NativeKernels) -> None:
    """Sequences of one token into the null block, and sequences without tokens."""
    delta = make_delta([2, 1, 1, 1], [5, 0, 0, 0])
    blocks = delta.batch.block_tables.clone()
    blocks[1:] = 0
    padded = replace(delta, batch=metadata([*blocks.tolist(), [0, 0], [0, 1]], [7, 1, 1, 1, 1, 3], [2, 1, 1, 1, 0, 0]))
    out, states = padded.run(operations.gated_delta_net)
    alone, left = delta.only(0).run(operations.gated_delta_net)
    assert torch.equal(out[:2], alone)
    assert not out.isnan().any()
    assert torch.equal(states[1:], left[1:])


def test_large_numbers_give_no_infinities(operations: ModuleType | NativeKernels) -> None:
    delta = make_delta([9], [4])
    for name in ("qkv", "gate", "beta", "decay"):
        delta = replace(delta, **{name: 100 * getattr(delta, name)})
    assert_is_expected(delta.run(operations.gated_delta_net), delta)


def test_a_layer_of_transformers() -> None:
    """With its weights in our arguments, and a prompt in two chunks."""
    config = Qwen3_5TextConfig(
        hidden_size=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=8, linear_conv_kernel_dim=4, num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    layer = qwen.Qwen3_5GatedDeltaNet(config, 0).eval()
    with torch.no_grad():
        layer.norm.weight.normal_(1)
        layer.dt_bias.normal_()
        x = torch.randn(70, 32)
        options = DeltaOptions(
            2, 4, 16, 8, layer.conv1d.weight.squeeze(1), layer.A_log, layer.dt_bias, layer.norm.weight,
            config.rms_norm_eps,
        )  # fmt: skip
        states = torch.zeros(2, 4 * (3 * options.num_channels + 4 * 16 * 8), dtype=torch.uint8)
        parts = [
            reference.gated_delta_net(
                layer.in_proj_qkv(chunk), layer.in_proj_z(chunk), layer.in_proj_b(chunk), layer.in_proj_a(chunk),
                states, metadata([[1, 1]], [end], [len(chunk)]), options,
            )
            for chunk, end in ((x[:41], 41), (x[41:], 70))
        ]  # fmt: skip
        torch.testing.assert_close(layer.out_proj(torch.cat(parts)), layer(x[None])[0], rtol=1e-4, atol=1e-5)


def test_blocks_that_are_too_small_are_refused() -> None:
    delta = make_delta([1], [0])
    with pytest.raises(ValueError, match="are too few for 3 x "):
        split_states(delta.states[:, :-4].contiguous(), delta.options)
    larger: DeltaBatch = replace(delta, states=torch.cat((delta.states, delta.states[:, :8]), dim=1))
    assert torch.equal(larger.run(reference.gated_delta_net)[0], delta.run(reference.gated_delta_net)[0])


@pytest.mark.parametrize("heads", [(2, 4), (1, 3)])
@pytest.mark.parametrize("dims", [(24, 40), (16, 150)])
def test_any_number_of_threads_gives_the_same_bits(
    native: NativeKernels, heads: tuple[int, int], dims: tuple[int, int]
) -> None:
    """Few threads take whole key heads, many take columns, and the tokens of a long prompt in slices."""
    delta = make_delta([1, 70, 2], [9, 0, 3], heads=heads, dims=dims, dtype=torch.bfloat16, in_place=True)
    one = delta.run(native.gated_delta_net)
    assert_is_expected(one, delta)
    for threads in (2, 4, 7):
        native.set_num_threads(threads)
        assert all(map(torch.equal, delta.run(native.gated_delta_net), one))


def test_it_goes_to_the_library_and_can_be_recorded() -> None:
    library = required_library()
    delta = make_delta([1, 1], [5, 0], in_place=True)
    out, states = delta.run(dispatched.gated_delta_net)
    assert torch.equal(out, delta.run(NativeKernels(library).gated_delta_net)[0])
    assert not torch.equal(out, delta.run(reference.gated_delta_net)[0])
    current = delta.states.clone()

    def step() -> list[Tensor]:
        return [replace(delta, states=current).in_place(dispatched.gated_delta_net)]

    (result,), recorded = record(step, StepMemory())
    assert isinstance(recorded, RecordedStep)
    assert torch.equal(current, states)
    delta.qkv.copy_(delta.qkv.flip(0))
    delta.batch.context_lens.add_(1)
    expected, left = replace(delta, states=current).run(dispatched.gated_delta_net)
    recorded.replay()
    assert torch.equal(result, expected)
    assert torch.equal(current, left)


def test_a_state_never_runs_ahead() -> None:
    """It would be advanced once more for tokens that then do not come."""
    required_library()
    delta = make_delta([1, 1], [5, 3], in_place=True)
    current = delta.states.clone()
    _, recorded = record(lambda: [replace(delta, states=current).in_place(dispatched.gated_delta_net)], StepMemory())
    assert isinstance(recorded, RecordedStep)
    dispatched.set_num_threads(2)
    recorded.replay(next_inputs=NextInputs([], [delta.batch.context_lens.numpy()]))
    after = current.clone()
    time.sleep(0.01)
    assert torch.equal(current, after)
    _, expected = replace(delta, states=after).run(dispatched.gated_delta_net)
    recorded.resume()
    assert torch.equal(current, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_lens": torch.tensor([2], dtype=torch.int32)}, "contradict each other"),
        ({"cu_seqlens_q": torch.tensor([0, 2], dtype=torch.int32)}, "contradict each other"),
        ({"block_tables": torch.tensor([[9, 2]], dtype=torch.int32)}, "outside the 4 blocks"),
        ({"block_tables": torch.tensor([[2, -1]], dtype=torch.int32)}, "outside the 4 blocks"),
        ({"block_tables": torch.zeros(1, 2)}, "block_tables must be int32"),
        ({"block_tables": torch.zeros(1, 1).int()}, r"must be \[B, 2\]"),
        ({"beta": torch.zeros(3, 3)}, r"beta torch.float32 \[3, 3\] must be \[3, 4\]"),
        ({"decay": torch.zeros(3, 4).half()}, "decay torch.float16"),
        ({"qkv": torch.zeros(3, 512)[:, ::2]}, "rows in one piece"),
        ({"num_key_heads": 3}, "must be|no multiple"),
        ({"dt_bias": torch.zeros(4).double()}, "dt_bias must be contiguous float32"),
        ({"states": torch.zeros(4, 32, dtype=torch.uint8)}, "are too few"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    delta = make_delta([3], [4])
    for name, value in changes.items():
        if name in AttentionMetadata._fields:
            delta = replace(delta, batch=delta.batch._replace(**{name: value}))
        elif hasattr(delta.options, name):
            delta = replace(delta, options=replace(delta.options, **{name: value}))
        else:
            delta = replace(delta, **{name: value})
    with pytest.raises(ValueError, match=message):
        delta.run(NativeKernels(required_library()).gated_delta_net)
