"""Tiny models whose linear weights are stored in several tensors, and what transformers makes of the same numbers.

Rows have 256 columns, which the blocks of all formats fill.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from tests.models.checkpoints import save
from tests.models.variants import VARIANTS
from tests.weights.gguf.models import original
from tests.weights.packed.byte_writers import Writer

# Linear layers, those of experts among them; no embeddings, heads, routers and norms.
LINEAR = re.compile(r".*(_proj|_proj_with_mqa|\.w[123]|\.fc[12])\.weight")


def write_packed(
    name: str,
    directory: Path,
    config: Mapping[str, Any],
    write: Writer,
    *,
    is_packed: Callable[[str], Any] = LINEAR.fullmatch,
) -> nn.Module:
    """Write a checkpoint of the variant `name` whose linear weights `write` has stored.

    config: the quantization_config. Returns the transformers model with the numbers that they stand for, in float32.
    """
    save(original(name, is_wide=True), directory)
    path = directory / "model.safetensors"
    plain, packed = load_file(path), {}
    for tensor_name, tensor in dict(plain).items():
        if not is_packed(tensor_name):
            packed[tensor_name] = tensor
            continue
        parts, numbers = write(tensor.float())
        prefix = tensor_name.removesuffix(".weight")
        packed |= {f"{prefix}{suffix}": part.contiguous() for suffix, part in parts.items()}
        plain[tensor_name] = numbers.contiguous()
    save_file(plain, path, {"format": "pt"})
    model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    VARIANTS[name].patch(model.eval())
    save_file(packed, path, {"format": "pt"})
    described = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**described, "quantization_config": dict(config)}))
    return model
