"""route and combine in Triton against their definitions, interpreted."""

from __future__ import annotations

import pytest
import torch

from pagewick.expert_routing import Routing
from pagewick.kernels import reference
from pagewick.kernels.options import SharedOutput
from tests.kernels.triton.comparison import DTYPES, assert_near, numbers

routing = pytest.importorskip("pagewick.kernels.triton.routing")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
# Qwen2-MoE, Qwen3-MoE, DeepSeek-V2 and DeepSeek-V3 with awkward sizes, and groups that are all open.
ROUTINGS = [
    (60, Routing(top_k=5)),
    (128, Routing(top_k=8, renormalize=True)),
    (160, Routing(top_k=6, num_groups=8, top_k_groups=3, scaling=16.0)),
    (
        72,
        Routing(
            top_k=4,
            scoring="sigmoid",
            renormalize=True,
            epsilon=0.25,
            num_groups=6,
            top_k_groups=2,
            group_score="sum_of_two",
        ),
    ),
    (8, Routing(top_k=2, num_groups=2, top_k_groups=2, scoring="sigmoid", scaling=2.5)),
    (40, Routing(top_k=3, num_groups=10, top_k_groups=4, group_score="sum_of_two")),
    (600, Routing(top_k=3)),
]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_experts", "rule"), ROUTINGS)
def test_routes(num_experts: int, rule: Routing, has_bias: bool) -> None:
    logits = numbers(6, num_experts).round(decimals=1)  # ties occur
    logits[2], logits[3, 5], logits[4, 3], logits[5] = 0, float("inf"), float("nan"), float("-inf")
    bias = numbers(num_experts, seed=1) if has_bias else None
    expert_ids, weights = routing.route(logits, rule, bias)
    expected_ids, expected = reference.route(logits, rule, bias)
    assert torch.equal(expert_ids, expected_ids) and expert_ids.dtype == torch.int32
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-7, equal_nan=True)
    scales = numbers(num_experts, seed=2)
    _, scaled = routing.route(logits, rule, bias, scales)
    torch.testing.assert_close(scaled, weights * scales[expert_ids.long()], equal_nan=True)


@pytest.mark.parametrize(("num_experts", "margin"), [(16, 0.6), (7, 0.02), (40, 1.5)])
def test_routes_among_experts_near_each_other(num_experts: int, margin: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Phi-3.5-MoE, with logits of both signs, ties, and quotients at the margin."""
    logits = numbers(8, num_experts) - torch.linspace(0, 2, 8)[:, None]
    logits[1], logits[2], logits[3, 5] = logits[1].round(decimals=1), 0, float("inf")
    logits[4, 3], logits[5] = float("nan"), float("-inf")
    rule = Routing(top_k=3, scoring="near", margin=margin, scaling=1.5)
    expected_ids, expected = reference.route(logits, rule)
    with pytest.raises(ValueError, match="a bias is added to scores"):
        routing.route(logits, rule, logits[0])
    monkeypatch.setattr(routing, "by_definition", None)
    expert_ids, weights = routing.route(logits, rule)
    assert torch.equal(expert_ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=2e-6, atol=1e-7, equal_nan=True)
    assert weights[~weights.isnan()].unique().numel() > 3


@pytest.mark.parametrize("has_table", [False, True])
@pytest.mark.parametrize("num_experts", [7, 40])
def test_logits_of_root_scores(num_experts: int, has_table: bool) -> None:
    """DeepSeek V4: by a bias, with ties and scores of all sizes, or by a table that may name an expert twice."""
    logits = numbers(5, num_experts + 3).mul(4)[:, 3:]
    logits[1], logits[2] = logits[1].round(), torch.linspace(-200, 90, num_experts)
    choice = numbers(num_experts, seed=1).round()
    if has_table:
        choice = numbers(5, num_experts, seed=2).argsort(1)[:, :4]
        choice[3, 1], choice[4] = choice[3, 0], choice[4, 0]
    found, expected = (each.root_logits(logits, choice, 4) for each in (routing, reference))
    assert found.isfinite().sum(1).tolist() == ([4, 4, 4, 3, 1] if has_table else [4] * 5)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_combine(dtype: torch.dtype) -> None:
    y, output = numbers(15, 1029).to(dtype), numbers(5, 1029, seed=1).to(dtype)
    weights, gate = numbers(5, 3, seed=2), numbers(5, seed=3)
    for shared in (None, SharedOutput(output), SharedOutput(output, gate)):
        assert_near(routing.combine(y, weights, shared), reference.combine(y, weights, shared), 4e-6)
