"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), absorbed, over cached latents."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pagewick import kernels
from pagewick.attention.backend import AttentionBatch, BoundLatents, Scoring
from pagewick.attention.cache_spec import CacheSpec, KeptLatents
from pagewick.huge_memory import apart
from pagewick.kernels.matrix import PerHeadLinear
from pagewick.kernels.options import Rotation, SelectedKeys
from pagewick.layers.attention import HeadSinks
from pagewick.layers.config import MlaConfig
from pagewick.layers.context import LayerContext
from pagewick.layers.elementwise import sigmoid_gate
from pagewick.layers.head_gates import HeadGates
from pagewick.layers.indexer import Indexer, LentSelection
from pagewick.layers.linear import ColumnParallelLinear, Linear, ReplicatedLinear, RowParallelLinear, head_share
from pagewick.layers.log_scales import LogScales
from pagewick.layers.norm import RMSNorm, ScaledRMSNorm
from pagewick.layers.rotary import Angles, CosSin
from pagewick.parallel.sharding import shard_bounds


class LatentProjection(nn.Module):
    """The checkpoint's kv_b_proj, divided into two products for each of this rank's H heads.

    queries: [T, H, qk_nope_head_dim] -> [T, H, kv_lora_rank], with each head's matrix of keys, transposed. values:
    [T, H, kv_lora_rank] -> [T, H, v_head_dim]. No format of weights can be multiplied transposed, so the weight is
    unpacked after loading, whatever its format.
    """

    def __init__(self, context: LayerContext, prefix: str, config: MlaConfig) -> None:
        super().__init__()
        key_dim, value_dim, rank = config.qk_nope_head_dim, config.v_head_dim, config.kv_lora_rank
        share = head_share(context, rank, config.num_heads, key_dim + value_dim)
        self.num_heads, self._sizes = share.num_rows // (key_dim + value_dim), (key_dim, value_dim)
        self._rank = rank
        self.num_parameters = share.num_rows * share.num_columns
        # In a list, so that it is not registered as a submodule: it is dropped once everything is loaded.
        with apart():
            self._loading = [context.make_weight(prefix, share)]
        # Those that observe the model ask for the names once it is loaded, too.
        self._expected = tuple(self._loading[0].expected())
        self.queries = PerHeadLinear(self.num_heads, rank, key_dim, context.dtype, context.device)
        self.values = PerHeadLinear(self.num_heads, value_dim, rank, context.dtype, context.device)
        self.query_weight = nn.Parameter(self.queries.weights.data, requires_grad=False)
        self.value_weight = nn.Parameter(self.values.weights.data, requires_grad=False)

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        return self._expected

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        """Keep this rank's heads. Raises ModelLoadError if the tensor does not fit."""
        self._loading[0].load(part, name, tensor)

    def finish_loading(self) -> None:
        loaded = self._loading.pop()
        loaded.finish()
        for head, rows in enumerate(loaded.unpack().view(self.num_heads, sum(self._sizes), self._rank)):
            keys, values = rows[: self._sizes[0]], rows[self._sizes[0] :]
            # Not contiguous(): it leaves a single column as it is.
            self.queries.weights.load(head, keys.t().clone(memory_format=torch.contiguous_format), 0)
            self.values.weights.load(head, values.contiguous(), 0)


class QueryGates:
    """Queries and gates of one projection, whose inputs are the queries' latents behind their norm and before it."""

    def __init__(self, context: LayerContext, num_heads: int, config: MlaConfig) -> None:
        """num_heads: of this rank."""
        assert config.q_lora_rank is not None, "gates are made from the queries' latents"
        heads = config.query_rows * torch.arange(num_heads)[:, None]
        queries = heads + torch.arange(config.qk_head_dim)
        gates = heads + torch.arange(config.qk_head_dim, config.query_rows)
        self._columns = tuple(columns.flatten().to(context.device) for columns in (queries, gates))
        self._twice = torch.arange(config.q_lora_rank, device=context.device).repeat(2)

    def with_norm(self, latents: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """Return norm(latents), and these followed by latents: [T, q_lora_rank] and [T, 2 * q_lora_rank]."""
        both = kernels.gather_columns(latents, self._twice)
        normed = both[:, : latents.shape[1]]
        return kernels.rms_norm(latents, norm.weight, norm.eps, out=normed), both

    def separated(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries [T, heads * qk_head_dim] and the gates [T, heads * v_head_dim]."""
        queries, gates = (kernels.gather_columns(projected, columns) for columns in self._columns)
        return queries, gates


class LatentCache(nn.Module):
    """The latents that a layer keeps. The engine reads `cache_spec` and calls `bind_cache` once.

    num_heads: query heads of this rank. sinks: as in Scoring. bound: the backend's; set by bind_cache, as is the cache
    group.
    """

    def __init__(self, context: LayerContext, num_heads: int, config: MlaConfig, sinks: Tensor | None = None) -> None:
        super().__init__()
        self._kept = KeptLatents(config.kv_lora_rank, config.qk_rope_head_dim, config.indexer is not None)
        self._scoring = Scoring(num_heads, config.softmax_scale, sinks=sinks)
        self._backend = context.backend
        self.bound: BoundLatents | None = None
        self.group = 0

    @property
    def cache_spec(self) -> CacheSpec:
        return self._backend.cache_spec(self._kept)

    def bind_cache(self, blocks: Tensor, group: int) -> None:
        """Use `blocks` [num_blocks, block_bytes] uint8, addressed by the block tables of cache group `group`."""
        self.bound, self.group = self._backend.bind_latents(self._kept, self._scoring, blocks, group), group


class LatentAttention(nn.Module):
    """Self-attention: [T, hidden_size] -> [T, hidden_size].

    Each rank has some of the heads; the latents, and the weights that make them, are on every rank. kept: None: the
    layer attends to the latents of another one. is_selective: each token sees a selection of those before it.
    """

    def __init__(self, context: LayerContext, prefix: str, hidden_size: int, config: MlaConfig) -> None:
        super().__init__()
        self._config = config
        self.is_selective = config.indexer is not None
        # Not a submodule: it is another layer.
        self._lenders: tuple[LatentAttention, ...] = ()
        head_dim = config.qk_head_dim
        if config.q_lora_rank is None:
            heads = head_share(context, hidden_size, config.num_heads, head_dim)
            self.q_proj = Linear(context, f"{prefix}.q_proj", heads)
        else:
            self.q_a_proj = ReplicatedLinear(
                context, f"{prefix}.q_a_proj", hidden_size, config.q_lora_rank, bias=config.attention_bias
            )
            self.q_a_layernorm = RMSNorm(context, config.q_lora_rank, config.norm_eps)
            num_inputs = 2 * config.q_lora_rank if config.has_gates else config.q_lora_rank
            heads = head_share(context, num_inputs, config.num_heads, config.query_rows)
            self.q_b_proj = Linear(context, f"{prefix}.q_b_proj", heads)
        self.indexer: Indexer | None = None
        self._lent: LentSelection | None = None
        if config.indexer is not None and not config.indexer.is_shared:
            self.indexer = Indexer(context, f"{prefix}.indexer", hidden_size, config.q_lora_rank, config.indexer)
        self.kv_b_proj = LatentProjection(context, f"{prefix}.kv_b_proj", config)
        first, last = shard_bounds(config.num_heads, context.tp_rank, context.tp_size)
        self.sinks = HeadSinks(context, range(first, last), config.num_heads) if config.has_sinks else None
        self.kept: LatentCache | None = None
        if config.has_own_latents:
            num_rows = config.kv_lora_rank + config.key_dim
            self.kv_a_proj_with_mqa = ReplicatedLinear(
                context, f"{prefix}.kv_a_proj_with_mqa", hidden_size, num_rows, bias=config.attention_bias
            )
            self.kv_a_layernorm = ScaledRMSNorm(context, config.kv_lora_rank, config.norm_eps, config.latent_scale)
            sinks = None if self.sinks is None else self.sinks.weight
            self.kept = LatentCache(context, self.kv_b_proj.num_heads, config, sinks)
        self.softmax_scaling: LogScales | None = None
        if config.has_log_scales:
            self.softmax_scaling = LogScales(
                context, head_dim, last - first, total_num_heads=config.num_heads, first_head=first
            )
        self._gates: QueryGates | None = None
        if config.has_gates:
            self._gates = QueryGates(context, self.kv_b_proj.num_heads, config)
        self.g_proj: ColumnParallelLinear | None = None
        ours, size = self.kv_b_proj.num_heads, config.v_head_dim
        if config.has_head_gates:
            self.g_proj = HeadGates(context, f"{prefix}.g_proj", hidden_size, config.num_heads, ours, size)
        elif config.has_number_gates:
            gates = config.num_heads * size
            self.g_proj = ColumnParallelLinear(context, f"{prefix}.g_proj", hidden_size, gates, multiple=size)
        num_columns = self.kv_b_proj.num_heads * head_dim
        # The cosines and sines of pairs that stand still.
        half = config.qk_rope_head_dim // 2
        self._still = torch.ones(1, half, device=context.device), torch.zeros(1, half, device=context.device)
        self._only_column = torch.zeros(num_columns, dtype=torch.int64, device=context.device)
        self.o_proj = RowParallelLinear(
            context,
            f"{prefix}.o_proj",
            config.num_heads * config.v_head_dim,
            hidden_size,
            bias=config.attention_bias,
            multiple=config.v_head_dim,
        )

    def borrow_from(self, lender: LatentAttention) -> None:
        """Attend to the latents of an earlier layer with equal sizes. Called once, if this one has none of its own."""
        assert self.kept is None and lender.kept is not None
        self._lenders = (lender,)

    def select_as(self, lent: LentSelection) -> None:
        """See what the indexer of an earlier layer selects. Called once, if this layer has none."""
        self._lent = lent
        lent.add_borrower()

    def forward(self, hidden_states: Tensor, angles: Angles | CosSin | None, batch: AttentionBatch) -> Tensor:
        """angles: those of qk_rope_head_dim / 2 pairs; None: nothing is rotated."""
        config, owner = self._config, self._lenders[0] if self._lenders else self
        assert owner.kept is not None and owner.kept.bound is not None, "bind_cache comes first"
        turn = angles[:2] if angles is not None and angles[0].numel() else None
        if turn is None:
            cos, sin = (each.expand(len(hidden_states), -1) for each in self._still)
            turn = cos, sin
        query_latents: Tensor | None = None
        selected: SelectedKeys | None = None
        gates: Tensor | None = None
        if config.q_lora_rank is None:
            queries = self.q_proj(hidden_states, batch)
        else:
            query_latents = self.q_a_proj(hidden_states, batch)
            if self._gates is None:
                query_latents = self.q_a_layernorm(query_latents)
                queries = self.q_b_proj(query_latents, batch)
            else:
                query_latents, both = self._gates.with_norm(query_latents, self.q_a_layernorm)
                queries, gates = self._gates.separated(self.q_b_proj(both, batch))
        if self.indexer is not None:
            selected = self.indexer(hidden_states, query_latents, angles, turn, batch, owner.kept.group)
        elif self._lent is not None:
            selected = self._lent.take()
        if self.softmax_scaling is not None:
            queries = self.softmax_scaling(queries, angles)
        if isinstance(angles, Angles) and angles.q_factors is not None:
            # Rotation is linear: scaled before it, queries are the same as scaled after it, but for rounding.
            queries = kernels.multiply(queries, kernels.gather_columns(angles.q_factors, self._only_column))
        sums = owner.kept.bound.forward(
            queries.view(len(hidden_states), self.kv_b_proj.num_heads, config.qk_head_dim),
            self.kv_a_proj_with_mqa(hidden_states, batch) if self.kept is not None else None,
            batch,
            self._absorb,
            selected,
            norm_weight=owner.kv_a_layernorm.weight,
            norm_eps=config.norm_eps,
            rotation=Rotation(*turn, config.rope_interleaved),
        )
        values = self.kv_b_proj.values.linear(sums).flatten(1)
        if self.g_proj is not None:
            gates = self.g_proj(hidden_states, batch)
        if gates is not None:
            values = sigmoid_gate(values, gates)
        return self.o_proj(values, batch)  # type: ignore[no-any-return]

    def _absorb(self, queries: Tensor) -> Tensor:
        """Return what does not rotate of queries in the space of latents: [T, H, head size] -> [T, H, kv_lora_rank]."""
        return self.kv_b_proj.queries.linear(queries[..., : self._config.qk_nope_head_dim])
