"""Rows of hashed n-grams as transformers has them, however the tokens are cut."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from transformers import Qwen4ExpTextConfig
from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen4

from pagewick import kernels
from pagewick.kernels.options import NgramOptions
from pagewick.layers.ngram_config import multipliers_of, primes_from

END, VOCAB = 5, 97


def module_of(num_places: int, layer: int) -> Any:
    config = Qwen4ExpTextConfig(
        vocab_size=VOCAB, hidden_size=48, num_hidden_layers=4, ngram_size=num_places, heads_per_ngram=2,
        ngram_vocab_size_base=31, make_ngram_vocab_size_divisible_by=8, eos_token_id=[END, 9], seed=3,
        indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=64, indexer_budget=8, indexer_compress_ratio=4,
        head_dim=16,
    )  # fmt: skip
    module = qwen4.Qwen4ExpTextNGramEmbedding(config, 12 * (num_places - 1), layer_idx=0, ple_layer_index=layer)
    # The rows are what is compared.
    rows: Any = torch.nn.Module()
    rows.weight, rows.forward = torch.zeros(1), lambda ids: ids.unsqueeze(-1)
    module.ngram_embedding = rows
    return module


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("num_places", [2, 3, 4])
def test_rows_are_those_of_transformers(num_places: int, layer: int) -> None:
    num_heads = 2 * (num_places - 1)
    primes = primes_from(31, num_heads * (layer + 1))[num_heads * layer :]
    sizes = torch.tensor(primes)
    offsets = (sizes.cumsum(0) - sizes).view(num_places - 1, 2)
    multipliers = multipliers_of(layer, num_places=num_places, vocab_size=VOCAB, seed=3)
    options = NgramOptions(END, torch.tensor(multipliers), sizes.view_as(offsets), offsets)
    torch.manual_seed(1)
    ids = torch.randint(0, VOCAB, (61,))
    # Two in a row, one of another kind that ends nothing, and one at either end.
    ids[[0, 11, 12, 30, 60]], ids[20] = END, 9
    earlier = torch.zeros(61, num_places - 1)
    for place in range(1, num_places):
        earlier[place:, place - 1] = ids[:-place] + 1
    expected = module_of(num_places, layer)(ids[None], None)[0]
    assert torch.equal(kernels.ngram_rows(ids, earlier, options), expected)
    assert len(expected.unique(dim=0)) > 40


def test_the_largest_ids_do_not_overflow() -> None:
    multipliers = multipliers_of(0, num_places=3, vocab_size=2**24, seed=1234)
    assert all(multiplier % 2 == 1 and multiplier * (2**24 - 1) < 2**63 for multiplier in multipliers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_similarities_keep_their_sign(dtype: torch.dtype) -> None:
    """Products of 9 numbers that are all 2 and 4.5: 9 * 9 / 3 = 27. Small ones count as 1e-6, and 0 as 0."""
    keys = torch.full((4, 18), 2.0)
    streams = torch.tensor([[4.5], [-4.5], [1e-9], [0.0]]).expand(4, 18)
    found = kernels.stream_similarities(keys.to(dtype), streams.to(dtype), 2)
    expected = torch.tensor([27.0**0.5, -(27.0**0.5), 1e-3, 0.0])[:, None].expand(4, 2)
    torch.testing.assert_close(found, expected.to(dtype))


@pytest.mark.parametrize("start", [0, 3, 120, 65_530, 20_000_000])
def test_primes(start: int) -> None:
    primes = (number for number in range(max(start, 2), start + 10**6) if is_prime(number))
    assert primes_from(start, 50) == tuple(itertools.islice(primes, 50))
    # More than one interval has.
    found = primes_from(start, 7000)
    assert len(set(found)) == 7000 and sorted(found) == list(found) and is_prime(found[-1])


def is_prime(number: int) -> bool:
    return all(number % divisor for divisor in range(2, math.isqrt(number) + 1))
