"""Weight: a layer's matrix, for products and for looking up rows, whatever the formats of its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import torch
from torch import Tensor, nn

from pagewick import kernels
from pagewick.quantization.at_load_memory import rows_of_piece
from pagewick.quantization.method import LinearMethod, Storage, StorageSpec
from pagewick.quantization.packing import Axis, Packing
from pagewick.quantization.share import Share


def _nothing(rows: Tensor) -> None:
    """Keep the memory of rows."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """How a mapped tensor is read: in pieces of about num_bytes.

    take: is called with a piece before it is stored, and returns it on the device that stores it. release: is called
    with a piece that will not be read again.
    """

    num_bytes: int = 2**22
    take: Callable[[Tensor], Tensor] = lambda rows: rows
    release: Callable[[Tensor], None] = _nothing


WHOLE: Final = Pieces()
"""Pieces that are stored from where they are, and kept."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring parts in one storage: the rows [start, stop) of this rank."""

    method: LinearMethod
    storage: Storage
    packings: Mapping[str, Packing]
    start: int
    stop: int


class Weight(nn.Module):
    """A rank's share of a weight [out_features, in_features].

    methods: one for each part of the share. Neighbours with equal methods share one storage, so that a layer whose
    parts all have the same format needs one product. The other arguments are those of StorageSpec.
    """

    def __init__(
        self,
        share: Share,
        methods: Sequence[LinearMethod],
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_multiplied: bool = True,
        has_float32_sums: bool = False,
    ) -> None:
        super().__init__()
        self.share = share
        runs: list[_Run] = []
        self._run_of: dict[str | None, _Run] = {}
        start = 0
        for method, pairs in groupby(zip(methods, share.parts, strict=True), key=lambda pair: pair[0]):
            parts = [part for _, part in pairs]
            spec = StorageSpec(
                tuple((part.name, part.num_kept) for part in parts), share.num_columns, dtype, device,
                is_multiplied=is_multiplied, has_float32_sums=has_float32_sums, first_column=share.columns[0],
            )  # fmt: skip
            storage = Storage(spec)
            run = _Run(method, storage, method.create(storage), start, start := start + spec.out_features)
            runs.append(run)
            self._run_of.update(dict.fromkeys((part.name for part in parts), run))
        self._runs = tuple(runs)
        self._only = runs[0] if len(runs) == 1 else None
        self.storages = nn.ModuleList(run.storage for run in runs)

    @property
    def num_parameters(self) -> int:
        """Number of weights that this rank keeps, however they are stored."""
        return self.share.num_rows * self.share.num_columns

    def expected(self) -> Iterator[tuple[str | None, str]]:
        """Yield (part, leaf) of every checkpoint tensor that `load` must get."""
        for part in self.share.parts:
            for name in self._run_of[part.name].packings:
                yield part.name, name

    def load(
        self,
        part: str | None,
        name: str,
        tensor: Tensor,
        pieces: Pieces = WHOLE,
    ) -> None:
        """Keep this rank's share of one checkpoint tensor. Raises ModelLoadError if it does not fit."""
        run = self._run_of[part]
        packing = run.packings[name]
        for offset, shard in self.share.shards(part, packing, tensor):
            for first, rows in _divided(shard, pieces) if packing.rows == Axis(0) else [(0, shard)]:
                run.method.load(run.storage, name, pieces.take(rows), out_offset=offset - run.start + first)
                pieces.release(rows)

    def finish(self) -> None:
        """Bring the weight into the layout of products. Called once, after everything is loaded."""
        for run in self._runs:
            run.method.finish(run.storage)

    def linear(self, x: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
        """Return x [..., in_features] times the transposed weight, plus bias.

        The result is [..., out_features], in out_dtype or the dtype of x.
        """
        if (run := self._only) is not None:
            return run.method.apply(run.storage, x, bias, out_dtype=out_dtype)
        out = kernels.empty_result((*x.shape[:-1], self.share.num_rows), out_dtype or x.dtype, x.device)
        for run in self._runs:
            of_run = None if bias is None else bias[run.start : run.stop]
            rows = out[..., run.start : run.stop]
            run.method.apply(run.storage, x, of_run, out_dtype=out_dtype, out=rows)
        return out

    def take(self, row_ids: Tensor) -> Tensor:
        """Return rows row_ids [n] int64: [n, in_features]. Only for a weight of one format."""
        (run,) = self._runs
        return run.method.take(run.storage, row_ids)

    def unpack(self) -> Tensor:
        """Return the weight in the activations' dtype: [out_features, in_features]."""
        return torch.cat([run.method.unpack(run.storage) for run in self._runs])


def _divided(rows: Tensor, pieces: Pieces) -> Iterator[tuple[int, Tensor]]:
    """Yield (number of the first row, rows) for pieces of a tensor that are small beside a model."""
    bytes_each = rows.nbytes // max(1, len(rows))
    step = rows_of_piece(bytes_each, pieces.num_bytes)
    for first in range(0, len(rows), step):
        yield first, rows[first : first + step]
