"""The stack: embedding, layers of attention and MLP, norm. T: tokens of all sequences of a batch, one after the other.

Differences between models are data, in a ModelConfig; no model appears here by name.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Final, Protocol

import torch
from torch import Tensor, nn

from pagewick.layers.altup import AltUpStreams
from pagewick.layers.context import BlockBatch, LayerContext
from pagewick.layers.distance_bias import DistanceBias
from pagewick.layers.elementwise import add, scale
from pagewick.layers.embedding import VocabParallelEmbedding, WholeEmbedding
from pagewick.layers.gated_streams import GatedReader
from pagewick.layers.hyper import HyperHead
from pagewick.layers.image_attention import text_of
from pagewick.layers.log_scales import LogPositions
from pagewick.layers.norm import LayerNorm, RMSNorm, empty_sum
from pagewick.layers.rotary import QueryScales, RotaryEmbedding, rotary_of
from pagewick.models.altup import AltUpBlock
from pagewick.models.blocks import BLOCKS, Block, CaptioningBlock, make_norm
from pagewick.models.config import ModelConfig
from pagewick.models.extended import ExtendedBlock
from pagewick.models.gated_streams import GatedStreamsBlock
from pagewick.models.hyper import HyperBlock
from pagewick.models.layer_inputs import LayerInputs
from pagewick.models.mixers import DecoderAttention, lend, share_indexers
from pagewick.models.mtp import MtpPredictor
from pagewick.models.parts import EncoderConfig
from pagewick.models.shortcut import ShortcutBlock, share_shortcuts
from pagewick.models.stages import stage_layers

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
    """Token ids to normalised hidden states: [T] -> [T, hidden_size].

    With several stages, only the last one knows these; the others return `unknown`, zeros [1, hidden_size], T times.
    absent: modules that other stages hold.
    """

    def __init__(self, context: LayerContext, config: ModelConfig) -> None:
        super().__init__()
        self._stages = stages = context.collectives.stages
        self.stage_layers = stage_layers(config, stages.size)
        own_layers = self.stage_layers[stages.index]
        first = context if stages.is_first else context.elsewhere()
        # All stages compute logits, of the same rows.
        with_head = context if config.tie_word_embeddings else first
        self.embed_tokens = VocabParallelEmbedding(
            with_head,
            "model.embed_tokens",
            config.vocab_size,
            config.hidden_size,
            is_head=config.tie_word_embeddings,
            has_head_bias=config.head_transform is not None,
        )
        self.embed_positions: WholeEmbedding | None = None
        if config.num_position_embeddings is not None:
            self.embed_positions = WholeEmbedding(
                first,
                "model.embed_positions",
                config.num_position_embeddings,
                config.hidden_size,
                first_row=config.position_offset,
            )
        encoder = config.encoder or EncoderConfig()
        self.embed_types: WholeEmbedding | None = None
        if encoder.num_token_types:
            self.embed_types = WholeEmbedding(first, "model.embed_types", encoder.num_token_types, config.hidden_size)
        self.embed_norm = make_norm(first, config) if config.has_embedding_norm else None
        # Layers with equal rotation share their angles, which are computed once per step.
        kinds = config.position_kinds
        self._rope_of_layer = [kinds.index((layer.rope, layer.query_scale)) for layer in config.layers]
        has_logs = any(layer.latent is not None and layer.latent.has_log_scales for layer in config.layers)
        self.log_positions = LogPositions(context) if has_logs else None
        self.rotary = nn.ModuleList(rotary_of(context, *kind) or nn.Identity() for kind in kinds)
        blocks = _make_blocks(context, config, own_layers)
        self.layers = nn.ModuleList(blocks)
        self.distance_bias: DistanceBias | None = None
        if encoder.num_distance_buckets:
            usual = [block.mixer for block in blocks if isinstance(block.mixer, DecoderAttention)]
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
        of_first = (self.embed_tokens, self.embed_positions, self.embed_types, self.embed_norm)
        outer = () if stages.is_first else of_first[1:] if config.tie_word_embeddings else of_first
        absent = [*outer, *blocks[: own_layers.start], *blocks[own_layers.stop :]]
        self.absent: tuple[nn.Module, ...] = tuple(module for module in absent if module is not None)
        self.unknown = context.zero_row(config.hidden_size)
        self._nothing = empty_sum(context, config.hidden_size) if config.has_wide_residual else None
        self._hidden_size, self._embedding_scale = config.hidden_size, config.embedding_scale
        if config.is_embedding_scale_rounded:
            self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=context.dtype))

    def forward(self, batch: DecoderBatch) -> Tensor:
        if batch.inputs_embeds is not None and isinstance(self.layers[0], CaptioningBlock):
            return self._captioned(batch, batch.inputs_embeds)
        num_tokens, stages = len(batch.input_ids), self._stages
        if stages.is_first:
            hidden_states, residual = self._begin(batch)
        else:
            hidden_states, residual = stages.receive(num_tokens, self.unknown)
        hidden_states, residual = self._run_layers(hidden_states, residual, batch)
        if stages.is_last:
            return self._end(hidden_states, residual, batch)
        stages.send(hidden_states, residual)
        return self.unknown.expand(num_tokens, -1)

    def _begin(self, batch: DecoderBatch) -> tuple[Tensor, Tensor | None]:
        """Return what the first layer gets: hidden states and residual."""
        hidden_states = self.embed(batch)
        residual = None if self._nothing is None else self._nothing.expand(len(hidden_states), -1)
        if self.hc_head is not None:
            # Between such layers, hidden states are all streams.
            hidden_states = self.hc_head.spread(hidden_states)
        if self.hyper_connection_mixer is not None:
            hidden_states = self.hyper_connection_mixer.spread(hidden_states)
        return hidden_states, residual

    def _run_layers(
        self, hidden_states: Tensor, residual: Tensor | None, batch: DecoderBatch
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layers of this stage."""
        positions = batch.positions[0] if len(batch.positions) == 1 else batch.positions
        kinds = RotaryEmbedding, QueryScales
        angles = [rope.angles(positions) if isinstance(rope, kinds) else None for rope in self.rotary]
        if self.log_positions is not None:
            logs = self.log_positions(positions)
            angles = [self.log_positions.added_to(each, logs) for each in angles]
        if self.layer_inputs is None:
            deep = () if batch.deep_embeds is None else batch.deep_embeds
            own = self.stage_layers[self._stages.index]
            for layer_idx, layer in zip(own, islice(self.layers, own.start, own.stop), strict=True):
                rope = angles[self._rope_of_layer[layer_idx]]
                hidden_states, residual = layer(hidden_states, residual, rope, batch)
                if layer_idx < len(deep):
                    # The next norm adds these two. For text it adds 0: its bits do not depend on images in the step.
                    residual = hidden_states if residual is None else add(hidden_states, residual)
                    hidden_states = deep[layer_idx]
            return hidden_states, residual
        owns = self.layer_inputs(batch.input_ids, hidden_states, batch, batch.embeds_mask)
        if self.altup is not None:
            # Between such layers, hidden states are the active stream, and the residual is the other streams.
            residual = self.altup.spread(hidden_states, batch)
        for layer, kind, given in zip(self.layers, self._rope_of_layer, owns, strict=True):
            hidden_states, residual = layer(hidden_states, residual, angles[kind], batch, given)
        if self.altup is not None and residual is not None:
            hidden_states, residual = self.altup.merge(hidden_states, residual, batch), None
        return hidden_states, residual

    def _end(self, hidden_states: Tensor, residual: Tensor | None, batch: DecoderBatch) -> Tensor:
        """Return the model's hidden states from the outputs of the last layer."""
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
        own = self.stage_layers[self._stages.index]
        for layer in islice(self.layers, own.start, own.stop):
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


def _make_blocks(context: LayerContext, config: ModelConfig, own: range) -> list[Block]:
    """Make all layers, and connect those that read from earlier ones; other ranks hold all but `own`."""
    contexts = [context if layer_idx in own else context.elsewhere() for layer_idx in range(config.num_layers)]
    blocks = [
        _BLOCKS[layer.block or config.block](contexts[layer_idx], f"model.layers.{layer_idx}", config, layer)
        for layer_idx, layer in enumerate(config.layers)
    ]
    mixers = [made.mixer if made.has_mixer else None for made in blocks]
    for layer, mixer in zip(config.layers, mixers, strict=True):
        if layer.lender is not None:
            lend(mixers[layer.lender], mixer)
    share_indexers(mixers)
    share_shortcuts(blocks)
    return blocks
