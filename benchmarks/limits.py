"""Upper limits of the machine: measured memory bandwidth and matrix product rate, and the token rates they allow."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch

from pagewick.cli.benchmarking.scenarios import Scenario
from pagewick.cli.random_model import Shape

READ_BYTES = 2**30
MATRIX_SIZE = 4096
BYTES_PER_WEIGHT = 2  # bf16


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """bandwidth: bytes per second read from memory; matmul_rate: operations per second on the numbers multiplied."""

    bandwidth: float
    matmul_rate: float


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Bytes of a model's weights as they are stored. shared: of layers, without experts. head: of the output matrix."""

    shared: int
    experts: int
    head: int

    @classmethod
    def in_bf16(cls, shape: Shape) -> Self:
        counts = shape.num_shared_parameters, shape.num_expert_parameters, shape.num_head_parameters
        return cls(*(count * BYTES_PER_WEIGHT for count in counts))

    @property
    def all(self) -> int:
        return self.shared + self.experts + self.head

    def read_in_step(self, shape: Shape, num_streams: int) -> float:
        """Return the bytes that a step with a token of each stream reads: all but the experts that none uses.

        The number of used experts is the expected one if all choices are equally likely:
        E * (1 - (1 - top_k / E)^streams).
        """
        if not shape.num_experts:
            return self.all
        used = 1 - (1 - shape.num_experts_per_tok / shape.num_experts) ** num_streams
        return self.shared + self.head + used * self.experts


def measure_bandwidth(device: str) -> float:
    """Return the bytes per second of summing 1 GiB of fp32, far more than any cache holds, with all threads."""
    values = torch.ones(READ_BYTES // 4, device=device)
    return READ_BYTES / min(_seconds(values.sum, device) for _ in range(3))


def measure_matmul_rate(device: str) -> float:
    """Return the operations per second of a 4096^3 bf16 matrix product; a multiplication and an addition are two."""
    left = torch.ones(MATRIX_SIZE, MATRIX_SIZE, dtype=torch.bfloat16, device=device)
    return 2 * MATRIX_SIZE**3 / min(_seconds(lambda: left @ left, device) for _ in range(3))


def limit(scenario: Scenario, shape: Shape, machine: MachineLimits, weights: StoredWeights | None = None) -> float:
    """Return the tokens per second that no implementation of these weights can exceed on this machine.

    For a prefill these are prompt tokens of one stream; for a decode, output tokens of all streams together. weights:
    None means bf16.
    """
    weights = weights or StoredWeights.in_bf16(shape)
    if scenario.is_prefill:
        return scenario.num_prompt_tokens / prefill_seconds(scenario, shape, machine, weights)
    return scenario.num_streams / step_seconds(scenario, shape, machine, weights)


def end_to_end_limit(
    scenario: Scenario, shape: Shape, machine: MachineLimits, weights: StoredWeights | None = None
) -> float:
    """Return the limit of output tokens per second of all streams when their prefills count as well."""
    weights = weights or StoredWeights.in_bf16(shape)
    first = prefill_seconds(scenario, shape, machine, weights, num_streams=scenario.num_streams)
    later = (scenario.num_output_tokens - 1) * step_seconds(scenario, shape, machine, weights)
    return scenario.num_streams * scenario.num_output_tokens / (first + later)


def prefill_seconds(
    scenario: Scenario, shape: Shape, machine: MachineLimits, weights: StoredWeights, *, num_streams: int = 1
) -> float:
    """Return the seconds of a prefill: the larger of operations / matmul rate and all weights / bandwidth.

    A token costs 2 operations per layer weight and 4 * q_size per earlier position and layer; the head is computed once
    for each stream.
    """
    length = scenario.num_prompt_tokens
    q_size = shape.num_attention_heads * shape.head_dim
    attention = 4 * q_size * shape.num_attention_layers * length * (length + 1) / 2
    operations = 2 * shape.num_active_parameters * length + attention + 2 * shape.num_head_parameters
    return max(num_streams * operations / machine.matmul_rate, weights.all / machine.bandwidth)


def step_seconds(scenario: Scenario, shape: Shape, machine: MachineLimits, weights: StoredWeights) -> float:
    """Return the seconds of a step with one token of every stream.

    This is the larger of (weights + K/V read + states read and written) / bandwidth and 2 * weights used / matmul rate.
    """
    mean_context_len = scenario.num_prompt_tokens + scenario.num_output_tokens / 2
    read = weights.read_in_step(shape, scenario.num_streams)
    read += scenario.num_streams * mean_context_len * kv_bytes_per_token(shape)
    read += 2 * scenario.num_streams * state_bytes(shape)
    operations = 2 * (shape.num_active_parameters + shape.num_head_parameters) * scenario.num_streams
    return max(read / machine.bandwidth, operations / machine.matmul_rate)


def kv_bytes_per_token(shape: Shape) -> int:
    """Return the bytes of keys and values per token, in all layers, in bf16."""
    return 2 * shape.num_attention_layers * shape.num_key_value_heads * shape.head_dim * BYTES_PER_WEIGHT


def state_bytes(shape: Shape) -> int:
    """Return the bytes of a sequence's states of linear attention, in all layers, in fp32."""
    return 4 * shape.num_linear_layers * shape.delta.num_state_floats if shape.delta else 0


def _seconds(run: Callable[[], object], device: str) -> float:
    start = time.perf_counter()
    run()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - start
