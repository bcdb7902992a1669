"""LatentProjection: the weight that makes keys and values of latents, in the form that absorbed attention needs."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from pagewick.huge_memory import apart
from pagewick.kernels.matrix import PerHeadLinear
from pagewick.layers.context import LayerContext
from pagewick.layers.linear import head_share
from pagewick.layers.mla_config import MlaConfig


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
        self.queries = PerHeadLinear(self.num_heads, rank, key_dim, context.dtype, context.device)
        self.values = PerHeadLinear(self.num_heads, value_dim, rank, context.dtype, context.device)
        self.query_weight = nn.Parameter(self.queries.weights.data, requires_grad=False)
        self.value_weight = nn.Parameter(self.values.weights.data, requires_grad=False)

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        return self._loading[0].expected()

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        """Keep this rank's heads. Raises ModelLoadError if the tensor does not fit."""
        self._loading[0].load(part, name, tensor)

    def finish_loading(self) -> None:
        loaded = self._loading.pop()
        loaded.finish()
        for head, rows in enumerate(loaded.unpack().view(self.num_heads, sum(self._sizes), self._rank)):
            keys, values = rows[: self._sizes[0]], rows[self._sizes[0] :]
            self.queries.weights.load(head, keys.t().contiguous(), 0)
            self.values.weights.load(head, values.contiguous(), 0)
