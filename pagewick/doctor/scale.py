"""A model over many GPUs, on paper: where its bytes lie, which of them a decode step moves, and how long that takes.

    memory of a rank = weights + runtime + activations + KV cache; offloaded experts lie in host memory
    time of a step   = the sum of bytes / bandwidth over everything that one rank reads, sends and copies

The time is a lower bound: rates are the datasheets', nothing overlaps, and arithmetic and latencies take no time. The
router is assumed to choose experts evenly: B tokens that choose k of E experts each meet E (1 - (1 - k/E)^B) different
ones. The part of them that is in host memory is as large as the part of all experts that is offloaded. Each of these
changes places with an expert on the device: one is copied to the device, then the other one back.

Each layer adds up its ranks' shares twice, and the embedding once. Within a node of G GPUs an all-reduce of M bytes
sends 2 (G - 1) / G M from each GPU; between N nodes, each GPU sends 2 (N - 1) / N of its share M / G. Imports no torch.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

from pagewick.config import EngineConfig
from pagewick.doctor.checkpoint import Checkpoint
from pagewick.doctor.clusters import Cluster
from pagewick.doctor.plan import (
    CACHE_SHARE,
    RUNTIME_BYTES,
    LayerGroup,
    Wishes,
    activation_bytes,
    cache_bytes,
    cache_groups,
    longest_context,
    tensor_parallel_sizes,
)
from pagewick.doctor.rank_weights import RankWeights, weights_of_rank
from pagewick.errors import ConfigError
from pagewick.models.config import ModelConfig
from pagewick.models.tensors import DTYPE_BYTES

DEFAULT_CONTEXT: Final = 8192


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of every layer that has some. intermediate_size: that of one expert.

    shared_intermediate_size: that of the expert that every token goes to; 0 if there is none. num_layers: how many
    layers have experts.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    shared_intermediate_size: int
    num_layers: int


def experts_of(model: ModelConfig) -> Experts | None:
    """The experts of a model; None if it has none."""
    if not model.mixtures:
        return None
    moe = model.mixtures[0]
    shared = moe.shared_intermediate_size or 0
    return Experts(moe.num_experts, moe.routing.top_k, moe.intermediate_size, shared, len(model.mixtures))


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes that one rank moves in a step in one way. bandwidth: bytes per second."""

    name: str
    num_bytes: int
    bandwidth: int

    @property
    def seconds(self) -> float:
        return self.num_bytes / self.bandwidth


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A step that gives each of num_sequences sequences one token.

    experts_met: the number of experts of a layer that some token goes to. experts_copied: how many of them are not on
    the device. Both are expected values, 0 without experts.
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
        """Upper limit, for all sequences together."""
        return self.num_sequences / self.seconds


@dataclass(frozen=True, slots=True)
class ScalePlan:
    """All bytes are of one rank.

    weights: in the GPU's memory. host: experts in main memory. kv_per_sequence: KV cache of a sequence of `context`
    tokens. kv_room: KV cache that the engine makes. num_fitting: how many such sequences fit at once. longest: tokens
    of the longest sequence that fits alone, at most the model's context. num_collectives: exchanges between ranks in a
    step. steps: one for a single sequence, and one for as many as are wanted and fit; none if no sequence fits.
    """

    cluster: Cluster
    experts: Experts | None
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
        """Bytes without any KV cache."""
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
    """Plan how a model would run on a machine that need not be here.

    num_sequences: wanted at once. experts_per_rank: times the number of ranks, the number of each layer's experts in
    host memory. weights: one rank's, if they are known already. Raises ConfigError for impossible wishes.
    """
    model = model_of(checkpoint)
    num_ranks = cluster.num_ranks
    _check(model, num_ranks, wishes, experts_per_rank)
    experts = experts_of(model)
    weights = weights or weights_of_rank(model, checkpoint, num_ranks, wishes.dtype)
    num_offloaded = experts_per_rank * num_ranks
    expert_bytes = 0 if experts is None else weights.routed_experts // experts.num_experts  # in all layers
    on_device = weights.total - num_offloaded * expert_bytes
    kv_dtype = wishes.kv_cache_dtype or wishes.dtype or model.dtype
    groups = cache_groups(model, cache_dtype=kv_dtype, num_ranks=num_ranks)
    runtime, activations = RUNTIME_BYTES["cuda"], activation_bytes(model)
    left = cluster.kind.memory - on_device - runtime
    kv_room = max(0, min(int(left * CACHE_SHARE["cuda"]), left - activations))
    context = wishes.max_model_len or min(DEFAULT_CONTEXT, model.max_position_embeddings)
    per_sequence = cache_bytes(groups, context)
    num_fitting = kv_room // per_sequence
    work = _Work(model, cluster, weights, experts, num_offloaded, groups, context, wishes.dtype or model.dtype)
    counts = sorted({1, min(num_sequences, num_fitting)}) if num_fitting else []
    return ScalePlan(
        cluster=cluster,
        experts=experts,
        num_offloaded=num_offloaded,
        weights=on_device,
        # There is room for one more expert, through which two change places.
        host=(num_offloaded + 1) * expert_bytes if num_offloaded else 0,
        runtime=runtime,
        activations=activations,
        kv_cache_dtype=kv_dtype,
        kv_bytes_per_token=sum(group.bytes_per_token for group in groups),
        kv_per_sequence=per_sequence,
        kv_room=kv_room,
        context=context,
        num_fitting=num_fitting,
        longest=longest_context(groups, kv_room, model.max_position_embeddings),
        num_collectives=work.num_all_reduces + 1 if num_ranks > 1 else 0,
        steps=tuple(work.step(count) for count in counts),
    )


def least_offload(checkpoint: Checkpoint, cluster: Cluster, wishes: Wishes) -> int | None:
    """The smallest --num-experts-offload-per-rank with which one sequence fits; None if none does."""
    model = model_of(checkpoint)
    experts = experts_of(model)
    if experts is None:
        return None
    weights = weights_of_rank(model, checkpoint, cluster.num_ranks, wishes.dtype)

    def fits(per_rank: int) -> bool:
        plan = plan_scale(checkpoint, cluster, wishes, num_sequences=1, experts_per_rank=per_rank, weights=weights)
        return plan.num_fitting > 0

    most = (experts.num_experts - experts.num_experts_per_tok) // cluster.num_ranks
    least = bisect_left(range(most + 1), True, lo=1, key=fits) if most > 0 else 1
    return least if least <= most else None


def model_of(checkpoint: Checkpoint) -> ModelConfig:
    """The model of a checkpoint that can be planned for GPUs. Raises ConfigError for another."""
    if checkpoint.is_gguf or checkpoint.model_config is None:
        reason = "the tensors of a GGUF file are not told apart" if checkpoint.is_gguf else checkpoint.verdict.reason
        raise ConfigError(f"--gpus: {reason}\n  name the original repository, with *.safetensors, of a model that runs")
    return checkpoint.model_config


@dataclass(frozen=True, slots=True)
class _Work:
    """Everything that a step's bytes depend on. dtype: that of hidden states."""

    model: ModelConfig
    cluster: Cluster
    weights: RankWeights
    experts: Experts | None
    num_offloaded: int
    groups: list[LayerGroup]
    context: int
    dtype: str

    @property
    def num_all_reduces(self) -> int:
        return 2 * self.model.num_layers + 1

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
        """Bytes that one new token reads of the cache of a sequence as long as the context."""
        return round(
            sum(
                group.bytes_per_token * min(self.context, self.context if (w := group.spec.lookback) is None else w + 1)
                for group in self.groups
            )
        )

    def _sent(self, count: int) -> tuple[float, float]:
        """Bytes that a GPU sends within its node and to others: all-reduces, and the logits' shares in float32."""
        gpus, nodes = self.cluster.num_gpus, self.cluster.num_nodes
        reduced = self.num_all_reduces * count * self.model.hidden_size * DTYPE_BYTES[self.dtype]
        share = count * self.model.vocab_size * 4 / self.cluster.num_ranks
        within = 2 * (gpus - 1) / gpus * reduced + (gpus - 1) * nodes * share
        between = 2 * (nodes - 1) / nodes * reduced / gpus + (nodes - 1) * share
        return within, between


def _check(model: ModelConfig, num_ranks: int, wishes: Wishes, experts_per_rank: int) -> None:
    if wishes.tensor_parallel_size not in (None, num_ranks):
        raise ConfigError(
            f"--tensor-parallel-size {wishes.tensor_parallel_size} is not the {num_ranks} GPUs that --gpus and --nodes "
            "say\n  leave it out"
        )
    if model.num_heads % num_ranks:
        sizes = ", ".join(map(str, tensor_parallel_sizes(model, min(num_ranks, model.num_heads))))
        raise ConfigError(f"{num_ranks} GPUs do not divide the model's {model.num_heads} heads; smaller: {sizes}")
    EngineConfig(max_model_len=wishes.max_model_len).check_max_model_len(model.longest_context)
    model.check_expert_offload(experts_per_rank, num_ranks)
