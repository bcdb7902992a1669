"""The decoder: embedding, layers of attention and MLP, norm, vocabulary head or a head of labels.

Differences between models are data, in a ModelConfig; no model appears here by name. Modules have the names that most
checkpoints give them; ModelConfig.names has the names in other files. T: tokens of all sequences of a batch, one after
the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Final, Protocol

import torch
from torch import Tensor, nn

from pagewick.layers.altup import AltUpStreams
from pagewick.layers.context import BlockBatch, LayerBatch, LayerContext
from pagewick.layers.distance_bias import DistanceBias
from pagewick.layers.elementwise import add, scale, soft_cap
from pagewick.layers.embedding import VocabParallelEmbedding, VocabParallelHead, WholeEmbedding
from pagewick.layers.gated_streams import GatedReader
from pagewick.layers.hyper import HyperHead
from pagewick.layers.image_attention import text_of
from pagewick.layers.label_head import DenseLayer, LabelScores
from pagewick.layers.log_scales import LogPositions
from pagewick.layers.norm import LayerNorm, RMSNorm, empty_sum
from pagewick.layers.rotary import QueryScales, RotaryEmbedding, rotary_of
from pagewick.models.altup import AltUpBlock
from pagewick.models.blocks import BLOCKS, Block, CaptioningBlock, make_norm
from pagewick.models.config import ModelConfig
from pagewick.models.extended import ExtendedBlock
from pagewick.models.gated_streams import GatedStreamsBlock
from pagewick.models.hyper import HyperBlock
from pagewick.models.image_attention import HeadTransform
from pagewick.models.labels import LabelHead
from pagewick.models.layer_inputs import LayerInputs
from pagewick.models.mixers import DecoderAttention, lend, share_indexers
from pagewick.models.mtp import MtpPredictor
from pagewick.models.parts import EncoderConfig
from pagewick.models.shortcut import ShortcutBlock, share_shortcuts
from pagewick.models.vision.building import build_encoder

_BLOCKS: Final[dict[str, type[Block]]] = {
    **BLOCKS,
    "extended": ExtendedBlock,
    "altup": AltUpBlock,
    "shortcut": ShortcutBlock,
    "hyper": HyperBlock,
    "gated_streams": GatedStreamsBlock,
}


class DecoderBatch(BlockBatch, Protocol):
    """input_ids: [T]. positions: [P, T], P = 1, or 3 where the rotary embedding has three axes (mrope_section).

    inputs_embeds: [T, hidden_size] of the model's dtype, embeds_mask: [T] bool, or both None. Where the mask is true, a
    token has this row in place of its row of the embedding table; the other rows may hold anything. Where layers attend
    to images, these are the rows from which each makes keys and values, of their own width. Given rows are used
    unchanged: the model's embedding scale multiplies only the table's rows, and the caller scales given rows if the
    model wants that. Learned positions are added to all rows. All input_ids are looked up, so they must be ids of the
    vocabulary where the mask is true, too.
    token_types: [T], rows of the table of types, in models that have one; None: all tokens have the first.
    deep_embeds: [N, T, hidden_size], which are added to the outputs of the first N layers, 0 for tokens of text; None:
    nothing is.
    """

    @property
    def input_ids(self) -> Tensor: ...

    @property
    def positions(self) -> Tensor: ...

    @property
    def inputs_embeds(self) -> Tensor | None: ...

    @property
    def embeds_mask(self) -> Tensor | None: ...

    @property
    def deep_embeds(self) -> Tensor | None: ...

    @property
    def token_types(self) -> Tensor | None: ...


class DecoderStack(nn.Module):
    """Token ids to normalised hidden states: [T] -> [T, hidden_size]."""

    def __init__(self, context: LayerContext, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            context,
            "model.embed_tokens",
            config.vocab_size,
            config.hidden_size,
            is_head=config.tie_word_embeddings,
            has_head_bias=config.head_transform is not None,
        )
        self.embed_positions: WholeEmbedding | None = None
        if config.num_position_embeddings is not None:
            self.embed_positions = WholeEmbedding(
                context,
                "model.embed_positions",
                config.num_position_embeddings,
                config.hidden_size,
                first_row=config.position_offset,
            )
        encoder = config.encoder or EncoderConfig()
        self.embed_types: WholeEmbedding | None = None
        if encoder.num_token_types:
            self.embed_types = WholeEmbedding(context, "model.embed_types", encoder.num_token_types, config.hidden_size)
        self.embed_norm = make_norm(context, config) if config.has_embedding_norm else None
        # Layers with equal rotation share their angles, which are computed once per step.
        kinds = config.position_kinds
        self._rope_of_layer = [kinds.index((layer.rope, layer.query_scale)) for layer in config.layers]
        has_logs = any(layer.latent is not None and layer.latent.has_log_scales for layer in config.layers)
        self.log_positions = LogPositions(context) if has_logs else None
        self.rotary = nn.ModuleList(rotary_of(context, *kind) or nn.Identity() for kind in kinds)
        blocks = [
            _BLOCKS[layer.block or config.block](context, f"model.layers.{layer_idx}", config, layer)
            for layer_idx, layer in enumerate(config.layers)
        ]
        self.layers = nn.ModuleList(blocks)
        attentions = [made.mixer if made.has_mixer else None for made in blocks]
        for layer, attention in zip(config.layers, attentions, strict=True):
            if layer.lender is not None:
                lender = attentions[layer.lender]
                lend(lender, attention)
        share_indexers(attentions)
        share_shortcuts(blocks)
        self.distance_bias: DistanceBias | None = None
        if encoder.num_distance_buckets:
            usual = [attention for attention in attentions if isinstance(attention, DecoderAttention)]
            heads = usual[0].qkv_proj.heads
            self.distance_bias = DistanceBias(context, encoder.num_distance_buckets, heads, config.num_heads)
            for attention in usual:
                attention.use_distances(self.distance_bias)
        self.layer_inputs: LayerInputs | None = None
        if config.layer_inputs is not None:
            self.layer_inputs = LayerInputs(context, config, config.layer_inputs)
        self.altup: AltUpStreams | None = None
        if config.altup is not None:
            self.altup = AltUpStreams(context, "model.altup", config.hidden_size, config.altup.num_streams)
        self.hc_head: HyperHead | None = None
        if config.hyper is not None:
            self.hc_head = HyperHead(context, config.hidden_size, config.hyper)
        self.hyper_connection_mixer: GatedReader | None = None
        if config.gated_streams is not None:
            self.hyper_connection_mixer = GatedReader(
                context, "model.hyper_connection_mixer", config.hidden_size, config.gated_streams
            )
        self.norm: RMSNorm | LayerNorm | nn.Identity = nn.Identity()
        if config.has_final_norm:
            self.norm = make_norm(context, config)
        self.mtp: MtpPredictor | None = None
        if config.has_mtp and config.mtp is not None:
            self.mtp = MtpPredictor(replace(context, lora=None), config, config.mtp)
        self._nothing = empty_sum(context, config.hidden_size) if config.has_wide_residual else None
        self._hidden_size, self._embedding_scale = config.hidden_size, config.embedding_scale
        if config.is_embedding_scale_rounded:
            self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=context.dtype))

    def forward(self, batch: DecoderBatch) -> Tensor:
        if batch.inputs_embeds is not None and isinstance(self.layers[0], CaptioningBlock):
            return self._captioned(batch, batch.inputs_embeds)
        hidden_states = self.embed(batch)
        residual = None if self._nothing is None else self._nothing.expand(len(hidden_states), -1)
        positions = batch.positions[0] if len(batch.positions) == 1 else batch.positions
        kinds = RotaryEmbedding, QueryScales
        angles = [rope.angles(positions) if isinstance(rope, kinds) else None for rope in self.rotary]
        if self.log_positions is not None:
            logs = self.log_positions(positions)
            angles = [self.log_positions.added_to(each, logs) for each in angles]
        if self.hc_head is not None:
            # Between such layers, hidden states are all streams.
            hidden_states = self.hc_head.spread(hidden_states)
        if self.hyper_connection_mixer is not None:
            hidden_states = self.hyper_connection_mixer.spread(hidden_states)
        if self.layer_inputs is None:
            deep = () if batch.deep_embeds is None else batch.deep_embeds
            for layer, rope, after in zip_longest(self.layers, self._rope_of_layer, deep):
                hidden_states, residual = layer(hidden_states, residual, angles[rope], batch)
                if after is not None:
                    # The next norm adds these two. For text it adds 0: its bits do not depend on images in the step.
                    residual = hidden_states if residual is None else add(hidden_states, residual)
                    hidden_states = after
        else:
            owns = self.layer_inputs(batch.input_ids, hidden_states, batch, batch.embeds_mask)
            if self.altup is not None:
                # Between such layers, hidden states are the active stream, and the residual is the other streams.
                residual = self.altup.spread(hidden_states, batch)
            for layer, rope, own in zip(self.layers, self._rope_of_layer, owns, strict=True):
                hidden_states, residual = layer(hidden_states, residual, angles[rope], batch, own)
            if self.altup is not None and residual is not None:
                hidden_states, residual = self.altup.merge(hidden_states, residual, batch), None
        if self.hc_head is not None:
            hidden_states = self.hc_head(hidden_states)
        if self.hyper_connection_mixer is not None:
            hidden_states = self.hyper_connection_mixer(hidden_states, batch)
        if residual is None:
            return self.norm(hidden_states)  # type: ignore[no-any-return]
        assert not isinstance(self.norm, nn.Identity), "blocks without a norm behind them return no residual"
        normed, _ = self.norm.add_and_norm(hidden_states, residual)
        return normed

    def _captioned(self, batch: DecoderBatch, rows: Tensor) -> Tensor:
        """Store the keys and values of images, and compute text; hidden states of images are 0. rows: inputs_embeds."""
        is_image = batch.embeds_mask
        assert is_image is not None, "rows that are given come with a mask"
        for layer in self.layers:
            assert isinstance(layer, CaptioningBlock), "all layers attend to images"
            layer.image_attn.store(rows[is_image], is_image, batch)
        hidden_states = rows.new_zeros(len(rows), self._hidden_size)
        found = text_of(batch.input_ids, batch.positions, batch, is_image)
        if found is not None:
            text, places = found
            hidden_states[places] = self(text)
        return hidden_states

    def embed(self, batch: DecoderBatch) -> Tensor:
        """Return the inputs of the first layer: [T] -> [T, hidden_size]."""
        embedded = self.embed_tokens(batch.input_ids)
        if self._embedding_scale != 1.0:
            embedded = scale(embedded, self._embedding_scale)
        if batch.inputs_embeds is not None:
            assert batch.embeds_mask is not None, "rows that are given come with a mask"
            embedded = torch.where(batch.embeds_mask.unsqueeze(-1), batch.inputs_embeds, embedded)
        if self.embed_types is not None:
            types = torch.zeros_like(batch.input_ids) if batch.token_types is None else batch.token_types
            embedded = add(embedded, self.embed_types(types))
        if self.embed_positions is not None:
            embedded = add(embedded, self.embed_positions(batch.positions[0]))
        return embedded if self.embed_norm is None else self.embed_norm(embedded)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """A language model, or an encoder, which has the same parts.

    visual: its encoder of images, whose output is a part of a batch; None without one. label_pooling: of what the
    labels are made, as in LabelHead.
    """

    def __init__(self, context: LayerContext, config: ModelConfig, tensor_names: Sequence[str] = ()) -> None:
        """tensor_names: those of the file, which decide how its names map to the decoder's modules."""
        super().__init__()
        config = config.fitted(tensor_names)
        names = config.name_map(tensor_names)
        # The loader asks for the file's name of a tensor, and for the tensors that it may skip.
        self.name_in_file = names.in_file
        self.name_in_adapter = (config.adapter_names or names).in_file
        self.ignored_weights = config.ignored_tensors
        choose_method = context.choose_method
        context = replace(context, choose_method=lambda prefix: choose_method(names.in_file(prefix)))
        self.model = DecoderStack(context, config)
        # Adapters change the layers of the text alone.
        context = replace(context, lora=None)
        self.visual = None if config.vision is None else build_encoder(context, "visual", config.vision)
        self.lm_head: VocabParallelHead | None = None
        if not config.tie_word_embeddings:
            sizes = config.hidden_size, config.vocab_size
            self.lm_head = VocabParallelHead(context, "lm_head", *sizes, bias=config.head_bias)
        self.head_transform: HeadTransform | None = None
        if (activation := config.head_transform) is not None:
            size, norm = config.hidden_size, make_norm(context, config)
            self.head_transform = HeadTransform(context, size, activation, norm)
        self.dense = nn.ModuleList(
            DenseLayer(context, f"dense.{idx}", one.in_features, one.out_features, one.activation, has_bias=one.bias)
            for idx, one in enumerate(config.dense)
        )
        self.score_dense: DenseLayer | None = None
        self.score_norm: LayerNorm | RMSNorm | None = None
        self.score: LabelScores | None = None
        self.label_pooling = "last"
        if config.labels is not None:
            self._add_labels(context, config, config.labels)
        self._logit_scale, self._logit_soft_cap = config.logit_scale, config.logit_soft_cap

    def _add_labels(self, context: LayerContext, config: ModelConfig, labels: LabelHead) -> None:
        size = config.hidden_size
        self.label_pooling = labels.pooling
        if labels.dense is not None:
            dense = labels.dense
            self.score_dense = DenseLayer(context, "score_dense", size, size, dense.activation, has_bias=dense.has_bias)
            self.score_norm = make_norm(context, config) if dense.has_norm else None
        self.score = LabelScores(context, "score", size, labels.num_labels, has_bias=labels.has_bias)

    def forward(self, batch: DecoderBatch) -> Tensor:
        """Hidden states [T, hidden_size] of every token of the batch."""
        return self.model(batch)  # type: ignore[no-any-return]

    def compute_logits(self, hidden_states: Tensor, batch: LayerBatch | None = None) -> Tensor:
        """Return logits [N, vocab_size] in float32 for the rows [N, hidden_size].

        batch: the sequences that the rows belong to: the batch of `forward` for all of its rows, BatchRows for some of
        them, None if they are unknown.
        """
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        if self.head_transform is not None:
            hidden_states = self.head_transform(hidden_states)
        logits = head.logits(hidden_states, batch)
        if self._logit_scale != 1.0:
            logits = scale(logits, self._logit_scale)
        if self._logit_soft_cap is not None:
            logits = soft_cap(logits, self._logit_soft_cap)
        return logits

    def compute_label_logits(self, hidden_states: Tensor) -> Tensor:
        """Return the logits [N, num_labels] of the labels in float32 for the rows [N, hidden_size]."""
        assert self.score is not None, "the engine refuses requests for labels that the model lacks"
        if self.score_dense is not None:
            hidden_states = self.score_dense(hidden_states)
        if self.score_norm is not None:
            hidden_states = self.score_norm(hidden_states)
        return self.score(hidden_states)  # type: ignore[no-any-return]

    def change_pooled(self, pooled: Tensor) -> Tensor:
        """Return what the layers behind the pooling make of a vector [hidden_size] float32: [embedding_size]."""
        for layer in self.dense:
            pooled = layer(pooled)
        return pooled
