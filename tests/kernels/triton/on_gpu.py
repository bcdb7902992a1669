"""Launches kernels on a real GPU for the tests, whose tensors are in host memory: PAGEWICK_TEST_GPU=1.

All tensors of a launch are copied to the GPU, whole storages and their views, and back behind it. So the tests of the
interpreted kernels compare what a GPU computes, through the package's own launcher, with the definitions.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from pagewick.kernels.triton.launcher import Launcher


class Mirror:
    """The storages of a launch on a device. Tensors that share memory share it there, too."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # By the address of a storage, its bytes and their copy.
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, value: Any) -> Any:
        """Return a tensor's counterpart on the device; other values as they are."""
        if not isinstance(value, Tensor) or value.is_cuda:
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in self._copies:
            own = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._copies[storage.data_ptr()] = own, own.to(self._device, copy=True)
        _, copy = self._copies[storage.data_ptr()]
        view = torch.empty(0, dtype=value.dtype, device=self._device)
        return view.set_(copy.untyped_storage(), value.storage_offset(), value.shape, value.stride())

    def bring_back(self) -> None:
        """Copy all memory back. On a GPU, this waits, so that an error belongs to the launch that made it."""
        for own, copy in self._copies.values():
            own.copy_(copy)


Launch = Callable[[Launcher, tuple[int, ...], Mapping[str, Any]], None]


def mirrored(launch: Launch, device: torch.device) -> Launch:
    """Return Launcher.launch for tensors in host memory."""

    @functools.wraps(launch)
    def on_device(launcher: Launcher, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
        mirror = Mirror(device)
        with _leaving_a_failed_gpu():
            launch(launcher, grid, {name: mirror.of(value) for name, value in arguments.items()})
            mirror.bring_back()

    return on_device


@contextmanager
def _leaving_a_failed_gpu() -> Iterator[None]:
    """End a process of `pytest -n` whose GPU has failed: another one runs the other tests, which would all fail."""
    try:
        yield
    except torch.AcceleratorError as error:
        if "PYTEST_XDIST_WORKER" in os.environ:
            print(error, file=sys.__stderr__, flush=True)
            os._exit(1)
        raise


def mirror_layers(blocks: ModuleType, device: torch.device) -> Callable[..., None]:
    """Return blocks._run for tensors in host memory: its kernel reads the addresses of the layers."""
    run = blocks._run

    def on_device(variant: Any, block_ids: Tensor, caches: Sequence[Tensor], content: Tensor) -> None:
        mirror = Mirror(device)
        run(variant, mirror.of(block_ids), [mirror.of(cache) for cache in caches], mirror.of(content))
        mirror.bring_back()

    return on_device


def use_gpu(patch: Any) -> None:
    """Let tests launch kernels on the GPU, with the variants that are chosen for it. patch: pytest's MonkeyPatch."""
    from pagewick.kernels import triton as backend
    from pagewick.kernels.triton import blocks, variant

    device = torch.device("cuda", 0)
    target = variant.target_of(device)
    for name in backend.MODULES:
        module = importlib.import_module(f"{backend.__name__}.{name}")
        if hasattr(module, "target_of"):
            patch.setattr(module, "target_of", lambda device: target)
    patch.setattr(Launcher, "launch", mirrored(Launcher.launch, device))
    patch.setattr(blocks, "_run", mirror_layers(blocks, device))
