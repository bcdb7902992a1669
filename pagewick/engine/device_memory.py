"""Says what to do when a GPU's memory is full. PyTorch's own message does not know our flags."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pagewick.errors import NotEnoughMemoryError

# The end of the sentence of PyTorch's message that says how much memory there is.
_FREE = " is free."


@contextmanager
def explaining_full_memory() -> Iterator[None]:
    """Raise NotEnoughMemoryError in place of PyTorch's error."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        said = str(error).partition("\n")[0]
        before, found, _ = said.partition(_FREE)
        raise NotEnoughMemoryError(
            f"the GPU's memory is full: {before}{found}\n"
            "  lower --gpu-memory-utilization, --max-num-batched-tokens or --max-num-seqs, or close other programs on "
            "the GPU, which nvidia-smi shows"
        ) from error
