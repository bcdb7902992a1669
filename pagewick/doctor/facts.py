"""Collects facts about this machine without judging them, so that tests can check the judgements on invented facts."""

from __future__ import annotations

import errno
import os
import platform
import resource
import shutil
import socket
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from pagewick.control_groups import GroupLimits, read_limits
from pagewick.doctor.gpus import Driver, TorchView, look_at_driver, look_at_torch
from pagewick.errors import ConfigError
from pagewick.weights.hub import DEFAULT_HUB, hub_settings
from pagewick.weights.hub_settings import HuggingFaceSettings

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
ONLINE_TIMEOUT_SECONDS = 10.0

# Flags in /proc/cpuinfo of instruction sets for fast matrix products, on x86 and Arm.
_INSTRUCTION_SETS = {
    "avx2": "AVX2", "avx_vnni": "AVX-VNNI", "avx512f": "AVX-512", "avx512_bf16": "AVX-512 BF16",
    "avx512_vnni": "AVX-512 VNNI", "amx_bf16": "AMX", "asimd": "NEON", "asimddp": "DOTPROD", "sve": "SVE",
    "bf16": "BF16", "i8mm": "I8MM",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Processor:
    """num_allowed: cores that this process may run on. instruction_sets: the relevant ones, by their usual names."""

    name: str = ""
    num_logical: int = 1
    num_physical: int = 1
    num_allowed: int = 1
    instruction_sets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Kernels:
    """The native library. status: one sentence. compiler: a C++ compiler's name. error: why the status is unknown."""

    is_on: bool = False
    status: str = ""
    is_built: bool = False
    compiler: str | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Cache:
    """The directory for models. free: bytes on its disk. error: why it is not writable. variable: sets another."""

    path: Path
    free: int
    error: str = ""
    variable: str = "HF_HOME"


@dataclass(frozen=True, slots=True)
class Hub:
    """reached: None if not tried, empty if it answers, else why not. variable: sets another endpoint."""

    endpoint: str
    is_offline: bool = False
    has_token: bool = False
    reached: str | None = None
    variable: str = "HF_ENDPOINT"


@dataclass(frozen=True, slots=True)
class System:
    """port_error: why the default port cannot be used. shared_memory: bytes of /dev/shm, None if it is missing.

    open_files: soft and hard limit. huge_pages: the kernel's setting for transparent huge pages.
    """

    name: str = ""
    python: str = ""
    port_error: str = ""
    shared_memory: int | None = None
    open_files: tuple[int, int] | None = None
    huge_pages: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """A machine as this process sees it. Memory is in bytes."""

    cache: Cache
    hub: Hub
    processor: Processor = field(default_factory=Processor)
    kernels: Kernels = field(default_factory=Kernels)
    memory_total: int = 0
    memory_available: int = 0
    limits: GroupLimits = field(default_factory=GroupLimits)
    driver: Driver = field(default_factory=Driver)
    torch: TorchView = field(default_factory=TorchView)
    system: System = field(default_factory=System)
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def usable_memory(self) -> int:
        """Bytes of main memory that this process can still allocate."""
        if self.limits.memory is None:
            return self.memory_available
        return max(0, min(self.memory_available, self.limits.memory - (self.limits.memory_used or 0)))


def collect(
    environ: Mapping[str, str], *, online: bool = False, port: int = DEFAULT_PORT, hub: str = DEFAULT_HUB
) -> Facts:
    """Collect the facts. Connects to the hub only if `online` is set and the environment does not forbid it."""
    memory = psutil.virtual_memory()
    torch = look_at_torch()
    cache, asked = look_at_hub(environ, hub, online=online)
    return Facts(
        cache=cache,
        hub=asked,
        processor=look_at_processor(),
        kernels=look_at_kernels(torch),
        memory_total=memory.total,
        memory_available=memory.available,
        limits=read_limits(),
        driver=look_at_driver(),
        torch=torch,
        system=look_at_system(port),
        environ=environ,
    )


def look_at_processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> Processor:
    """Describe the processor, from the kernel's description if there is one."""
    entries: dict[str, str] = {}
    for line in _text(cpuinfo).splitlines():
        name, _, value = line.partition(":")
        entries.setdefault(name.strip().lower(), value.strip())
    flags = set((entries.get("flags") or entries.get("features") or "").split())
    num_logical = os.cpu_count() or 1
    return Processor(
        name=entries.get("model name") or platform.processor() or platform.machine(),
        num_logical=num_logical,
        num_physical=psutil.cpu_count(logical=False) or num_logical,
        num_allowed=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else num_logical,
        instruction_sets=tuple(name for flag, name in _INSTRUCTION_SETS.items() if flag in flags),
    )


def look_at_kernels(torch: TorchView) -> Kernels:
    """Load the native library as the engine does, and report on it."""
    if torch.version is None:
        return Kernels(error="torch cannot be imported")
    from pagewick.kernels import cpu
    from pagewick.kernels.cpu.build import find_compiler

    try:
        compiler: str | None = find_compiler()
    except ConfigError:
        compiler = None
    try:
        is_on, status, error = cpu.library() is not None, cpu.status(), ""
    except ConfigError as wrong:
        is_on, status, error = False, "", str(wrong)
    return Kernels(is_on, status, cpu.LIBRARY_PATH.exists(), compiler, error)


def look_at_cache(path: Path, variable: str = "HF_HOME") -> Cache:
    """Check that models can be stored, by making a file in the directory, or in its nearest parent, and removing it."""
    try:
        there = next(parent for parent in (path, *path.parents) if parent.exists())
        probe = there / f".pagewick-{uuid.uuid4().hex}"
        free = shutil.disk_usage(there).free
        probe.touch()
        probe.unlink()
    except OSError as error:
        return Cache(path, 0, error.strerror or str(error), variable)
    return Cache(path, free, "", variable)


def look_at_hub(environ: Mapping[str, str], hub: str, *, online: bool) -> tuple[Cache, Hub]:
    """Describe a hub's cache and endpoint, and with `online` whether it answers. The token itself is not kept."""
    settings = hub_settings(hub, environ)
    has_token = settings.token is not None
    if isinstance(settings, HuggingFaceSettings) and not has_token:
        has_token = bool(_text(settings.token_path).strip())
    reached = ping(settings.endpoint) if online and not settings.offline else None
    asked = Hub(settings.endpoint, settings.offline, has_token, reached, settings.endpoint_variable)
    return look_at_cache(settings.cache_dir, settings.cache_variable), asked


def ping(endpoint: str) -> str:
    """Return why nothing answers at an address; empty if something does."""
    from huggingface_hub import get_session

    from pagewick.weights.transfer import HTTP_ERROR

    try:
        get_session().head(endpoint, timeout=ONLINE_TIMEOUT_SECONDS)
    except (HTTP_ERROR, OSError) as error:
        return str(error).partition("\n")[0] or type(error).__name__
    return ""


def look_at_system(port: int) -> System:
    """Read the operating system's settings that a server depends on."""
    shared = Path("/dev/shm")
    return System(
        name=f"{platform.system()} {platform.release()}",
        python=".".join(map(str, sys.version_info[:3])),
        port_error=try_port(DEFAULT_HOST, port),
        shared_memory=shutil.disk_usage(shared).total if shared.is_dir() else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        # `madvise` of `always [madvise] never`.
        huge_pages=_text(Path("/sys/kernel/mm/transparent_hugepage/enabled")).partition("[")[2].partition("]")[0],
    )


def try_port(host: str, port: int) -> str:
    """Return why a server could not listen there now; empty if it could. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((host, port))
            server.listen(1)
        except OSError as error:
            return "in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
    return ""


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
