"""Says what to do when a GPU's memory is full, or when it has failed. PyTorch does not know our flags."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pagewick.errors import NotEnoughMemoryError

# A kernel fails while the host does other things, and every later call reports that.
_FAILED = (
    "The GPU has failed, perhaps in an earlier call than the one above; this process cannot use it any more. To find "
    "the cause: --enforce-eager leaves out CUDA graphs, PAGEWICK_TRITON=0 leaves out Pagewick's kernels, and with both "
    "--enforce-eager and CUDA_LAUNCH_BLOCKING=1 the call above is the one that failed. Please report it (docs/gpu.md)."
)
# The end of the sentence of PyTorch's message that says how much memory there is.
_FREE = " is free."


@contextmanager
def explaining_device_errors() -> Iterator[None]:
    """Raise NotEnoughMemoryError in place of PyTorch's error, and add advice to errors of a GPU that has failed."""
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
    except torch.AcceleratorError as error:
        error.add_note(_FAILED)
        raise
