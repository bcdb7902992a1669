"""The table of a model's tensors: their names, their shapes, and the share of each that a rank keeps. Imports no torch.

The decoder's modules load these tensors: tests/models/test_tensor_table.py compares the two for every variant. Matrices
are [out, in], as checkpoints have them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pagewick.layers.compressed_config import WindowConfig
from pagewick.layers.config import XIELU_SHAPES, MlaConfig
from pagewick.layers.state_config import StateConfig
from pagewick.models.caption_parts import head_transform_tensors, image_attention_tensors
from pagewick.models.config import ModelConfig
from pagewick.models.expert_tensors import expert_tensors
from pagewick.models.latent_tensors import head_block_tensors, latent_tensors
from pagewick.models.mtp_config import PATH, MtpConfig
from pagewick.models.name_map import NameMap
from pagewick.models.parts import (
    NORMS_OF_EXPERTS,
    XIELU,
    AttentionConfig,
    EncoderConfig,
    HeadNormConfig,
    LayerConfig,
    LayerInputsConfig,
    MlpConfig,
)
from pagewick.models.row_tensors import stream_tensors, window_tensors
from pagewick.models.state_tensors import Named, state_tensors
from pagewick.models.stream_tensors import (
    altup_tensors,
    block_index_tensors,
    gated_connection_tensors,
    gated_reader_tensors,
    ngram_tensors,
)
from pagewick.models.tensor_sizes import ModelTensor, Role, Size, cut, whole
from pagewick.models.vision.tensor_parts import AllHeads, Dimension, KeyHeads, Shared
from pagewick.models.vision.tensors import vision_tensors
from pagewick.parallel.sharding import kept_key_heads, kv_heads_of_rank, shard_bounds

if TYPE_CHECKING:
    from pagewick.layers.config import MoeConfig
    from pagewick.models.labels import LabelHead

# The projections of AltUp's streams before the first layer, and behind the last one.
_STREAM_PROJECTIONS: Final = ("projections", "unembed_projections")


def model_tensors(
    config: ModelConfig, tensor_names: Sequence[str] = (), *, rank: int = 0, num_ranks: int = 1
) -> Iterator[ModelTensor]:
    """Yield every tensor that a checkpoint of `config` must hold, with the share of one of `num_ranks` ranks.

    tensor_names: those of the file, which decide what it calls the tensors.
    """
    config = config.fitted(tensor_names)
    return _Table(config, config.name_map(tensor_names), rank, num_ranks).all()


@dataclass(frozen=True, slots=True)
class _Table:
    config: ModelConfig
    names: NameMap
    rank: int
    num_ranks: int

    def all(self) -> Iterator[ModelTensor]:
        config, hidden = self.config, whole(self.config.hidden_size)
        vocabulary = self._cut(config.vocab_size)
        yield self._tensor("model.embed_tokens.weight", "embedding", vocabulary, hidden)
        if (rows := config.num_position_embeddings) is not None:
            positions = Size(rows, rows - config.position_offset)
            yield self._tensor("model.embed_positions.weight", "embedding", positions, hidden)
        if config.encoder is not None:
            yield from self._encoder_inputs(config.encoder, hidden)
        if config.has_embedding_norm:
            yield from self._model_norm("model.embed_norm")
        if config.layer_inputs is not None:
            yield from self._layer_inputs("model.layer_inputs", config.layer_inputs)
        if config.altup is not None:
            for index, kind in itertools.product(range(config.altup.num_streams - 1), _STREAM_PROJECTIONS):
                yield from self._linear(f"model.altup.{kind}.{index}", "mlp", hidden, hidden)
        for kind_idx, (rope, _) in enumerate(config.position_kinds):
            if rope is not None and rope.is_learned:
                yield self._tensor(f"model.rotary.{kind_idx}.alpha", "attention", whole(rope.rotary_dim // 2))
        for layer_idx, layer in enumerate(config.layers):
            yield from self._layer(f"model.layers.{layer_idx}", layer)
        if config.hyper is not None:
            named = stream_tensors(config.hyper, hidden, config.hyper.num_streams)
            yield from self._named("model.hc_head", named)
        if config.gated_streams is not None:
            named = gated_reader_tensors(config.gated_streams, hidden)
            yield from self._named("model.hyper_connection_mixer", named)
        if config.has_final_norm:
            yield from self._model_norm("model.norm")
        if config.has_mtp and config.mtp is not None:
            yield from self._mtp(config.mtp)
        if not config.tie_word_embeddings:
            yield from self._linear("lm_head", "head", vocabulary, hidden, has_bias=config.head_bias)
        if config.head_transform is not None:
            for name, role, sizes in head_transform_tensors(hidden, vocabulary):
                yield self._tensor(name, role, *sizes)
        if config.labels is not None:
            yield from self._labels(config.labels, hidden)
        for idx, dense in enumerate(config.dense):
            sizes = whole(dense.out_features), whole(dense.in_features)
            yield from self._linear(f"dense.{idx}", "labels", *sizes, has_bias=dense.bias)
        if config.vision is not None:
            for path, dimensions in vision_tensors(config.vision):
                yield self._tensor(f"visual.{path}", "vision", *map(self._dimension, dimensions))

    def _layer(self, path: str, layer: LayerConfig) -> Iterator[ModelTensor]:
        config, hidden = self.config, whole(self.config.hidden_size)
        if layer.attention is not None:
            yield from self._mixer(path, layer.attention)
        if layer.beside is not None:
            yield from self._state(path, layer.beside.mamba)
        if isinstance(layer.mlp, MlpConfig):
            yield from self._mlp(f"{path}.mlp", layer.mlp)
        elif layer.mlp is not None:
            yield from self._experts(f"{path}.mlp", layer.mlp)
        for name in layer.norms(config.block):
            if name in layer.gated_norms:
                yield from self._gated_norm(f"{path}.{name}")
            else:
                yield from self._model_norm(f"{path}.{name}")
        if config.block == "extended":
            yield from self._extension(path, layer)
        elif layer.experts is not None:
            yield from self._experts(f"{path}.mixture", layer.experts)
        if config.altup is not None:
            yield from self._named(path, altup_tensors(config.altup, hidden))
            if (inputs := config.layer_inputs) is not None:
                yield from self._layer_input(f"{path}.layer_input", inputs)
        if layer.image is not None:
            heads = self._cut(config.num_heads).times(config.hidden_size // config.num_heads)
            yield from self._named(path, image_attention_tensors(layer.image, hidden, heads))
        if config.hyper is not None:
            for part in ("attn_hc", "ffn_hc"):
                named = stream_tensors(config.hyper, hidden, config.hyper.num_weights)
                yield from self._named(f"{path}.{part}", named)
        if config.gated_streams is not None:
            for part in ("attn", "mlp"):
                named = gated_connection_tensors(config.gated_streams, hidden)
                yield from self._named(f"{path}.{part}_hyper_connection", named)
        if layer.ngrams is not None:
            yield from self._named(f"{path}.ple", ngram_tensors(layer.ngrams, self.rank, self.num_ranks))

    def _mtp(self, mtp: MtpConfig) -> Iterator[ModelTensor]:
        hidden = whole(self.config.hidden_size)
        for name in ("embedding_norm", "hidden_norm", "norm"):
            yield from self._model_norm(f"{PATH}.{name}")
        yield from self._linear(f"{PATH}.fc", "mlp", hidden, hidden.times(2))
        yield from self._layer(f"{PATH}.layer", mtp.layer(self.config.layers))

    def _encoder_inputs(self, config: EncoderConfig, hidden: Size) -> Iterator[ModelTensor]:
        if config.num_token_types:
            yield self._tensor("model.embed_types.weight", "embedding", whole(config.num_token_types), hidden)
        if config.num_distance_buckets:
            rows, heads = whole(config.num_distance_buckets), self._cut(self.config.num_heads)
            yield self._tensor("model.distance_bias.weight", "attention", rows, heads)

    def _labels(self, head: LabelHead, hidden: Size) -> Iterator[ModelTensor]:
        if head.dense is not None:
            yield from self._linear("score_dense", "labels", hidden, hidden, has_bias=head.dense.has_bias)
            if head.dense.has_norm:
                yield from self._model_norm("score_norm")
        yield from self._linear("score", "labels", whole(head.num_labels), hidden, has_bias=head.has_bias)

    def _mixer(
        self, path: str, config: AttentionConfig | MlaConfig | WindowConfig | StateConfig
    ) -> Iterator[ModelTensor]:
        if isinstance(config, WindowConfig):
            named = window_tensors(config, whole(self.config.hidden_size), self.rank, self.num_ranks)
            return self._named(f"{path}.self_attn", named)
        if isinstance(config, AttentionConfig):
            return self._attention(f"{path}.self_attn", config)
        if isinstance(config, MlaConfig):
            named = latent_tensors(config, whole(self.config.hidden_size), self._cut(config.num_heads))
            return (self._tensor(f"{path}.self_attn.{name}", role, *sizes) for name, role, sizes in named)
        return self._state(path, config)

    def _state(self, path: str, config: StateConfig) -> Iterator[ModelTensor]:
        return self._named(path, state_tensors(config, whole(self.config.hidden_size), self.rank, self.num_ranks))

    def _named(self, path: str, tensors: Iterable[Named]) -> Iterator[ModelTensor]:
        return (self._tensor(f"{path}.{name}", role, *sizes) for name, role, sizes in tensors)

    def _attention(self, path: str, config: AttentionConfig) -> Iterator[ModelTensor]:
        hidden, num_heads = whole(self.config.hidden_size), config.num_heads
        first, last = shard_bounds(num_heads, self.rank, self.num_ranks)
        kv_heads = kv_heads_of_rank(num_heads, config.num_kv_heads, self.rank, self.num_ranks)
        queries = Size(num_heads, last - first).times(config.head_dim)
        keys = Size(config.num_kv_heads, len(kv_heads)).times(config.head_dim)
        values, outputs = (
            Size(count, kept).times(config.output_dim)
            for count, kept in ((config.num_kv_heads, len(kv_heads)), (num_heads, last - first))
        )
        rows = {"q_proj": queries.times(2) if config.has_gate else queries, "k_proj": keys, "v_proj": values}
        if config.layout == "keys_are_values":
            # A rank keeps them once for each use.
            rows = {"q_proj": queries, "k_proj": Size(keys.whole, 2 * keys.kept)}
        elif config.layout == "queries":
            rows = {"q_proj": queries}
        elif config.layout != "parts":
            rows = {"qkv_proj": Size(queries.whole + 2 * keys.whole, queries.kept + 2 * keys.kept)}
        for name, size in rows.items():
            yield from self._linear(f"{path}.{name}", "attention", size, hidden, has_bias=config.qkv_bias)
        if config.has_head_gates:
            yield from self._linear(f"{path}.g_proj", "attention", Size(num_heads, last - first), hidden)
        elif config.has_number_gates:
            yield from self._linear(f"{path}.g_proj", "attention", queries, hidden)
        yield from self._linear(f"{path}.o_proj", "attention", hidden, outputs, has_bias=config.o_bias)
        if config.block_index is not None:
            yield from self._named(f"{path}.indexer", block_index_tensors(config.block_index, hidden))
        yield from self._named(f"{path}.indexer", head_block_tensors(config.head_blocks, hidden))
        if config.has_sinks:
            yield self._tensor(f"{path}.sinks.weight", "attention", Size(num_heads, last - first))
        if config.head_norm is not None and config.head_norm.has_weight:
            yield from self._head_norm(f"{path}.q_norm", config, config.head_norm, num_heads, range(first, last))
            if config.layout != "queries":
                yield from self._head_norm(f"{path}.k_norm", config, config.head_norm, config.num_kv_heads, kv_heads)

    def _head_norm(
        self, path: str, config: AttentionConfig, norm: HeadNormConfig, num_heads: int, kept: Sequence[int]
    ) -> Iterator[ModelTensor]:
        """kept: ids of this rank's heads; one may repeat."""
        if norm.is_joint:
            size = Size(num_heads, len(kept)).times(config.head_dim)
            yield self._tensor(f"{path}.weight", "norm", size)
            return
        if norm.is_matrix:
            heads = Size(num_heads, len(kept))
            yield self._tensor(f"{path}.weight", "norm", heads, whole(config.head_dim))
            return
        if not norm.is_per_head:
            yield from self._norm(path, config.head_dim, has_bias=norm.has_bias)
            return
        for head in range(num_heads):
            size = Size(config.head_dim, kept.count(head) * config.head_dim)
            yield self._tensor(f"{path}.norms.{head}.weight", "norm", size)

    def _mlp(self, path: str, config: MlpConfig) -> Iterator[ModelTensor]:
        inner = self._cut(config.intermediate_size)
        names = config.input_projections
        rows = {"gate_up_proj": inner.times(len(names))} if config.is_fused else dict.fromkeys(names, inner)
        hidden = whole(self.config.hidden_size)
        for name, size in rows.items():
            yield from self._linear(f"{path}.{name}", "mlp", size, hidden, has_bias=config.bias)
        yield from self._linear(f"{path}.down_proj", "mlp", hidden, inner, has_bias=config.bias)
        if config.activation == XIELU:
            for name, shape in XIELU_SHAPES.items():
                yield self._tensor(f"{path}.act_fn.{name}", "norm", *map(whole, shape))

    def _layer_inputs(self, path: str, inputs: LayerInputsConfig) -> Iterator[ModelTensor]:
        width = whole(self.config.num_layers * inputs.size)
        # A rank keeps the first row once more for each of its ids behind the last row.
        rows = Size(inputs.vocab_size, self._cut(inputs.num_ids(self.config.vocab_size)).kept)
        yield self._tensor(f"{path}.embed_tokens.weight", "embedding", rows, width)
        yield from self._linear(f"{path}.projection", "mlp", width, whole(self.config.hidden_size))
        yield from self._norm(f"{path}.norm", inputs.size)

    def _extension(self, path: str, layer: LayerConfig) -> Iterator[ModelTensor]:
        """Yield the tensors that an extended block has besides those of a sandwich."""
        if layer.experts is not None:
            yield from self._experts(f"{path}.mixture", layer.experts)
            for name in NORMS_OF_EXPERTS:
                yield from self._model_norm(f"{path}.{name}")
        if (inputs := self.config.layer_inputs) is not None:
            yield from self._layer_input(f"{path}.layer_input", inputs)
        yield self._tensor(f"{path}.layer_scalar.weight", "norm", whole(1))

    def _layer_input(self, path: str, inputs: LayerInputsConfig) -> Iterator[ModelTensor]:
        """Yield the tensors by which a layer adds its own input."""
        hidden = whole(self.config.hidden_size)
        yield from self._linear(f"{path}.gate_proj", "mlp", whole(inputs.size), hidden)
        yield from self._linear(f"{path}.projection", "mlp", hidden, whole(inputs.size))
        yield from self._model_norm(f"{path}.norm")

    def _experts(self, path: str, config: MoeConfig) -> Iterator[ModelTensor]:
        return self._named(path, expert_tensors(config, whole(self.config.hidden_size), self._cut))

    def _linear(
        self, path: str, role: Role, rows: Size, columns: Size, *, has_bias: bool = False
    ) -> Iterator[ModelTensor]:
        yield self._tensor(f"{path}.weight", role, rows, columns)
        if has_bias:
            yield self._tensor(f"{path}.bias", role, rows)

    def _model_norm(self, path: str) -> Iterator[ModelTensor]:
        if self.config.norm.has_weight:
            yield from self._norm(path, self.config.hidden_size, has_bias=self.config.norm.has_bias)

    def _gated_norm(self, path: str) -> Iterator[ModelTensor]:
        hidden, rank = whole(self.config.hidden_size), self.config.norm.gate_rank
        assert rank is not None, "layers with gated norms have a model that says their rank"
        yield from self._norm(f"{path}.norm", self.config.hidden_size)
        # No format has rows as short as those of the second.
        yield self._tensor(f"{path}.gate_down.weight", "norm", whole(rank), hidden)
        yield self._tensor(f"{path}.gate_up.weight", "norm", hidden, whole(rank))

    def _norm(self, path: str, size: int, *, has_bias: bool = False, role: Role = "norm") -> Iterator[ModelTensor]:
        yield self._tensor(f"{path}.weight", role, whole(size))
        if has_bias:
            yield self._tensor(f"{path}.bias", role, whole(size))

    def _tensor(self, path: str, role: Role, *sizes: Size) -> ModelTensor:
        shape, kept = zip(*sizes, strict=True) if sizes else ((), ())
        return ModelTensor(path, self.names.in_file(path), shape, kept, role)

    def _dimension(self, size: Dimension) -> Size:
        if isinstance(size, KeyHeads | AllHeads):
            start, stop = kept_key_heads(size.num_heads, size.num_kv_heads, self.rank, self.num_ranks)
            keys = Size(size.num_kv_heads, stop - start)
            if isinstance(size, KeyHeads):
                return keys.times(size.unit)
            return self._cut(size.num_heads).plus(keys.times(2)).times(size.unit)
        return self._cut(size.number).times(size.unit) if isinstance(size, Shared) else whole(size)

    def _cut(self, size: int) -> Size:
        return cut(size, self.rank, self.num_ranks)
