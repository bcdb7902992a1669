"""sample_tokens in Triton against its definition and a plain loop, interpreted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pagewick.kernels import reference
from pagewick.kernels.options import DrawOptions
from tests.deep import IS_DEEP
from tests.kernels.test_sampling import PARAMETERS, expected_probs, expected_token
from tests.kernels.triton.comparison import numbers

sampling = pytest.importorskip("pagewick.kernels.triton.sampling")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def draw_options(parameters: list[tuple[float, float, int, float]], uniform: Tensor) -> DrawOptions:
    temperature, min_p, top_k, top_p = torch.tensor(parameters, dtype=torch.float64).unbind(1)
    return DrawOptions(temperature.float(), min_p, top_k.long(), top_p, uniform)


def random(num: int, seed: int = 0) -> Tensor:
    return torch.rand(num, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("seed", range(40 if IS_DEEP else 1))
def test_tokens_of_a_plain_loop(seed: int) -> None:
    logits = (3 * numbers(len(PARAMETERS), 23, seed=seed)).round(decimals=1)  # ties occur
    uniform = random(len(PARAMETERS), seed)
    drawn = sampling.sample_tokens(logits, draw_options(PARAMETERS, uniform))
    for row, (token_id, parameters) in enumerate(zip(drawn.tolist(), PARAMETERS, strict=True)):
        assert token_id == expected_token(expected_probs(logits[row].tolist(), *parameters), uniform[row].item())


def test_a_large_bucket_is_halved_until_few_tokens_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal logits share a bucket; the lowest ids come first. Few tokens are ordered here, so that little is enough."""
    few = {"NUM_RANKED": 64, "RANKED_BLOCK": 32}
    draws = tuple(replace(variant, constexprs={**variant.constexprs, **few}) for variant in sampling._DRAWS)
    monkeypatch.setattr(sampling, "_DRAWS", draws)
    logits = torch.zeros(3, 1100)
    logits[0, 200:300], logits[1], logits[2, :150] = float("-inf"), -0.0, 0.001
    uniform = random(3, 3)
    parameters = [(1.0, 0.0, 0, 1.0), (1.0, 0.0, 800, 0.75), (1.0, 0.999, 151, 1.0)]
    drawn = sampling.sample_tokens(logits, draw_options(parameters, uniform)).tolist()
    number = int(uniform[0] * 1000)
    assert drawn == [number if number < 200 else number + 100, int(uniform[1] * 600), int(uniform[2] * 151)]


def test_a_row_of_several_parts() -> None:
    logits, uniform = numbers(1, sampling.PART + 1), random(1, 4)
    logits[0, -1] = 3.5
    draw = draw_options([(0.5, 0.01, 50, 0.9)], uniform)
    assert torch.equal(sampling.sample_tokens(logits, draw), reference.sample_tokens(logits, draw))
    masks = torch.full((1, -(-logits.shape[1] // 8)), 0x55, dtype=torch.uint8)
    assert torch.equal(sampling.sample_tokens(logits, draw, masks), reference.sample_tokens(logits, draw, masks))
    first = draw._replace(uniform=torch.zeros_like(uniform))
    assert sampling.sample_tokens(logits, first).item() == int(logits.argmax())


def test_ties_masked_tokens_and_extreme_numbers() -> None:
    logits = torch.full((6, 100), float("-inf"))
    logits[:2] = 0.0
    logits[:2, [30, 60]] = 5.0
    logits[2:4, 17], logits[3, 3] = -1000.0, -1000.5
    logits[4:, :3] = torch.tensor([1e4, -1e4, 9.9e3])
    parameters = [
        (1.0, 0.0, 1, 1.0), (1.0, 1.0, 2, 1.0), (1.0, 0.0, 0, 1.0), (1.0, 0.0, 0, 1.0), (1e-30, 0.5, 0, 1.0),
        (1e30, 0.0, 0, 1.0),
    ]  # fmt: skip
    uniform = torch.tensor([0.9, 0.9, 1 - 2**-53, 1 - 2**-53, 0.99, 0.5], dtype=torch.float64)
    drawn = sampling.sample_tokens(logits, draw_options(parameters, uniform))
    assert drawn.tolist() == [30, 60, 17, 3, 0, 2]


def test_a_row_that_has_no_numbers_gives_some_token_of_the_vocabulary() -> None:
    logits = numbers(3, 50)
    logits[0, 7], logits[1, 9], logits[2] = float("nan"), float("inf"), float("-inf")
    drawn = sampling.sample_tokens(logits, draw_options([(1.0, 0.1, 5, 0.5)] * 3, random(3)))
    assert bool(((drawn >= 0) & (drawn < 50)).all())
