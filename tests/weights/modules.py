"""Writes what sentence-transformers writes beside a model, in the forms of its versions 2 and 6."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

OLD_TYPES = {
    kind: f"sentence_transformers.models.{kind}" for kind in ("Transformer", "Pooling", "Dense", "Normalize", "Dropout")
}
NEW_TYPES = {
    "Transformer": "sentence_transformers.base.modules.transformer.Transformer",
    "Pooling": "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
    "Dense": "sentence_transformers.base.modules.dense.Dense",
    "Normalize": "sentence_transformers.base.modules.normalize.Normalize",
    "Dropout": "sentence_transformers.sentence_transformer.modules.dropout.Dropout",
}
MEAN = {
    "word_embedding_dimension": 384,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": True,
    "pooling_mode_max_tokens": False,
    "pooling_mode_mean_sqrt_len_tokens": False,
}
NEW_MEAN = {"embedding_dimension": 384, "pooling_mode": "mean", "include_prompt": True}


def modules(kinds: Sequence[str], types: dict[str, str] = OLD_TYPES) -> list[dict[str, Any]]:
    """Return the content of modules.json; a kind that `types` lacks is a type itself."""
    return [
        {
            "idx": idx,
            "name": str(idx),
            "path": "" if "Transformer" in kind else f"{idx}_{kind}",
            "type": types.get(kind, kind),
        }
        for idx, kind in enumerate(kinds)
    ]


def dense(in_features: int, out_features: int, /, **changes: Any) -> dict[str, Any]:
    """Return the config.json of a Dense."""
    activation = "torch.nn.modules.activation.Tanh"
    sizes = {"in_features": in_features, "out_features": out_features}
    return {**sizes, "bias": True, "activation_function": activation, **changes}


def dense_weights(in_features: int, out_features: int, *, bias: bool = True, seed: int = 0) -> bytes:
    """Return the model.safetensors of a Dense."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {"linear.weight": torch.randn(out_features, in_features, generator=generator)}
    if bias:
        tensors["linear.bias"] = torch.randn(out_features, generator=generator)
    return save(tensors)


def with_two_layers() -> dict[str, bytes]:
    """Return all files of modules for vectors of 384 numbers that become 24 and then 8."""
    identity = dense(384, 24, bias=False, activation_function="torch.nn.modules.linear.Identity")
    contents: dict[str, Any] = {
        "modules.json": modules(["Transformer", "Pooling", "Dense", "Dense", "Normalize"], NEW_TYPES),
        "1_Pooling/config.json": NEW_MEAN,
        "2_Dense/config.json": identity,
        "3_Dense/config.json": dense(24, 8),
    }
    return {
        **{name: json.dumps(content).encode() for name, content in contents.items()},
        "2_Dense/model.safetensors": dense_weights(384, 24, bias=False, seed=1),
        "3_Dense/model.safetensors": dense_weights(24, 8, seed=2),
    }


def write_files(directory: Path, contents: dict[str, Any]) -> Path:
    """Write files in a directory and its folders; what is not bytes is written as JSON."""
    for name, content in contents.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return directory
