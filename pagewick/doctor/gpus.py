"""GPUs as the driver reports them and as torch reports them, and whether the two go together."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pagewick.doctor.findings import Finding, format_memory, note, ok, problem

SUBJECT = "GPU"
SMI_TIMEOUT_SECONDS = 20
_QUERY = "index,name,driver_version,memory.total,memory.free,compute_cap"
# The oldest driver for each major version of CUDA, by NVIDIA's notes on minor version compatibility.
_OLDEST_DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
_GET_TORCH = "install torch with CUDA: https://pytorch.org/get-started/locally"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. Memory in bytes; capability: NVIDIA's number for its generation, such as (9, 0)."""

    name: str
    total_memory: int
    free_memory: int
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Driver:
    """The report of nvidia-smi. path: where the program is, None if it is missing. error: why it failed; else empty."""

    path: str | None = None
    version: str = ""
    gpus: tuple[Gpu, ...] = ()
    error: str = ""
    has_device_files: bool = False


@dataclass(frozen=True, slots=True)
class TorchView:
    """The installed torch and the GPUs that it finds. version: None if it cannot be imported; `error` says why.

    cuda: the version that it was built for, such as 12.8; None for a build without CUDA. architectures: GPU generations
    that it has code for, such as (7, 0). warning: its warning when it looks for GPUs.
    """

    version: str | None = None
    error: str = ""
    cuda: str | None = None
    hip: str | None = None
    gpus: tuple[Gpu, ...] = ()
    architectures: tuple[tuple[int, int], ...] = ()
    has_mps: bool = False
    warning: str = ""


def check_gpus(driver: Driver, torch: TorchView, environ: Mapping[str, str]) -> list[Finding]:
    """Check that the machine's GPUs can be used."""
    if torch.version is None:
        return []  # another check reports it
    if torch.gpus:
        return [*_used(torch), *_too_old(torch)]
    if torch.has_mps:
        return [ok(SUBJECT, "Apple's, by Metal")]
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "none", "NoDevFiles") and (driver.gpus or torch.cuda):
        return [note(SUBJECT, f"hidden by CUDA_VISIBLE_DEVICES={visible!r}; the CPU is used", "unset it to use GPUs")]
    if driver.error:
        fix = "reinstall the NVIDIA driver, or restart the machine if it was updated"
        return [problem(SUBJECT, f"nvidia-smi fails: {driver.error}", fix)]
    if driver.gpus:
        return [_unused(driver, torch, visible)]
    if driver.has_device_files:
        fix = "in a container: start it with the NVIDIA runtime (--gpus all)"
        return [problem(SUBJECT, "there are NVIDIA devices, and no nvidia-smi or usable driver", fix)]
    return [ok(SUBJECT, "none; the CPU is used")]


def _used(torch: TorchView) -> list[Finding]:
    kind = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}"
    findings = []
    for gpu in torch.gpus:
        free = f"{format_memory(gpu.free_memory)} of {format_memory(gpu.total_memory)} free"
        text = f"{gpu.name}, {free} ({kind}); Pagewick is untested on GPUs so far"
        is_full = gpu.free_memory < gpu.total_memory / 2
        fix = "other programs use its memory; nvidia-smi shows which"
        findings.append(note(SUBJECT, text, fix) if is_full else ok(SUBJECT, text))
    return findings


def _too_old(torch: TorchView) -> list[Finding]:
    """Problems with GPUs that are too old for this torch, which has no code for them."""
    oldest = min(torch.architectures, default=(0, 0))
    return [
        problem(
            SUBJECT,
            f"{gpu.name} is of generation {_dotted(gpu.capability)}, and this torch starts at {_dotted(oldest)}",
            "install an older torch that still has code for it, or use --device cpu",
        )
        for gpu in torch.gpus
        if gpu.capability < oldest
    ]


def _unused(driver: Driver, torch: TorchView, visible: str | None) -> Finding:
    """The reason why torch does not see the GPUs that the driver reports."""
    names = ", ".join(gpu.name for gpu in driver.gpus)
    if torch.cuda is None:
        return problem(SUBJECT, f"{names} cannot be used: torch {torch.version} has no CUDA", _GET_TORCH)
    oldest = _OLDEST_DRIVERS.get(int(torch.cuda.partition(".")[0]), "")
    if oldest and numbers_of(driver.version) < numbers_of(oldest):
        text = f"{names} cannot be used: driver {driver.version} is too old for CUDA {torch.cuda}"
        return problem(SUBJECT, text, f"update the driver to {oldest} or newer, or install a torch for an older CUDA")
    if visible is not None:
        text = f"CUDA_VISIBLE_DEVICES={visible!r} leaves none of {names}"
        return problem(SUBJECT, text, "unset it, or give the numbers that nvidia-smi shows")
    reason = torch.warning or "torch does not say why"
    return problem(SUBJECT, f"torch does not see {names}: {reason}", "run nvidia-smi; restart after driver updates")


def look_at_driver(root: Path = Path("/")) -> Driver:
    """Ask nvidia-smi, if it is installed."""
    path = shutil.which("nvidia-smi")
    found = partial(Driver, path, has_device_files=any((root / "dev").glob("nvidia[0-9]*")))
    if path is None:
        return found()
    command = [path, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return found(error=str(error).partition("\n")[0])
    if done.returncode == 0:
        return parse_smi(done.stdout, found)
    error_text = next(iter((done.stdout + done.stderr).strip().splitlines()), f"exit status {done.returncode}")
    # It also fails on a machine without GPUs, where that does not matter.
    is_harmless = "no devices" in error_text.lower() and not found().has_device_files
    return found(error="" if is_harmless else error_text)


def parse_smi(text: str, found: Callable[..., Driver]) -> Driver:
    """Parse the output of nvidia-smi for _QUERY; memory there is in MiB. found: makes a Driver of its fields."""
    gpus, version = [], ""
    for line in text.strip().splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 6:
            return found(error=f"its answer is {line[:80]!r}")
        _, name, version, total, free, capability = cells
        gpus.append(Gpu(name, _mebibytes(total), _mebibytes(free), _pair(capability)))
    return found(version=version, gpus=tuple(gpus))


def look_at_torch() -> TorchView:
    """Import torch and ask it. Its warnings are recorded, not shown."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # torch would import numpy itself, and swallow a Ctrl-C meanwhile.
        with contextlib.suppress(ImportError, OSError):
            import numpy as np  # noqa: F401
        try:
            import torch
        except (ImportError, OSError) as error:
            return TorchView(error=str(error).partition("\n")[0])
        gpus = []
        if torch.cuda.is_available():
            for index in range(torch.cuda.device_count()):
                free, total = torch.cuda.mem_get_info(index)
                capability = torch.cuda.get_device_capability(index)
                gpus.append(Gpu(torch.cuda.get_device_name(index), total, free, capability))
        architectures = [_architecture(name) for name in torch.cuda.get_arch_list()] if gpus else []
    said = [str(warning.message).partition("\n")[0] for warning in caught if "CUDA" in str(warning.message)]
    return TorchView(
        version=torch.__version__,
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        gpus=tuple(gpus),
        architectures=tuple(pair for pair in architectures if pair is not None),
        has_mps=torch.backends.mps.is_available(),
        warning=said[0] if said else "",
    )


def _architecture(name: str) -> tuple[int, int] | None:
    """Return (9, 0) for sm_90 or sm_90a."""
    match = re.fullmatch(r"sm_(\d+)(\d)[a-z]*", name)
    return (int(match[1]), int(match[2])) if match else None


def _mebibytes(text: str) -> int:
    return int(float(text) * 2**20) if text.replace(".", "", 1).isdigit() else 0


def _pair(text: str) -> tuple[int, int]:
    numbers = numbers_of(text)
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (0, 0)


def numbers_of(version: str) -> tuple[int, ...]:
    """Return (12, 8) for 12.8."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _dotted(pair: tuple[int, int]) -> str:
    return f"{pair[0]}.{pair[1]}"
