"""Batches of examples in few shapes, since PyTorch compiles its matrix products anew for every shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

UNLEARNT = -100
# With 4,096 tokens a step takes 10 % longer: fewer activations stay in the processor's cache.
_MAX_MICRO_TOKENS = 2048
# The number of tokens of a batch, and the number of those that are learnt, are multiples of this.
ROWS = 64


class Example(NamedTuple):
    """Token ids of one document and, per position, the next token to learn or `UNLEARNT`."""

    token_ids: list[int]
    targets: list[int]


class Group(NamedTuple):
    """Consecutive examples of a batch, each padded to `length` tokens."""

    num_examples: int
    length: int


class MicroBatch(NamedTuple):
    """Padded examples one after the other: `input_ids`, `targets` and `positions`, each `[tokens]`, and their groups.

    starts: the place of each example's first token. Tokens behind the last group belong to no example.
    """

    input_ids: Tensor
    targets: Tensor
    positions: Tensor
    groups: list[Group]
    starts: list[int]

    def to(self, device: str) -> MicroBatch:
        """Return the same batch on a device."""
        tensors = (self.input_ids.to(device), self.targets.to(device), self.positions.to(device))
        return MicroBatch(*tensors, self.groups, self.starts)


def padded_length(length: int) -> int:
    """Round up to a multiple of 8 or, beyond 128, of 32: finer steps make more shapes, coarser ones more padding."""
    return round_up(length, 8 if length <= 128 else 32)


def round_up(number: int, multiple: int) -> int:
    """Return the next multiple."""
    return -(-number // multiple) * multiple


def to_micro_batch(examples: Sequence[Example]) -> MicroBatch:
    """Join examples, best sorted by length: neighbours of one padded length become a group."""
    lengths = [padded_length(len(example.token_ids)) for example in examples]
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    shape = (round_up(sum(lengths), ROWS),)
    input_ids, targets, positions = torch.zeros(shape).long(), torch.full(shape, UNLEARNT), torch.zeros(shape).long()
    for example, start, length in zip(examples, starts, lengths, strict=True):
        end = start + len(example.token_ids)
        input_ids[start:end] = torch.tensor(example.token_ids)
        targets[start:end] = torch.tensor(example.targets)
        positions[start : start + length] = torch.arange(length)
    groups = [Group(len(list(equal)), length) for length, equal in groupby(lengths)]
    return MicroBatch(input_ids, targets, positions, groups, starts)


def micro_batches(examples: Sequence[Example]) -> Iterator[MicroBatch]:
    """Join examples of like length, at most 2,048 tokens at a time unless one example is longer."""
    waiting: list[Example] = []
    num_tokens = 0
    for example in sorted(examples, key=lambda item: len(item.token_ids)):
        length = padded_length(len(example.token_ids))
        if waiting and num_tokens + length > _MAX_MICRO_TOKENS:
            yield to_micro_batch(waiting)
            waiting, num_tokens = [], 0
        waiting.append(example)
        num_tokens += length
    if waiting:
        yield to_micro_batch(waiting)
