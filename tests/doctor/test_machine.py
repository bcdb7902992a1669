"""Every fault that `pagewick doctor` is to find, seeded one by one into a good machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from pagewick.control_groups import GroupLimits
from pagewick.doctor import facts as facts_module
from pagewick.doctor.facts import Cache, Facts, collect, look_at_cache, look_at_processor, try_port
from pagewick.doctor.findings import format_memory
from pagewick.doctor.gpus import Driver, Gpu, TorchView
from pagewick.doctor.machine import check_machine
from pagewick.doctor.report import machine_json, machine_text
from tests.doctor.machines import CPU_TORCH, CUDA_TORCH, DRIVER, GIB, GOOD, H200, spoilt
from tests.permissions import forbidden

OLD_GPU = Gpu("Tesla M40", 12 * GIB, 12 * GIB, (5, 2))
FULL_GPU = Gpu("NVIDIA H200", 141 * GIB, 10 * GIB, (9, 0))
BLIND_TORCH = TorchView("2.13.0+cu128", cuda="12.8")


def bad(facts: Facts) -> list[tuple[str, str, str]]:
    """(level, subject, text and fix) of everything that is not ok."""
    found = [finding for finding in check_machine(facts) if finding.level != "ok"]
    assert all(finding.fix for finding in found if finding.level == "problem")
    return [(finding.level, finding.subject, f"{finding.text} -> {finding.fix}") for finding in found]


def test_a_good_machine() -> None:
    assert bad(GOOD) == []
    assert bad(spoilt(driver=DRIVER, torch=CUDA_TORCH)) == []


# Changed facts -> level, subject, and words of the finding.
SEEDED: dict[str, tuple[Facts, str, str, tuple[str, ...]]] = {
    "an old Python": (spoilt("system", python="3.10.2"), "problem", "Python", ("3.10.2", "3.11")),
    "no torch": (spoilt(torch=TorchView(error="No module named 'torch'")), "problem", "torch", ("No module", "pip")),
    "an old torch": (spoilt(torch=TorchView("2.9.1")), "problem", "torch", ("2.9.1", "torch>=2.11")),
    "affinity": (spoilt("processor", num_allowed=2), "note", "CPU", ("2 of 8", "taskset")),
    "a quota of cores": (spoilt(limits=GroupLimits(cores=1.5)), "note", "CPU", ("1.5 of 8", "with 1 thread;")),
    "threads in words": (spoilt(environ={"OMP_NUM_THREADS": "four"}), "problem", "threads", ("'four'", "unset")),
    "threads by level": (spoilt(environ={"OMP_NUM_THREADS": "4,2"}), "problem", "threads", ("'4,2'",)),
    "no threads": (spoilt(environ={"OMP_NUM_THREADS": "0"}), "problem", "threads", ("'0'",)),
    "too many threads": (spoilt(environ={"OMP_NUM_THREADS": "64"}), "note", "threads", ("64", "the 8 cores")),
    "too few threads": (spoilt(environ={"OMP_NUM_THREADS": "1"}), "note", "threads", ("7 cores idle",)),
    "no library": (
        spoilt("kernels", is_on=False, is_built=False, status="native kernels off: not built"),
        "problem", "kernels", ("not built", "pagewick.kernels.cpu.build"),
    ),
    "no compiler": (
        spoilt("kernels", is_on=False, is_built=False, compiler=None),
        "problem", "kernels", ("no C++ compiler", "g++"),
    ),
    "a library that does not load": (
        spoilt("kernels", is_on=False, status="native kernels off: it does not load (GLIBC)"),
        "problem", "kernels", ("GLIBC", "build"),
    ),
    "a library that is switched off": (
        spoilt("kernels", is_on=False, status="native kernels off: PAGEWICK_NATIVE=0"),
        "note", "kernels", ("PAGEWICK_NATIVE=0", "unset PAGEWICK_NATIVE"),
    ),
    "an unknown instruction set": (
        spoilt("kernels", is_on=False, error="PAGEWICK_CPU_ISA: instruction set 'sse9' is not available here"),
        "problem", "kernels", ("sse9", "unset PAGEWICK_CPU_ISA"),
    ),
    "a switch that says neither yes nor no": (
        spoilt("kernels", is_on=False, error="PAGEWICK_NATIVE is 'nein'; set it to 0 or 1, or unset it"),
        "problem", "kernels", ("nein", "unset PAGEWICK_NATIVE"),
    ),
    "a container's memory": (
        spoilt(limits=GroupLimits(memory=8 * GIB, memory_used=3 * GIB)),
        "note", "memory", ("8.0 GiB", "5.0 GiB that are left"),
    ),
    "little memory": (spoilt(memory_available=GIB), "problem", "memory", ("1.0 GiB", "smaller model")),
    "a cache that cannot be written": (
        spoilt(cache=Cache(Path("/cache/hub"), 0, "Read-only file system")),
        "problem", "cache", ("Read-only file system", "HF_HOME"),
    ),
    "a full disk": (spoilt("cache", free=10**8), "problem", "cache", ("0.1 GB free", "HF_HOME")),
    "a small disk": (spoilt("cache", free=5 * 10**9), "note", "cache", ("5.0 GB free", "HF_HOME")),
    "offline": (spoilt("hub", is_offline=True), "note", "hub", ("HF_HUB_OFFLINE",)),
    "a hub that does not answer": (
        spoilt("hub", reached="Name or service not known"), "problem", "hub", ("Name or service", "HTTPS_PROXY"),
    ),
    "a port in use": (spoilt("system", port_error="in use"), "note", "port", ("8000", "in use", "--port")),
    "few open files": (spoilt("system", open_files=(256, 4096)), "problem", "files", ("256", "ulimit -n 4096")),
    "no huge pages": (spoilt("system", huge_pages="never"), "note", "huge pages", ("never", "madvise")),
    "small shared memory": (
        spoilt(
            system=spoilt("system", shared_memory=64 * 2**20).system,
            torch=TorchView("2.13.0", cuda="12.8", gpus=(H200, H200)),
        ),
        "note", "shared memory", ("64.0 MiB", "--shm-size"),
    ),
    "torch without CUDA": (spoilt(driver=DRIVER), "problem", "GPU", ("H200 cannot be used", "no CUDA", "pytorch.org")),
    "an old driver": (
        spoilt(driver=Driver("smi", "470.57.02", (H200,)), torch=BLIND_TORCH),
        "problem", "GPU", ("470.57.02 is too old for CUDA 12.8", "525.60.13"),
    ),
    "a driver that fails": (
        spoilt(driver=Driver("smi", error="Failed to initialize NVML: Driver/library version mismatch")),
        "problem", "GPU", ("version mismatch", "restart"),
    ),
    "devices without a driver": (
        spoilt(driver=Driver(has_device_files=True), torch=BLIND_TORCH), "problem", "GPU", ("--gpus all",),
    ),
    "GPUs that torch does not see": (
        spoilt(driver=DRIVER, torch=TorchView("2.13.0", cuda="12.8", warning="CUDA unknown error")),
        "problem", "GPU", ("does not see NVIDIA H200", "CUDA unknown error"),
    ),
    "GPUs that are hidden": (
        spoilt(driver=DRIVER, torch=BLIND_TORCH, environ={"CUDA_VISIBLE_DEVICES": ""}),
        "note", "GPU", ("CUDA_VISIBLE_DEVICES=''", "unset"),
    ),
    "a GPU that is not there": (
        spoilt(driver=DRIVER, torch=BLIND_TORCH, environ={"CUDA_VISIBLE_DEVICES": "7"}),
        "problem", "GPU", ("'7' leaves none", "nvidia-smi"),
    ),
    "a GPU without code": (
        spoilt(torch=TorchView("2.13.0", cuda="12.8", gpus=(OLD_GPU,), architectures=((7, 5), (9, 0)))),
        "problem", "GPU", ("Tesla M40 is of generation 5.2", "starts at 7.5"),
    ),
    "a GPU in use": (
        spoilt(torch=TorchView("2.13.0", cuda="12.8", gpus=(FULL_GPU,))),
        "note", "GPU", ("10.0 GiB of 141.0", "nvidia-smi"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SEEDED)
def test_every_seeded_fault_is_found_and_nothing_else(name: str) -> None:
    facts, level, subject, words = SEEDED[name]
    found = bad(facts)
    # Where torch is missing, or memory is short, nothing more can follow; each fault shows in one line.
    assert [(level, subject)] == [(found_level, found_subject) for found_level, found_subject, _ in found]
    assert all(word in found[0][2] for word in words), found


def test_a_limit_as_large_as_the_machine_is_none() -> None:
    assert bad(spoilt(limits=GroupLimits(memory=64 * GIB, memory_used=0, cores=8.0))) == []


def test_what_the_container_leaves_counts() -> None:
    facts = spoilt(limits=GroupLimits(memory=4 * GIB, memory_used=3 * GIB))
    assert facts.usable_memory == GIB
    assert [level for level, subject, _ in bad(facts) if subject == "memory"] == ["note", "problem"]


def test_a_gpu_is_not_promised_to_work() -> None:
    (found,) = [f for f in check_machine(spoilt(driver=DRIVER, torch=CUDA_TORCH)) if f.subject == "GPU"]
    assert found.text == "NVIDIA H200, 139.0 GiB of 141.0 GiB free (CUDA 12.8); Pagewick is untested on GPUs so far"


def test_no_gpu_is_no_fault() -> None:
    assert bad(spoilt(torch=CPU_TORCH, driver=Driver("smi"))) == []
    assert bad(spoilt(torch=TorchView("2.13.0", has_mps=True))) == []


def test_text_and_json() -> None:
    findings = check_machine(spoilt("system", open_files=(256, 4096)))
    text = machine_text(findings)
    assert "problem  files" in text and "-> run: ulimit -n 4096" in text
    assert text.splitlines()[-1] == "1 problem"
    assert machine_text(check_machine(GOOD)).splitlines()[-1] == "Pagewick can run on this machine."
    found = machine_json(findings)
    assert found["ok"] is False
    assert {"level": "ok", "subject": "port", "text": "8000 is free", "fix": ""} in found["findings"]


class TestCollect:
    def test_this_machine(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*args: object, **options: object) -> NoReturn:
            raise AssertionError("a connection was tried")

        monkeypatch.setattr(socket.socket, "connect", refuse)
        monkeypatch.setattr(socket, "getaddrinfo", refuse)
        facts = collect({"HF_HOME": str(tmp_path / "none/hf"), "HF_TOKEN": "hf_secret", "HOME": str(tmp_path)}, port=0)
        assert facts.cache == Cache(tmp_path / "none/hf/hub", facts.cache.free)
        assert 0 < facts.usable_memory <= facts.memory_total
        assert facts.system.python == sys.version.split()[0]
        assert facts.hub.has_token and facts.hub.reached is None
        assert "hf_secret" not in machine_text(check_machine(facts))
        assert list(tmp_path.iterdir()) == []

    def test_offline_is_stronger_than_online(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tried: list[str] = []
        monkeypatch.setattr(facts_module, "ping", lambda endpoint: tried.append(endpoint) or "")
        environ = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://mirror"}
        assert collect(environ | {"HF_HUB_OFFLINE": "1"}, online=True).hub.reached is None
        assert tried == []
        assert collect(environ, online=True).hub.reached == ""
        assert tried == ["http://mirror"]

    def test_modelscope(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tried: list[str] = []
        monkeypatch.setattr(facts_module, "ping", lambda endpoint: tried.append(endpoint) or "no route")
        environ = {"MODELSCOPE_CACHE": str(tmp_path), "MODELSCOPE_DOMAIN": "ms", "MODELSCOPE_API_TOKEN": "secret"}
        facts = collect(environ, online=True, hub="modelscope")
        assert (facts.cache.path, facts.hub.has_token, tried) == (tmp_path, True, ["https://ms"])
        text = machine_text(check_machine(facts))
        assert "check the network, HTTPS_PROXY and MODELSCOPE_ENDPOINT" in text and "secret" not in text

    def test_a_hub_that_is_not_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in [name for name in os.environ if "proxy" in name.lower()]:
            monkeypatch.delenv(name)
        with socket.create_server(("127.0.0.1", 0)) as closed:
            address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        script = f"from pagewick.doctor.facts import ping; print(ping({address!r}))"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
        assert "refused" in done.stdout

    def test_a_port_in_use(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            assert try_port("127.0.0.1", port) == "in use"
        assert try_port("127.0.0.1", port) == ""

    def test_a_cache_below_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        assert look_at_cache(tmp_path / "file/hub").error == "Not a directory"

    def test_a_cache_that_may_not_be_entered(self, tmp_path: Path) -> None:
        (tmp_path / "home").mkdir()
        with forbidden(tmp_path / "home", 0):
            assert look_at_cache(tmp_path / "home/hub/deep").error == "Permission denied"

    @pytest.mark.parametrize(
        ("text", "name", "sets"),
        [
            ("model name\t: Xeon\nflags\t\t: fpu avx2 avx512f amx_bf16\n", "Xeon", ("AVX2", "AVX-512", "AMX")),
            ("model name\t: Core\nflags\t\t: fpu avx2 avx_vnni\n", "Core", ("AVX2", "AVX-VNNI")),
            ("processor\t: 0\nFeatures\t: fp asimd asimddp sve i8mm\n", None, ("NEON", "DOTPROD", "SVE", "I8MM")),
        ],
    )
    def test_processors(self, text: str, name: str | None, sets: tuple[str, ...], tmp_path: Path) -> None:
        (tmp_path / "cpuinfo").write_text(text)
        found = look_at_processor(tmp_path / "cpuinfo")
        assert found.instruction_sets == sets
        assert found.name == name or name is None

    def test_kernels_are_those_of_the_engine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from pagewick.doctor.facts import look_at_kernels
        from pagewick.kernels import cpu

        found = look_at_kernels(CPU_TORCH)
        assert (found.is_on, found.status) == (cpu.library() is not None, cpu.status())

        def wrong() -> NoReturn:
            raise facts_module.ConfigError("PAGEWICK_CPU_ISA: no sse9")

        monkeypatch.setattr(cpu, "library", wrong)
        assert look_at_kernels(CPU_TORCH).error == "PAGEWICK_CPU_ISA: no sse9"
        assert look_at_kernels(TorchView()).error != ""


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [(0, "0.0 KiB"), (114688, "112 KiB"), (2**20, "1.0 MiB"), (300 * 2**20, "300 MiB"), (1.5 * 2**30, "1.5 GiB")],
)
def test_memory_in_words(num_bytes: Any, shown: str) -> None:
    assert format_memory(num_bytes) == shown


def test_threads_are_compared_with_the_quota() -> None:
    def finding(threads: str) -> Any:
        facts = spoilt(limits=GroupLimits(cores=2.5), environ={"OMP_NUM_THREADS": threads})
        return next(one for one in check_machine(facts) if one.subject == "threads")

    assert finding("2").level == "ok"
    assert "more than the 2 cores" in finding("8").text
    assert "leaves 1 cores idle" in finding("1").text


def test_a_number_of_threads_counts_more_than_a_quota() -> None:
    found = bad(spoilt(limits=GroupLimits(cores=2.5), environ={"OMP_NUM_THREADS": "4"}))
    assert [subject for _, subject, _ in found] == ["CPU", "threads"]
    assert "2.5 of 8" in found[0][2] and "computes with 4 threads;" in found[0][2]
