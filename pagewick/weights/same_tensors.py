"""Whether tensors that a model leaves out hold the numbers with which it computes in their place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import torch
from torch import Tensor

from pagewick.errors import ModelLoadError
from pagewick.weights.source import TensorSource

_PIECE_NUMBERS: Final = 2**23


def check_tied_heads(source: TensorSource, heads: Mapping[str, str]) -> None:
    """Raise ModelLoadError if a head that would not be loaded differs from the embedding that is used in its place.

    heads: the names of such heads, each with that of its embedding. Both are read, in pieces.
    """
    for head, embedding in heads.items():
        if not _are_equal(source, head, embedding):
            raise ModelLoadError(
                f"this model's head is tied to its embedding, but {head} differs from {embedding}\n"
                "  set tie_word_embeddings to false in config.json, so that the head is used; it may be true by default"
            )


def check_zeros(source: TensorSource, biases: Iterable[str]) -> None:
    """Raise ModelLoadError if one of these biases, which would not be loaded, is not zero."""
    for name in biases:
        bias = source.get(name)
        if bool((bias.float() != 0).any()):
            raise ModelLoadError(
                f"{name} holds other numbers than zeros, and config.json says that this model has no such bias\n"
                "  config.json and the weights do not belong together; download or copy both again"
            )
        source.release(bias)


def _are_equal(source: TensorSource, first: str, second: str) -> bool:
    kinds = source.stored_type(first), source.stored_type(second)
    # Bytes of two block formats mean different numbers.
    if source.shape(first) != source.shape(second) or (kinds[0] != kinds[1] and str in map(type, kinds)):
        return False
    tensors = source.get(first).reshape(-1), source.get(second).reshape(-1)
    for start in range(0, len(tensors[0]), _PIECE_NUMBERS):
        pieces = [tensor[start : start + _PIECE_NUMBERS] for tensor in tensors]
        if not _hold_equal_numbers(*pieces):
            return False
        for piece in pieces:
            source.release(piece)
    return True


def _hold_equal_numbers(first: Tensor, second: Tensor) -> bool:
    # Equal bytes are equal numbers even where they are NaN.
    if first.dtype == second.dtype and torch.equal(first.view(torch.uint8), second.view(torch.uint8)):
        return True
    # torch compares no numbers of 8 bits with others.
    if min(first.itemsize, second.itemsize) < 2:
        return False
    common = torch.promote_types(first.dtype, second.dtype)
    return torch.equal(first.to(common), second.to(common))
