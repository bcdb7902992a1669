"""TensorSource: the interface of all checkpoint formats. Knows no model.

Tensor names and config keys are Hugging Face's; a format with other names translates them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from pagewick.errors import ModelNotFoundError
from pagewick.weights.files import GGUF_SUFFIX


class TensorSource(Protocol):
    """Named tensors and a config; a context manager that closes itself."""

    def names(self) -> Sequence[str]:
        """Return all tensor names, in the order of their bytes on disk."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Return the data type of a tensor without reading it."""
        ...

    def stored_type(self, name: str) -> torch.dtype | str:
        """Return how a tensor's numbers are stored: as a dtype, or in a block format such as Q4_K.

        This determines the LinearMethod of a weight. `get`, `shape` and `dtype` treat a block format as bytes.
        """
        ...

    def get(self, name: str) -> torch.Tensor:
        """Return a tensor on the CPU, mapped from the file where possible: never write to it, copy it to keep it."""
        ...

    def release(self, tensor: torch.Tensor) -> None:
        """Free the memory of a tensor from `get`, which the caller has copied and will not read again."""
        ...

    def config(self) -> dict[str, Any]:
        """Return the model's configuration in Hugging Face's form (`config.json`), as a new dict."""
        ...

    def generation_config(self) -> dict[str, Any]:
        """Return the sampling defaults of the model's authors (`generation_config.json`); empty if there are none."""
        ...

    def close(self) -> None:
        """Close the files. Tensors that are still referenced stay valid."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_source(path: Path, *, as_numbers: bool = False) -> TensorSource:
    """Open a checkpoint: a directory with safetensors, or a GGUF file.

    as_numbers: weights that a directory's checkpoint stores in several tensors are numbers, to be quantized at load.
    Raises ModelNotFoundError if it does not exist, ModelLoadError if its files cannot be used, ConfigError if its
    weights are quantized in a way that is not supported.
    """
    from pagewick.weights.gguf.source import GgufSource
    from pagewick.weights.packed.headers import logical_tensors
    from pagewick.weights.packed.source import PackedSource
    from pagewick.weights.safetensors import SafetensorsSource

    if path.is_file() and path.suffix == GGUF_SUFFIX:
        return GgufSource(path)
    if not path.is_dir():
        fix = f"give the directory it is in: {path.parent}" if path.is_file() else "check the path"
        raise ModelNotFoundError(f"{path} is not a directory\n  {fix}")
    source = SafetensorsSource(path)
    weights = logical_tensors(source.config(), source.infos).weights
    return PackedSource(source, weights, as_numbers=as_numbers) if weights else source
