"""Checks of a machine. Every check is a function of facts alone."""

from __future__ import annotations

from collections.abc import Callable

from pagewick.devices import num_cores_of
from pagewick.doctor.checkpoint import Checkpoint
from pagewick.doctor.facts import DEFAULT_PORT, Facts
from pagewick.doctor.findings import Finding, format_memory, note, ok, problem
from pagewick.doctor.gpus import check_gpus, numbers_of
from pagewick.weights.progress import format_bytes

MIN_PYTHON = (3, 11)
MIN_TORCH = (2, 11)
# Enough for a small model and its cache.
MIN_MEMORY_BYTES = 2 * 2**30
# A model of 7 billion parameters in 16 bits.
COMFORTABLE_DISK_BYTES = 16 * 10**9
MIN_DISK_BYTES = 2 * 10**9
# A connection is a file, and so is every shard of a model.
MIN_OPEN_FILES = 1024
# Several GPUs of one machine may exchange their sums there (NCCL).
MIN_SHARED_MEMORY_BYTES = 256 * 2**20


def check_machine(facts: Facts) -> list[Finding]:
    """Run all checks, those of the software first."""
    checks: tuple[Callable[[Facts], list[Finding]], ...] = (
        check_software,
        check_processor,
        check_threads,
        check_kernels,
        check_memory,
        lambda facts: check_gpus(facts.driver, facts.torch, facts.environ),
        check_cache,
        check_hub,
        check_system,
    )
    return [finding for check in checks for finding in check(facts)]


def hindrances(facts: Facts, checkpoint: Checkpoint) -> list[Finding]:
    """Problems that keep this machine from running any model, or from downloading this one to its disk."""
    found = [finding for finding in check_software(facts) if finding.level == "problem"]
    is_remote = not checkpoint.is_downloaded and not checkpoint.is_only_described
    size, free = checkpoint.num_bytes, facts.cache.free
    if is_remote and size > free:
        text = f"the download takes {format_bytes(size)}, and {format_bytes(free)} are free in {facts.cache.path}"
        found.append(problem("disk", text, f"free some space, or set {facts.cache.variable} to a larger disk"))
    return found


def check_software(facts: Facts) -> list[Finding]:
    python, torch = facts.system.python, facts.torch
    wanted = ".".join(map(str, MIN_PYTHON))
    findings = [
        ok("Python", f"{python} on {facts.system.name}")
        if numbers_of(python) >= MIN_PYTHON
        else problem("Python", f"{python} is too old", f"use Python {wanted} or newer")
    ]
    if torch.version is None:
        text = f"torch cannot be imported: {torch.error or 'it is not installed'}"
        return [*findings, problem("torch", text, "install it again: pip install --force-reinstall torch")]
    if numbers_of(torch.version) < MIN_TORCH:
        fix = f"pip install --upgrade 'torch>={'.'.join(map(str, MIN_TORCH))}'"
        return [*findings, problem("torch", f"{torch.version} is too old", fix)]
    build = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}" if torch.hip else "CPU only"
    return [*findings, ok("torch", f"{torch.version} ({build})")]


def check_processor(facts: Facts) -> list[Finding]:
    cpu = facts.processor
    sets = ", ".join(cpu.instruction_sets)
    cores = f"{cpu.num_physical} cores" if cpu.num_physical == cpu.num_logical else (
        f"{cpu.num_physical} cores, {cpu.num_logical} threads"
    )  # fmt: skip
    findings = [ok("CPU", f"{cpu.name}, {cores}{f' ({sets})' if sets else ''}")]
    if cpu.num_allowed < cpu.num_logical:
        text = f"this process may use {cpu.num_allowed} of {cpu.num_logical} (its affinity)"
        findings.append(note("CPU", text, "start it without taskset, or give the container more cores, to use all"))
    quota = facts.limits.cores
    if quota is not None and quota < cpu.num_allowed:
        count = num_cores_of(facts.environ.get("OMP_NUM_THREADS", ""), min(cpu.num_allowed, cpu.num_physical), quota)
        threads = "1 thread" if count == 1 else f"{count} threads"
        findings.append(
            note(
                "CPU",
                f"the container may use {quota:g} of {cpu.num_allowed} cores at a time",
                f"Pagewick computes with {threads}; give the container more for speed",
            )
        )
    return findings


def _num_usable(facts: Facts) -> int:
    """Return the number of cores that the affinity and the container's quota leave, at least 1."""
    allowed, quota = facts.processor.num_allowed, facts.limits.cores
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def check_threads(facts: Facts) -> list[Finding]:
    """Check OMP_NUM_THREADS, which sets the number of threads that compute."""
    text = facts.environ.get("OMP_NUM_THREADS")
    if not text:
        return []
    if not text.isdigit() or int(text) < 1:
        fix = "set it to a number of cores, or unset it"
        return [problem("threads", f"OMP_NUM_THREADS={text!r} is no number above 0, so one thread computes", fix)]
    usable = _num_usable(facts)
    cores, threads = min(facts.processor.num_physical, usable), int(text)
    if threads > usable:
        shown = f"OMP_NUM_THREADS={threads} is more than the {usable} cores that may be used"
        return [note("threads", shown, "unset it: threads that wait for a core slow the others down")]
    if threads < cores:
        return [
            note("threads", f"OMP_NUM_THREADS={threads} leaves {cores - threads} cores idle", "unset it to use all")
        ]
    return [ok("threads", f"OMP_NUM_THREADS={threads}")]


def check_kernels(facts: Facts) -> list[Finding]:
    """Check that the fast code for CPUs is used."""
    kernels = facts.kernels
    if kernels.is_on:
        return [ok("kernels", kernels.status)]
    if facts.torch.version is None:
        return []
    if kernels.error:
        variable = kernels.error.split(maxsplit=1)[0].rstrip(":")
        return [problem("kernels", kernels.error, f"unset {variable}, or give it another value")]
    if "PAGEWICK_NATIVE=" in kernels.status:
        return [note("kernels", f"{kernels.status}; plain PyTorch is used, which is slower", "unset PAGEWICK_NATIVE")]
    if not kernels.is_built and kernels.compiler is None:
        fix = "install g++ or clang++, then: python -m pagewick.kernels.cpu.build"
        return [problem("kernels", "the native library is not built, and there is no C++ compiler", fix)]
    fix = "build them: python -m pagewick.kernels.cpu.build"
    return [problem("kernels", f"{kernels.status}; plain PyTorch is used, which is slower", fix)]


def check_memory(facts: Facts) -> list[Finding]:
    findings = []
    limit = facts.limits.memory
    text = f"{format_memory(facts.memory_available)} of {format_memory(facts.memory_total)} available"
    if limit is not None and limit < facts.memory_total:
        left = format_memory(facts.usable_memory)
        fix = f"Pagewick keeps to the {left} that are left; give the container more for larger models"
        findings.append(note("memory", f"the container may use {format_memory(limit)} of {text}", fix))
    else:
        findings.append(ok("memory", text))
    if facts.usable_memory < MIN_MEMORY_BYTES:
        shown = f"only {format_memory(facts.usable_memory)} can be used"
        findings.append(problem("memory", shown, "end other programs, or use a smaller model"))
    return findings


def check_cache(facts: Facts) -> list[Finding]:
    cache = facts.cache
    if cache.error:
        fix = f"set {cache.variable} to a directory that you may write to"
        return [problem("cache", f"{cache.path} cannot be written: {cache.error}", fix)]
    shown = f"{cache.path}, {cache.free / 10**9:.1f} GB free"
    move = f"free some space, or set {cache.variable} to a directory on a larger disk"
    if cache.free < MIN_DISK_BYTES:
        return [problem("cache", shown, move)]
    if cache.free < COMFORTABLE_DISK_BYTES:
        return [note("cache", f"{shown}: less than a model of 7 B parameters takes", move)]
    return [ok("cache", shown)]


def check_hub(facts: Facts) -> list[Finding]:
    hub = facts.hub
    token = "a token is there" if hub.has_token else "no token, which gated and private models need"
    if hub.is_offline:
        return [note("hub", f"offline (HF_HUB_OFFLINE): nothing is downloaded; {token}", "unset it to download models")]
    if hub.reached is None:
        return [ok("hub", f"{hub.endpoint}, {token}; not tried (--online does)")]
    if hub.reached:
        fix = f"check the network, HTTPS_PROXY and {hub.variable}; directories and the built-in model work without"
        return [problem("hub", f"{hub.endpoint} does not answer: {hub.reached}", fix)]
    return [ok("hub", f"{hub.endpoint} answers; {token}")]


def check_system(facts: Facts) -> list[Finding]:
    system = facts.system
    findings = []
    if system.port_error:
        fix = "stop what uses it, or serve with another --port"
        findings.append(note("port", f"{DEFAULT_PORT}, the default, is not free: {system.port_error}", fix))
    else:
        findings.append(ok("port", f"{DEFAULT_PORT} is free"))
    if system.open_files is not None and 0 <= system.open_files[0] < MIN_OPEN_FILES:
        soft, hard = system.open_files
        raised = MIN_OPEN_FILES * 8 if hard < 0 else min(hard, MIN_OPEN_FILES * 8)
        text = f"at most {soft} can be open, and every connection is one"
        findings.append(problem("files", text, f"run: ulimit -n {raised}"))
    is_small = system.shared_memory is not None and system.shared_memory < MIN_SHARED_MEMORY_BYTES
    if is_small and len(facts.torch.gpus) > 1:
        text = f"/dev/shm has {format_memory(system.shared_memory or 0)}, and several GPUs may need more of it"
        findings.append(note("shared memory", text, "start the container with --shm-size=1g"))
    if system.huge_pages == "never":
        fix = "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        findings.append(note("huge pages", "the kernel is set to give none (transparent huge pages: never)", fix))
    return findings
