"""An index that selects the blocks of tokens which a token sees (Qwen4-Exp).

T: tokens of a batch; H: hidden_size; I: numbers of an index key. Module names are checkpoint names.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagewick.kernels.options import CompressOptions, Rotation, SelectedKeys
from pagewick.layers.compressed_config import BlockIndexConfig
from pagewick.layers.compressor import RowCache
from pagewick.layers.config import RopeConfig
from pagewick.layers.context import LayerContext, TokenBatch
from pagewick.layers.linear import ReplicatedLinear
from pagewick.layers.norm import RMSNorm
from pagewick.layers.rotary import RotaryEmbedding
from pagewick.quantization.share import check_floats


class BlockKeyNorm(nn.Module):
    """The weight of the RMS norm of blocks' keys, [I] float32, plus 1."""

    def __init__(self, context: LayerContext, dim: int) -> None:
        super().__init__()
        empty = torch.empty(dim, dtype=torch.float32, device=context.device)
        self.weight = nn.Parameter(empty, requires_grad=False)

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        return ((None, "weight"),)

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        check_floats(tensor, tuple(self.weight.shape))
        self.weight.copy_(tensor).add_(1.0)


class BlockIndex(nn.Module):
    """Selects blocks for each token. Every rank has all of it, so that all ranks select the same."""

    def __init__(
        self, context: LayerContext, prefix: str, hidden_size: int, config: BlockIndexConfig, rope: RopeConfig
    ) -> None:
        super().__init__()
        self._config, dim = config, config.head_dim
        self.ratio = config.ratio
        # No token has more before it.
        self._top_k = min(config.top_k, max(1, context.max_model_len // config.ratio))
        self.index_qk_proj = ReplicatedLinear(context, f"{prefix}.index_qk_proj", hidden_size, config.num_rows)
        self.q_layernorm = RMSNorm(context, dim, config.norm_eps, offset=1.0)
        self.k_layernorm = BlockKeyNorm(context, dim)
        self.tokens, self.blocks = (RowCache(context, kept) for kept in config.kept())
        self.rotary = RotaryEmbedding(context, rope)
        # The softmax of equal gates is the mean.
        no_bias = torch.zeros(config.ratio, dim, device=context.device)
        self._options = CompressOptions(config.ratio, False, no_bias, self.k_layernorm.weight, config.norm_eps)

    def forward(self, hidden_states: Tensor, rotation: Rotation, batch: TokenBatch) -> SelectedKeys:
        """Store the keys of blocks that end among these tokens [T, H], and select for each token. rotation: theirs."""
        config, num_tokens = self._config, len(hidden_states)
        num_columns = config.num_heads * config.head_dim
        products = self.index_qk_proj(hidden_states, batch)
        queries = self.q_layernorm(products[:, :num_columns].reshape(-1, config.head_dim))
        rows = F.pad(products[:, num_columns:], (0, config.head_dim))
        first = self.rotary.angles((batch.positions[0] + 1 - config.ratio).clamp(min=0))
        self.tokens.rows.compress(rows, batch, self.blocks.rows, Rotation(first.cos, first.sin), self._options)
        return self.blocks.rows.select(
            queries.view(num_tokens, config.num_heads, config.head_dim),
            torch.ones(num_tokens, config.num_heads, device=queries.device),
            batch,
            None,
            rotation=rotation,
            top_k=self._top_k,
        )
