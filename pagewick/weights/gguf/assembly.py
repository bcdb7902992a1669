"""Makes a GGUF file's tensors from a checkpoint's, one piece after the other: the reverse of GgufSource."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from pagewick.weights.gguf.header import GgufTensor
from pagewick.weights.gguf.pieces import JoinedPiece, Piece

Rows = Iterator[tuple[int, Tensor]]
"""Rows [n, columns] of a tensor, from its first to its last, with the index in its first dimension if it has three."""


@dataclass(frozen=True)
class Assembly:
    """Where the rows of a file's tensors come from.

    pieces: what the file's reader would find in it. numbers: contents of tensors that are made from the configuration.
    get, release: as in TensorSource, by the names of the pieces.
    """

    pieces: Sequence[Piece | JoinedPiece]
    numbers: Mapping[str, Sequence[float]]
    get: Callable[[str], Tensor]
    release: Callable[[Tensor], None]

    def rows(self, tensor: GgufTensor) -> Rows:
        """Yield a tensor's rows; a piece is read when its rows are asked for, and released after them."""
        if tensor.name in self.numbers:
            yield 0, torch.tensor(self.numbers[tensor.name], dtype=torch.float32).view(1, -1)
            return
        for piece in self._by_tensor[tensor.name]:
            weight = self.get(piece.name)
            yield _first_row(piece) // max(1, prod(tensor.shape[1:-1])), _stored_rows(piece, tensor, weight)
            self.release(weight)

    @cached_property
    def _by_tensor(self) -> Mapping[str, Sequence[Piece | JoinedPiece]]:
        """The pieces of each of the file's tensors, from its first row to its last."""
        found: dict[str, list[Piece | JoinedPiece]] = {}
        for piece in self.pieces:
            tensors = (piece.keys, piece.values) if isinstance(piece, JoinedPiece) else (piece.tensor,)
            for tensor in tensors:
                found.setdefault(tensor.name, []).append(piece)
        return {name: sorted(pieces, key=_first_row) for name, pieces in found.items()}


def _first_row(piece: Piece | JoinedPiece) -> int:
    return 0 if isinstance(piece, JoinedPiece) else piece.start


def _stored_rows(piece: Piece | JoinedPiece, tensor: GgufTensor, weight: Tensor) -> Tensor:
    """Return the rows of `tensor` that a weight of the checkpoint becomes."""
    if isinstance(piece, JoinedPiece):
        num_heads, _, nope_size = piece.keys.shape
        heads = weight.view(num_heads, -1, weight.shape[-1])
        is_keys = tensor.name == piece.keys.name
        part = heads[:, :nope_size].transpose(1, 2) if is_keys else heads[:, nope_size:]
        return part.reshape(-1, tensor.shape[-1])
    rows = weight.reshape(-1, piece.row_size)
    if (num_missing := piece.num_rows - len(rows)) > 0:
        rows = torch.cat((rows, rows[:1].expand(num_missing, -1)))
    if piece.num_heads:
        rows = rows.view(piece.num_heads, 2, -1, piece.row_size).transpose(1, 2).reshape(rows.shape)
    if piece.key_heads is not None:
        rows = separate_heads(rows, *piece.key_heads)
    if piece.decay_sign:
        return piece.decay_sign * rows.float().exp()
    return rows.float() + piece.offset if piece.offset else rows


def separate_heads(rows: Tensor, num_key_heads: int, num_queries: int) -> Tensor:
    """Do the reverse of source.join_heads."""
    heads = rows.view(num_key_heads, num_queries + 2, -1, rows.shape[1])
    parts = heads[:, :num_queries], heads[:, -2], heads[:, -1]
    return torch.cat([part.reshape(-1, rows.shape[1]) for part in parts])
