"""GGUF files as a TensorSource. Tensors are mapped, never read as a whole.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, Final

import torch

from pagewick.quantization.block_formats import BLOCK_FORMATS, kept_format
from pagewick.quantization.expansion import expand
from pagewick.quantization.ggml import dequantize
from pagewick.weights.gguf.checkpoint import open_gguf
from pagewick.weights.gguf.config import generation_config
from pagewick.weights.gguf.header import GgufTensor
from pagewick.weights.gguf.pieces import GatheredPiece, JoinedPiece, Piece, scale_of
from pagewick.weights.mapped import release_pages
from pagewick.weights.source import TensorSource
from pagewick.weights.tensor_headers import describe_expansions, gguf_tensors

_DTYPES: Final = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}


class GgufSource(TensorSource):
    """The model in a GGUF file and its other parts. mmproj: the file with the part that sees.

    Opening reads the headers only. Raises ModelLoadError for a malformed or truncated file, for one that holds no
    model, and for an architecture, key or tensor that is not supported.
    """

    def __init__(self, path: Path, mmproj: Path | None = None) -> None:
        self.checkpoint = open_gguf(path, mmproj)
        self._pieces = {piece.name: piece for piece in self.checkpoint.pieces}
        by_name = {tensor.name: tensor for tensor in self.checkpoint.tensors}
        self._scales = {name: scale for name, tensor in by_name.items() if (scale := scale_of(tensor, by_name))}
        sizes = {part: path.stat().st_size for part, path in enumerate(self.checkpoint.paths)}
        self._bytes = {
            part: torch.from_file(str(self.checkpoint.paths[part]), shared=False, size=size, dtype=torch.uint8)
            for part, size in sizes.items()
        }

    @property
    def note(self) -> str:
        """A line about types that are kept in another one; empty if there are none."""
        expansions = describe_expansions(gguf_tensors(self.checkpoint))
        return expansions and f"expanding weights, without a change of their numbers: {expansions}"

    def names(self) -> Sequence[str]:
        """Return all tensor names: file by file, by offset inside a file."""
        return tuple(self._pieces)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor; rows of a block format count in bytes."""
        piece = self._pieces[name]
        stored_type = self.stored_type(name)
        if isinstance(stored_type, torch.dtype) or not isinstance(piece, Piece):
            return piece.shape
        block = piece.tensor.format
        numbers, num_bytes = block[1:] if stored_type == block.name else BLOCK_FORMATS[stored_type]
        return (*piece.shape[:-1], piece.shape[-1] // numbers * num_bytes)

    def dtype(self, name: str) -> torch.dtype:
        """Return the data type of a tensor; that of a block format is uint8."""
        return _DTYPES.get(self._pieces[name].stored_type, torch.uint8)

    def stored_type(self, name: str) -> torch.dtype | str:
        """Return the data type, or the name of the block format, such as Q4_K: the one that `get` returns."""
        piece = self._pieces[name]
        if isinstance(piece, Piece) and piece.tensor.name in self._scales:
            return kept_format(piece.stored_type)
        return _DTYPES.get(piece.stored_type, piece.stored_type)

    def get(self, name: str) -> torch.Tensor:
        """Return a tensor, mapped from the file unless its rows or numbers have to be changed."""
        piece = self._pieces[name]
        if isinstance(piece, JoinedPiece):
            return self._joined(piece)
        if isinstance(piece, GatheredPiece):
            parts = [self._numbers(tensor).view(piece.part_shape) for tensor in piece.tensors]
            if piece.colours_last:
                return parts[0].movedim(1, -1).flatten(1)
            found = torch.cat(parts, dim=piece.axis)
            return separate_halves(found, piece.num_heads) if piece.num_heads else found
        stored = self.stored_rows(piece.tensor)[piece.start : piece.start + piece.num_rows]
        found = stored
        if (scales := self._scales_of(piece.tensor)) is not None:
            scale = scales[piece.start * len(scales) // prod(piece.tensor.shape[:-1])]
            found = expand(piece.stored_type, stored, piece.shape[-1], scale)
        if piece.num_heads:
            found = separate_halves(found, piece.num_heads)
        if piece.halved is not None:
            found = interleave_halves(found, *piece.halved)
        if piece.key_heads is not None:
            found = join_heads(found, *piece.key_heads)
        if piece.offset:
            found = found.to(torch.float32) - piece.offset
        if piece.decay_sign:
            found = _logarithms(found * -piece.decay_sign)
        if found is not stored:
            release_pages(stored)
        return found.reshape(self.shape(name))

    def config(self) -> dict[str, Any]:
        """Return the configuration in Hugging Face's form."""
        return dict(self.checkpoint.config)

    def generation_config(self) -> dict[str, Any]:
        """Return the sampling defaults of the file, and the tokens that end a response."""
        return generation_config(self.checkpoint.values)

    def close(self) -> None:
        """Forget the files; each mapping ends when its last tensor is gone."""
        self._bytes.clear()

    def stored_rows(self, tensor: GgufTensor) -> torch.Tensor:
        """Return a file's tensor as rows: numbers, or bytes of blocks. A vector has a number in each."""
        stored = self._bytes[tensor.part][tensor.offset : tensor.offset + tensor.num_bytes]
        dtype = _DTYPES.get(tensor.format.name, torch.uint8)
        if tensor.offset % dtype.itemsize:  # such a file has an unusual alignment
            stored = stored.clone()
        return stored.view(dtype).view(-1, 1 if len(tensor.shape) == 1 else tensor.row_bytes // dtype.itemsize)

    def _scales_of(self, tensor: GgufTensor) -> torch.Tensor | None:
        """Return the factors of a tensor's numbers: one, or one for each expert. None: there are none."""
        scales = self._scales.get(tensor.name)
        return None if scales is None else self.stored_rows(scales).flatten()

    def _joined(self, piece: JoinedPiece) -> torch.Tensor:
        keys, values = (self._numbers(tensor) for tensor in (piece.keys, piece.values))
        return torch.cat([keys.transpose(1, 2), values], dim=1).reshape(piece.shape)

    def _numbers(self, tensor: GgufTensor) -> torch.Tensor:
        """Return a file's tensor in float32, whatever its format."""
        rows = self.stored_rows(tensor)
        name = tensor.format.name
        if name in _DTYPES:
            numbers = rows.float()
        else:
            # A vector in blocks is one row of them.
            numbers = dequantize(name, rows.view(-1, tensor.row_bytes), tensor.shape[-1])
        release_pages(rows)
        if (scales := self._scales_of(tensor)) is not None:
            numbers = numbers.view(len(scales), -1) * scales.unsqueeze(1)
        return numbers.view(tensor.shape)


def separate_halves(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo the interleaving of the two halves of each head's rows: [num_heads * head_dim, n]."""
    return rows.view(num_heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def interleave_halves(rows: torch.Tensor, num_heads: int, num_turned: int) -> torch.Tensor:
    """Interleave the two halves of the first num_turned rows of each head: [num_heads * head_dim, n]."""
    heads = rows.view(num_heads, -1, rows.shape[1])
    turned = heads[:, :num_turned].view(num_heads, 2, -1, rows.shape[1]).transpose(1, 2).flatten(1, 2)
    return torch.cat((turned, heads[:, num_turned:]), dim=1).reshape(rows.shape)


def join_heads(rows: torch.Tensor, num_key_heads: int, num_queries: int) -> torch.Tensor:
    """Return rows of all queries, all keys and all values [N, n] with those of one key head after the other."""
    heads = rows.view(num_key_heads * (num_queries + 2), -1, rows.shape[1])
    queries, keys, values = torch.split(heads, [num_key_heads * num_queries, num_key_heads, num_key_heads])
    parts = (part.view(num_key_heads, -1, *heads.shape[1:]) for part in (queries, keys, values))
    return torch.cat(list(parts), dim=1).reshape(rows.shape)


def _logarithms(decays: torch.Tensor) -> torch.Tensor:
    """Return A_log of numbers -exp(A_log): those that fit into bfloat16 as they were, others but for their last bit."""
    found = (-decays.to(torch.float64)).log()
    short = found.to(torch.bfloat16).to(torch.float64)
    # The exponential that was stored is rounded to float32, by a library that may have been one bit off.
    is_short = (short.exp() + decays).abs() <= 2.0**-22 * decays.abs()
    return torch.where(is_short, short, found).to(torch.float32)
