"""Upper limits of the machine: measured memory bandwidth and matrix product rate, and the token rates they allow."""

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
    """Return the bytes per second of summing 1 GiB of fp32, far more than any cache holds, with all threads."""
    values = torch.ones(READ_BYTES // 4, device=device)
    return READ_BYTES / min(_seconds(values.sum, device) for _ in range(3))


def measure_matmul_rate(device: str) -> float:
    """Return the operations per second of a 4096^3 bf16 matrix product; a multiplication and an addition are two."""
    left = torch.ones(MATRIX_SIZE, MATRIX_SIZE, dtype=torch.bfloat16, device=device)
    return 2 * MATRIX_SIZE**3 / min(_seconds(lambda: left @ left, device) for _ in range(3))


def limit(scenario: Scenario, shape: Shape, machine: MachineLimits) -> float:
    """Return the tokens per second that no implementation of these bf16 weights can exceed on this machine.

    For a prefill these are prompt tokens of one stream; for a decode, output tokens of all streams together.
    """
    if scenario.is_prefill:
        return scenario.num_prompt_tokens / prefill_seconds(scenario, shape, machine)
    return scenario.num_streams / step_seconds(scenario, shape, machine)


def end_to_end_limit(scenario: Scenario, shape: Shape, machine: MachineLimits) -> float:
    """Return the limit of output tokens per second of all streams when their prefills count as well."""
    first = prefill_seconds(scenario, shape, machine, num_streams=scenario.num_streams)
    later = (scenario.num_output_tokens - 1) * step_seconds(scenario, shape, machine)
    return scenario.num_streams * scenario.num_output_tokens / (first + later)


def prefill_seconds(scenario: Scenario, shape: Shape, machine: MachineLimits, *, num_streams: int = 1) -> float:
    """Return the seconds of a prefill: the larger of operations / matmul rate and all weights / bandwidth.

    A token costs 2 operations per layer weight and 4 * q_size per earlier position and layer; the head is computed once
    for each stream.
    """
    length = scenario.num_prompt_tokens
    q_size = shape.num_attention_heads * shape.head_dim
    attention = 4 * q_size * shape.num_hidden_layers * length * (length + 1) / 2
    operations = 2 * shape.num_active_parameters * length + attention + 2 * shape.num_head_parameters
    return max(num_streams * operations / machine.matmul_rate, weight_bytes(shape) / machine.bandwidth)


def step_seconds(scenario: Scenario, shape: Shape, machine: MachineLimits) -> float:
    """Return the seconds of a step with one token of every stream.

    This is the larger of (weights + K/V read) / bandwidth and 2 * weights used / matmul rate.
    """
    mean_context_len = scenario.num_prompt_tokens + scenario.num_output_tokens / 2
    read = step_weight_bytes(shape, scenario.num_streams)
    read += scenario.num_streams * mean_context_len * kv_bytes_per_token(shape)
    operations = 2 * (shape.num_active_parameters + shape.num_head_parameters) * scenario.num_streams
    return max(read / machine.bandwidth, operations / machine.matmul_rate)


def step_weight_bytes(shape: Shape, num_streams: int) -> float:
    """Return the bytes of weights that a step with a token of each stream reads: all but the experts that none uses.

    The number of used experts is the expected one if all choices are equally likely: E * (1 - (1 - top_k / E)^streams).
    """
    if not shape.num_experts:
        return weight_bytes(shape)
    used = 1 - (1 - shape.num_experts_per_tok / shape.num_experts) ** num_streams
    always = shape.num_shared_parameters + shape.num_head_parameters
    return (always + used * shape.num_expert_parameters) * BYTES_PER_WEIGHT


def weight_bytes(shape: Shape) -> int:
    """Return the bytes of all weights."""
    return (shape.num_block_parameters + shape.num_head_parameters) * BYTES_PER_WEIGHT


def kv_bytes_per_token(shape: Shape) -> int:
    """Return the bytes of keys and values per token, in all layers, in bf16."""
    return 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * BYTES_PER_WEIGHT


def _seconds(run: Callable[[], object], device: str) -> float:
    start = time.perf_counter()
    run()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - start
