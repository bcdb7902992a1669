"""Tiny random rerankers, written by transformers: models with a head of labels in place of the vocabulary head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from pagewick.engine.engine import Engine
from tests.models.checkpoints import _reinitialise, save
from tests.models.pooled import pooled
from tests.models.variants import VARIANTS


def write_labelled(name: str, directory: Path, num_labels: int, **entries: Any) -> nn.Module:
    """Write a checkpoint with the sizes of the variant `name` and a head of labels; return transformers' model."""
    variant = VARIANTS[name]
    values = {**variant.all_entries(), "num_labels": num_labels, "pad_token_id": 0, **entries}
    config = getattr(transformers, f"{variant.config}Config")(**values)
    torch.manual_seed(num_labels)
    model: Any = transformers.AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            _reinitialise(parameter_name, parameter, is_peaked=True)
    save(model.eval(), directory)
    return model  # type: ignore[no-any-return]


def scored(
    engine: Engine, prompts: Sequence[list[int]], label_ids: Sequence[int] = (), *, salt: str | None = None
) -> list[Tensor]:
    """Give all prompts to the engine at once; return the logits of their labels, or of tokens."""
    return pooled(engine, prompts, "score", cache_salt=salt, label_ids=list(label_ids))
