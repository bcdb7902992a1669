"""The gated delta rule against transformers. Tests of all operations on states: test_states.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from pagewick.kernels import reference
from pagewick.kernels.options import DeltaOptions
from pagewick.kernels.reference_delta import split_states
from tests.kernels.conftest import NativeKernels, required_library
from tests.kernels.delta import DeltaBatch, make_channel_delta, make_delta
from tests.kernels.states import assert_is_expected, metadata


@pytest.mark.parametrize(
    ("heads", "dims", "width"),
    [((1, 1), (1, 1), 1), ((1, 3), (24, 40), 2), ((3, 3), (16, 7), 3), ((2, 6), (33, 128), 4), ((1, 2), (128, 128), 4)],
)
def test_heads_dimensions_and_widths(
    operations: ModuleType | NativeKernels, heads: tuple[int, int], dims: tuple[int, int], width: int
) -> None:
    delta = make_delta([1, 6, 2], [3, 0, 1], heads=heads, dims=dims, width=width)
    assert_is_expected(delta.run(operations.gated_delta_net), delta)


@pytest.mark.parametrize(
    ("heads", "dims", "width"),
    [((1, 1), (1, 1), 1), ((3, 3), (16, 7), 3), ((2, 2), (33, 80), 4), ((1, 1), (128, 128), 4)],
)
def test_channels_that_decay_by_themselves(
    operations: ModuleType | NativeKernels, heads: tuple[int, int], dims: tuple[int, int], width: int
) -> None:
    delta = make_channel_delta([1, 40, 2], [3, 0, 1], heads=heads, dims=dims, width=width)
    assert_is_expected(delta.run(operations.gated_delta_net), delta)


@pytest.mark.parametrize("decay_bound", [-0.3, -5.0])
def test_decays_with_a_bound(operations: ModuleType | NativeKernels, decay_bound: float) -> None:
    delta = make_channel_delta([1, 40, 2], [3, 0, 1], dims=(33, 7), decay_bound=decay_bound)
    assert_is_expected(delta.run(operations.gated_delta_net), delta)


def test_states_that_are_reflected(operations: ModuleType | NativeKernels) -> None:
    delta = make_delta([1, 40, 2], [3, 0, 1], strength=2.0)
    assert_is_expected(delta.run(operations.gated_delta_net), delta)


@pytest.mark.parametrize("make", [make_delta, make_channel_delta, partial(make_channel_delta, decay_bound=-5.0)])
def test_large_numbers_give_no_infinities(
    operations: ModuleType | NativeKernels, make: Callable[..., DeltaBatch]
) -> None:
    delta = make([9], [4])
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beta": torch.zeros(3, 3)}, r"beta torch.float32 \[3, 3\] must be \[3, 4\]"),
        ({"decay": torch.zeros(3, 4).half()}, "decay torch.float16"),
        ({"qkv": torch.zeros(3, 512)[:, ::2]}, "rows in one piece"),
        ({"num_key_heads": 3}, "must be|no multiple"),
        ({"has_channel_decay": True}, r"decay torch.float32 \[3, 4\] must be \[3, 96\]"),
        ({"has_channel_decay": True, "decay": torch.zeros(3, 96)}, "4 value heads decay by channel"),
        ({"decay_bound": -5.0}, "decay_bound must be below 0, not -5.0, and decays be by channel"),
        ({"dt_bias": torch.zeros(4).double()}, "dt_bias must be contiguous float32"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    delta = make_delta([3], [4]).changed(changes)
    with pytest.raises(ValueError, match=message):
        delta.run(NativeKernels(required_library()).gated_delta_net)
