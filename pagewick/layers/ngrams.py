"""Embeddings of the n-grams that end at a token, which a layer adds to its streams (Qwen4-Exp).

T: tokens of a batch; S: streams; H: hidden_size. Every rank has all of it but for the table, whose rows are divided.
Module names are checkpoint names.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pagewick import kernels
from pagewick.errors import ModelLoadError
from pagewick.kernels.options import ConvolutionOptions, NgramOptions
from pagewick.layers.context import LayerContext, TokenBatch
from pagewick.layers.elementwise import add, sigmoid_gate
from pagewick.layers.embedding import ShardedEmbedding
from pagewick.layers.gated_streams import StreamNorm, spread_columns
from pagewick.layers.linear import ReplicatedLinear
from pagewick.layers.ngram_config import NgramConfig
from pagewick.layers.state import StateLayer, constant
from pagewick.quantization.share import check_floats, check_shape

# Raise the numbers whenever the layout of a state changes.
_IDS_LAYOUT, _INPUTS_LAYOUT = "earlier tokens 1", "spread convolution 1"


class EarlierTokens(StateLayer):
    """The ids of the last tokens of a sequence, which are its state."""

    def __init__(self, context: LayerContext, num_places: int, num_bytes: int) -> None:
        super().__init__(num_bytes, _IDS_LAYOUT)
        # A convolution that takes one input of each channel, exactly: ids are whole numbers below 2**24.
        taps = torch.eye(num_places, num_places + 1, device=context.device).flip(0)
        self._options = ConvolutionOptions(taps)
        self._ones = torch.ones(1, 2 * num_places, device=context.device)

    def forward(self, batch: TokenBatch) -> Tensor:
        """Return one more than the ids before each token, the nearest first, 0 where there is none: [T, places]."""
        ids, num_places = batch.input_ids, self._ones.shape[1] // 2
        states, metadata = self.states(batch, len(ids))
        numbers = (ids + 1).to(torch.float32).unsqueeze(1).expand(-1, num_places)
        gated = torch.cat((self._ones.expand(len(ids), -1), numbers), dim=1)
        return kernels.short_convolution(gated, states, metadata, self._options)


class SpreadConvolution(StateLayer):
    """silu(convolution) of each channel, whose inputs lie `step` tokens apart: [T, channels] -> [T, channels]."""

    def __init__(self, context: LayerContext, config: NgramConfig, num_bytes: int) -> None:
        super().__init__(num_bytes, _INPUTS_LAYOUT)
        self._step = config.num_orders + 1
        self._stored_shape = config.num_channels, 1, config.conv_size
        # The inputs between them have weights of 0.
        self._spread = constant(context, config.num_channels, config.conv_width)
        self._options = ConvolutionOptions(self._spread, has_gates=False)

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        return ((None, "weight"),)

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        check_floats(tensor, self._stored_shape)
        self._spread.zero_()
        self._spread[:, :: self._step].copy_(tensor.squeeze(1))

    def forward(self, x: Tensor, batch: TokenBatch) -> Tensor:
        states, metadata = self.states(batch, len(x))
        return kernels.short_convolution(x, states, metadata, self._options)


class NgramTable(nn.Module):
    """The embeddings of the n-grams that end at each token: [T] -> [T, embed_dim].

    The numbers of its hashes follow from config.json, unless the file has them.
    """

    def __init__(self, context: LayerContext, prefix: str, config: NgramConfig, num_bytes: int) -> None:
        super().__init__()
        self._config = config
        self.earlier = EarlierTokens(context, config.num_orders, num_bytes)
        sizes = torch.tensor(config.head_sizes, device=context.device)
        offsets = (sizes.cumsum(0) - sizes).view(config.num_orders, -1)
        multipliers = torch.tensor(config.multipliers, device=context.device)
        self._options = NgramOptions(config.end_id, multipliers, sizes.view_as(offsets), offsets)
        self._numbers = {
            "layer_multipliers": multipliers, "ngram_heads_vocab_sizes": self._options.sizes,
            "ngram_heads_offsets": offsets,
        }  # fmt: skip
        # The file calls them parts of ngram_embedding.
        shards = {f"ngram_embedding.shard_{number}": rows for number, rows in enumerate(config.shard_rows)}
        self.ngram_embedding = ShardedEmbedding(context, prefix, shards, config.head_dim)

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        return ()

    def optional_weights(self) -> Iterable[tuple[str | None, str]]:
        return ((None, name) for name in self._numbers)

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        target = self._numbers[name]
        check_shape(tensor, (target.numel(),))
        if tensor.dtype != torch.int64:
            raise ModelLoadError(f"it holds {tensor.dtype}, and must hold int64")
        target.copy_(tensor.view_as(target))

    def finish_loading(self) -> None:
        """Raise ModelLoadError for numbers by which a hash could be no row of the table."""
        multipliers, sizes, offsets = self._options.multipliers, self._options.sizes, self._options.offsets
        most = (2**63 - 1) // self._config.vocab_size
        fits = multipliers.min() > 0 and multipliers.max() <= most and sizes.min() > 0 and offsets.min() >= 0
        # Not a sum, which may be too large for 64 bits.
        if not fits or (offsets > self._config.num_rows - sizes).any():
            raise ModelLoadError(
                f"{', '.join(self._numbers)}: hashes reach beyond the table of {self._config.num_rows} rows\n"
                "  config.json and the weights do not belong together; download or copy both again"
            )

    def forward(self, batch: TokenBatch) -> Tensor:
        rows = kernels.ngram_rows(batch.input_ids, self.earlier(batch), self._options)
        return self.ngram_embedding(rows.flatten()).view(len(rows), -1)  # type: ignore[no-any-return]


class NgramLayer(nn.Module):
    """From streams [T, S * H] to their increments [T, S * H].

    Each stream takes as much of a value as it agrees with a key of its own. Convolutions over what the streams of the
    tokens before have taken are added to that.
    """

    def __init__(self, context: LayerContext, prefix: str, config: NgramConfig) -> None:
        super().__init__()
        num_streams, size, eps = config.num_streams, config.stream_size, config.norm_eps
        of_ids, of_inputs = config.state_sizes
        self.ple_embedding = NgramTable(context, f"{prefix}.ple_embedding", config, of_ids)
        self.key_proj = ReplicatedLinear(context, f"{prefix}.key_proj", config.embed_dim, config.num_channels)
        self.value_proj = ReplicatedLinear(context, f"{prefix}.value_proj", config.embed_dim, size)
        self.norm_key, self.norm_query, self.norm_conv = (StreamNorm(context, num_streams, size, eps) for _ in range(3))
        self.conv1d = SpreadConvolution(context, config, of_inputs)
        self._num_streams = num_streams
        self._stream_of_number = spread_columns(context, num_streams, size)
        self._number_of_value = torch.arange(size, device=context.device).repeat(num_streams)

    def forward(self, streams: Tensor, batch: TokenBatch) -> Tensor:
        embedded = self.ple_embedding(batch)
        keys = self.norm_key(self.key_proj(embedded, batch))
        logits = kernels.stream_similarities(keys, self.norm_query(streams), self._num_streams)
        values = kernels.gather_columns(self.value_proj(embedded, batch), self._number_of_value)
        taken = sigmoid_gate(values, kernels.gather_columns(logits, self._stream_of_number))
        return add(taken, self.conv1d(self.norm_conv(taken), batch))
