"""CacheSpec's arithmetic, compared with counting."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pagewick.attention.cache_spec import (
    CACHE_DTYPES,
    CacheDtype,
    CacheSpec,
    KeptHeads,
    KeptIndexKeys,
    KeptLatents,
    KeptRows,
    KeptState,
    attention_spec,
    native_spec,
    state_spec,
)
from pagewick.errors import ConfigError

INT8 = CacheDtype("int8", 8, num_scale_bytes=4)


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_num_blocks_counts_the_blocks_that_hold_a_token(block_size: int) -> None:
    spec = CacheSpec(kind="any", block_size=block_size, block_bytes=1)
    for num_tokens in range(35):
        assert spec.num_blocks(num_tokens) == len({token // block_size for token in range(num_tokens)})


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("lookback", [None, 0, 1, 2, 5, 16])
def test_first_block_is_the_first_that_a_later_token_reads(lookback: int | None, block_size: int) -> None:
    spec = CacheSpec(kind="any", block_size=block_size, block_bytes=1, lookback=lookback)
    for num_computed_tokens in range(35):
        seen = {num_computed_tokens // block_size}  # the next token's own block
        for token in range(num_computed_tokens, num_computed_tokens + 40):
            first = 0 if lookback is None else max(0, token - lookback)
            seen |= {key // block_size for key in range(first, num_computed_tokens)}
        assert spec.first_block(num_computed_tokens) == min(seen)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 3, 8, 16])
def test_a_chunk_keeps_its_first_block_to_its_end(chunk: int, block_size: int) -> None:
    spec = CacheSpec(kind="any", block_size=block_size, block_bytes=1, lookback=chunk - 1, is_chunked=True)
    for num_computed_tokens in range(70):
        chunks = [token // chunk for token in range(num_computed_tokens + 1)]
        assert spec.first_block(num_computed_tokens) == chunks.index(chunks[-1]) // block_size


def test_full_attention_keeps_keys_and_values_of_every_token() -> None:
    spec = native_spec(KeptHeads(num_kv_heads=3, head_dim=64), 16, "bfloat16")
    assert spec.block_bytes == 2 * 3 * 64 * 16 * 2
    assert (spec.kind, spec.block_size, spec.lookback, spec.chunk_alignment) == ("full_attention", 16, None, 1)
    assert (spec.key_dtype, spec.value_dtype, spec.prefix_reuse) == ("bfloat16", "bfloat16", "blocks")


def test_the_lookback_of_a_window_excludes_the_new_token() -> None:
    full, windowed = (native_spec(KeptHeads(2, 24, window), 8, "float32") for window in (None, 7))
    assert (windowed.kind, windowed.lookback, windowed.block_bytes) == ("sliding_window", 6, full.block_bytes)
    # 24 is rounded up to 32.
    assert full.block_bytes == 2 * 2 * 32 * 8 * 4


def test_layers_of_equal_numbers_have_equal_specs() -> None:
    one, same = native_spec(KeptHeads(2, 64), 16, "float16"), native_spec(KeptHeads(2, 64), 16, "float16")
    assert one == same and hash(one) == hash(same)
    assert one != native_spec(KeptHeads(2, 64), 32, "float16")
    # The number of bytes is equal, but their meaning is not.
    assert one != native_spec(KeptHeads(2, 64), 16, "bfloat16")
    assert one != native_spec(KeptHeads(2, 64), 16, "float16", layout="packed")


@pytest.mark.parametrize(("latent_dim", "rope_dim"), [(512, 64), (7, 3)])
def test_a_latent_takes_no_more_than_its_elements(latent_dim: int, rope_dim: int) -> None:
    spec = native_spec(KeptLatents(latent_dim, rope_dim), 32, "bfloat16")
    assert (spec.kind, spec.lookback) == ("latent", None)
    assert spec.block_bytes == 32 * (latent_dim + rope_dim) * 2


def test_index_keys_take_a_group_of_their_own() -> None:
    latents, keys = (native_spec(kept, 8, "float16") for kept in (KeptLatents(20, 4, True), KeptIndexKeys(24)))
    assert latents.block_bytes == keys.block_bytes == 8 * 24 * 2
    assert (keys.kind, keys.lookback) == ("index_keys", None) and latents != keys


def test_a_block_of_entries_covers_whole_windows() -> None:
    """Windows of 4 tokens end in blocks of 32; a window of 128 is a block, and of 48 a part of one."""
    for ratio, size, num_rows in ((4, 32, 8), (128, 128, 1), (48, 96, 2), (1, 32, 32)):
        spec = native_spec(KeptRows(20, 47, ratio), 32, "bfloat16")
        assert (spec.block_size, spec.block_bytes, spec.lookback) == (size, num_rows * 20 * 2, 47)
    assert native_spec(KeptRows(20, None, 4), 32, "float32").first_block(1000) == 0


@pytest.mark.parametrize("kept", [KeptLatents(20, 4, True), KeptIndexKeys(24), KeptRows(24, 8, 2)])
@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
def test_selected_tokens_have_no_scales(kept: KeptLatents | KeptIndexKeys | KeptRows, dtype: str) -> None:
    with pytest.raises(ConfigError, match=f"--kv-cache-dtype {dtype} does not go with the sparse attention"):
        native_spec(kept, 8, dtype)


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        (KeptLatents(24, 8), "the latent attention of this model; give int8 or bfloat16"),
        (KeptHeads(2, 20), "the heads of 20 of this model; give int8 or bfloat16"),
        (KeptHeads(2, 64, is_selective=True), "the sparse attention of this model; give bfloat16"),
    ],
)
def test_4_bits_are_for_heads_that_can_be_rotated(kept: KeptHeads | KeptLatents, words: str) -> None:
    with pytest.raises(ConfigError, match=f"--kv-cache-dtype int4 does not go with {words}"):
        native_spec(kept, 8, "int4")
    # Half a byte for each number, and 4 bytes for each scale.
    assert native_spec(KeptHeads(3, 24), 32, "int4").block_bytes == 32 * 3 * 2 * (32 // 2 + 4)


@pytest.mark.parametrize("block_size", [1, 3, 32])
def test_scales_of_every_token_and_head_are_counted(block_size: int) -> None:
    """Sizes are multiples of 16 bytes; keys and values may have different dtypes."""
    int8 = attention_spec(KeptHeads(3, 20), block_size, INT8, INT8, layout="l")
    exact = block_size * 3 * 2 * (20 + 4)
    assert exact <= int8.block_bytes < exact + 16 and int8.block_bytes % 16 == 0
    mixed = attention_spec(KeptHeads(3, 20), block_size, CACHE_DTYPES["float16"], INT8, layout="l")
    exact = block_size * 3 * (40 + 20 + 4)
    assert exact <= mixed.block_bytes < exact + 16
    assert (mixed.key_dtype, mixed.value_dtype, mixed.layout) == ("float16", "int8", "l")
    latents = attention_spec(KeptLatents(20, 5), block_size, INT8, INT8, layout="l")
    exact = block_size * (20 + 4 + 5 + 4)
    assert exact <= latents.block_bytes < exact + 16


def test_a_table_of_snapshots_has_two_entries() -> None:
    tokens = CacheSpec(kind="any", block_size=4, block_bytes=1)
    states = CacheSpec(kind="any", block_size=4, block_bytes=1, lookback=1, prefix_reuse="snapshots")
    assert [tokens.table_width(number) for number in (1, 4, 5, 400)] == [1, 1, 2, 100]
    assert [states.table_width(number) for number in (1, 4, 5, 400)] == [3, 3, 3, 3]


def test_bytes_are_known_without_torch() -> None:
    code = "import pagewick.attention.cache_spec, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("num_bytes", "distance"),
    [(100, 32), (2**17, 32), (2**20, 256), (2_195_456, 512), (2**23, 1024), (2**26, 1024)],
)
def test_a_state_takes_about_as_much_memory_as_the_tokens_between_two_snapshots(num_bytes: int, distance: int) -> None:
    spec = state_spec(KeptState(num_bytes), layout="states 1")
    assert spec.has_snapshots and spec.lookback == 1
    assert spec.block_size == distance
    assert spec.block_bytes % 64 == 0 and 0 <= spec.block_bytes - num_bytes < 64
