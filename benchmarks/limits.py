"""What the machine could do at best: measured memory bandwidth and matrix product rate, and what follows from them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pagewick.cli.bench import Scenario
from pagewick.cli.random_model import Shape

READ_BYTES = 2**30
MATRIX_SIZE = 4096
BYTES_PER_WEIGHT = 2  # bf16


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """bandwidth: bytes per second read from memory; matmul_rate: bf16 floating point operations per second."""

    bandwidth: float
    matmul_rate: float


def measure_bandwidth(device: str) -> float:
    """Bytes per second while summing 1 GiB of fp32, all threads: far larger than any cache."""
    values = torch.ones(READ_BYTES // 4, device=device)
    return READ_BYTES / min(_seconds(values.sum, device) for _ in range(3))


def measure_matmul_rate(device: str) -> float:
    """Operations per second of a 4096^3 bf16 matrix product; a multiplication and an addition are two."""
    left = torch.ones(MATRIX_SIZE, MATRIX_SIZE, dtype=torch.bfloat16, device=device)
    return 2 * MATRIX_SIZE**3 / min(_seconds(lambda: left @ left, device) for _ in range(3))


def limit(scenario: Scenario, shape: Shape, machine: MachineLimits) -> float:
    """Tokens per second that no implementation of these bf16 weights can exceed on this machine.

    Prefill: operations / matmul rate, where a token costs 2 per layer weight and 4 * q_size per earlier position and
    layer, and the head is computed once. Decode, per step of all streams: the larger of
    (all weights + K/V read) / bandwidth and 2 * weights * streams / matmul rate.
    """
    q_size = shape.num_attention_heads * shape.head_dim
    kv_bytes = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * BYTES_PER_WEIGHT
    if scenario.is_prefill:
        length = scenario.num_prompt_tokens
        attention = 4 * q_size * shape.num_hidden_layers * length * (length + 1) / 2
        operations = 2 * shape.num_block_parameters * length + attention + 2 * shape.num_head_parameters
        return length / (operations / machine.matmul_rate)
    num_weights = shape.num_block_parameters + shape.num_head_parameters
    mean_context_len = scenario.num_prompt_tokens + scenario.num_output_tokens / 2
    read = num_weights * BYTES_PER_WEIGHT + scenario.num_streams * mean_context_len * kv_bytes
    seconds = max(
        read / machine.bandwidth,
        2 * num_weights * scenario.num_streams / machine.matmul_rate,
    )
    return scenario.num_streams / seconds


def _seconds(run: Callable[[], object], device: str) -> float:
    start = time.perf_counter()
    run()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - start
