"""Rotation of heads, cache writes and products by the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from pagewick import kernels
from pagewick.kernels import reference
from pagewick.kernels.options import Rotation, StoredMatrix
from pagewick.kernels.reference_rope import turn_heads
from tests.kernels.paged import plain_cache


def angles(num_tokens: int, half: int) -> torch.Tensor:
    frequencies = 10000.0 ** (-torch.arange(half) / half)
    return torch.arange(num_tokens)[:, None] * 7.0 * frequencies


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (64, 64), (80, 20), (6, 2)])
def test_rotated_heads_have_the_bits_of_transformers(head_dim: int, rotary_dim: int) -> None:
    torch.manual_seed(head_dim)
    q, k = torch.randn(11, 6, head_dim), torch.randn(11, 2, head_dim)
    theta = angles(11, rotary_dim // 2)
    rotation = Rotation(theta.cos(), theta.sin())
    twice = torch.cat((theta, theta), dim=-1)
    expected_q, expected_k = apply_rotary_pos_emb(q[..., :rotary_dim], k[..., :rotary_dim], twice.cos(), twice.sin())
    assert torch.equal(turn_heads(q, None, rotation), torch.cat((expected_q, q[..., rotary_dim:]), dim=-1))
    assert torch.equal(turn_heads(k, None, rotation), torch.cat((expected_k, k[..., rotary_dim:]), dim=-1))


def test_heads_are_turned_by_the_angle() -> None:
    q = torch.tensor([[[1.0, 0.0, 0.0, 2.0]]])
    theta = torch.tensor([[torch.pi / 2, torch.pi]])
    rotated = turn_heads(q, None, Rotation(theta.cos(), theta.sin()))
    torch.testing.assert_close(rotated, torch.tensor([[[0.0, 0.0, 1.0, -2.0]]]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("slots", [[0, 5, 11, 6], [7, -1, -1, 2], [-1, -1, -1, -1], []])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
def test_store_kv_writes_the_named_slots_and_nothing_else(slots: list[int], cache_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, len(slots), 3, 8)
    kv_cache = torch.full((4, 2, 3, 4, 8), float("nan"), dtype=cache_dtype)
    expected = kv_cache.clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[slot // 4, 0, :, slot % 4] = k[token]
            expected[slot // 4, 1, :, slot % 4] = v[token]
    kernels.store_kv(k, v, plain_cache(kv_cache), torch.tensor(slots, dtype=torch.int64))
    assert torch.equal(kv_cache.nan_to_num(99), expected.nan_to_num(99))


class RoundedTo(TorchDispatchMode):
    """Record the dtypes of all products."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "mm" in func.__name__:
            self.dtypes.append(result.dtype)
        return result


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8)])
def test_logits_on_a_gpu_are_never_rounded_to_16_bits(shape: tuple[int, ...], has_bias: bool) -> None:
    """Tensors without memory stand in for those of a GPU: PyTorch knows which dtypes and shapes these would have."""
    with FakeTensorMode(), RoundedTo() as products:
        x, data, bias = (torch.empty(size, dtype=torch.bfloat16, device="cuda") for size in (shape, (5, 8), (5,)))
        weight = StoredMatrix(data, 5, 8, is_packed=False)
        logits = reference.linear(x, weight, bias if has_bias else None, torch.float32)
        assert (logits.dtype, logits.shape) == (torch.float32, (*shape[:-1], 5))
        assert reference.linear(x, weight, bias if has_bias else None).dtype == torch.bfloat16
    assert products.dtypes == [torch.float32, torch.bfloat16]
