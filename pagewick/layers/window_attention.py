"""Attention to a window of keys that are their own values, and to compressed entries (DeepSeek V4).

T: tokens of a batch; H: hidden_size. Module names are checkpoint names.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from pagewick import kernels
from pagewick.huge_memory import apart
from pagewick.kernels.matrix import PerHeadLinear
from pagewick.kernels.options import Rotation, ScoreOptions, SelectedKeys
from pagewick.layers.attention import HeadSinks
from pagewick.layers.compressed_config import WindowConfig
from pagewick.layers.compressor import Compressor, EntryIndexer, RowCache, turning
from pagewick.layers.config import RopeConfig
from pagewick.layers.context import LayerContext, TokenBatch
from pagewick.layers.elementwise import scale
from pagewick.layers.linear import Linear, ReplicatedLinear, RowParallelLinear, head_share, row_share
from pagewick.layers.norm import PlainRMSNorm, RMSNorm
from pagewick.layers.rotary import Angles, RotaryEmbedding
from pagewick.parallel.sharding import shard_bounds


class GroupProjection(nn.Module):
    """A product of each group of this rank's heads with a matrix of its own: [T, G, K] -> [T, G, rank].

    The file has the matrices one above the other. The weight is unpacked after loading, whatever its format.
    """

    def __init__(self, context: LayerContext, prefix: str, config: WindowConfig) -> None:
        super().__init__()
        rank, width = config.group_rank, config.group_width
        share = row_share(context, config.num_groups * rank, width, multiple=rank)
        self.num_groups = share.num_rows // rank
        self.num_parameters = share.num_rows * width
        # In a list, so that it is not registered as a submodule: it is dropped once everything is loaded.
        with apart():
            self._loading = [context.make_weight(prefix, share)]
        self._expected = tuple(self._loading[0].expected())
        self._product = PerHeadLinear(self.num_groups, rank, width, context.dtype, context.device)
        self.weight = nn.Parameter(self._product.weights.data, requires_grad=False)

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        return self._expected

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        """Keep this rank's groups. Raises ModelLoadError if the tensor does not fit."""
        self._loading[0].load(part, name, tensor)

    def finish_loading(self) -> None:
        loaded = self._loading.pop()
        loaded.finish()
        for group, rows in enumerate(loaded.unpack().chunk(self.num_groups)):
            self._product.weights.load(group, rows.contiguous(), 0)

    def forward(self, x: Tensor) -> Tensor:
        return self._product.linear(x)


class WindowAttention(nn.Module):
    """Self-attention: [T, H] -> [T, H].

    Each rank has some of the groups of heads; keys and entries, and the weights that make them, are on every rank.
    """

    def __init__(
        self, context: LayerContext, prefix: str, hidden_size: int, config: WindowConfig, rope: RopeConfig
    ) -> None:
        super().__init__()
        self._config = config
        eps, head_dim, low = config.norm_eps, config.head_dim, config.q_lora_rank
        first, last = shard_bounds(config.num_heads, context.tp_rank, context.tp_size)
        self._num_heads = last - first
        self.q_a_proj = ReplicatedLinear(context, f"{prefix}.q_a_proj", hidden_size, low)
        self.q_a_norm = RMSNorm(context, low, eps)
        self.q_b_proj = Linear(context, f"{prefix}.q_b_proj", head_share(context, low, config.num_heads, head_dim))
        self.q_b_norm = PlainRMSNorm(context, head_dim, eps)
        self.kv_proj = ReplicatedLinear(context, f"{prefix}.kv_proj", hidden_size, head_dim)
        self.kv_norm = RMSNorm(context, head_dim, eps)
        self.sinks = HeadSinks(context, range(first, last), config.num_heads)
        self.o_a_proj = GroupProjection(context, f"{prefix}.o_a_proj", config)
        outputs = config.num_groups * config.group_rank
        self.o_b_proj = RowParallelLinear(
            context, f"{prefix}.o_b_proj", outputs, hidden_size, multiple=config.group_rank
        )
        self.keys = RowCache(context, config.kept()[0])
        self._scores = ScoreOptions(config.softmax_scale, config.window, sinks=self.sinks.weight)
        self.compressor: Compressor | None = None
        self.indexer: EntryIndexer | None = None
        if config.compressor is not None:
            name = f"{prefix}.compressor"
            self.compressor = Compressor(context, name, hidden_size, head_dim, config.compressor, eps)
            # Entries turn by other positions than tokens.
            self.rotary = RotaryEmbedding(context, rope)
            if config.compressor.indexer is not None:
                self.indexer = EntryIndexer(
                    context, f"{prefix}.indexer", hidden_size, low, config.compressor, config.compressor.indexer, eps
                )

    def forward(self, hidden_states: Tensor, angles: Angles, batch: TokenBatch) -> Tensor:
        """angles: those of the last pairs of the longest vectors, as turning needs them."""
        num_tokens, head_dim = len(hidden_states), self._config.head_dim
        rotation = turning(angles, head_dim)
        query_latents = self.q_a_norm(self.q_a_proj(hidden_states, batch))
        queries = self.q_b_norm(self.q_b_proj(query_latents, batch).view(-1, head_dim))
        queries = kernels.rotate_heads(queries.view(num_tokens, self._num_heads, head_dim), rotation)
        keys = self.keys.rows
        keys.store(self.kv_norm(self.kv_proj(hidden_states, batch)), batch, rotation)
        selected: SelectedKeys | None = None
        if self.compressor is not None:
            first_angles = self.rotary.shifted_angles(batch.positions[0], 1 - self.compressor.ratio)
            self.compressor.compress(hidden_states, first_angles, batch)
            if self.indexer is not None:
                self.indexer.compress(hidden_states, first_angles, batch)
                selected = self.indexer.select(hidden_states, query_latents, angles, batch, self.compressor.entries)
        entries = None if self.compressor is None else self.compressor.entries.rows
        attended = keys.attend(queries, batch, self._scores, entries, selected)
        # Values are keys, which are rotated: what is left of their rotation is that by the distance.
        back = Rotation(rotation.cos.contiguous(), scale(rotation.sin.contiguous(), -1.0), interleaved=True)
        attended = kernels.rotate_heads(attended, back)
        grouped = self.o_a_proj(attended.view(num_tokens, self.o_a_proj.num_groups, -1))
        return self.o_b_proj(grouped.flatten(1), batch)  # type: ignore[no-any-return]
