"""Streams of hyper-connections in Triton against their definitions, interpreted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagewick.kernels import reference_hyper
from pagewick.kernels.options import HyperOptions, StreamWeights
from tests.kernels.triton.comparison import DTYPES, assert_near, numbers

hyper = pytest.importorskip("pagewick.kernels.triton.hyper")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def options_of(num_streams: int, num_weights: int, num_iterations: int = 5) -> HyperOptions:
    num_scales = 1 if num_weights == num_streams else 3
    biases, scales = numbers(num_weights, seed=1), numbers(num_scales, seed=2)
    return HyperOptions(biases, scales, num_iterations, eps=1e-2, norm_eps=1e-3)


def weights_of(num_tokens: int, num_streams: int) -> StreamWeights:
    before, after = numbers(2, num_tokens, num_streams, seed=5)
    return StreamWeights(before, after, numbers(num_tokens, num_streams, num_streams, seed=6))


def parts(weights: StreamWeights) -> list[Tensor]:
    return [part for part in weights if part is not None]


@pytest.mark.parametrize("num_streams", [1, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights(num_streams: int, dtype: torch.dtype) -> None:
    """The cases include a single stream, and tokens whose numbers do not fit into one tile."""
    streams = numbers(3, num_streams, 4096 // num_streams + 77).to(dtype)
    for num_weights in {num_streams, (2 + num_streams) * num_streams}:
        products, options = 20 * numbers(3, num_weights, seed=4), options_of(num_streams, num_weights)
        found = hyper.stream_weights(products, streams, options)
        expected = reference_hyper.stream_weights(products, streams, options)
        assert len(parts(found)) == len(parts(expected)) == (1 if num_weights == num_streams else 3)
        for ours, theirs in zip(parts(found), parts(expected), strict=True):
            assert ours.dtype == torch.float32
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-6)


def test_iterations_count() -> None:
    """Each of them changes the result, and few products are far from a limit."""
    streams, products = numbers(2, 4, 9), 9 * numbers(2, 24, seed=4)
    for num_iterations in (1, 2, 20):
        options = options_of(4, 24, num_iterations)
        found = hyper.stream_weights(products, streams, options).mixing
        torch.testing.assert_close(
            found, reference_hyper.stream_weights(products, streams, options).mixing, rtol=2e-5, atol=1e-6
        )


@pytest.mark.parametrize("num_streams", [1, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_and_mixtures(num_streams: int, dtype: torch.dtype) -> None:
    """With an output that is a part of wider rows, and with more numbers than a program takes."""
    streams, weights = numbers(3, num_streams, 1029).to(dtype), weights_of(3, num_streams)
    output = numbers(3, 1040, seed=3).to(dtype)[:, 5:1034]
    assert_near(
        hyper.collapse_streams(streams, weights.before), reference_hyper.collapse_streams(streams, weights.before)
    )
    assert_near(
        hyper.expand_streams(streams, output, weights), reference_hyper.expand_streams(streams, output, weights), 4e-6
    )


def test_a_token_has_the_bits_that_it_has_alone() -> None:
    streams, output = numbers(7, 4, 1029).half(), numbers(7, 1029, seed=3).half()
    products, options = 20 * numbers(7, 24, seed=4), options_of(4, 24)
    weights = hyper.stream_weights(products, streams, options)
    together = [*parts(weights), hyper.collapse_streams(streams, weights.before)]
    together.append(hyper.expand_streams(streams, output, weights))
    for token in (0, 6):
        part = slice(token, token + 1)
        own = hyper.stream_weights(products[part], streams[part], options)
        alone = [*parts(own), hyper.collapse_streams(streams[part], own.before)]
        alone.append(hyper.expand_streams(streams[part], output[part], own))
        assert all(torch.equal(one, all_of[part]) for one, all_of in zip(alone, together, strict=True))


def test_other_calls_pass_to_the_definition() -> None:
    """More streams than there is room for."""
    streams, products, options = numbers(2, 5, 9), numbers(2, 35, seed=4), options_of(5, 35)
    weights = hyper.stream_weights(products, streams, options)
    expected = reference_hyper.stream_weights(products, streams, options)
    assert all(map(torch.equal, weights, expected))
    for name, arguments in (("collapse_streams", (weights.before,)), ("expand_streams", (streams[:, 0], weights))):
        assert torch.equal(
            getattr(hyper, name)(streams, *arguments), getattr(reference_hyper, name)(streams, *arguments)
        )


def test_streams_that_are_not_mixed_go_to_the_definition() -> None:
    streams, products, output = numbers(3, 4, 77), numbers(3, 8, seed=4), numbers(3, 77, seed=7)
    options = HyperOptions(numbers(8, seed=1), numbers(2, seed=2), 0, eps=1e-2, norm_eps=1e-3, magnitude=1.7)
    found = hyper.stream_weights(products, streams, options)
    expected = reference_hyper.stream_weights(products, streams, options)
    assert found.mixing is None and torch.equal(found.after, expected.after)
    whole = hyper.expand_streams(streams, output, found)
    assert torch.equal(whole, reference_hyper.expand_streams(streams, output, expected))
