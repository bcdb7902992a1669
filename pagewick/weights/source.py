"""TensorSource: what every checkpoint format looks like to the rest of Pagewick. Knows no model.

Inside, tensor names and config keys are Hugging Face's; a format with other names translates them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from pagewick.errors import ModelNotFoundError


class TensorSource(Protocol):
    """Named tensors and a config; a context manager that closes itself."""

    def names(self) -> Sequence[str]:
        """All tensor names, in the order in which their bytes lie on disk."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Data type of a tensor, without reading it."""
        ...

    def stored_type(self, name: str) -> torch.dtype | str:
        """How its numbers are stored, which chooses the method for a weight: a dtype, or a block format such as Q4_K.

        A tensor of a block format is bytes for `get`, `shape` and `dtype`.
        """
        ...

    def get(self, name: str) -> torch.Tensor:
        """A tensor on the CPU, mapped from the file where possible: do not write it, copy what you keep."""
        ...

    def release(self, tensor: torch.Tensor) -> None:
        """The caller has copied a tensor from `get` and will not read it again: its memory may go."""
        ...

    def config(self) -> dict[str, Any]:
        """The model's configuration in Hugging Face's form (`config.json`); a fresh dict."""
        ...

    def generation_config(self) -> dict[str, Any]:
        """What the model's makers advise for generation (`generation_config.json`); empty if they do not."""
        ...

    def close(self) -> None:
        """Close the files. Tensors that are still referenced stay valid."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_source(path: Path) -> TensorSource:
    """Open the checkpoint in a directory, in whatever format it is; safetensors is the only one yet.

    Raises ModelNotFoundError if there is no such directory, ModelLoadError if what it holds cannot be used.
    """
    from pagewick.weights.safetensors import SafetensorsSource

    if not path.is_dir():
        fix = f"give the directory it is in: {path.parent}" if path.is_file() else "check the path"
        raise ModelNotFoundError(f"{path} is not a directory\n  {fix}")
    return SafetensorsSource(path)
