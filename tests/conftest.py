"""Fixtures for every test: the built-in model, and memory that shows when it is read before it was written."""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import pagewick  # noqa: F401  before torch: it settles how torch's threads wait for each other

# The same examples every time, and no failure because a machine is busy. --hypothesis-profile=default looks for others.
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")

# Tests of these folders run numerical code of the package.
NUMERICAL = frozenset({"attention", "engine", "kernels", "layers", "models", "quantization"})
# A large cache is reserved, not written: to fill it would commit all its memory.
MAX_POISONED_BYTES = 64 * 2**20


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """The directory of the built-in model."""
    from pagewick.demo import MODEL_DIR

    return MODEL_DIR


@pytest.fixture
def ctrl_c_interrupts() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt in this process and in the child processes that the test starts.

    A process that a script starts with `&` or under nohup ignores SIGINT, and its children inherit that. A handler, in
    contrast, is replaced by the default action when a child starts.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def poison_uninitialised_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty and its kin, called from the package, give NaN: what is read before it was written fails at once.

    Bytes get 255, which reads as NaN in every floating-point format.
    """
    if not NUMERICAL & set(request.path.relative_to(request.config.rootpath).parts):
        return
    import torch

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


def poisoned(allocate: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with a fill of what it returns to a caller in the package."""

    @functools.wraps(allocate)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        tensor = allocate(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("pagewick.") and tensor.device.type != "meta" and tensor.nbytes <= MAX_POISONED_BYTES:
            fill(tensor)
        return tensor

    return wrapper


def fill(tensor: Any) -> None:
    import torch

    if tensor.is_floating_point():
        tensor.detach().fill_(float("nan"))
    elif tensor.dtype == torch.uint8:
        tensor.fill_(255)
