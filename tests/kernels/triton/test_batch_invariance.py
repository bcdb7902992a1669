"""With --batch-invariant, a row has the same bits in every batch: each operation of a step, interpreted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch import Tensor

from pagewick.expert_routing import Routing
from pagewick.kernels import batch_invariance
from pagewick.kernels.options import (
    DrawOptions,
    HeadLayout,
    HeadOptions,
    Rotation,
    ScoreOptions,
    StoredMatrix,
)
from tests.deep import IS_DEEP
from tests.kernels.delta import make_delta
from tests.kernels.paged import Paged, make_paged, plain_cache
from tests.kernels.scan import make_convolution, make_scan
from tests.kernels.states import StateBatch
from tests.kernels.test_mla import make_latents
from tests.kernels.triton.comparison import numbers
from tests.kernels.triton.test_moe import E, K, plain_experts, quantized_experts, random, some_ids
from tests.kernels.triton.test_quantized import packed, random_x

pytest.importorskip("triton")
from pagewick.kernels.triton import (
    attention,
    delta,
    latents,
    launches,
    logits,
    mla,
    moe,
    norm,
    rope,
    routing,
    sampling,
    scan,
    short_convolution,
)
from pagewick.kernels.triton.linear import linear
from pagewick.kernels.triton.quantized import quantized_linear

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
BATCHES, MOST = (1, 2, 5, 17) if IS_DEEP else (1, 5, 17), 33
# Computes the results of the first n of MOST rows.
Operation = Callable[[int], Tensor]


@pytest.fixture(autouse=True)
def required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_invariance, "is_required", lambda: True)


def product(dtype: torch.dtype, out_dtype: torch.dtype) -> Operation:
    x, weight = numbers(MOST, 72).to(dtype), numbers(21, 72, seed=1).to(dtype)
    bias = numbers(21, seed=2).to(dtype)
    return lambda n: linear(x[:n], StoredMatrix(weight, 21, 72, False), bias, out_dtype)


def quantized_product(dtype: torch.dtype) -> Operation:
    weight, _ = packed("Q4_K")
    x = random_x(MOST, weight.num_columns, dtype)
    return lambda n: quantized_linear(x[:n], weight)


def products_of_experts(name: str) -> Operation:
    weight = quantized_experts(name)[0] if name else plain_experts(dtype=torch.float16)
    x, ids = random(MOST, K, dtype=torch.float16), some_ids(MOST, 2)
    return lambda n: moe.grouped_linear(x[:n], weight, ids[:n]).view(n, -1)


def layer_of_experts() -> Operation:
    gate_up, down = plain_experts(66, 64, torch.float16), plain_experts(64, 33, torch.float16)
    x, scores = random(MOST, 64, dtype=torch.float16), random(MOST, E, seed=5)
    return lambda n: moe.fused_moe(x[:n], scores[:n], gate_up, down, Routing(top_k=2, renormalize=True))


def norms() -> Operation:
    x, residual, weight = numbers(MOST, 96), numbers(MOST, 96, seed=1), numbers(96, seed=2)
    return lambda n: torch.cat(
        (norm.add_rms_norm(x[:n], residual[:n], weight, 1e-6)[0], norm.layer_norm(x[:n], weight, weight, 1e-6)), dim=1
    )


def choices_of_experts() -> Operation:
    scores, outputs = numbers(MOST, 20), numbers(3 * MOST, 40, seed=1)

    def compute(n: int) -> Tensor:
        ids, weights = routing.route(scores[:n], Routing(top_k=3))
        return torch.cat((ids, weights, routing.combine(outputs[: 3 * n], weights)), dim=1)

    return compute


def heads_and_what_is_stored() -> Operation:
    qkv, (cos, sin) = numbers(MOST, 4 * 32), numbers(2, MOST, 16, seed=1)

    def compute(n: int) -> Tensor:
        cache = plain_cache(torch.zeros(MOST, 2, 1, 1, 32))
        rotation = HeadOptions(Rotation(cos[:n], sin[:n]))
        q = rope.rope_and_store(qkv[:n], cache, torch.arange(n), HeadLayout(2, 1, 32), rotation)
        return torch.cat((q.flatten(1), cache.data[:n].flatten(1)), dim=1)

    return compute


def latents_that_are_stored() -> Operation:
    q, rows, (cos, sin) = numbers(MOST, 2, 24), numbers(MOST, 48, seed=1), numbers(2, MOST, 8, seed=2)

    def compute(n: int) -> Tensor:
        cache, rotation = torch.zeros(MOST, 1, 48), Rotation(cos[:n], sin[:n])
        rotated = latents.rope_and_store_latent(
            q[:n], rows[:n], cache, torch.arange(n), rotation=rotation, norm_weight=torch.ones(32), norm_eps=1e-6
        )
        return torch.cat((rotated.flatten(1), cache[:n].flatten(1)), dim=1)

    return compute


def tokens_and_sums() -> Operation:
    x = numbers(MOST, 1100)
    # Most are the likeliest tokens: the interpreter takes its time for drawing.
    temperature = torch.zeros(MOST)
    temperature[[0, 4, 16]] = 0.9
    column = torch.full((MOST,), 0.9, dtype=torch.float64)
    draw = DrawOptions(temperature, 0.01 * column, torch.full((MOST,), 50), column, column)

    def compute(n: int) -> Tensor:
        best, highest = logits.argmax_rows(x[:n])
        drawn = sampling.sample_tokens(x[:n], DrawOptions(*(values[:n] for values in draw)))
        return torch.stack((best, highest, logits.log_softmax_stats(x[:n])[1], drawn), dim=1)

    return compute


def attend(paged: Paged) -> Tensor:
    return attention.paged_attention(paged.q, plain_cache(paged.kv_cache), paged.metadata, ScoreOptions(0.25))


def sequences_of_one_token() -> Operation:
    paged = make_paged([1] * MOST, [1 + 4 * seq for seq in range(MOST)], heads=(2, 1), head_dim=16)

    def compute(n: int) -> Tensor:
        tables, lens, begins = paged.block_tables[:n], paged.context_lens[:n], paged.cu_seqlens_q[: n + 1]
        return attend(replace(paged, q=paged.q[:n], block_tables=tables, context_lens=lens, cu_seqlens_q=begins))

    return compute


def results_and_states(batch: StateBatch, module: ModuleType) -> Operation:
    def compute(n: int) -> Tensor:
        first = batch.first(n)
        out, states = first.run(batch.of_module(module))
        left = states.view(torch.float32)[first.batch.block_tables[:, 1]]
        return torch.cat((out.view(n, -1), left), dim=1)

    return compute


OPERATIONS: dict[str, Callable[[], Operation]] = {
    "linear in float16": lambda: product(torch.float16, torch.float16),
    "linear in float16 into float32": lambda: product(torch.float16, torch.float32),
    "linear in float32": lambda: product(torch.float32, torch.float32),
    "quantized_linear in float16": lambda: quantized_product(torch.float16),
    "quantized_linear in float32": lambda: quantized_product(torch.float32),
    "grouped_linear": lambda: products_of_experts(""),
    "grouped_linear of int4": lambda: products_of_experts("int4_g64"),
    "fused_moe": layer_of_experts,
    "norms": norms,
    "route and combine": choices_of_experts,
    "rope_and_store": heads_and_what_is_stored,
    "rope_and_store_latent": latents_that_are_stored,
    "argmax_rows, log_softmax_stats and sample_tokens": tokens_and_sums,
    "paged_attention": sequences_of_one_token,
    "gated_delta_net": lambda: results_and_states(
        make_delta([1] * MOST, [3] * MOST, heads=(1, 1), dims=(16, 16), width=2), delta
    ),
    "selective_scan": lambda: results_and_states(
        make_scan([1] * MOST, [3] * MOST, heads=(2, 1), dims=(32, 16), width=2), scan
    ),
    "short_convolution": lambda: results_and_states(
        make_convolution([1] * MOST, [3] * MOST, num_channels=16), short_convolution
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_row_has_the_same_bits_in_every_batch(name: str) -> None:
    compute = OPERATIONS[name]()
    together = compute(MOST)
    for number in BATCHES:
        assert torch.equal(compute(number), together[:number]), number


@pytest.mark.parametrize("cuts", [(0, 1, 4, 18), *([(0, 17, 18), tuple(range(19))] if IS_DEEP else [])], ids=str)
def test_a_prompt_has_the_same_bits_in_chunks_of_any_length(cuts: tuple[int, ...]) -> None:
    """The batch decides how long a chunk is, and how many draft tokens are verified at once."""
    paged = make_paged([18], [290], heads=(2, 1), head_dim=16)
    whole = attend(paged)
    latent = make_latents([18], [290], dims=(32, 16))
    of_latents = latent.attend(mla)
    for begin, end in pairwise(cuts):
        assert torch.equal(attend(paged.only(0, begin, end)), whole[begin:end])
        assert torch.equal(latent.only(0, begin, end).attend(mla), of_latents[begin:end])


def test_one_kind_of_tile_serves_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype, kind in ((torch.bfloat16, launches.FEW), (torch.float32, launches.ROWS)):
        assert {launches.kind_for(number, dtype) for number in (1, 16, 17, 5000)} == {kind}
        assert {moe.kind_for_choices(number, 8, dtype) for number in (1, 17, 5000)} == {kind}
    monkeypatch.setattr(batch_invariance, "is_required", lambda: False)
    assert len({launches.kind_for(number, torch.bfloat16) for number in (1, 16, 17, 5000)}) == 4
