"""Stages: what the ranks of one pipeline send to each other. They hold successive layers of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# A header has, for each of two tensors: the number of its dimensions (0: there is no tensor), its dtype, and the sizes
# of all dimensions but the first.
_MOST_DIMENSIONS: Final = 4
_HEADER_SIZE: Final = 1 + _MOST_DIMENSIONS

# The sizes of a tensor but for the first, and its dtype.
_Form = tuple[tuple[int, ...], torch.dtype]


class Stages:
    """This rank's place in its pipeline. index: from 0; size: the number of stages.

    group: the ranks of the pipeline; None if this one is alone. ranks: their numbers in the world, in order.
    is_ahead: whether later stages may still have to compute what this one has sent.
    The ranks of a pipeline must call `send` and `receive` in pairs, and `from_last` together, in the same order.
    RuntimeError means that another rank is lost and that the group cannot be used any more.
    """

    def __init__(self, index: int = 0, ranks: Sequence[int] = (0,), group: dist.ProcessGroup | None = None) -> None:
        self.index, self.size = index, len(ranks)
        self._ranks, self._group = list(ranks), group
        self.is_ahead = False
        # Those of the tensors that cross the borders to the next stage and from the one before, once they are known.
        self._sent: list[_Form | None] | None = None
        self._received: list[_Form | None] | None = None

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.size - 1

    def send(self, hidden_states: Tensor, residual: Tensor | None) -> None:
        """Send the outputs of this stage's last layer, [T, ...] each, to the next stage.

        Their dtypes, and their sizes but for T, are those of the first call, with which they travel.
        """
        tensors = (hidden_states, residual)
        forms = [None if tensor is None else (tuple(tensor.shape[1:]), tensor.dtype) for tensor in tensors]
        receiver = self._ranks[self.index + 1]
        self.is_ahead = True
        if self._sent is None:
            header = torch.tensor([*_in_numbers(forms[0]), *_in_numbers(forms[1])], device=hidden_states.device)
            dist.send(header, receiver, group=self._group)
            self._sent = forms
        assert forms == self._sent, (forms, self._sent)
        for tensor in tensors:
            if tensor is not None:
                dist.send(_bytes_of(tensor.contiguous()), receiver, group=self._group)

    def receive(self, num_tokens: int, beside: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what the stage before sends for a batch of `num_tokens` tokens: hidden states and residual.

        They lie on the device of `beside`.
        """
        sender, device = self._ranks[self.index - 1], beside.device
        if self._received is None:
            header = torch.empty(2 * _HEADER_SIZE, dtype=torch.int64, device=device)
            dist.recv(header, sender, group=self._group)
            numbers = header.tolist()
            self._received = [_from_numbers(numbers[:_HEADER_SIZE]), _from_numbers(numbers[_HEADER_SIZE:])]
        received: list[Tensor | None] = []
        for form in self._received:
            received.append(None)
            if form is not None:
                sizes, dtype = form
                received[-1] = tensor = torch.empty((num_tokens, *sizes), dtype=dtype, device=device)
                dist.recv(_bytes_of(tensor), sender, group=self._group)
        hidden_states, residual = received
        assert hidden_states is not None, "a stage has an output"
        return hidden_states, residual

    def from_last(self, rows: Tensor) -> Tensor:
        """Return the last stage's `rows` on every stage; on the others, `rows` has their shape and dtype."""
        if self.size == 1 or not rows.numel():
            return rows
        rows = rows.contiguous() if self.is_last else torch.empty_like(rows, memory_format=torch.contiguous_format)
        dist.broadcast(_bytes_of(rows), self._ranks[-1], group=self._group)
        self.is_ahead = False
        return rows


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as bytes, because not every backend knows every dtype."""
    return tensor.view(-1).view(torch.uint8)


def _in_numbers(form: _Form | None) -> list[int]:
    sizes, dtype = form or ((), torch.float32)
    assert len(sizes) < _MOST_DIMENSIONS, sizes
    numbers = [0 if form is None else 1 + len(sizes), _DTYPES.index(dtype), *sizes]
    return numbers + [0] * (_HEADER_SIZE - len(numbers))


def _from_numbers(numbers: Sequence[int]) -> _Form | None:
    num_dimensions, dtype, *sizes = numbers
    return (tuple(sizes[: num_dimensions - 1]), _DTYPES[dtype]) if num_dimensions else None
