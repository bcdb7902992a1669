"""Fixtures for every test: the built-in model, and memory that shows when it is read before it was written."""

from __future__ import annotations

import functools
import gc
import logging
import os
import signal
import ssl
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

# Before anything imports torch: importing pagewick decides how torch's threads wait for each other, and each worker of
# `pytest -n`, like each server that it starts, computes with one thread unless a test asks for more.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before anything imports triton: its kernels are interpreted here (tests/kernels/triton/harness.py), or compiled, and
# emulated (tests/kernels/triton/ptx/) or run on a GPU (tests/kernels/triton/on_gpu.py).
os.environ["TRITON_INTERPRET"] = "0" if {"PAGEWICK_EMULATE_PTX", "PAGEWICK_TEST_GPU"} & os.environ.keys() else "1"
# Tests start hundreds of processes: without compiled modules beside the sources, each would compile the package anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
import pagewick  # noqa: F401
from tests.deep import beyond_share, repetitions, share_of_cases
from tests.distribution import LongestUnitsFirst, rank_of
from tests.rewriting import rewrite_share

# Every client of httpx and of openai reads the certificates of the system, which takes 30 ms. Tests make thousands, and
# none of them connects to an https address.
ssl.create_default_context = functools.cache(ssl.create_default_context)

# The same examples every time, and no failure because a machine is busy. --hypothesis-profile=default looks for others.
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")
# Hypothesis also draws constants of the modules loaded so far: the examples would depend on the tests before.
assert callable(providers._get_local_constants)
providers._get_local_constants = Constants

# Tests of these folders run numerical code of the package.
NUMERICAL = frozenset({"attention", "engine", "kernels", "layers", "models", "quantization"})
# A large cache is reserved, not written: to fill it would commit all its memory.
MAX_POISONED_BYTES = 64 * 2**20


def pytest_xdist_auto_num_workers() -> int | None:
    """One worker more than there are processors: tests wait for clocks and for the processes that they start."""
    return None if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else len(os.sched_getaffinity(0)) + 1


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LongestUnitsFirst:
    return LongestUnitsFirst(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker which share of the cases to run: all must collect the same tests."""
    node.workerinput["share_of_cases"] = share_of_cases()


def pytest_sessionstart(session: pytest.Session) -> None:
    worker: dict[str, Any] | None = getattr(session.config, "workerinput", None)
    if worker is not None:
        number = int(worker["workerid"].removeprefix("gw"))
        rewrite_share(session.config, session.config.rootpath / "tests", number, worker["workercount"])
    elif getattr(session.config.option, "numprocesses", None) and (share := share_of_cases()) < 1:
        # Also with -q, which leaves out the header of the report.
        line = f"a slow machine: {share:.0%} of the cases of each test run; PAGEWICK_TEST_SHARE=1 runs them all"
        session.config.pluginmanager.getplugin("terminalreporter").write_line(line)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only a deep run repeats; put the slowest tests first where several workers share them."""
    left_out = repetitions(items)
    worker: dict[str, Any] = getattr(config, "workerinput", {})
    left_out |= beyond_share([item for item in items if item not in left_out], worker.get("share_of_cases", 1.0))
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: rank_of(item.nodeid))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave imported modules and collected tests out of garbage collections.

    They stay, and are more than a million objects. To look at them again and again takes a third of the time of
    collecting the tests, and would slow each full collection afterwards.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_finish() -> None:
    """Let the loggers of libraries hand their records on to the root logger.

    pytest adds its handlers to every logger that does not, six times per test; torch has more than fifty of them.
    """
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


def pytest_sessionfinish() -> None:
    # Libraries complain of objects that are still there at the end of the process.
    gc.unfreeze()


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """The directory of the built-in model."""
    from pagewick.demo import MODEL_DIR

    return MODEL_DIR


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    """Undo what a command that runs in this process does to loggers: later tests read their records."""
    loggers = [logging.getLogger(name) for name in ("pagewick", "uvicorn", "uvicorn.error", "asyncio", "opentelemetry")]
    before = [(logger, logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, handlers, level, propagate in before:
        logger.handlers, logger.propagate = handlers, propagate
        # This empties the caches of all loggers.
        if logger.level != level:
            logger.setLevel(level)


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
    """Fill what the package gets from torch.empty and its kin with NaN, so that reading it before writing it fails.

    Bytes get 255, which reads as NaN in every floating-point format.
    """
    if not NUMERICAL & set(request.path.relative_to(request.config.rootpath).parts):
        return
    poison_allocations(monkeypatch)


def poison_allocations(patch: pytest.MonkeyPatch) -> None:
    import torch
    from torch.utils import _device

    # `with torch.device("meta")` looks functions up in a set that torch makes once. Made under the patch, it would lack
    # torch's own torch.empty: models on the meta device would take their memory, up to the last test of the process.
    _device._device_constructors()
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        patch.setattr(owner, name, poisoned(getattr(owner, name)))


def poisoned(allocate: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that allocates a tensor: a caller in the package gets the tensor filled with NaN."""

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
