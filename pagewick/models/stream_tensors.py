"""The tensors of gated streams and AltUp's, of embeddings of n-grams, and of indexes of blocks. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pagewick.models.state_tensors import Named
from pagewick.models.tensor_sizes import Size, whole
from pagewick.parallel.sharding import shard_bounds

if TYPE_CHECKING:
    from pagewick.layers.compressed_config import BlockIndexConfig
    from pagewick.layers.config import GatedStreamsConfig
    from pagewick.layers.ngram_config import NgramConfig
    from pagewick.models.parts import AltUpConfig


def gated_reader_tensors(config: GatedStreamsConfig, hidden: Size) -> Iterator[Named]:
    """Yield the name behind the reader's, the role and the sizes of each tensor. hidden: the size of hidden states."""
    width, low = hidden.times(config.num_streams), whole(config.rank)
    yield "hc_norm.weight", "norm", (width,)
    yield "input_mix_weight_down.weight", "mlp", (low, width)
    yield "input_mix_weight_up.weight", "mlp", (width, low)


def gated_connection_tensors(config: GatedStreamsConfig, hidden: Size) -> Iterator[Named]:
    """Yield the same for what reads streams and adds to them."""
    yield from gated_reader_tensors(config, hidden)
    yield "block_inject_weight.weight", "mlp", (whole(config.num_streams), hidden.times(config.num_streams))


def ngram_tensors(config: NgramConfig, rank: int, num_ranks: int) -> Iterator[Named]:
    """Yield the same for what a layer knows of n-grams."""
    start, stop = shard_bounds(config.num_rows, rank, num_ranks)
    begin = 0
    for number, rows in enumerate(config.shard_rows):
        kept = max(0, min(stop - begin, rows) - max(start - begin, 0))
        name = f"ple_embedding.ngram_embedding.shard_{number}.weight"
        yield name, "embedding", (Size(rows, kept), whole(config.head_dim))
        begin += rows
    width, inputs = whole(config.num_channels), whole(config.embed_dim)
    yield "key_proj.weight", "mlp", (width, inputs)
    yield "value_proj.weight", "mlp", (whole(config.stream_size), inputs)
    for name in ("norm_key", "norm_query", "norm_conv"):
        yield f"{name}.weight", "norm", (width,)
    # The inputs between those of the convolution have weights, too.
    yield "conv1d.weight", "state", (width, whole(1), Size(config.conv_size, config.conv_width))


def block_index_tensors(config: BlockIndexConfig, hidden: Size) -> Iterator[Named]:
    """Yield the same for what selects blocks of tokens."""
    yield "index_qk_proj.weight", "attention", (whole(config.num_rows), hidden)
    yield "q_layernorm.weight", "norm", (whole(config.head_dim),)
    yield "k_layernorm.weight", "state", (whole(config.head_dim),)


def altup_tensors(config: AltUpConfig, hidden: Size) -> Iterator[Named]:
    """Yield the same of the tensors that a block with AltUp has besides those of a sandwich and its own input."""
    streams, low = whole(config.num_streams), whole(config.laurel_rank)
    yield "altup.router_norm.weight", "norm", (hidden,)
    yield "altup.modality_router.weight", "mlp", (streams, hidden)
    yield "altup.prediction_coefs.weight", "mlp", (whole(config.num_streams**2), streams)
    yield "altup.correction_coefs.weight", "mlp", (streams, streams)
    yield "altup.correct_output_scale.weight", "norm", (hidden,)
    yield "laurel.linear_left.weight", "mlp", (low, hidden)
    yield "laurel.linear_right.weight", "mlp", (hidden, low)
    yield "laurel.post_laurel_norm.weight", "norm", (hidden,)
