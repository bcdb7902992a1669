"""Which GPUs the Triton kernels serve, and that a CPU needs nothing of Triton."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from pagewick import kernels
from pagewick.kernels import TABLE, triton

CHECK = """
import sys
sys.modules["triton"] = None  # to import it raises ImportError
import torch
from pagewick import kernels
from pagewick.attention.native import choose_backend
choose_backend(torch.device("cpu"), "bfloat16", 32)
print(kernels.add(torch.ones(2), torch.ones(2)).tolist(), kernels.TABLE.backend("add", "cuda", torch.float32))
"""


@pytest.fixture(autouse=True)
def answers_of_this_test_only() -> Iterator[None]:
    triton.why_off.cache_clear()
    yield
    triton.why_off.cache_clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """PyTorch sees a GPU of capability 8.0, Triton and a C compiler are installed, and Triton can compile C."""
    monkeypatch.delenv("PAGEWICK_TRITON", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    launcher = SimpleNamespace(get_current_device=lambda: 0)
    monkeypatch.setattr("triton.runtime.driver", SimpleNamespace(active=launcher))
    return monkeypatch


def test_a_cpu_needs_no_triton() -> None:
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True)
    assert done.stdout == "[2.0, 2.0] None\n", done.stderr


def test_a_gpu_is_served_in_dtypes_that_kernels_know(gpu: pytest.MonkeyPatch) -> None:
    assert TABLE.backend("paged_attention", "cuda", torch.bfloat16) is triton.BACKEND
    assert TABLE.backend("paged_attention", "cuda", torch.float64) is None
    assert TABLE.backend("paged_attention", "mps", torch.bfloat16) is None
    assert not any(TABLE.backend(name, "cpu", torch.float64) is triton.BACKEND for name in triton.OPERATIONS)


def test_an_older_gpu_is_not_served(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    assert "older than compute capability 8.0" in triton.why_off()
    assert not triton.supports("paged_attention", "cuda", torch.float16)
    triton.why_off.cache_clear()
    gpu.setattr(torch.version, "hip", "6.3")
    assert triton.why_off() == ""


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("importlib.util.find_spec", lambda name: None, "pip install 'pagewick[gpu]'"),
        ("torch.cuda.is_available", lambda: False, "PyTorch sees no GPU"),
        ("shutil.which", lambda name: None, "Triton needs a C compiler; install gcc"),
    ],
)
def test_the_reason_why_they_are_off(gpu: pytest.MonkeyPatch, name: str, value: object, reason: str) -> None:
    gpu.setattr(name, value)
    assert reason in triton.why_off()
    assert kernels.status("cuda:1") == f"plain PyTorch: {triton.why_off()}"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (subprocess.CalledProcessError(1, ["/usr/bin/gcc", "main.c"]), "CalledProcessError: Command '['/usr/bin/gcc'"),
        (AssertionError("libcuda.so cannot found!\nPlease"), "AssertionError: libcuda.so cannot found!); install"),
        (PermissionError(13, "Permission denied", "/.triton"), "/.triton"),
    ],
)
def test_triton_must_be_able_to_compile_its_launcher(gpu: pytest.MonkeyPatch, error: Exception, said: str) -> None:
    """Python's headers may be missing, the driver's library, or a directory for Triton's cache."""

    def fails() -> int:
        raise error

    gpu.setattr("triton.runtime.driver", SimpleNamespace(active=SimpleNamespace(get_current_device=fails)))
    assert said in triton.why_off() and "python3-dev" in triton.why_off()
    assert TABLE.backend("paged_attention", "cuda", torch.bfloat16) is None


def test_any_c_compiler_will_do(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr("shutil.which", lambda name: None)
    gpu.setenv("CC", "/opt/bin/cc")
    assert kernels.status("cuda") == "Triton kernels"
    assert kernels.status("mps") == "plain PyTorch: there are no kernels for this device"
    assert kernels.status("cpu") == kernels.native_status()


def test_they_can_be_turned_off(gpu: pytest.MonkeyPatch) -> None:
    gpu.setenv("PAGEWICK_TRITON", "0")
    assert triton.why_off() == "PAGEWICK_TRITON=0"
    assert TABLE.backend("paged_attention", "cuda", torch.bfloat16) is None


@pytest.mark.parametrize(
    ("capability", "target"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_89"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90"),
        ((10, 0), "sm_90"),
        ((12, 0), "sm_89"),
    ],
)
def test_the_target_of_a_gpu(gpu: pytest.MonkeyPatch, capability: tuple[int, int], target: str) -> None:
    from pagewick.kernels.triton.variant import target_of

    gpu.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    assert target_of.__wrapped__(torch.device("cuda", 0)) == target
    gpu.setattr(torch.version, "hip", "6.3")
    assert target_of.__wrapped__(torch.device("cuda", 0)) == "gfx942"
    assert target_of.__wrapped__(torch.device("cpu")) == "sm_90"
