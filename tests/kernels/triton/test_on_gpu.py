"""The copies by which tests launch kernels on a GPU, with other memory of the host in the GPU's place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from pagewick.kernels import reference

pytest.importorskip("triton")
from pagewick.kernels.triton import blocks, norm
from pagewick.kernels.triton.launcher import Launcher
from tests.kernels.triton.on_gpu import mirror_layers, mirrored

CPU = torch.device("cpu")


def test_views_of_one_storage_stay_views_of_one_and_what_a_launch_writes_comes_back() -> None:
    memory = torch.arange(40, dtype=torch.float32)
    x, out = memory[1:31].view(5, 6)[:, ::2], memory[:30].view(6, 5).t()[1:]
    other = torch.tensor([3])
    before = memory.clone()

    def launch(launcher: Launcher, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
        there, result = arguments["x"], arguments["out"]
        assert there.data_ptr() - result.data_ptr() == x.data_ptr() - out.data_ptr()
        assert there.stride() == x.stride() and result.stride() == out.stride() and torch.equal(there, x)
        assert there.data_ptr() != x.data_ptr() and arguments["other"].data_ptr() != other.data_ptr()
        assert arguments["number"] == 7
        result.fill_(-1.0)
        assert bool((memory == before).all())

    arguments = {"x": x, "out": out, "other": other, "number": 7, "none": torch.empty(0)}
    mirrored(launch, CPU)(None, (1,), arguments)  # type: ignore[arg-type]
    assert bool((out == -1.0).all()) and other.item() == 3
    before.view(-1)[:30].view(6, 5).t()[1:].fill_(-1.0)
    assert torch.equal(memory, before)


def test_kernels_on_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Launcher, "launch", mirrored(Launcher.launch, CPU))
    x, weight = torch.randn(3, 70)[:, 5:69], torch.randn(64)
    torch.testing.assert_close(norm.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    monkeypatch.setattr(blocks, "_run", mirror_layers(blocks, CPU))
    caches = [torch.randint(0, 256, (5, 48), dtype=torch.uint8) for _ in range(2)]
    ids = torch.tensor([4, 0])
    content = blocks.gather_blocks(ids, caches)
    assert torch.equal(content, reference.gather_blocks(ids, caches))
    blocks.scatter_blocks(torch.tensor([1, 2]), caches, content)
    assert all(torch.equal(cache[1:3], cache[[4, 0]]) for cache in caches)
