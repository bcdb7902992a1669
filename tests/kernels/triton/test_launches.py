"""Triton's own way from a host function to the start of a kernel, which the interpreter does not take."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


@functools.cache
def forms() -> dict[str, list[str]]:
    """The kernels of which there is a new form for some sizes of a batch, and for others: see launched_forms.py."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.triton.launched_forms"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def test_triton_takes_the_arguments_of_the_kernels() -> None:
    assert {
        "advance_states", "attend_long", "attend_short", "attend_short_latents", "combine_rows",
        "convolve_heads", "draw_rows", "finish_heads", "group_kernel", "keep_inputs", "latent_store",
        "map_rows", "mask_parts", "merge_splits", "norm_rows", "rope_store", "route_tokens", "rows_kernel",
        "tiles_kernel", "weigh_parts",
    } <= {*forms()["first"]}  # fmt: skip


def test_no_kernel_is_compiled_for_the_size_of_a_batch() -> None:
    assert forms()["further"] == []
