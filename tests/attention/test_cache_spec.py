"""CacheSpec's arithmetic against counting."""

from __future__ import annotations

import pytest

from pagewick.attention.cache_spec import CacheSpec, full_attention_spec, latent_spec


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_num_blocks_counts_the_blocks_that_hold_a_token(block_size: int) -> None:
    spec = CacheSpec(kind="any", block_size=block_size, block_bytes=1)
    for num_tokens in range(35):
        assert spec.num_blocks(num_tokens) == len({token // block_size for token in range(num_tokens)})


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("lookback", [None, 0, 1, 2, 5, 16])
def test_first_block_is_the_first_that_a_later_token_looks_at(lookback: int | None, block_size: int) -> None:
    spec = CacheSpec(kind="any", block_size=block_size, block_bytes=1, lookback=lookback)
    for num_computed_tokens in range(35):
        seen = {num_computed_tokens // block_size}  # the next token's own block
        for token in range(num_computed_tokens, num_computed_tokens + 40):
            first = 0 if lookback is None else max(0, token - lookback)
            seen |= {key // block_size for key in range(first, num_computed_tokens)}
        assert spec.first_block(num_computed_tokens) == min(seen)


def test_full_attention_keeps_keys_and_values_of_every_token() -> None:
    spec = full_attention_spec(num_kv_heads=3, head_dim=64, block_size=16, element_bytes=2)
    assert spec.block_bytes == 2 * 3 * 64 * 16 * 2
    assert (spec.block_size, spec.lookback, spec.chunk_alignment) == (16, None, 1)


def test_layers_of_equal_numbers_have_equal_specs() -> None:
    assert full_attention_spec(2, 64, 16, 2) == full_attention_spec(2, 64, 16, 2)
    assert hash(full_attention_spec(2, 64, 16, 2)) == hash(full_attention_spec(2, 64, 16, 2))
    assert full_attention_spec(2, 64, 16, 2) != full_attention_spec(2, 64, 32, 2)


@pytest.mark.parametrize(("rank", "rope_dim"), [(512, 64), (7, 3)])
def test_a_latent_takes_no_more_than_its_elements(rank: int, rope_dim: int) -> None:
    spec = latent_spec(rank, rope_dim, block_size=32, element_bytes=2)
    assert (spec.kind, spec.lookback) == ("latent", None)
    assert spec.block_bytes == 32 * (rank + rope_dim) * 2
