"""Reads an adapter, whatever its form."""

from __future__ import annotations

from pathlib import Path

from pagewick.weights.description import is_gguf
from pagewick.weights.lora.adapter import Adapter
from pagewick.weights.lora.gguf import gguf_rank, read_gguf
from pagewick.weights.lora.peft import peft_rank, read_peft


def read_adapter(path: Path, num_heads: int, num_kv_heads: int, *, is_transposed: bool = False) -> Adapter:
    """Read an adapter: a directory that PEFT has written, or a GGUF file of llama.cpp.

    num_heads, num_kv_heads: those of the base model. is_transposed: whether its checkpoints have transposed weights.
    Raises ModelLoadError.
    """
    if is_gguf(path):
        return read_gguf(path, num_heads, num_kv_heads)
    return read_peft(path, is_transposed=is_transposed)


def adapter_rank(path: Path) -> int:
    """Return the largest rank in an adapter, from its headers. Raises ModelLoadError."""
    if is_gguf(path):
        return gguf_rank(path)
    return peft_rank(path)
