"""PackedSource: a checkpoint of safetensors with packed weights, each of which is read as one tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from pagewick.errors import ModelLoadError
from pagewick.quantization.block_formats import stored_block
from pagewick.quantization.plan import keeps
from pagewick.weights.packed.layout import NUMBERS, PackedWeight
from pagewick.weights.source import TensorSource, WrappedSource
from pagewick.weights.tensor_headers import describe_numbers

_ORDER_DTYPE: Final = torch.int64


class PackedSource(WrappedSource):
    """A source whose packed weights are rows of blocks, or numbers; other tensors are as in the file.

    mix: the one to which weights will be quantized at load. Those that it does not keep are float32 numbers then.
    """

    def __init__(self, source: TensorSource, weights: Mapping[str, PackedWeight], *, mix: str | None = None) -> None:
        super().__init__(source)
        self._weights = {name: weight.format.resolved(weight, source.get) for name, weight in weights.items()}
        self._kept = {name for name, weight in weights.items() if mix is None or keeps(mix, weight.stored_type)}
        ordered = [self._weights[name] for name in weights if name in self._kept and weights[name].has_column_order]
        self._orders = {weight.order_name: weight for weight in ordered}
        parts = {part.name: name for name, weight in weights.items() for part in weight.parts.values()}
        self._names = tuple(dict.fromkeys([*(parts.get(name, name) for name in source.names()), *self._orders]))

    @property
    def labels(self) -> Mapping[str, str]:
        """The formats of the packed weights in words, by the weight's name, except those to be quantized."""
        return {name: self._weights[name].format.label for name in self._kept}

    @property
    def note(self) -> str:
        """A line about weights that no block format holds; empty if there are none."""
        found = describe_numbers(self._weights[name].info for name in self._weights if name in self._kept)
        return found and f"no block format holds some weights, which are kept as numbers of 16 bits: {found}"

    def names(self) -> Sequence[str]:
        """Return the names of plain tensors and of weights, in the order of the files; orders of columns come last."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor; rows of a block format count in bytes."""
        if name in self._orders:
            return (self._orders[name].shape[1],)
        if (weight := self._weights.get(name)) is None:
            return super().shape(name)
        if not isinstance(kind := self.stored_type(name), str):
            return weight.shape
        numbers, num_bytes = stored_block(kind)
        return weight.shape[0], weight.shape[1] // numbers * num_bytes

    def dtype(self, name: str) -> torch.dtype:
        """Return the data type of a tensor; that of a block format is uint8."""
        kind = self.stored_type(name)
        return torch.uint8 if isinstance(kind, str) else kind

    def stored_type(self, name: str) -> torch.dtype | str:
        """Return the data type, or the block format in which `get` returns a weight."""
        if name in self._orders:
            return _ORDER_DTYPE
        if (weight := self._weights.get(name)) is None:
            return super().stored_type(name)
        return torch.float32 if name not in self._kept or weight.stored_type == NUMBERS else weight.stored_type

    def get(self, name: str) -> torch.Tensor:
        """Return a tensor: mapped if it is plain, decoded if it is a weight.

        Raises ModelLoadError if a weight's tensors contradict its format.
        """
        order = self._orders.get(name)
        weight = order or self._weights.get(name)
        if weight is None:
            return super().get(name)
        try:
            if order is not None:
                return weight.format.column_order(weight, self._source.get)
            if name not in self._kept:
                return weight.format.numbers(weight, self._source.get)
            return weight.format.read(weight, self._source.get)
        except ModelLoadError as error:
            raise ModelLoadError(f"cannot load {weight.name}: {error}") from error
        finally:
            for part in weight.parts.values():
                self._source.release(self._source.get(part.name))
