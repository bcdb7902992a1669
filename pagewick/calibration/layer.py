"""Runs one decoder layer at a time over a text, in float32.

T: tokens of a batch of the text; H: hidden_size. The states of a text are the layer's inputs, one tensor [T, H] for
each batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from pagewick.attention.backend import GroupBatch
from pagewick.attention.native import choose_backend, default_block_size
from pagewick.calibration.observation import InputObservation, Seen
from pagewick.calibration.selections import SharedSelections
from pagewick.errors import ConfigError
from pagewick.layers.attention import Attention
from pagewick.layers.context import LayerContext
from pagewick.layers.head_blocks import HeadBlockIndexer
from pagewick.layers.indexer import Indexer
from pagewick.layers.latent_attention import LatentCache
from pagewick.layers.rotary import Angles, rotary_of
from pagewick.layers.state import StateLayer
from pagewick.models.blocks import BLOCKS, Block
from pagewick.models.config import ModelConfig
from pagewick.models.name_map import NameMap
from pagewick.models.parts import LayerConfig
from pagewick.models.stack import DecoderStack
from pagewick.parallel.collectives import Collectives
from pagewick.quantization.unquantized import UnquantizedMethod
from pagewick.weights.loader import build_routes
from pagewick.weights.source import TensorSource

_CPU: Final = torch.device("cpu")
_BLOCK_SIZE: Final = default_block_size(_CPU)
# Sequences are computed together up to this number of tokens.
_TOKENS_AT_ONCE: Final = 2048

States = list[Tensor]
GetTensor = Callable[[str], Tensor]


class Enough(Exception):
    """Raised by an observer that has seen all it waits for: the rest of the layer need not be computed."""


@dataclass(frozen=True, slots=True)
class TextBatch:
    """Sequences of a text that are computed together: a DecoderBatch."""

    input_ids: Tensor
    positions: Tensor
    cu_seqlens_q: Tensor
    context_lens: Tensor
    groups: Sequence[GroupBatch]
    inputs_embeds: Tensor | None = None
    embeds_mask: Tensor | None = None
    deep_embeds: Tensor | None = None
    key_ends: Tensor | None = None
    window_key_ends: Tensor | None = None
    token_types: Tensor | None = None
    adapter_ids: Tensor | None = None


def _reads_more(layer: LayerConfig) -> bool:
    """Whether a layer, of a block that reads hidden states alone, also reads what is outside of it."""
    has_logs = layer.latent is not None and layer.latent.has_log_scales
    return layer.lender is not None or has_logs or (layer.rope is not None and layer.rope.is_learned)


def batches_of(token_ids: Sequence[Sequence[int]], config: ModelConfig) -> list[TextBatch]:
    """Divide a text into batches. Raises ConfigError for sequences that the model cannot read."""
    longest = max(config.max_position_embeddings, config.longest_context)
    together: list[list[Sequence[int]]] = [[]]
    for ids in filter(len, token_ids):
        if len(ids) > longest:
            raise ConfigError(
                f"the text has a sequence of {len(ids)} tokens, and the model reads {longest}; divide the text"
            )
        if not all(0 <= token_id < config.vocab_size for token_id in ids):
            raise ConfigError(
                f"the text has tokens outside of the vocabulary of {config.vocab_size}; use the model's tokenizer"
            )
        if together[-1] and sum(map(len, together[-1])) + len(ids) > _TOKENS_AT_ONCE:
            together.append([])
        together[-1].append(ids)
    return [_batch(sequences) for sequences in together if sequences]


def _batch(sequences: Sequence[Sequence[int]]) -> TextBatch:
    lens = [len(ids) for ids in sequences]
    num_blocks = [-(-num_tokens // _BLOCK_SIZE) for num_tokens in lens]
    first_blocks = list(accumulate(num_blocks, initial=0))
    tables = torch.zeros(len(lens), max(num_blocks), dtype=torch.int32)
    # Running states go to the block in the second column; no step continues from them. Their layers have no slots.
    states = torch.tensor([[0, row, 0] for row in range(len(lens))], dtype=torch.int32)
    slots = []
    for row, num_tokens in enumerate(lens):
        tables[row, : num_blocks[row]] = torch.arange(first_blocks[row], first_blocks[row + 1])
        slots.append(first_blocks[row] * _BLOCK_SIZE + torch.arange(num_tokens))
    return TextBatch(
        input_ids=torch.tensor([token_id for ids in sequences for token_id in ids]),
        positions=torch.cat([torch.arange(num_tokens) for num_tokens in lens]).unsqueeze(0),
        cu_seqlens_q=torch.tensor(list(accumulate(lens, initial=0)), dtype=torch.int32),
        context_lens=torch.tensor(lens, dtype=torch.int32),
        groups=[GroupBatch(torch.cat(slots), tables), GroupBatch(torch.cat(slots), states)],
    )


class TextRunner:
    """Runs the layers of a checkpoint over batches of a text."""

    def __init__(self, source: TensorSource, config: ModelConfig, batches: Sequence[TextBatch]) -> None:
        if config.block not in BLOCKS or any(map(_reads_more, config.layers)):
            raise ConfigError(
                f"{config.architecture} cannot be run layer by layer: its layers read more than hidden states\n"
                "  quantize it at load instead: --quantization"
            )
        self._source, self._config, self._batches = source, config, batches
        self.names: NameMap = config.name_map(source.names())
        longest = max((int(batch.context_lens.max()) for batch in batches), default=1)
        self._context = LayerContext(
            dtype=torch.float32,
            device=_CPU,
            collectives=Collectives.single(),
            backend=choose_backend(_CPU, "float32", _BLOCK_SIZE),
            choose_method=lambda prefix: UnquantizedMethod(),
            max_model_len=max(longest, config.max_position_embeddings),
        )
        self._selections = SharedSelections(len(batches))
        self._num_blocks = max((int(batch.groups[0].block_tables.max()) + 1 for batch in batches), default=1)

    def name(self, layer_idx: int, path: str) -> str:
        """Return the checkpoint's name of a tensor of a layer."""
        return self.names.in_file(f"model.layers.{layer_idx}.{path}")

    @torch.inference_mode()
    def embed(self) -> States:
        """Return the inputs of the first layer. Only the rows of tokens that occur are read."""
        used = torch.tensor(sorted({token_id for batch in self._batches for token_id in batch.input_ids.tolist()}))
        stack = DecoderStack(self._context, replace(self._config, layers=(), vocab_size=len(used)))
        for path, route in build_routes(stack).items():
            tensor = self._source.get(self.names.in_file(f"model.{path}"))
            route.module.load_weight(
                route.leaf, tensor[used] if path.startswith("embed_tokens") else tensor, route.part
            )
        return [
            stack.embed(replace(batch, input_ids=torch.searchsorted(used, batch.input_ids))) for batch in self._batches
        ]

    @torch.inference_mode()
    def run(self, layer_idx: int, get: GetTensor, states: States, seen: Seen | None = None) -> Iterator[Tensor]:
        """Yield the layer's outputs for each batch; get: returns its tensors by their names in the checkpoint.

        seen: an InputObservation's; if it raises Enough, the layer's inputs are yielded instead. A layer that shares
        the selection of an earlier one sees what that one selected when it last ran to its end.
        """
        block, observation = self._build(layer_idx, get, seen)
        layer = self._config.layers[layer_idx]
        rotary = rotary_of(self._context, layer.rope, layer.query_scale)
        self._selections.enter(block)
        for batch_idx, (batch, hidden_states) in enumerate(zip(self._batches, states, strict=True)):
            angles: Angles | None = None if rotary is None else rotary.angles(batch.positions[0])
            self._selections.before(block, batch_idx)
            try:
                added, residual = block(hidden_states, None, angles, batch)
            except Enough:
                yield hidden_states
            else:
                self._selections.after(block, batch_idx)
                yield added + residual
        if observation is not None:
            observation.close()

    def _build(self, layer_idx: int, get: GetTensor, seen: Seen | None) -> tuple[Block, InputObservation | None]:
        config, layer = self._config, self._config.layers[layer_idx]
        block = BLOCKS[layer.block or config.block](self._context, f"model.layers.{layer_idx}", config, layer)
        routes = {self.name(layer_idx, path): route for path, route in build_routes(block).items()}
        for name, route in routes.items():
            route.module.load_weight(route.leaf, get(name), route.part)
        for module in block.modules():
            if callable(finish := getattr(module, "finish_loading", None)):
                finish()
        for part in block.modules():
            if isinstance(part, Attention | LatentCache | Indexer | HeadBlockIndexer | StateLayer):
                blocks = torch.zeros(self._num_blocks, part.cache_spec.block_bytes, dtype=torch.uint8)
                part.bind_cache(blocks, int(isinstance(part, StateLayer)))
        return block, None if seen is None else InputObservation(block, routes, seen)
