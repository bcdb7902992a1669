"""A model without an engine: built, loaded from tensors in memory, and given whole prompts in one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from pagewick.engine.cache.kv_cache import allocate_cache, cache_groups
from pagewick.engine.host_batch import Batch, ragged_batch
from pagewick.layers.context import LayerContext
from pagewick.models.decoder import Decoder
from pagewick.models.registry import build_model, read_config
from pagewick.weights.loader import load_weights
from pagewick.weights.opening import open_source
from tests.models.checkpoints import write_checkpoint
from tests.weights.test_loader import MemorySource


def make_checkpoint(name: str, directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the tensors of a variant."""
    write_checkpoint(name, directory)
    with open_source(directory) as source:
        return source.config(), load_file(directory / "model.safetensors")


def build(context: LayerContext, config: dict[str, Any], tensors: Mapping[str, Tensor]) -> Decoder:
    """Build the model, with room for one batch in its cache."""
    model = build_model(context, read_config(config), list(tensors))
    load_weights(model, MemorySource(dict(tensors)))
    groups = cache_groups(model)
    allocate_cache(groups, [64] * len(groups), torch.device("cpu"))
    return model


def make_batch(model: Decoder, prompts: Sequence[Sequence[int]]) -> Batch:
    """Make a batch of whole prompts, each in blocks of its own."""
    groups = cache_groups(model)
    specs = [group.spec for group in groups]
    tables = []
    for spec in specs:
        per_seq = max(spec.num_blocks(len(prompt)) for prompt in prompts)
        tables.append(np.arange(len(prompts) * per_seq, dtype=np.int32).reshape(len(prompts), per_seq))
    batch = ragged_batch(
        np.array([token_id for prompt in prompts for token_id in prompt], np.int64),
        starts=[0] * len(prompts),
        num_tokens=[len(prompt) for prompt in prompts],
        block_tables=tables,
        specs=specs,
    )
    return batch.to(torch.device("cpu"))


@torch.inference_mode()
def logits_of(model: Decoder, prompts: Sequence[Sequence[int]]) -> Tensor:
    """The logits of every token of every prompt: [T, vocab_size]."""
    batch = make_batch(model, prompts)
    return model.compute_logits(model(batch), batch)
