"""Calls that no kernel serves go to PyTorch: they are documented, logged once, and refused with --batch-invariant."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pagewick import kernels
from pagewick.errors import ConfigError
from pagewick.kernels import TABLE, batch_invariance, reference, triton
from pagewick.kernels.dispatch import Table
from pagewick.kernels.kv_cache import KVCache
from pagewick.kernels.triton import fallback
from tests.log_lines import collected_lines

NAMES = {name for name, value in vars(kernels).items() if hasattr(value, "__wrapped__")}
DOCUMENT = Path(__file__).parents[3] / "docs" / "gpu.md"


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """The messages of the log from here on; nothing has been logged before."""
    fallback._note.cache_clear()
    with collected_lines(logging.DEBUG) as found:
        yield found
    fallback._note.cache_clear()


def test_every_operation_that_is_left_to_pytorch_on_a_gpu_is_a_line_of_the_document() -> None:
    _, _, rest = DOCUMENT.read_text(encoding="utf-8").partition("## Left to PyTorch")
    rows = [line for line in rest.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(name for name in named if name in NAMES) == sorted(NAMES - set(triton.OPERATIONS) | {"linear"})


@pytest.mark.parametrize("device_kind", ["mps", "cuda"])
def test_a_device_without_kernels_is_one_line(device_kind: str, lines: list[str]) -> None:
    """No GPU is here, so that PyTorch serves everything on one, too."""
    table = Table(TABLE.backends)
    for name in NAMES:
        table.operation(getattr(reference, name))
    for _ in range(2):
        assert table.choose(reference.rms_norm, device_kind, torch.bfloat16) is reference.rms_norm
        assert table.choose(reference.add, device_kind, torch.bfloat16) is reference.add
    assert lines == [f"kernels for torch.bfloat16 on {device_kind}: the reference serves everything"]


def test_a_kind_of_arguments_is_logged_once(lines: list[str]) -> None:
    weight = torch.ones(5)
    for num_rows in (1, 2, 7):
        x = torch.ones(num_rows, 5)
        expected = reference.rms_norm(x, weight, 1e-6)
        assert torch.equal(fallback.by_definition(reference.rms_norm, x, weight, 1e-6), expected)
    fallback.by_definition(reference.rms_norm, torch.ones(2, 5).half(), weight, 1e-6)
    cache = KVCache(torch.zeros(2, 2, 1, 3, 5), 5, is_packed=False)
    fallback.by_definition(reference.store_kv, torch.ones(1, 1, 5), torch.ones(1, 1, 5), cache, torch.tensor([3]))
    kinds = (
        "rms_norm of float32 [*, 5], float32 [*]",
        "rms_norm of float16 [*, 5], float32 [*]",
        "store_kv of float32 [*, 1, 5], float32 [*, 1, 5], float32 [*, 2, 1, 3, 5], int64 [*]",
    )
    assert lines == [f"no kernel serves {kind}: it runs in plain PyTorch (docs/gpu.md)" for kind in kinds]


def test_sums_that_may_depend_on_the_batch_are_refused_with_batch_invariant(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_invariance, "is_required", lambda: True)
    x = torch.ones(2, 5)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"--batch-invariant: no kernel serves rms_norm of float32 \[\*, 5\]"):
            fallback.by_definition(reference.rms_norm, x, x[0], 1e-6)
    # Each number of the result is computed by itself.
    assert torch.equal(fallback.by_definition(reference.scale, x, 2.0), x * 2)


def test_names_of_exact_operations_exist() -> None:
    assert not fallback._EXACT - set(triton.OPERATIONS)
