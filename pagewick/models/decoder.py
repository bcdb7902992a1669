"""The decoder: the stack of layers, and a vocabulary head or a head of labels.

Differences between models are data, in a ModelConfig; no model appears here by name. Modules have the names that most
checkpoints give them; ModelConfig.names has the names in other files. T: tokens of all sequences of a batch, one after
the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from pagewick.layers.context import LayerBatch, LayerContext
from pagewick.layers.elementwise import scale, soft_cap
from pagewick.layers.embedding import VocabParallelHead
from pagewick.layers.label_head import DenseLayer, LabelScores
from pagewick.layers.norm import LayerNorm, RMSNorm
from pagewick.models.blocks import make_norm
from pagewick.models.config import ModelConfig
from pagewick.models.image_attention import HeadTransform
from pagewick.models.labels import LabelHead
from pagewick.models.stack import DecoderBatch, DecoderStack
from pagewick.models.vision.building import build_encoder
from pagewick.models.vision.pixels import PatchReader


class Decoder(nn.Module):
    """A language model, or an encoder, which has the same parts.

    visual: its encoder of images, whose output is a part of a batch; None without one. label_pooling: of what the
    labels are made, as in LabelHead. absent: modules that other ranks hold; they have names and shapes, and no weights.
    is_blind: whether `visual` is one of them.
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
        self._stages = context.collectives.stages
        self.absent = self.model.absent
        # Adapters change the layers of the text alone.
        context = replace(context, lora=None)
        self.visual: PatchReader | None = None
        self.is_blind = False
        if config.vision is not None:
            # Behind the first stage, only layers that attend to images read what it makes.
            self.is_blind = not self._stages.is_first and config.image_attention is None
            self.visual = build_encoder(context.elsewhere() if self.is_blind else context, "visual", config.vision)
            self.absent = (*self.absent, self.visual) if self.is_blind else self.absent
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

    def layers_of_stages(self) -> list[list[nn.Module]]:
        """Return the layers of each stage of the pipeline."""
        layers = list(self.model.layers)
        return [layers[own.start : own.stop] for own in self.model.stage_layers]

    def known_rows(self, hidden_states: Tensor) -> Tensor:
        """Return rows of what `forward` returns as its last stage knows them; all stages must call this."""
        return self._stages.from_last(hidden_states)

    def forward(self, batch: DecoderBatch) -> Tensor:
        """Hidden states [T, hidden_size] of every token of the batch; see `known_rows`."""
        return self.model(batch)  # type: ignore[no-any-return]

    def compute_logits(self, hidden_states: Tensor, batch: LayerBatch | None = None) -> Tensor:
        """Return logits [N, vocab_size] in float32 for the rows [N, hidden_size].

        batch: the sequences that the rows belong to: the batch of `forward` for all of its rows, BatchRows for some of
        them, None if they are unknown.
        """
        hidden_states = self.known_rows(hidden_states)
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
