"""Reads adapters in GGUF files, as llama.cpp's convert_lora_to_gguf.py writes them.

For a tensor `blk.0.attn_q.weight` of the base model, the file has `blk.0.attn_q.weight.lora_a` [r, in] and `.lora_b`
[out, r], whose rows lie as those of the tensor; `read_gguf` puts them into the order of a checkpoint. The scale is
adapter.lora.alpha / r, and 1 if alpha is 0. Source: https://github.com/ggml-org/llama.cpp, convert_lora_to_gguf.py and
src/llama-adapter.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from pagewick.errors import ModelLoadError
from pagewick.weights.files import name_some
from pagewick.weights.gguf.architecture import GgufArchitecture
from pagewick.weights.gguf.architectures import ARCHITECTURES
from pagewick.weights.gguf.checkpoint import OTHER_TYPES
from pagewick.weights.gguf.header import GgufHeader, GgufTensor, read_gguf_header
from pagewick.weights.gguf.source import join_heads, separate_halves
from pagewick.weights.lora.adapter import Adapter, digest_of, paired

_NAME: Final = re.compile(
    r"(?P<base>(blk\.(?P<layer>\d{1,6})\.)?(?P<stem>[a-z0-9_]+)\.weight)\.lora_(?P<factor>[ab])", re.ASCII
)
_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_gguf(path: Path, num_heads: int, num_kv_heads: int) -> Adapter:
    """Read the adapter in a file. num_heads, num_kv_heads: those of the base model. Raises ModelLoadError."""
    header = read_gguf_header(path)
    architecture = _architecture_of(header, path)
    alpha = header.values.get("adapter.lora.alpha", 0.0)
    a: dict[str, Tensor] = {}
    b: dict[str, Tensor] = {}
    for tensor, match in _factors(header, path):
        name = architecture.layer.get(match["stem"])
        if match["layer"] is None or name is None or "{}" in name:
            raise ModelLoadError(
                f"{path} changes {match['base']}, which adapters cannot change\n"
                "  adapters may change linear layers of the text, but not experts, embeddings or the vocabulary head"
            )
        name = architecture.layer_prefix.format(match["layer"]) + name
        numbers = _numbers(path, tensor)
        if match["factor"] == "a":
            a[name] = numbers
        else:
            where = f"{path}: {tensor.name}"
            b[name] = _in_order(numbers, architecture, match["stem"], num_heads, num_kv_heads, where)
    scales = {name: alpha / max(1, len(factor)) if alpha else 1.0 for name, factor in a.items()}
    return Adapter(paired(str(path), a, b, scales), digest_of([path]), is_gguf=True)


def _in_order(
    rows: Tensor, architecture: GgufArchitecture, stem: str, num_heads: int, num_kv_heads: int, where: str
) -> Tensor:
    """Return the rows of a factor lora_b in the order of the checkpoint's. where: the tensor, for errors."""
    if architecture.is_permuted and stem in ("attn_q", "attn_k"):
        count = num_heads if stem == "attn_q" else num_kv_heads
        _check_rows(rows, 2 * count, f"{count} heads", where)
        return separate_halves(rows, count)
    if architecture.is_by_head and stem == "attn_qkv":
        # A base model of another kind may have no heads, or numbers of heads that form no groups.
        is_grouped = num_kv_heads > 0 and num_heads % num_kv_heads == 0
        total = num_heads + 2 * num_kv_heads if is_grouped else 0
        _check_rows(rows, total, f"{num_heads} heads and {num_kv_heads} key heads", where)
        return join_heads(rows, num_kv_heads, num_heads // num_kv_heads)
    return rows


def _check_rows(rows: Tensor, divisor: int, owners: str, where: str) -> None:
    """Raise ModelLoadError unless the divisor is positive and divides the number of rows."""
    if divisor <= 0 or len(rows) % divisor:
        raise ModelLoadError(
            f"{where} has {len(rows)} rows, which are not those of {owners}\n  is it an adapter of this model?"
        )


def gguf_rank(path: Path) -> int:
    """Return the largest rank of the adapter in a file. Raises ModelLoadError."""
    header = read_gguf_header(path)
    _architecture_of(header, path)
    return max((tensor.shape[0] for tensor, match in _factors(header, path) if match["factor"] == "a"), default=1)


def _architecture_of(header: GgufHeader, path: Path) -> GgufArchitecture:
    """Check that the file holds an adapter that is supported, and return the architecture of its base model."""
    values = header.values
    kind = values.get("general.type", "model")
    if kind != "adapter" or values.get("adapter.type") != "lora":
        held = (
            f"an adapter of the type {values.get('adapter.type')!r}"
            if kind == "adapter"
            else OTHER_TYPES.get(str(kind), f"a {kind}")
        )
        raise ModelLoadError(f"{path} holds {held}, not a LoRA adapter")
    alpha = values.get("adapter.lora.alpha", 0.0)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not np.isfinite(alpha):
        raise ModelLoadError(f"adapter.lora.alpha in {path} is {alpha!r}; it must be a number")
    if values.get("adapter.alora.invocation_tokens"):
        raise ModelLoadError(
            f"{path} is an activated LoRA adapter (adapter.alora.invocation_tokens), which is not supported"
        )
    architecture: Any = values.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelLoadError(f"{path} is an adapter of the architecture {architecture!r}, which is not supported")
    if architecture == "gpt2":
        # A square weight would not show it: its change would be transposed, too.
        raise ModelLoadError(
            f"{path} is an adapter of GPT-2, and llama.cpp's converter transposes the factors of GPT-2\n"
            "  load the directory from which the file was made"
        )
    return ARCHITECTURES[architecture]


def _factors(header: GgufHeader, path: Path) -> Iterator[tuple[GgufTensor, re.Match[str]]]:
    other = [tensor.name for tensor in header.tensors if not _NAME.fullmatch(tensor.name)]
    if other:
        raise ModelLoadError(f"{path} has tensors beside the factors lora_a and lora_b: {name_some(sorted(other))}")
    for tensor in header.tensors:
        match = _NAME.fullmatch(tensor.name)
        assert match is not None, "the others were refused"
        if tensor.format.name not in _DTYPES or len(tensor.shape) != 2:
            raise ModelLoadError(
                f"{path} has {tensor.name} in {tensor.format.name} with {len(tensor.shape)} dimensions; factors are "
                "matrices in F32, F16 or BF16"
            )
        yield tensor, match


def _numbers(path: Path, tensor: GgufTensor) -> Tensor:
    with path.open("rb") as file:
        file.seek(tensor.offset)
        data = bytearray(file.read(tensor.num_bytes))
    return torch.frombuffer(data, dtype=_DTYPES[tensor.format.name]).view(tensor.shape).float()
