"""A model over many GPUs, on paper: what lies where, what a step of decoding moves, how long that takes at least.

    memory of a rank = weights + runtime + activations + KV cache; offloaded experts lie in host memory
    time of a step   = the sum of bytes / bandwidth over everything that one rank reads, sends and copies

The rates are datasheets', nothing overlaps, and neither arithmetic nor latencies count: a bound, not a promise. Experts
are taken to be chosen evenly. Of E experts, B tokens that choose k each meet E (1 - (1 - k/E)^B); a share of them as
large as the share of experts in host memory is not on the device. Such a one changes places with another: it is copied
to the device and the other one back, one after the other.

Each layer adds up its ranks' shares twice, and the embedding once. Within a node of G GPUs an all-reduce of M bytes
sends 2 (G - 1) / G M from each GPU; between N nodes, each GPU sends 2 (N - 1) / N of its share M / G. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pagewick.doctor.checkpoint import Checkpoint
from pagewick.doctor.clusters import Cluster
from pagewick.doctor.experts import ExpertShape, experts_of
from pagewick.doctor.parts import RankWeights, weights_of_rank
from pagewick.doctor.plan import (
    BLOCK_SIZE,
    CACHE_SHARE,
    RUNTIME_BYTES,
    Wishes,
    activation_bytes,
    cache_bytes,
    longest_context,
)
from pagewick.doctor.shape import DTYPE_BYTES, LayerGroup, text_part
from pagewick.errors import ConfigError

DEFAULT_CONTEXT: Final = 8192


@dataclass(frozen=True, slots=True)
class Cost:
    """What a step moves in one way. num_bytes: of one rank. bandwidth: bytes per second."""

    name: str
    num_bytes: int
    bandwidth: int

    @property
    def seconds(self) -> float:
        return self.num_bytes / self.bandwidth


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One token for each of so many sequences.

    experts_met: of each layer with experts, how many some token goes to. experts_copied: how many of them were not on
    the device. Both are expectations, 0 without experts.
    """

    num_sequences: int
    experts_met: float
    experts_copied: float
    costs: tuple[Cost, ...]

    @property
    def num_bytes(self) -> int:
        return sum(cost.num_bytes for cost in self.costs)

    @property
    def seconds(self) -> float:
        return sum(cost.seconds for cost in self.costs)

    @property
    def tokens_per_second(self) -> float:
        """Of all sequences together, at most."""
        return self.num_sequences / self.seconds


@dataclass(frozen=True, slots=True)
class ScalePlan:
    """Bytes are of one rank, and so is the memory.

    weights: in the GPU's memory. host: of experts, in main memory. kv_per_sequence: at `context` tokens. kv_room: what
    the engine gives the KV cache. num_fitting: sequences of that length at once. longest: tokens of one alone, at most
    the model's context. num_collectives: exchanges between ranks in a step. steps: of one sequence, and of as many as
    are wanted and fit; none if no sequence does.
    """

    cluster: Cluster
    experts: ExpertShape | None
    num_offloaded: int
    weights: int
    host: int
    runtime: int
    activations: int
    kv_cache_dtype: str
    kv_bytes_per_token: float
    kv_per_sequence: int
    kv_room: int
    context: int
    num_fitting: int
    longest: int
    num_collectives: int
    steps: tuple[DecodeStep, ...]

    @property
    def needed(self) -> int:
        """Without any KV cache."""
        return self.weights + self.runtime + self.activations


def plan_scale(
    checkpoint: Checkpoint,
    cluster: Cluster,
    wishes: Wishes,
    *,
    num_sequences: int,
    experts_per_rank: int = 0,
    weights: RankWeights | None = None,
) -> ScalePlan:
    """How a model would run on a machine that need not be here. wishes.tensor_parallel_size is the cluster's ranks.

    num_sequences: wanted at once. experts_per_rank: times the number of ranks, so many experts of each layer are in
    host memory. weights: a rank's, if they are known already. Raises ConfigError for wishes that cannot be.
    """
    shape = checkpoint.shape
    experts = experts_of(text_part(checkpoint.config), shape.num_layers)
    _check(checkpoint, cluster, wishes, experts, experts_per_rank)
    num_ranks = cluster.num_ranks
    weights = weights or weights_of_rank(checkpoint, num_ranks, wishes.dtype)
    num_offloaded = experts_per_rank * num_ranks
    expert_bytes = 0 if experts is None else weights.routed_experts // experts.num_experts  # in all layers
    on_device = weights.total - num_offloaded * expert_bytes
    kv_dtype = wishes.kv_cache_dtype or wishes.dtype or shape.dtype
    groups = shape.cache_groups(block_size=BLOCK_SIZE, cache_dtype=kv_dtype, tensor_parallel_size=num_ranks)
    runtime, activations = RUNTIME_BYTES["cuda"], activation_bytes(shape)
    left = cluster.kind.memory - on_device - runtime
    kv_room = max(0, min(int(left * CACHE_SHARE["cuda"]), left - activations))
    context = wishes.max_model_len or min(DEFAULT_CONTEXT, shape.max_position_embeddings)
    per_sequence = cache_bytes(groups, context)
    num_fitting = kv_room // per_sequence
    work = _Work(checkpoint, cluster, weights, experts, num_offloaded, groups, context, wishes.dtype or shape.dtype)
    counts = sorted({1, min(num_sequences, num_fitting)}) if num_fitting else []
    return ScalePlan(
        cluster=cluster,
        experts=experts,
        num_offloaded=num_offloaded,
        weights=on_device,
        # One row more: through it, two experts change places.
        host=(num_offloaded + 1) * expert_bytes if num_offloaded else 0,
        runtime=runtime,
        activations=activations,
        kv_cache_dtype=kv_dtype,
        kv_bytes_per_token=sum(group.bytes_per_token for group in groups),
        kv_per_sequence=per_sequence,
        kv_room=kv_room,
        context=context,
        num_fitting=num_fitting,
        longest=longest_context(groups, kv_room, shape.max_position_embeddings),
        num_collectives=work.num_all_reduces + 1 if num_ranks > 1 else 0,
        steps=tuple(work.step(count) for count in counts),
    )


def least_offload(checkpoint: Checkpoint, cluster: Cluster, wishes: Wishes) -> int | None:
    """The smallest --num-experts-offload-per-rank with which one sequence fits; None if none does."""
    experts = experts_of(text_part(checkpoint.config), checkpoint.shape.num_layers)
    if experts is None:
        return None
    most = (experts.num_experts - experts.num_experts_per_tok) // cluster.num_ranks

    weights = weights_of_rank(checkpoint, cluster.num_ranks, wishes.dtype)

    def fits(per_rank: int) -> bool:
        plan = plan_scale(checkpoint, cluster, wishes, num_sequences=1, experts_per_rank=per_rank, weights=weights)
        return plan.num_fitting > 0

    low, high = 1, most
    if most < 1 or not fits(most):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


@dataclass(frozen=True, slots=True)
class _Work:
    """What a step's bytes depend on. dtype: of hidden states."""

    checkpoint: Checkpoint
    cluster: Cluster
    weights: RankWeights
    experts: ExpertShape | None
    num_offloaded: int
    groups: list[LayerGroup]
    context: int
    dtype: str

    @property
    def num_all_reduces(self) -> int:
        return 2 * self.checkpoint.shape.num_layers + 1

    def step(self, count: int) -> DecodeStep:
        kind = self.cluster.kind
        met, copied = self._experts(count)
        costs = [
            Cost("attention, dense layers, norms", self.weights.dense, kind.bandwidth),
            Cost("vocabulary head", self.weights.read_head, kind.bandwidth),
            Cost("KV cache", count * self._kv_bytes(), kind.bandwidth),
        ]
        if self.experts is not None:
            each = self.weights.routed_experts / self.experts.num_experts
            costs[1:1] = [
                Cost("shared experts", self.weights.shared_experts, kind.bandwidth),
                Cost("routed experts", round(met * each), kind.bandwidth),
            ]
            if self.num_offloaded:
                costs.append(Cost("experts from and to the host", round(2 * copied * each), kind.host_link))
        within, between = self._sent(count)
        if self.cluster.num_gpus > 1:
            costs.append(Cost("between GPUs", round(within), kind.gpu_link))
        if self.cluster.num_nodes > 1:
            costs.append(Cost("between nodes", round(between), self.cluster.network))
        return DecodeStep(count, met, copied, tuple(cost for cost in costs if cost.num_bytes))

    def _experts(self, count: int) -> tuple[float, float]:
        if self.experts is None:
            return 0.0, 0.0
        total = self.experts.num_experts
        met = total * (1 - (1 - self.experts.num_experts_per_tok / total) ** count)
        return met, met * self.num_offloaded / total

    def _kv_bytes(self) -> int:
        """What one new token reads of the cache of a sequence as long as the context."""
        return round(
            sum(
                group.bytes_per_token * min(self.context, self.context if (w := group.spec.lookback) is None else w + 1)
                for group in self.groups
            )
        )

    def _sent(self, count: int) -> tuple[float, float]:
        """Bytes that a GPU sends within its node and to others: all-reduces, and the logits' shares in float32."""
        gpus, nodes = self.cluster.num_gpus, self.cluster.num_nodes
        shape = self.checkpoint.shape
        reduced = self.num_all_reduces * count * shape.hidden_size * DTYPE_BYTES[self.dtype]
        share = count * shape.vocab_size * 4 / self.cluster.num_ranks
        within = 2 * (gpus - 1) / gpus * reduced + (gpus - 1) * nodes * share
        between = 2 * (nodes - 1) / nodes * reduced / gpus + (nodes - 1) * share
        return within, between


def _check(
    checkpoint: Checkpoint, cluster: Cluster, wishes: Wishes, experts: ExpertShape | None, per_rank: int
) -> None:
    shape, num_ranks = checkpoint.shape, cluster.num_ranks
    if checkpoint.is_gguf or shape.other_cache:
        reason = shape.other_cache or "a GGUF file does not say which weights are experts'"
        raise ConfigError(f"--gpus: {reason}\n  name the model's original repository, with *.safetensors")
    if wishes.tensor_parallel_size not in (None, num_ranks):
        raise ConfigError(
            f"--tensor-parallel-size {wishes.tensor_parallel_size} is not the {num_ranks} GPUs that --gpus and --nodes "
            "say\n  leave it out"
        )
    if num_ranks not in shape.tensor_parallel_sizes(num_ranks):
        sizes = ", ".join(map(str, shape.tensor_parallel_sizes(min(num_ranks, shape.num_heads))))
        raise ConfigError(f"{num_ranks} GPUs do not divide the model's {shape.num_heads} heads; smaller: {sizes}")
    if wishes.max_model_len is not None and wishes.max_model_len > shape.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len {wishes.max_model_len} is longer than the model's context of "
            f"{shape.max_position_embeddings} tokens"
        )
    if not per_rank:
        return
    if experts is None:
        raise ConfigError(f"--num-experts-offload-per-rank {per_rank}: this model has no experts; leave it out")
    most = (experts.num_experts - experts.num_experts_per_tok) // num_ranks
    if per_rank > most:
        raise ConfigError(
            f"--num-experts-offload-per-rank {per_rank} on {num_ranks} ranks leaves fewer than the "
            f"{experts.num_experts_per_tok} experts that a token goes to; at most {most}"
        )
