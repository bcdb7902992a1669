"""`python -m benchmarks.sparse_attention`: milliseconds of one layer of DeepSeek-V3.2, selection and attention.

Beside it stands dense attention to the same latents. Numbers are random and in bfloat16; the time does not depend on
them. Medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import click

from pagewick import kernels
from pagewick.devices import num_cores
from pagewick.kernels.options import AttentionMetadata, Rotation

import torch  # isort: skip  # after Pagewick, which sets how OpenMP's threads wait

BLOCK_SIZE = 32
NUM_HEADS, LATENT_DIM, ROPE_DIM = 128, 512, 64
NUM_INDEX_HEADS, INDEX_DIM, TOP_K = 64, 128, 2048
# New tokens, and the length of their sequence with them.
SHAPES = ((1, 4096), (1, 32768), (1, 131072), (64, 4096), (64, 32768))


def milliseconds(compute: Callable[[], Any], repeats: int) -> float:
    compute()
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        compute()
        found.append(time.perf_counter() - begin)
    return statistics.median(found) * 1e3


def measure(num_tokens: int, context_len: int, repeats: int) -> tuple[float, float, float]:
    """Return the times of the selection, of attention to what it selects, and of attention to everything."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    num_blocks = -(-context_len // BLOCK_SIZE)
    keys, latents = random(num_blocks, BLOCK_SIZE, INDEX_DIM), random(num_blocks, BLOCK_SIZE, LATENT_DIM + ROPE_DIM)
    queries, weights = random(num_tokens, NUM_INDEX_HEADS, INDEX_DIM), torch.randn(num_tokens, NUM_INDEX_HEADS)
    table = torch.arange(num_blocks, dtype=torch.int32).unsqueeze(0)
    ends = torch.tensor([0, num_tokens], dtype=torch.int32)
    metadata = AttentionMetadata(table, torch.tensor([context_len], dtype=torch.int32), ends)
    angles = torch.rand(num_tokens, ROPE_DIM // 2)
    rotation = Rotation(angles.cos(), angles.sin())
    q_latent, q_rope = random(num_tokens, NUM_HEADS, LATENT_DIM), random(num_tokens, NUM_HEADS, ROPE_DIM)

    def select() -> AttentionMetadata:
        found = kernels.select_keys(queries, weights, keys, metadata, table, rotation=rotation, top_k=TOP_K)
        return AttentionMetadata(found.slots, found.counts, found.starts, 1)

    def attend(cache: torch.Tensor, places: AttentionMetadata) -> torch.Tensor:
        return kernels.latent_attention(q_latent, q_rope, cache, places, softmax_scale=0.1)

    selected, single = select(), latents.view(-1, 1, LATENT_DIM + ROPE_DIM)
    return (
        milliseconds(select, repeats),
        milliseconds(lambda: attend(single, selected), repeats),
        milliseconds(lambda: attend(latents, metadata), repeats),
    )


@click.command()
@click.option("--repeats", default=7, show_default=True)
def main(repeats: int) -> None:
    """Print a table."""
    kernels.set_num_threads(num_cores())
    print("new tokens  context  select  attend  dense")
    for num_tokens, context_len in SHAPES:
        select, attend, dense = measure(num_tokens, context_len, repeats)
        print(f"{num_tokens:10}  {context_len:7,}  {select:6.1f}  {attend:6.1f}  {dense:5.1f}", flush=True)


if __name__ == "__main__":
    main()
