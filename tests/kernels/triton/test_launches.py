"""Triton's own way from a host function to the start of a kernel, which the interpreter does not take."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from pagewick.kernels.triton.launcher import Launcher

driver = pytest.importorskip("triton.runtime").driver


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
        "advance_chunks", "advance_scan", "advance_states", "attend_all", "attend_long", "attend_short",
        "attend_short_latents", "combine_rows", "convolve_channels", "convolve_heads", "convolve_products", "draw_rows",
        "finish_heads", "gate_rows", "group_kernel", "keep_inputs", "latent_store", "map_rows", "mask_parts",
        "merge_splits", "norm_rows", "relate_tokens", "rope_store", "route_tokens", "rows_kernel", "tiles_kernel",
        "turn_rows", "weigh_parts",
    } <= {*forms()["first"]}  # fmt: skip


def test_no_kernel_is_compiled_for_the_size_of_a_batch() -> None:
    assert forms()["further"] == []


def test_numbers_and_addresses_decide_the_form_that_is_launched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Triton decides it: launched_forms.py compares each launch with Triton's own choice."""
    params = [SimpleNamespace(name=name, do_not_specialize=name == "free") for name in ("at", "size", "free", "BLOCK")]
    launched: list[tuple[str, tuple[object, ...]]] = []

    class Kernel:
        def __init__(self) -> None:
            self.params, self.num_compiled = params, 0

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
            def compile_and_run(**arguments: object) -> object:
                self.num_compiled += 1
                form = f"form {self.num_compiled}"
                launched.append((form, grid))
                return {(*grid, 1, 1)[:3]: lambda *values: launched.append((form, values))}

            return compile_and_run

    kernel, data = Kernel(), torch.zeros(64)
    launcher = Launcher(kernel, {"at": "*fp32", "size": "i32", "free": "i32"}, {"BLOCK": 8}, {"num_warps": 4})
    aligned, other = (data[:8], data[1:9]) if data.data_ptr() % 16 == 0 else (data[3:11], data[:8])

    def form_of(at: Tensor, size: int, free: int) -> str:
        launcher.launch((5,), {"free": free, "size": size, "at": at})
        return launched[-1][0]

    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_device=lambda: 0))
    assert form_of(aligned, 3, 7) == "form 1"
    assert form_of(aligned, 3, 9) == "form 1"
    assert launched[-1][1] == (aligned, 3, 9, 8)
    changes = [(other, 3, 7), (aligned, 1, 7), (aligned, 3, 2**31), (aligned.double(), 3, 7)]
    assert [form_of(*change) for change in changes] == ["form 2", "form 3", "form 4", "form 5"]
    assert [form_of(*change) for change in changes] == ["form 2", "form 3", "form 4", "form 5"]
