"""Bans, bias and penalties: changes of single logits, all steps of all rows in one launch.

Definition: edit_tokens of reference_sampling.py, with the same bits. A program takes one row through all steps, so that
only its own threads have to wait for each other between two steps.

Dimensions: R rows with changes, E changes, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewick.kernels import reference
from pagewick.kernels.options import EditStep, TokenEdits
from pagewick.kernels.triton.fallback import by_definition
from pagewick.kernels.triton.logits import is_served
from pagewick.kernels.triton.variant import Variant, Workload

BLOCK = 1024


@triton.jit(do_not_specialize=["num_rows", "row_stride"])
def edit_rows(
    logits_ptr, row_ids_ptr, starts_ptr, token_ids_ptr, amounts_ptr, changed_ptr, num_rows, row_stride,
    NUM_STEPS: tl.constexpr, REPETITION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Change the logits [N, V] of row row_ids[program_id(0)]. changed: [E] float32, memory for this kernel.

    A token may occur twice in a step, so all logits of a step are read before the first is written.
    """
    place = tl.program_id(0)
    row_ptr = logits_ptr + tl.load(row_ids_ptr + place) * row_stride
    for step in range(NUM_STEPS):
        begin = tl.load(starts_ptr + step * num_rows + place)
        end = tl.load(starts_ptr + step * num_rows + place + 1)
        for first in range(begin, end, BLOCK):
            changes = first + tl.arange(0, BLOCK)
            inside = changes < end
            before = tl.load(row_ptr + tl.load(token_ids_ptr + changes, mask=inside, other=0), mask=inside, other=0.0)
            amounts = tl.load(amounts_ptr + changes, mask=inside, other=1.0)
            scaled = tl.where(before > 0, tl.math.div_rn(before, amounts), before * amounts)
            tl.store(changed_ptr + changes, tl.where(step == REPETITION, scaled, before + amounts), mask=inside)
        tl.debug_barrier()
        for first in range(begin, end, BLOCK):
            changes = first + tl.arange(0, BLOCK)
            inside = changes < end
            places = row_ptr + tl.load(token_ids_ptr + changes, mask=inside, other=0)
            tl.store(places, tl.load(changed_ptr + changes, mask=inside, other=0.0), mask=inside)
        tl.debug_barrier()


_EDIT_ROWS = Variant(
    "edit_rows", edit_rows,
    {"logits_ptr": "*fp32", **dict.fromkeys(("row_ids_ptr", "starts_ptr", "token_ids_ptr"), "*i64"),
     **dict.fromkeys(("amounts_ptr", "changed_ptr"), "*fp32"), "num_rows": "i32", "row_stride": "i32"},
    {"NUM_STEPS": len(EditStep), "REPETITION": int(EditStep.REPETITION), "BLOCK": BLOCK}, in_sample=True,
)  # fmt: skip
VARIANTS = (_EDIT_ROWS,)

# A change reads a token id, an amount and a logit, and writes the logit; memory is read in pieces of 32 bytes.
_NUM_CHANGES = 2048
WORKLOADS = tuple(
    Workload("edit_tokens", f"{rows} rows of {_NUM_CHANGES:,} changes", rows * _NUM_CHANGES * (8 + 4 + 64),
             2 * rows * _NUM_CHANGES, on_tensor_cores=False)
    for rows in (1, 256)
)  # fmt: skip


def edit_tokens(logits: Tensor, edits: TokenEdits) -> None:
    """reference.edit_tokens for logits [N, V] float32."""
    if not is_served(logits) or edits.amounts.dtype != logits.dtype:
        by_definition(reference.edit_tokens, logits, edits)
        return
    _EDIT_ROWS.launch(
        (len(edits.row_ids),), logits_ptr=logits, row_ids_ptr=edits.row_ids, starts_ptr=edits.starts,
        token_ids_ptr=edits.token_ids, amounts_ptr=edits.amounts, changed_ptr=torch.empty_like(edits.amounts),
        num_rows=len(edits.row_ids), row_stride=logits.stride(0),
    )  # fmt: skip
