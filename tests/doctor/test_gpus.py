"""GPUs as nvidia-smi and torch report them, and how both are asked."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from pagewick.doctor.gpus import Driver, Gpu, look_at_driver, look_at_torch, parse_smi

ANSWER = """0, NVIDIA GeForce RTX 3090, 535.183.01, 24576, 23871, 8.6
1, Tesla T4, 535.183.01, 15360, [N/A], 7.5
"""


def smi(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a nvidia-smi that is a shell script first in the path."""
    path = directory / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")


def test_its_answer() -> None:
    found = parse_smi(ANSWER, partial(Driver, "smi", has_device_files=True))
    first = Gpu("NVIDIA GeForce RTX 3090", 24576 * 2**20, 23871 * 2**20, (8, 6))
    assert found == Driver("smi", "535.183.01", (first, Gpu("Tesla T4", 15360 * 2**20, 0, (7, 5))), "", True)


def test_an_answer_that_is_none() -> None:
    assert parse_smi("help me", Driver).error == "its answer is 'help me'"


def test_it_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, monkeypatch, 'case "$*" in *name,driver_version*csv*) echo "0, GPU, 1.2, 10, 5, 9.0";; esac')
    found = look_at_driver(tmp_path)
    assert (found.version, found.gpus) == ("1.2", (Gpu("GPU", 10 * 2**20, 5 * 2**20, (9, 0)),))


def test_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, monkeypatch, "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    assert look_at_driver(tmp_path).error == "Failed to initialize NVML: Driver/library version mismatch"
    smi(tmp_path, monkeypatch, "exit 9")
    assert look_at_driver(tmp_path).error == "exit status 9"


def test_without_devices_it_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, monkeypatch, "echo 'No devices were found'; exit 6")
    assert look_at_driver(tmp_path).error == ""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    assert look_at_driver(tmp_path).error == "No devices were found"


def test_it_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert look_at_driver(tmp_path) == Driver()


def test_torch() -> None:
    found = look_at_torch()
    assert (found.version, found.cuda) == (torch.__version__, torch.version.cuda)
    assert len(found.gpus) == torch.cuda.device_count()
