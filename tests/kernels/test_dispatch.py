"""Which implementation of an operation is chosen, how often, and that all of them have the same signature."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pagewick import kernels
from pagewick.kernels import TABLE, cpu, reference
from pagewick.kernels.dispatch import Backend, Table
from tests.kernels.conftest import required_library

BACKENDS = TABLE.backends
NAMES = sorted(name for name, value in vars(kernels).items() if hasattr(value, "__wrapped__"))


class Fake:
    """A backend with sums of float32 tensors on "meta", a device that only has shapes; counts what it is asked."""

    def __init__(self, name: str = "fake") -> None:
        self.questions: list[tuple[str, str, torch.dtype]] = []
        self.num_sums = 0
        self.is_on = True
        self.backend = Backend(name, {"add": self.add}, self.supports)

    def supports(self, operation: str, device_kind: str, dtype: torch.dtype) -> bool:
        self.questions.append((operation, device_kind, dtype))
        return self.is_on and (operation, device_kind, dtype) == ("add", "meta", torch.float32)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        self.num_sums += 1
        return torch.empty_like(a)


def on_meta(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(3, dtype=dtype, device="meta")


def test_a_backend_serves_what_it_supports_and_the_reference_the_rest() -> None:
    fake = Fake()
    table = Table([fake.backend])
    add, scale = table.operation(reference.add), table.operation(reference.scale)
    assert add(on_meta(), on_meta()).device.type == "meta"
    assert fake.num_sums == 1
    assert add(on_meta(torch.float16), on_meta(torch.float16)).dtype == torch.float16
    assert scale(on_meta(), 2.0).device.type == "meta"
    assert add(torch.ones(3), torch.ones(3)).tolist() == [2.0] * 3
    assert fake.num_sums == 1
    assert table.backend("add", "meta", torch.float32) is fake.backend
    assert table.backend("scale", "meta", torch.float32) is None


def test_the_first_backend_that_supports_it_is_chosen() -> None:
    first, second = Fake(), Fake()
    first.is_on = False
    add = Table([first.backend, second.backend]).operation(reference.add)
    add(on_meta(), on_meta())
    assert (first.num_sums, second.num_sums) == (0, 1)


def test_it_is_chosen_once_until_it_is_to_be_chosen_again() -> None:
    fake = Fake()
    table = Table([fake.backend])
    add = table.operation(reference.add)
    for device in ("meta", "cpu"):
        x = torch.ones(3, device=device)
        add(x, x)
        num_questions = len(fake.questions)
        assert num_questions > 0
        add(x, x)
        add(x, x)
        assert len(fake.questions) == num_questions
    assert fake.num_sums == 3
    fake.is_on = False
    add(on_meta(), on_meta())
    assert fake.num_sums == 4
    table.choose_again()
    add(on_meta(), on_meta())
    assert fake.num_sums == 4


def test_a_line_for_each_device_and_dtype_says_what_was_chosen() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("pagewick.kernels.dispatch")
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    try:
        table = Table([Fake("fake one").backend])
        add, scale = table.operation(reference.add), table.operation(reference.scale)
        for x in (on_meta(), on_meta(), torch.ones(3)):
            add(scale(x, 2.0), x)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert lines == [
        "kernels for torch.float32 on meta: fake one serves add; the reference serves scale",
        "kernels for torch.float32 on cpu: the reference serves everything",
    ]


def test_the_library_serves_every_operation_that_it_has() -> None:
    required_library()
    for name in cpu.BACKEND.operations:
        dtypes = [dtype for dtype in (torch.float32, torch.bfloat16, torch.int64) if cpu.supports(name, "cpu", dtype)]
        assert dtypes, name
        assert all(TABLE.backend(name, "cpu", dtype) is cpu.BACKEND for dtype in dtypes)
        assert not any(cpu.supports(name, "cuda", dtype) for dtype in dtypes)
    assert not cpu.supports("rms_norm", "cpu", torch.float64)


@pytest.mark.usefixtures("without_the_library")
def test_without_the_library_it_serves_nothing() -> None:
    assert not any(cpu.supports(name, "cpu", torch.float32) for name in NAMES)


def test_operations_have_the_signature_of_their_definition() -> None:
    assert len(NAMES) > 20
    for name in NAMES:
        assert signature(getattr(kernels, name)) == signature(getattr(reference, name)), name
    for backend in BACKENDS:
        assert set(backend.operations) <= set(NAMES)
        if backend.name == "triton":
            pytest.importorskip("triton")
        for name, function in backend.operations.items():
            assert signature(function) == signature(getattr(reference, name)), f"{name} of {backend.name}"


def signature(function: Callable[..., Any]) -> tuple[Any, ...]:
    """Names, kinds, defaults and annotations; the latter without modules, and whether they are strings or not."""
    found = inspect.signature(function)
    parameters = [(each.name, each.kind, each.default, plain(each.annotation)) for each in found.parameters.values()]
    return (*parameters, plain(found.return_annotation))


def plain(annotation: Any) -> str:
    return re.sub(r"\b\w+\.", "", annotation if isinstance(annotation, str) else inspect.formatannotation(annotation))


def add(a: Tensor, b: Tensor) -> Tensor:
    return a + b


def renamed(a: Tensor, other: Tensor) -> Tensor:
    return a + other


def untyped(a: Tensor, b: float) -> Tensor:
    return a + b


def test_a_signature_that_differs_would_be_found() -> None:
    assert signature(add) == signature(reference.add)
    assert signature(renamed) != signature(reference.add)
    assert signature(untyped) != signature(reference.add)
