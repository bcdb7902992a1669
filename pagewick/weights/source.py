"""TensorSource: the interface of all checkpoint formats. Knows no model.

Tensor names and config keys are Hugging Face's; a format with other names translates them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch

from pagewick.weights.mapped import release_pages


class TensorSource(ABC):
    """Named tensors and a config; a context manager that closes itself."""

    @property
    def labels(self) -> Mapping[str, str]:
        """The formats of weights in words, by the weight's name, where the stored type does not say it all."""
        return {}

    @property
    def note(self) -> str:
        """A line about weights that are kept in another form than they are stored in; empty if there are none."""
        return ""

    @abstractmethod
    def names(self) -> Sequence[str]:
        """Return all tensor names, in the order of their bytes on disk."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """Return the data type of a tensor without reading it."""

    def stored_type(self, name: str) -> torch.dtype | str:
        """Return how a tensor's numbers are stored: as a dtype, or in a block format such as Q4_K.

        This determines the LinearMethod of a weight. `get`, `shape` and `dtype` treat a block format as bytes.
        """
        return self.dtype(name)

    @abstractmethod
    def get(self, name: str) -> torch.Tensor:
        """Return a tensor on the CPU, mapped from the file where possible: never write to it, copy it to keep it."""

    def release(self, tensor: torch.Tensor) -> None:
        """Free the memory of a tensor from `get`, which the caller has copied and will not read again.

        The file stays in the system's page cache.
        """
        release_pages(tensor)

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Return the model's configuration in Hugging Face's form (`config.json`), as a new dict."""

    @abstractmethod
    def generation_config(self) -> dict[str, Any]:
        """Return the sampling defaults of the model's authors (`generation_config.json`); empty if there are none."""

    @abstractmethod
    def close(self) -> None:
        """Close the files. Tensors that are still referenced stay valid: a mapping ends with its last tensor."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class WrappedSource(TensorSource):
    """A source that passes to another one whatever a subclass does not change."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source

    @property
    def labels(self) -> Mapping[str, str]:
        """The formats of weights in words."""
        return self._source.labels

    @property
    def note(self) -> str:
        """A line about weights that are kept in another form."""
        return self._source.note

    def names(self) -> Sequence[str]:
        """Return all tensor names."""
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._source.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """Return the data type of a tensor."""
        return self._source.dtype(name)

    def stored_type(self, name: str) -> torch.dtype | str:
        """Return the data type or the block format of a tensor."""
        return self._source.stored_type(name)

    def get(self, name: str) -> torch.Tensor:
        """Return a tensor, mapped where possible."""
        return self._source.get(name)

    def release(self, tensor: torch.Tensor) -> None:
        """Free the memory of a tensor from `get`."""
        self._source.release(tensor)

    def config(self) -> dict[str, Any]:
        """Return the checkpoint's configuration."""
        return self._source.config()

    def generation_config(self) -> dict[str, Any]:
        """Return the checkpoint's sampling defaults."""
        return self._source.generation_config()

    def close(self) -> None:
        """Close the checkpoint."""
        self._source.close()
