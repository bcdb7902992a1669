"""Paged attention through the backend, compared with torch's attention over contiguous keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pagewick import kernels
from pagewick.attention.backend import GroupBatch, Scoring
from pagewick.attention.cache_spec import KeptHeads, native_spec
from pagewick.attention.native import NativeBackend, choose_backend
from pagewick.kernels.options import AttentionMetadata
from pagewick.layers.attention import Attention
from tests.layers.ranks import BLOCK_SIZE, single_context


@dataclass
class Step:
    """An AttentionBatch of one group."""

    cu_seqlens_q: Tensor
    context_lens: Tensor
    groups: Sequence[GroupBatch]
    key_ends: Tensor | None = None


class Sequences:
    """Keys and values of some sequences, and the shuffled blocks of their cache."""

    def __init__(self, lengths: Sequence[int], num_kv_heads: int, head_dim: int, block_size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.block_size = block_size
        self.keys = [torch.randn(length, num_kv_heads, head_dim, generator=generator) for length in lengths]
        self.values = [torch.randn(length, num_kv_heads, head_dim, generator=generator) for length in lengths]
        numbers = [-(-length // block_size) for length in lengths]
        self.num_blocks = sum(numbers) + 3
        shuffled = Random(seed).sample(range(self.num_blocks), self.num_blocks)
        self.tables = [[shuffled.pop() for _ in range(number)] for number in numbers]

    def step(self, chunks: Sequence[tuple[int, int, int]]) -> tuple[Step, Tensor, Tensor]:
        """Return the batch of (sequence, start, end) chunks, its keys and its values."""
        width = max(len(self.tables[seq]) for seq, _, _ in chunks)
        slots = [
            self.tables[seq][position // self.block_size] * self.block_size + position % self.block_size
            for seq, start, end in chunks
            for position in range(start, end)
        ]
        tables = [self.tables[seq] + [0] * (width - len(self.tables[seq])) for seq, _, _ in chunks]
        group = GroupBatch(torch.tensor(slots), torch.tensor(tables, dtype=torch.int32))
        lengths = torch.tensor([0] + [end - start for _, start, end in chunks])
        step = Step(
            cu_seqlens_q=lengths.cumsum(0).to(torch.int32),
            context_lens=torch.tensor([end for _, _, end in chunks], dtype=torch.int32),
            groups=[group],
        )
        k = torch.cat([self.keys[seq][start:end] for seq, start, end in chunks])
        v = torch.cat([self.values[seq][start:end] for seq, start, end in chunks])
        return step, k, v

    def expected(self, seq: int, q: Tensor, start: int, scale: float) -> Tensor:
        """Compute with torch the attention of queries [n, H, D] at positions from `start`."""
        end = start + q.shape[0]
        mask = torch.arange(end) <= torch.arange(start, end).unsqueeze(1)
        attended = functional.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            self.keys[seq][:end].transpose(0, 1).unsqueeze(0),
            self.values[seq][:end].transpose(0, 1).unsqueeze(0),
            attn_mask=mask,
            scale=scale,
            enable_gqa=True,
        )
        return attended.squeeze(0).transpose(0, 1)


@pytest.mark.parametrize("block_size", [1, 3, 16, 32])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 4, 16), (6, 2, 8), (8, 1, 24), (2, 2, 64)])
def test_chunks_of_several_sequences_attend_to_their_own_past(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> None:
    lengths = [1, 5, 33, 70]
    sequences = Sequences(lengths, num_kv_heads, head_dim, block_size, seed=block_size + head_dim)
    backend, kept, scale = (
        choose_backend(torch.device("cpu"), "float32", block_size),
        KeptHeads(num_kv_heads, head_dim),
        0.3,
    )
    # Slots that were not written must not be read.
    blocks = torch.full((sequences.num_blocks, backend.cache_spec(kept).block_bytes), 255, dtype=torch.uint8)
    bound = backend.bind_heads(kept, Scoring(num_heads, scale), blocks, group=0)
    queries = [
        torch.randn(length, num_heads, head_dim, generator=torch.Generator().manual_seed(length)) for length in lengths
    ]
    random, done = Random(1), [0] * len(lengths)
    while done != lengths:
        unfinished = [seq for seq, length in enumerate(lengths) if done[seq] < length]
        chosen = random.sample(unfinished, random.randint(1, len(unfinished)))
        chunks = [
            (seq, done[seq], random.choice([done[seq] + 1, random.randint(done[seq] + 1, lengths[seq])]))
            for seq in chosen
        ]
        step, k, v = sequences.step(chunks)
        q = torch.cat([queries[seq][start:end] for seq, start, end in chunks])
        attended = bound.forward(q, k, v, step)
        assert attended.shape == q.shape and attended.dtype == q.dtype
        first = 0
        for seq, start, end in chunks:
            expected = sequences.expected(seq, queries[seq][start:end], start, scale)
            torch.testing.assert_close(attended[first : first + end - start], expected, atol=2e-6, rtol=1e-5)
            first += end - start
            done[seq] = end


@pytest.mark.parametrize(("lengths", "limit"), [([7, 3, 9], 1), ([7, 3, 12], 4), ([1], 1), ([30], 22)])
def test_kernels_are_told_how_long_queries_can_be(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], limit: int
) -> None:
    """Every sequence goes on by a token, but those that are longer than nine by more."""
    told: list[AttentionMetadata] = []
    attend = kernels.paged_attention
    monkeypatch.setattr(kernels, "paged_attention", lambda *args: (told.append(args[2]), attend(*args))[1])
    sequences = Sequences(lengths, num_kv_heads=2, head_dim=8, block_size=16, seed=5)
    step, k, v = sequences.step([(seq, min(length - 1, 8), length) for seq, length in enumerate(lengths)])
    kept, backend = KeptHeads(2, 8), choose_backend(torch.device("cpu"), "float32", 16)
    blocks = torch.zeros(sequences.num_blocks, backend.cache_spec(kept).block_bytes, dtype=torch.uint8)
    backend.bind_heads(kept, Scoring(2, 0.5), blocks, group=0).forward(torch.randn(len(k), 2, 8), k, v, step)
    assert told[0].max_query_len == limit >= int(told[0].cu_seqlens_q.diff().max())


@pytest.mark.parametrize("sees_whole", [False, True])
def test_only_layers_that_see_images_whole_use_their_ends(sees_whole: bool) -> None:
    sequences = Sequences([9], num_kv_heads=2, head_dim=8, block_size=BLOCK_SIZE, seed=4)
    layer = Attention(single_context(), 4, 2, 8, 0.5, sees_images_whole=sees_whole)
    layer.bind_cache(torch.zeros(sequences.num_blocks, layer.cache_spec.block_bytes, dtype=torch.uint8), group=0)
    step, k, v = sequences.step([(0, 0, 9)])
    step.key_ends = torch.tensor([1, 2, 7, 7, 7, 7, 7, 8, 9], dtype=torch.int32)
    q = torch.randn(9, 4, 8, generator=torch.Generator().manual_seed(0))
    found, causal = layer(q, k, v, step), sequences.expected(0, q, 0, 0.5)
    is_causal = torch.isclose(found, causal, atol=2e-6, rtol=1e-5).flatten(1).all(1)
    assert is_causal.tolist() == [True, True, *[not sees_whole] * 4, True, True, True]


def test_the_layer_uses_the_group_that_it_was_bound_to() -> None:
    sequences = Sequences([9], num_kv_heads=2, head_dim=8, block_size=BLOCK_SIZE, seed=4)
    layer = Attention(single_context(), num_heads=4, num_kv_heads=2, head_dim=8, softmax_scale=0.5)
    assert layer.cache_spec == NativeBackend(BLOCK_SIZE, "float32").cache_spec(KeptHeads(2, 8))
    layer.bind_cache(torch.zeros(sequences.num_blocks, layer.cache_spec.block_bytes, dtype=torch.uint8), group=1)
    step, k, v = sequences.step([(0, 0, 9)])
    unusable = GroupBatch(torch.tensor([]), torch.tensor([]))
    step.groups = [unusable, step.groups[0]]
    q = torch.randn(9, 4, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(layer(q, k, v, step), sequences.expected(0, q, 0, 0.5), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cache_of_another_dtype_is_rounded_into_and_the_result_is_not(dtype: torch.dtype) -> None:
    sequences = Sequences([40], num_kv_heads=2, head_dim=32, block_size=32, seed=4)
    backend, kept = choose_backend(torch.device("cpu"), str(dtype).removeprefix("torch."), 32), KeptHeads(2, 32)
    blocks = torch.full((sequences.num_blocks, backend.cache_spec(kept).block_bytes), 255, dtype=torch.uint8)
    bound = backend.bind_heads(kept, Scoring(4, 0.2), blocks, group=0)
    step, k, v = sequences.step([(0, 0, 40)])
    q = torch.randn(40, 4, 32, generator=torch.Generator().manual_seed(0))
    attended = bound.forward(q, k, v, step)
    assert attended.dtype == torch.float32
    torch.testing.assert_close(attended, sequences.expected(0, q, 0, 0.2), atol=4e-2, rtol=4e-2)
    sequences.keys = [k.to(dtype).float()]
    sequences.values = [v.to(dtype).float()]
    closer = sequences.expected(0, q.to(dtype).float(), 0, 0.2)
    torch.testing.assert_close(attended, closer, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(("num_kv_heads", "head_dim", "block_size", "dtype"), [(2, 8, 4, torch.float32),
    (3, 24, 32, torch.bfloat16), (1, 16, 3, torch.bfloat16), (2, 128, 1, torch.float16)])  # fmt: skip
def test_blocks_are_as_large_as_the_spec_says(
    num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    kept, name = KeptHeads(num_kv_heads, head_dim), str(dtype).removeprefix("torch.")
    backend = NativeBackend(block_size, name)
    spec = backend.cache_spec(kept)
    assert spec == native_spec(kept, block_size, name, layout=spec.layout) and spec.layout
    blocks = torch.zeros(5, spec.block_bytes, dtype=torch.uint8)
    cache = backend.bind_heads(kept, Scoring(num_kv_heads, 1.0), blocks, group=0).cache
    assert (cache.num_blocks, cache.num_kv_heads, cache.block_size) == (5, num_kv_heads, block_size)
    assert (cache.head_dim, cache.dtype) == (head_dim, dtype)
    assert cache.data.data_ptr() == blocks.data_ptr()
    cache.data[4].fill_(1)
    assert not blocks[:4].any()


def test_blocks_of_a_gpu_have_another_layout_than_those_of_a_cpu() -> None:
    """A CPU must not find blocks that a GPU has written to disk, nor a GPU those of a CPU."""
    layouts = {
        choose_backend(torch.device(device), "bfloat16", 32).cache_spec(KeptHeads(2, 64)).layout
        for device in ("cpu", "cuda:0", "mps")
    }
    assert len(layouts) == 3
    one, other = (choose_backend(torch.device("cuda", index), "bfloat16", 32) for index in (0, 1))
    assert one.cache_spec(KeptHeads(2, 64)) == other.cache_spec(KeptHeads(2, 64))


def test_fused_heads_give_the_same_as_separate_ones() -> None:
    layer = Attention(single_context(), num_heads=6, num_kv_heads=2, head_dim=24, softmax_scale=0.4)
    sequences = Sequences([11], num_kv_heads=2, head_dim=24, block_size=BLOCK_SIZE, seed=7)
    step, k, v = sequences.step([(0, 0, 11)])
    q = torch.randn(11, 6, 24, generator=torch.Generator().manual_seed(0))
    layer.bind_cache(torch.full((sequences.num_blocks, layer.cache_spec.block_bytes), 255, dtype=torch.uint8), group=0)
    apart = layer(q, k, v, step)
    layer.bind_cache(torch.full((sequences.num_blocks, layer.cache_spec.block_bytes), 255, dtype=torch.uint8), group=0)
    qkv = torch.cat([heads.flatten(1) for heads in (q, k, v)], dim=1)
    assert torch.equal(layer.forward_fused(qkv, step), apart)
