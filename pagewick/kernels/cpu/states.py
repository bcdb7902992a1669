"""Checks of operations that keep a state of each sequence: their rows, parameters, blocks and batch."""

import torch
from torch import Tensor

from pagewick.kernels.cpu.binding import BAD_BLOCK_ID, BAD_LENGTHS, DTYPES, check_metadata
from pagewick.kernels.options import AttentionMetadata


def check_rows(x: Tensor, shape: tuple[int, int], dtype: torch.dtype, name: str) -> None:
    """Raise ValueError unless x has this shape and dtype, one of DTYPES, and rows in one piece."""
    if x.shape != shape or x.dtype != dtype or dtype not in DTYPES or (x.stride(1) != 1 and shape[1] > 1):
        raise ValueError(
            f"{name} {x.dtype} {list(x.shape)} must be {list(shape)} of one native dtype, rows in one piece"
        )


def check_parameters(parameters: dict[str, tuple[Tensor, tuple[int, ...]]]) -> None:
    """Raise ValueError unless each is contiguous float32 of the shape beside it."""
    for name, (parameter, shape) in parameters.items():
        if parameter.shape != shape or parameter.dtype != torch.float32 or not parameter.is_contiguous():
            raise ValueError(f"{name} must be contiguous float32 {list(shape)}")


def check_states(states: Tensor, batch: AttentionMetadata) -> None:
    """Raise ValueError for blocks that the library cannot read, or a batch that does not say where each state goes."""
    if not states.is_contiguous() or states.data_ptr() % 4:
        raise ValueError("states must be contiguous, and begin at a multiple of 4 bytes")
    check_metadata(batch)
    if batch.block_tables.shape[1] < 3:
        raise ValueError(f"block_tables must be [B, 3], not {list(batch.block_tables.shape)}")


def check_status(status: int, states: Tensor, rows: str) -> None:
    """Raise ValueError if the library has refused the batch. rows: the name of the tensor with a row for each token."""
    if status == BAD_LENGTHS:
        raise ValueError(
            f"context_lens, cu_seqlens_q, {rows} and the last column of block_tables contradict each other"
        )
    if status == BAD_BLOCK_ID:
        raise ValueError(f"block_tables name a block outside the {len(states)} blocks of states")
