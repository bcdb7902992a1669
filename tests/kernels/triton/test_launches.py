"""Triton's own way from a host function to the start of a kernel, which the interpreter does not take."""

from __future__ import annotations

import functools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pagewick.kernels.triton import launcher as launcher_module
from pagewick.kernels.triton.launcher import Launcher
from pagewick.kernels.triton.variant import Variant

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
        "advance_chunks", "advance_scan", "advance_states", "attend_all", "attend_blocks", "attend_long",
        "attend_long_window", "attend_short", "attend_short_latents", "attend_short_window", "choose_blocks",
        "collect_slots", "combine_rows", "compress_windows", "convolve_channels", "convolve_heads", "convolve_products",
        "count_digits", "draw_rows", "edit_rows", "finish_heads", "gate_rows", "group_kernel", "join_chunks",
        "keep_inputs", "latent_store", "map_rows", "mask_parts", "merge_entries", "merge_splits", "move_blocks",
        "norm_rows", "number_tokens", "relate_channels", "relate_tokens", "rope_store", "route_tokens", "rows_kernel",
        "scan_channels", "scan_chunks", "score_blocks", "score_keys", "spread_output", "store_rows", "sum_streams",
        "tiles_kernel", "turn_index_rows", "turn_rows", "weigh_parts", "weigh_roots", "weigh_streams",
    } <= {*forms()["first"]}  # fmt: skip


def test_no_kernel_is_compiled_for_the_size_of_a_batch() -> None:
    assert forms()["further"] == []


class Kernel:
    """Stands for a kernel: each compilation makes another form. launched: the forms, with the grid or the arguments."""

    def __init__(self) -> None:
        names = ("at", "size", "free", "BLOCK")
        self.params = [SimpleNamespace(name=name, do_not_specialize=name == "free") for name in names]
        self.num_compiled = 0
        self.launched: list[tuple[str, tuple[object, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        def compile_and_run(**arguments: object) -> object:
            self.num_compiled += 1
            form = f"form {self.num_compiled}"
            self.launched.append((form, grid))
            return {(*grid, 1, 1)[:3]: lambda *values: self.launched.append((form, values))}

        return compile_and_run

    def launcher(self) -> Launcher:
        return Launcher(self, {"at": "*fp32", "size": "i32", "free": "i32"}, {"BLOCK": 8}, {"num_warps": 4})


def test_numbers_and_addresses_decide_the_form_that_is_launched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Triton decides it: launched_forms.py compares each launch with Triton's own choice."""
    kernel, data = Kernel(), torch.zeros(64)
    launcher = kernel.launcher()
    aligned, other = (data[:8], data[1:9]) if data.data_ptr() % 16 == 0 else (data[3:11], data[:8])

    def form_of(at: Tensor, size: int, free: int) -> str:
        launcher.launch((5,), {"free": free, "size": size, "at": at})
        return kernel.launched[-1][0]

    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_device=lambda: 0))
    assert form_of(aligned, 3, 7) == "form 1"
    assert form_of(aligned, 3, 9) == "form 1"
    assert kernel.launched[-1][1] == (aligned, 3, 9, 8)
    changes = [(other, 3, 7), (aligned, 1, 7), (aligned, 3, 2**31), (aligned.double(), 3, 7)]
    assert [form_of(*change) for change in changes] == ["form 2", "form 3", "form 4", "form 5"]
    assert [form_of(*change) for change in changes] == ["form 2", "form 3", "form 4", "form 5"]


@pytest.mark.parametrize(("hip", "num_forms"), [(None, 1), ("6.3", 2)])
def test_memory_of_more_than_two_gigabytes_has_a_form_of_its_own_on_amd(
    hip: str | None, num_forms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's other form has addresses of 32 bits; what counts is the memory of which a tensor is a view."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_device=lambda: 0))
    kernel = Kernel()
    launcher = kernel.launcher()
    for num_bytes in (2**31 - 1, 2**31, 2**31 - 1, 2**31):
        view = torch.empty(num_bytes, dtype=torch.uint8, device="meta")[:8]
        launcher.launch((5,), {"free": 7, "size": 3, "at": view})
    assert kernel.num_compiled == num_forms


@pytest.mark.parametrize(("num_bytes", "is_within"), [(2**31 - 1, True), (2**31, False)])
def test_triton_draws_the_line_there(num_bytes: int, is_within: bool) -> None:
    from triton.backends.amd.compiler import HIPBackend

    view = torch.empty(num_bytes, dtype=torch.uint8, device="meta")[:8]
    # The first call only finds out whether PyTorch is there.
    HIPBackend.is_within_2gb(view)
    assert HIPBackend.is_within_2gb(view) is is_within


def test_a_launch_that_compiles_is_explained_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = iter([0.0, 0.4, 1.0, 1.6, 2.0, 3.0])
    monkeypatch.setattr(launcher_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(launcher_module, "_note_compiler", functools.cache(launcher_module._note_compiler.__wrapped__))
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_device=lambda: 0))
    caplog.set_level(logging.INFO, logger="pagewick")
    launcher, said = Kernel().launcher(), []
    for size in (3, 4, 5):
        launcher.launch((5,), {"free": 7, "size": size, "at": torch.zeros(8)})
        said.append(len(caplog.records))
    assert said == [0, 1, 1] and "Triton compiles" in caplog.text


@pytest.mark.parametrize(
    ("arch", "version", "num_stages"),
    [
        (90, "3.6.0", 1), (100, "3.7.0+git9844da95", 1), (90, "3.7.1", 3), (90, "3.10.0", 3), (80, "3.6.0", 3),
        (89, "3.6.0", 3), (120, "3.7.0", 3), ("gfx942", "3.6.0", 3),
    ],
)  # fmt: skip
def test_loops_with_products_load_nothing_ahead_where_triton_leaves_out_fences(
    arch: int | str, version: str, num_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = SimpleNamespace(backend="hip" if isinstance(arch, str) else "cuda", arch=arch)
    gpu = SimpleNamespace(get_current_device=lambda: 0, get_current_target=lambda: target)
    monkeypatch.setattr(driver, "_active", gpu)
    monkeypatch.setattr("triton.__version__", version)
    for uses_tensor_cores, expected in ((True, num_stages), (False, 3)):
        given: list[object] = []

        class Recorder(Kernel):
            def __getitem__(self, grid: tuple[int, ...], given: list[object] = given) -> Callable[..., object]:
                return lambda **arguments: given.append(arguments["num_stages"])

        variant = Variant(
            "product", Recorder(), {"at": "*fp32", "size": "i32", "free": "i32"}, {"BLOCK": 8}, num_stages=3,
            uses_tensor_cores=uses_tensor_cores,
        )  # fmt: skip
        variant.launch((1,), at=torch.zeros(8), size=3, free=7)
        assert given == [expected]


def test_an_error_of_the_compiler_names_our_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own exceptions name neither the kernel of ours nor a way to do without it."""

    def fail(self: Launcher, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
        raise OSError("ptxas: unknown architecture")

    monkeypatch.setattr(Launcher, "launch", fail)
    variant = Variant("norm of bf16", Kernel(), {"at": "*fp32"}, {"BLOCK": 8})
    variant.launch((0, 3), at=torch.zeros(1))
    with pytest.raises(OSError, match="ptxas") as caught:
        variant.launch((1,), at=torch.zeros(1))
    (note,) = caught.value.__notes__
    assert "'norm of bf16'" in note and "PAGEWICK_TRITON=0" in note
