"""Batches of sequences with running states: what the tests of all operations on them have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from pagewick.kernels.options import AttentionMetadata

# Half a unit in the last place of 1, and in float32 what the sums add to it.
ROUNDING = {torch.float32: 4e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}
# Blocks that are nobody's source or target: block 0 is that of padding.
NUM_SPARE = 2


@dataclass(frozen=True)
class StateBatch:
    """The arguments of an operation: new tokens of some sequences, and their states. Subclasses add the others.

    OPERATION: its name. ROWS: the fields that have a row for each token; the result has the dtype of the first one.
    ERRORS: what sums in another order may change in results, and in states.
    """

    OPERATION: ClassVar[str]
    ROWS: ClassVar[tuple[str, ...]]
    ERRORS: ClassVar[tuple[float, float]]

    states: Tensor
    batch: AttentionMetadata

    def of_module(self, operations: Any) -> Callable[..., Tensor]:
        """Return the operation of a module, or of the native library."""
        found: Callable[..., Tensor] = getattr(operations, self.OPERATION)
        return found

    def run(self, operation: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        """Return the result and the states that are left; those of the batch stay as they are."""
        states = self.states.clone()
        return replace(self, states=states).in_place(operation), states

    def in_place(self, operation: Callable[..., Tensor]) -> Tensor:
        """Call the operation with these arguments."""
        raise NotImplementedError

    def expected(self) -> tuple[Tensor, Tensor]:
        """Return what `run` returns, computed in float32."""
        raise NotImplementedError

    def of(self, seq: int) -> slice:
        """Its new tokens."""
        return slice(*self.batch.cu_seqlens_q[seq : seq + 2].tolist())

    def only(self, seq: int, begin: int = 0, end: int | None = None) -> Self:
        """New tokens begin .. end of one sequence, as a batch of its own."""
        start, stop = self.of(seq).start, self.of(seq).stop
        tokens = range(start, stop)[begin:end]
        block_tables = self.batch.block_tables[seq : seq + 1].clone()
        if begin:
            block_tables[:, 0] = block_tables[:, 1]
        block_tables[:, 2] = 0
        length = int(self.batch.context_lens[seq]) - (stop - start) + begin + len(tokens)
        rows = {name: getattr(self, name)[tokens.start : tokens.stop] for name in self.ROWS}
        return replace(self, batch=metadata(block_tables.tolist(), [length], [len(tokens)]), **rows)

    def first(self, num_seqs: int) -> Self:
        """Return the first sequences as a batch."""
        tables, lengths, starts = self.batch[:3]
        rows = {name: getattr(self, name)[: int(starts[num_seqs])] for name in self.ROWS}
        batch = AttentionMetadata(tables[:num_seqs], lengths[:num_seqs], starts[: num_seqs + 1])
        return replace(self, batch=batch, **rows)

    def changed(self, changes: dict[str, Any]) -> Self:
        """Return the batch with other arguments, by the names of fields of its metadata, its options or its own."""
        batch = self
        for name, value in changes.items():
            options: Any = batch.options  # type: ignore[attr-defined]
            if name in AttentionMetadata._fields:
                batch = replace(batch, batch=batch.batch._replace(**{name: value}))
            elif hasattr(options, name):
                batch = replace(batch, options=replace(options, **{name: value}))
            else:
                batch = replace(batch, **{name: value})
        return batch

    def sequences(self) -> Iterator[tuple[slice, int | None, int]]:
        """Yield the rows of each sequence with new tokens, the block of its state (None: it is new), and the target."""
        for seq, (source, target, _) in enumerate(self.batch.block_tables.tolist()):
            rows = self.of(seq)
            if rows.start < rows.stop:
                has_past = int(self.batch.context_lens[seq]) > rows.stop - rows.start
                yield rows, source if has_past else None, target


def assert_is_expected(
    found: tuple[Tensor, Tensor], batch: StateBatch, *, num_roundings: int = 1, error: float = 0.0
) -> None:
    """The result but for its roundings, targets but for sums in another order, and all other blocks to the bit.

    error: what the roundings of operands may change in results and in states, as a part of 1 or of a larger number.
    """
    expected, left = batch.expected()
    out, states = found[0].float(), found[1].view(torch.float32)
    assert found[0].dtype == getattr(batch, batch.ROWS[0]).dtype and out.shape == expected.shape
    rounding = num_roundings * ROUNDING[found[0].dtype] * expected.abs() + error * (1 + expected.abs())
    excess = (out - expected).abs() - rounding - batch.ERRORS[0]
    assert bool((excess <= 0).all()), f"an error of {excess.max().item()} more than tolerated"
    targets = sorted({target for _, _, target in batch.sequences()})
    torch.testing.assert_close(
        states[targets], left.view(torch.float32)[targets], rtol=1e-5 + error, atol=batch.ERRORS[1] + error
    )
    others = [block for block in range(len(states)) if block not in targets]
    assert torch.equal(found[1][others], batch.states[others])


def assert_same_bits_in_chunks(batch: StateBatch, operations: Any, cuts: dict[int, Sequence[int]]) -> None:
    """That sequences of a batch have the bits that they have alone and cut in chunks. cuts: by sequence."""
    operation = batch.of_module(operations)
    together, states = batch.run(operation)
    for seq, places in cuts.items():
        current, parts = batch.states.clone(), []
        for begin, end in pairwise(places):
            out, current = replace(batch.only(seq, begin, end), states=current).run(operation)
            parts.append(out)
        assert torch.equal(torch.cat(parts), together[batch.of(seq)])
        target = batch.batch.block_tables[seq, 1]
        assert torch.equal(current[target], states[target])


def assert_padding_changes_nothing(batch: StateBatch, operations: Any) -> None:
    """That a batch of [2, 1, 1, 1] tokens gives its first sequence's bits if the rest is padding.

    Sequences of one token into the null block, and sequences without tokens, change nothing else. Padding has equal
    tokens, so that it does not matter which of them is stored last.
    """
    operation = batch.of_module(operations)
    for name in batch.ROWS:
        getattr(batch, name)[3:] = getattr(batch, name)[2]
    blocks = [batch.batch.block_tables[0].tolist(), [0, 0], [0, 0], [0, 0], [0, 0], [0, 1]]
    context_lens = [int(batch.batch.context_lens[0]), 1, 1, 1, 1, 3]
    out, states = replace(batch, batch=metadata(blocks, context_lens, [2, 1, 1, 1, 0, 0])).run(operation)
    alone, left = batch.only(0).run(operation)
    assert torch.equal(out[:2], alone)
    assert not out.isnan().any()
    assert torch.equal(states[1:], left[1:])


def assert_states_stop_before_draft_tokens(batch: StateBatch, operations: Any, num_stored: dict[int, int]) -> None:
    """That the last tokens of some sequences change no bit of a result, and none of the states that are stored.

    num_stored: by sequence, how many of its tokens come before them.
    """
    operation = batch.of_module(operations)
    expected, states = batch.run(operation)
    for seq, count in num_stored.items():
        alone, target = replace(batch.only(seq, 0, count), states=batch.states), batch.batch.block_tables[seq, 1]
        states[target] = alone.run(operation)[1][target]
    tables = batch.batch.block_tables.clone()
    tables[list(num_stored), 2] = torch.tensor(list(num_stored.values()), dtype=torch.int32)
    found, left = batch.changed({"block_tables": tables}).run(operation)
    assert torch.equal(found, expected)
    assert torch.equal(left, states)


def metadata(block_tables: list[list[int]], context_lens: Sequence[int], q_lens: Sequence[int]) -> AttentionMetadata:
    starts = torch.tensor([0, *q_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    # All of the new tokens change the state that is stored, unless a row says how many do.
    rows = [row if len(row) == 3 else [*row, 0] for row in block_tables]
    blocks, lengths = torch.tensor(rows, dtype=torch.int32), torch.tensor(context_lens, dtype=torch.int32)
    return AttentionMetadata(blocks, lengths, starts)


def random_states(
    generator: torch.Generator, q_lens: Sequence[int], earlier: Sequence[int], size: int, in_place: bool
) -> tuple[Tensor, AttentionMetadata]:
    """Return blocks [num_blocks, 4 * size] and the metadata of a batch.

    Sources of new sequences are NaN, and so is block 0. With in_place each sequence's state goes to the block that it
    comes from.
    """
    num_seqs = len(q_lens)
    numbers = torch.randn(NUM_SPARE + 2 * num_seqs, size, generator=generator)
    block_ids = (NUM_SPARE + torch.randperm(2 * num_seqs, generator=generator)).view(num_seqs, 2)
    if in_place:
        block_ids[:, 1] = block_ids[:, 0]
    numbers[0] = float("nan")
    for seq, count in enumerate(earlier):
        if not count:
            numbers[block_ids[seq, 0]] = float("nan")
    context_lens = [new + old for new, old in zip(q_lens, earlier, strict=True)]
    return numbers.view(torch.uint8), metadata(block_ids.tolist(), context_lens, q_lens)
