"""A model over many GPUs, on paper: which of its bytes a decode step moves, and how long that takes.

    time of a step = the sum of bytes / bandwidth over everything that one rank reads, sends and copies

The memory of a rank is planned as for a GPU of this machine (`plan`); offloaded experts lie in host memory.
The time is a lower bound: rates are the datasheets', nothing overlaps, and arithmetic and latencies take no time. The
router is assumed to choose experts evenly: B tokens that choose k of E experts each meet E (1 - (1 - k/E)^B) different
ones. The part of them that is in host memory is as large as the part of all experts that is offloaded. Each of these
changes places with an expert on the device: one is copied to the device, then the other one back.

Each layer adds up its ranks' shares twice, and the embedding once. Within a node of G GPUs an all-reduce of M bytes
sends 2 (G - 1) / G M from each GPU; between N nodes, each GPU sends 2 (N - 1) / N of its share M / G. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from pagewick.doctor.checkpoint import Checkpoint
from pagewick.doctor.clusters import Cluster
from pagewick.doctor.plan import (
    MAX_NUM_SEQS,
    Device,
    LayerGroup,
    Plan,
    Wishes,
    cache_groups,
    longest_context,
    make_plan,
    tensor_parallel_sizes,
)
from pagewick.doctor.rank_weights import RankWeights, weights_of_rank
from pagewick.errors import ConfigError
from pagewick.models.config import ModelConfig
from pagewick.models.tensor_sizes import DTYPE_BYTES

DEFAULT_CONTEXT: Final = 8192


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
    """A plan for a cluster. memory: that of one rank. host: bytes of one rank's experts in main memory.

    num_experts, num_offloaded: of each layer. num_fitting: how many sequences of the planned context fit at once.
    longest: tokens of the longest sequence that fits alone, at most the model's context. num_collectives: exchanges
    between ranks in a step. steps: one for a single sequence, and one for as many as are wanted and fit; none if no
    sequence fits.
    """

    cluster: Cluster
    memory: Plan
    num_experts: int
    num_offloaded: int
    host: int
    num_fitting: int
    longest: int
    num_collectives: int
    steps: tuple[DecodeStep, ...]


def plan_scale(
    checkpoint: Checkpoint,
    model: ModelConfig,
    cluster: Cluster,
    wishes: Wishes,
    *,
    experts_per_rank: int = 0,
) -> ScalePlan:
    """Plan how a checkpoint's model would run on a machine that need not be here.

    experts_per_rank: number of each layer's experts in host memory, divided by the number of ranks. Raises ConfigError
    for impossible wishes.
    """
    num_ranks = cluster.num_ranks
    _check(model, num_ranks, wishes, experts_per_rank)
    weights = weights_of_rank(model, checkpoint, num_ranks, wishes.dtype)
    num_experts = model.mixtures[0].num_experts if model.mixtures else 0
    num_offloaded = experts_per_rank * num_ranks
    expert_bytes = weights.expert // num_experts if num_experts else 0  # in all layers
    context = wishes.max_model_len or min(DEFAULT_CONTEXT, model.max_position_embeddings)
    wishes = replace(wishes, max_model_len=context, tensor_parallel_size=num_ranks)
    on_device = weights.total - num_offloaded * expert_bytes
    device = Device("cuda", cluster.kind.memory, cluster.kind.memory, cluster.num_gpus, is_planned=True)
    memory = make_plan(model, lambda size: on_device, device, wishes)
    groups = cache_groups(model, cache_dtype=memory.kv_cache_dtype, num_ranks=num_ranks)
    kv_bytes, offloaded = _read_bytes(groups, context), num_offloaded / (num_experts or 1)
    num_fitting = 0 if memory.missing else memory.rows[-1].num_sequences
    counts = sorted({1, min(wishes.max_num_seqs or MAX_NUM_SEQS, num_fitting)}) if num_fitting else []
    return ScalePlan(
        cluster=cluster,
        memory=memory,
        num_experts=num_experts,
        num_offloaded=num_offloaded,
        # One row is spare, so that two experts can change places.
        host=(num_offloaded + 1) * expert_bytes if num_offloaded else 0,
        num_fitting=num_fitting,
        longest=longest_context(groups, memory.kv_chosen, model.max_position_embeddings),
        num_collectives=_num_all_reduces(model) + 1 if num_ranks > 1 else 0,
        steps=tuple(_step(model, cluster, weights, offloaded, kv_bytes, memory.dtype, count) for count in counts),
    )


def least_offload(model: ModelConfig, weights: RankWeights, memory: Plan) -> int | None:
    """The smallest --num-experts-offload-per-rank with which a plan for a GPU fits; None if none does.

    weights: one rank's, all of them.
    """
    if not model.mixtures or model.mixtures[0].num_identities:
        # Experts without weights keep the others on the device, too.
        return None
    experts, num_ranks = model.mixtures[0], memory.tensor_parallel_size

    def fits(per_rank: int) -> bool:
        on_device = weights.total - per_rank * num_ranks * (weights.expert // experts.num_experts)
        return not make_plan(model, lambda size: on_device, memory.device, memory.wishes).missing

    most = (experts.num_experts - experts.routing.top_k) // num_ranks
    return next((per_rank for per_rank in range(1, most + 1) if fits(per_rank)), None)


def _step(
    model: ModelConfig, cluster: Cluster, weights: RankWeights, offloaded: float, kv_bytes: int, dtype: str, count: int
) -> DecodeStep:
    """A step for `count` sequences. offloaded: share of the experts. kv_bytes: read of the cache of each sequence."""
    kind, gpus, nodes = cluster.kind, cluster.num_gpus, cluster.num_nodes
    met = copied = each = 0.0
    if model.mixtures:
        mixture = model.mixtures[0]
        total, chance = mixture.num_experts, mixture.routing.top_k / (mixture.num_experts + mixture.num_identities)
        met, each = total * (1 - (1 - chance) ** count), weights.expert / total
        copied = met * offloaded
    # All-reduces, and the logits' shares in float32.
    reduced = _num_all_reduces(model) * count * model.hidden_size * DTYPE_BYTES[dtype]
    share = count * model.vocab_size * 4 / cluster.num_ranks
    within = 2 * (gpus - 1) / gpus * reduced + (gpus - 1) * nodes * share
    between = 2 * (nodes - 1) / nodes * reduced / gpus + (nodes - 1) * share
    costs = (
        Cost("attention, dense layers, norms", weights.dense, kind.bandwidth),
        Cost("shared experts", weights.shared_expert, kind.bandwidth),
        Cost("routed experts", round(met * each), kind.bandwidth),
        Cost("vocabulary head", weights.read_head, kind.bandwidth),
        Cost("KV cache", count * kv_bytes, kind.bandwidth),
        Cost("experts from and to the host", round(2 * copied * each), kind.host_link),
        Cost("between GPUs", round(within), kind.gpu_link),
        Cost("between nodes", round(between), cluster.network),
    )
    return DecodeStep(count, met, copied, tuple(cost for cost in costs if cost.num_bytes))


def _num_all_reduces(model: ModelConfig) -> int:
    return 2 * len(model.all_layers) + 1


def _read_bytes(groups: Sequence[LayerGroup], context: int) -> int:
    """Bytes that one new token reads of the cache of a sequence as long as the context."""
    lengths = [context if (window := group.spec.lookback) is None else min(context, window + 1) for group in groups]
    return round(sum(group.bytes_per_token * length for group, length in zip(groups, lengths, strict=True)))


def _check(model: ModelConfig, num_ranks: int, wishes: Wishes, experts_per_rank: int) -> None:
    if wishes.tensor_parallel_size not in (None, num_ranks):
        raise ConfigError(
            f"--tensor-parallel-size {wishes.tensor_parallel_size} is not the {num_ranks} GPUs that --gpus and --nodes "
            "say\n  leave it out"
        )
    if wishes.pipeline_parallel_size > 1:
        raise ConfigError(
            "--pipeline-parallel-size is planned for this machine, or with --memory; with --gpus, all GPUs share every "
            "layer\n  leave one of the two out"
        )
    for parts, count in model.divided.items():
        if count % num_ranks:
            sizes = ", ".join(map(str, tensor_parallel_sizes(model, min(num_ranks, count))))
            raise ConfigError(f"{num_ranks} GPUs do not divide the model's {count} {parts}; smaller: {sizes}")
    model.check_expert_offload(experts_per_rank, num_ranks)
