"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), absorbed, over cached latents."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pagewick.attention.backend import AttentionBatch
from pagewick.attention.cache_spec import CacheSpec, latent_spec
from pagewick.attention.latent import attend_latents, view_latent_cache
from pagewick.huge_memory import apart
from pagewick.kernels import HeadMatrices
from pagewick.layers.context import LayerContext
from pagewick.layers.linear import Linear, Part, ReplicatedLinear, RowParallelLinear
from pagewick.layers.mla_config import MlaConfig
from pagewick.layers.norm import RMSNorm
from pagewick.layers.rotary import CosSin
from pagewick.parallel.sharding import shard_bounds


class LatentAttention(nn.Module):
    """Self-attention: [T, hidden_size] -> [T, hidden_size].

    Heads are shared out over the ranks; the latents, and what makes them, are on every rank. The engine reads
    `cache_spec` and calls `bind_cache` once.
    """

    def __init__(self, context: LayerContext, prefix: str, hidden_size: int, config: MlaConfig) -> None:
        super().__init__()
        self._config = config
        self._block_size = context.backend.block_size
        self._cache_dtype = context.cache_dtype
        self._cache: Tensor | None = None
        self._group = 0
        head_dim = config.qk_head_dim
        if config.q_lora_rank is None:
            self.q_proj = HeadParallelLinear(context, f"{prefix}.q_proj", hidden_size, config.num_heads, head_dim)
        else:
            self.q_a_proj = ReplicatedLinear(
                context, f"{prefix}.q_a_proj", hidden_size, config.q_lora_rank, bias=config.attention_bias
            )
            self.q_a_layernorm = RMSNorm(context, config.q_lora_rank, config.norm_eps)
            self.q_b_proj = HeadParallelLinear(
                context, f"{prefix}.q_b_proj", config.q_lora_rank, config.num_heads, head_dim
            )
        self.kv_a_proj_with_mqa = ReplicatedLinear(
            context, f"{prefix}.kv_a_proj_with_mqa", hidden_size, config.latent_size, bias=config.attention_bias
        )
        self.kv_a_layernorm = RMSNorm(context, config.kv_lora_rank, config.norm_eps)
        self.kv_b_proj = LatentProjection(context, f"{prefix}.kv_b_proj", config)
        self.o_proj = RowParallelLinear(
            context,
            f"{prefix}.o_proj",
            config.num_heads * config.v_head_dim,
            hidden_size,
            bias=config.attention_bias,
            multiple=config.v_head_dim,
        )

    @property
    def cache_spec(self) -> CacheSpec:
        config = self._config
        return latent_spec(config.kv_lora_rank, config.qk_rope_head_dim, self._block_size, self._cache_dtype.itemsize)

    def bind_cache(self, blocks: Tensor, group: int) -> None:
        """Use `blocks` [num_blocks, block_bytes] uint8, addressed by the block tables of cache group `group`."""
        self._cache = view_latent_cache(blocks, self._block_size, self._config.latent_size, self._cache_dtype)
        self._group = group

    def forward(self, hidden_states: Tensor, cos_sin: CosSin, batch: AttentionBatch) -> Tensor:
        """cos_sin: two of [T, qk_rope_head_dim / 2], as RotaryEmbedding gives them."""
        assert self._cache is not None, "bind_cache comes first"
        config, (cos, sin) = self._config, cos_sin
        sums = attend_latents(
            self._queries(hidden_states).view(len(hidden_states), self.kv_b_proj.num_heads, config.qk_head_dim),
            self.kv_a_proj_with_mqa(hidden_states),
            self._cache,
            batch,
            batch.groups[self._group],
            absorb=self.kv_b_proj.queries.linear,
            norm_weight=self.kv_a_layernorm.weight,
            norm_eps=config.norm_eps,
            cos=cos,
            sin=sin,
            interleaved=config.rope_interleaved,
            softmax_scale=config.softmax_scale,
        )
        values = self.kv_b_proj.values.linear(sums)
        return self.o_proj(values.flatten(1))  # type: ignore[no-any-return]

    def _queries(self, hidden_states: Tensor) -> Tensor:
        """[T, num_heads * qk_head_dim] of this rank's heads."""
        if self._config.q_lora_rank is None:
            return self.q_proj(hidden_states)  # type: ignore[no-any-return]
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))  # type: ignore[no-any-return]


class HeadParallelLinear(Linear):
    """Output rows are cut between heads of `head_dim` rows."""

    def __init__(
        self, context: LayerContext, prefix: str, in_features: int, total_num_heads: int, head_dim: int
    ) -> None:
        num_rows = total_num_heads * head_dim
        rows = shard_bounds(num_rows, context.tp_rank, context.tp_size, multiple=head_dim)
        super().__init__(context, prefix, in_features, (0, in_features), [Part(None, num_rows, (rows,))], bias=False)


class LatentProjection(nn.Module):
    """The checkpoint's kv_b_proj, which makes keys and values of latents, as the two products that are made of it.

    queries: [T, H, qk_nope_head_dim] -> [T, H, kv_lora_rank], with each head's matrix of keys. values: [T, H,
    kv_lora_rank] -> [T, H, v_head_dim]. H: this rank's heads. A quantized weight is unpacked for this: every linear
    method can multiply with the unit matrix.
    """

    def __init__(self, context: LayerContext, prefix: str, config: MlaConfig) -> None:
        super().__init__()
        key_dim, value_dim, rank = config.qk_nope_head_dim, config.v_head_dim, config.kv_lora_rank
        first, last = shard_bounds(config.num_heads, context.tp_rank, context.tp_size)
        self.num_heads, self._head_dim, self._key_dim, self._rank = last - first, key_dim + value_dim, key_dim, rank
        self._dtype, self._device = context.dtype, context.device
        # Not registered as a part of this module: it is gone when everything is loaded.
        with apart():
            self._loading = [HeadParallelLinear(context, prefix, rank, config.num_heads, self._head_dim)]
        self.queries = HeadMatrices(self.num_heads, rank, key_dim, context.dtype, context.device)
        self.values = HeadMatrices(self.num_heads, value_dim, rank, context.dtype, context.device)
        self.query_weight = nn.Parameter(self.queries.weights.data, requires_grad=False)
        self.value_weight = nn.Parameter(self.values.weights.data, requires_grad=False)

    @property
    def num_uncounted_parameters(self) -> int:
        """Below 0: what packed weights are padded with."""
        both = (self.queries.weights, self.values.weights)
        return sum(each.num_experts * each.num_rows * each.num_columns - each.data.numel() for each in both)

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        return self._loading[0].expected_weights()

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        """As Linear.load_weight."""
        self._loading[0].load_weight(name, tensor, part)

    def finish_loading(self) -> None:
        loaded = self._loading.pop()
        loaded.finish_loading()
        unit = torch.eye(self._rank, dtype=self._dtype, device=self._device)
        rows = loaded(unit).t().reshape(self.num_heads, self._head_dim, self._rank)
        for head in range(self.num_heads):
            keys, values = rows[head, : self._key_dim], rows[head, self._key_dim :]
            self.queries.weights.load(head, keys.t().contiguous(), 0)
            self.values.weights.load(head, values.contiguous(), 0)
