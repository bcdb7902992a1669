"""Loading the native library, saying why not, and which calls go to it."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pagewick import kernels
from pagewick.errors import ConfigError
from pagewick.kernels import cpu, reference
from pagewick.kernels.cpu import attention, build, norm
from pagewick.kernels.cpu.binding import LIBRARY_PATH, load
from pagewick.kernels.matrix import Matrix
from pagewick.kernels.options import ScoreOptions
from pagewick.kernels.recorded_steps import RecordedStep, StepMemory, record
from tests.deep import IS_DEEP
from tests.kernels.conftest import ISAS, ISAS_HERE, STAND_IN_LIBRARY, required_library
from tests.kernels.native_programs import (
    BESIDE_AVX512_BF16,
    STAND_INS,
    build_library_of,
    build_native_test,
    build_pool_test,
    build_sanitized_test,
    build_stand_in_library,
)
from tests.kernels.paged import expected_attention, make_paged, plain_cache

# `pagewick.kernels.cpu.binding` is also the name of a function.
native_library = importlib.import_module("pagewick.kernels.cpu.binding")


@pytest.fixture(autouse=True)
def restore_the_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("PAGEWICK_NATIVE", "PAGEWICK_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    library = required_library()
    before = library.isa
    yield
    library.select_isa(before)
    library.set_num_threads(torch.get_num_threads())


def test_the_best_instruction_set_is_taken() -> None:
    library, reason = load()
    assert library is not None
    assert reason == ""
    assert kernels.native_status() == f"native kernels: {library.isa}"
    assert library.isa == [isa for isa in ISAS if isa in library.supported_isas()][-1]


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set_is_tested(isa: str) -> None:
    if isa not in required_library().supported_isas():
        pytest.skip(f"needs a processor whose flags in lscpu name {isa}; on this one no kernel is tested with it")
    assert isa in ISAS_HERE


def test_an_instruction_set_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWICK_CPU_ISA", "generic")
    library, _ = load()
    assert library is not None
    assert library.isa == "generic"


@pytest.mark.parametrize("isa", ["sse9", "AVX2", "neon" if "avx2" in ISAS else "avx2"])
def test_an_instruction_set_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    monkeypatch.setenv("PAGEWICK_CPU_ISA", isa)
    with pytest.raises(ConfigError, match=rf"PAGEWICK_CPU_ISA.*'{isa}' is not available here; choose from: generic"):
        load()


def test_a_library_that_is_not_there_or_does_not_fit_is_explained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "libpagewick_cpu.so"
    monkeypatch.setattr(native_library, "LIBRARY_PATH", path)
    assert load() == (None, "libpagewick_cpu.so not built; run `make install`")
    path.write_bytes(b"not a library")
    library, reason = load()
    assert library is None
    assert "libpagewick_cpu.so does not load" in reason
    monkeypatch.undo()
    monkeypatch.setattr(native_library, "ABI_VERSION", 0)
    assert load() == (None, "libpagewick_cpu.so was built from other sources; run `make install`")


def test_without_the_library_the_reference_serves(without_the_library: str) -> None:
    reason = without_the_library
    assert kernels.native_status() == f"native kernels off: {reason}"
    kernels.set_num_threads(2)
    x, weight = torch.randn(3, 20), torch.randn(20)
    assert torch.equal(kernels.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    assert not kernels.packs_kv(64, 32, torch.float32, x.device)
    paged = make_paged([3], [40])
    cache = plain_cache(paged.kv_cache)
    out = kernels.paged_attention(paged.q, cache, paged.metadata, ScoreOptions(0.125))
    assert torch.equal(out, paged.attend(reference.paged_attention))


def test_operations_go_to_the_library() -> None:
    # With this many values, some differ in the last bit between two ways of computing them.
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(300, 1000, generator=generator), torch.randn(1000, generator=generator)
    assert torch.equal(kernels.rms_norm(x, weight, 1e-5), norm.rms_norm(x, weight, 1e-5))
    assert not torch.equal(kernels.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    paged = make_paged([70], [100])
    out = paged.attend(kernels.paged_attention)
    assert torch.equal(out, paged.attend(attention.paged_attention))
    assert not torch.equal(out, paged.attend(reference.paged_attention))


def test_unsupported_dtypes_go_to_the_reference() -> None:
    x = torch.randn(3, 20, dtype=torch.float64)
    assert kernels.rms_norm(x, x[0], 1e-5).dtype == torch.float64
    assert kernels.rms_norm(x.bfloat16(), x[0].float(), 1e-5).dtype == torch.bfloat16
    assert kernels.rms_norm(x[:0], x[0], 1e-5).shape == (0, 20)
    for head_dim in (4, 36, 512):
        paged = make_paged([2], [70], head_dim=head_dim)
        out = paged.attend(kernels.paged_attention)
        torch.testing.assert_close(out.double(), expected_attention(paged), rtol=1e-5, atol=5e-6)


def test_gradients_flow_through_the_reference() -> None:
    x, weight = torch.randn(3, 20, requires_grad=True), torch.ones(20)
    kernels.rms_norm(x, weight, 1e-5).sum().backward()
    assert x.grad is not None
    with torch.no_grad():
        assert torch.equal(kernels.rms_norm(x, weight, 1e-5), norm.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("num_threads", [0, -1])
def test_at_least_one_thread(num_threads: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1, not {num_threads}"):
        kernels.set_num_threads(num_threads)


def test_a_missing_or_failing_compiler_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="no C\\+\\+ compiler found: install one"):
        build.find_compiler()
    failing = tmp_path / "failing"
    failing.write_text("#!/bin/sh\necho broken >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CXX", str(failing))
    with pytest.raises(ConfigError, match=r"the C\+\+ compiler failed: .*\nbroken"):
        build.build_library(tmp_path / "library.so")
    assert not (tmp_path / "library.so").exists()
    with pytest.raises(
        ConfigError, match=r"no C\+\+ compiler for riscv64 found: install one \(Debian: apt install g\+\+-ri"
    ):
        build.find_compiler("riscv64")


# The C++ test programs. Deadlines that only catch hangs.
RUN_TIMEOUT_S = 600
BUILD_AND_RUN_TIMEOUT_S = 1500
NO_AARCH64 = "PAGEWICK_NO_AARCH64"
# Whether the stand-ins for instructions that this processor lacks can run (native/stand_ins.h).
HAS_STAND_INS = "avx512_bf16" in ISAS_HERE
# Their kernels differ from those of avx512_bf16 by the products only.
LIKE_AVX512_BF16 = ("avx512", "avx512_vnni")
AARCH64_SYSROOT = Path("/usr/aarch64-linux-gnu")
FAMILIES = (
    "convert", "norm", "matrix", "quantized", "rope", "activation", "elementwise", "logits", "attention", "kv_bytes",
    "mla", "index", "delta", "scan", "channel_scan", "convolution", "moe", "streams", "hyper",
    "compressed", "window", "recorded_steps",
)  # fmt: skip
# The families of instruction sets that have only kernels for products with quantized weights.
BYTE_FAMILIES = ("quantized", "moe")
# Those of AMX: everything else is that of AVX-512 BF16.
AMX_FAMILIES = ("matrix", "quantized", "attention", "mla", "moe", "window")


@pytest.fixture
def compiler() -> str:
    try:
        return build.find_compiler()
    except ConfigError as error:
        pytest.skip(str(error))


def run_program(*command: str | Path) -> str:
    """Run a test program and return its output. Fails if the program does."""
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=RUN_TIMEOUT_S)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.endswith("all tests passed\n")
    return result.stdout


def assert_all_ran(output: str, ran: list[str], not_run: list[str], wanted: tuple[str, ...] = FAMILIES) -> None:
    for isa in ran:
        has_only_bytes = build.PARTIAL_SETS.get(isa) == build.BYTE_PRODUCTS
        expected = [family for family in wanted if not has_only_bytes or family in BYTE_FAMILIES]
        found = [line.split()[1] for line in output.splitlines() if line.startswith(f"{isa}: ")]
        assert found == expected, output
    for isa in not_run:
        assert f"{isa}: not run, this processor does not have it" in output.splitlines()


@pytest.mark.usefixtures("compiler")
@pytest.mark.timeout(BUILD_AND_RUN_TIMEOUT_S)
def test_the_library_works_as_its_interface_says(tmp_path: Path) -> None:
    library = required_library()
    program = tmp_path / "test_native"
    build_native_test(program, LIBRARY_PATH)
    supported = library.supported_isas()
    assert_all_ran(run_program(program), supported, [isa for isa in ISAS if isa not in supported])


def widest_sets(supported: list[str], is_intel: bool) -> tuple[list[str], list[str]]:
    """Return the last set with all kernels and those after it, and what has to be built to run them."""
    if "avx512_bf16" in supported:
        supported = [isa for isa in supported if isa not in LIKE_AVX512_BF16]
    first = max(place for place, isa in enumerate(supported) if isa not in build.PARTIAL_SETS)
    widest = supported[first:]
    return widest, [*widest, *(BESIDE_AVX512_BF16 if is_intel and "avx512_bf16" in widest else ())]


@pytest.mark.parametrize(
    ("supported", "is_intel", "run", "beside"),
    [
        (["generic"], True, ["generic"], []),
        (["generic", "avx2", "avx_vnni"], True, ["avx2", "avx_vnni"], []),
        (["generic", "avx2", "avx512", "avx512_vnni"], True, ["avx512", "avx512_vnni"], []),
        ([*build.X86_SETS], True, ["avx512_bf16", "amx"], ["avx512_vnni"]),
        ([*build.X86_SETS], False, ["avx512_bf16", "amx"], []),
    ],
)
def test_the_widest_sets_need_no_others(
    supported: list[str], is_intel: bool, run: list[str], beside: list[str]
) -> None:
    assert widest_sets(supported, is_intel) == (run, run + beside)


@pytest.mark.usefixtures("compiler")
@pytest.mark.timeout(BUILD_AND_RUN_TIMEOUT_S)
def test_the_kernels_run_under_the_sanitizers(tmp_path: Path) -> None:
    """With the largest vectors; PAGEWICK_DEEP=1 takes all instruction sets of this processor."""
    program = tmp_path / "test_native"
    built = isas = required_library().supported_isas()
    if not IS_DEEP:
        processor = Path("/proc/cpuinfo")
        isas, built = widest_sets(isas, is_intel=not processor.exists() or "GenuineIntel" in processor.read_text())
    build_sanitized_test(program, built)
    assert_all_ran(run_program(program, *isas), isas, [])


@pytest.mark.usefixtures("compiler")
def test_the_thread_pool_has_no_races(tmp_path: Path) -> None:
    program = tmp_path / "test_pool"
    build_pool_test(program)
    run_program(program)


@pytest.mark.skipif(platform.machine() in ("aarch64", "arm64"), reason="other tests cover it on aarch64")
@pytest.mark.skipif(os.environ.get(NO_AARCH64) == "1", reason=f"{NO_AARCH64}=1: no cross compiler and emulator here")
@pytest.mark.timeout(BUILD_AND_RUN_TIMEOUT_S)
def test_the_kernels_run_on_aarch64(tmp_path: Path) -> None:
    """With NEON, and with most of its products of bytes; PAGEWICK_DEEP=1 runs the kernels of all sets."""
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    assert emulator, f"there is no qemu-aarch64: `make test` installs it as root; {NO_AARCH64}=1 leaves this test out"
    library, program = tmp_path / "libpagewick_cpu.so", tmp_path / "test_native"
    isas = [*build.ARM_SETS] if IS_DEEP else ["neon", "neon_i8mm"]
    # Optimising further would take more time than it saves in the emulator.
    build_library_of(library, isas, "aarch64")
    build_native_test(program, library, "aarch64")
    assert_all_ran(run_program(emulator, "-L", AARCH64_SYSROOT, program, *isas), isas, [])
    found = instructions_by_set("aarch64-linux-gnu-objdump", library)
    assert {"usdot", "usmmla"} <= found["neon_i8mm"]
    assert not {"sdot", "usdot", "usmmla"} & (found["neon"] | found.get("generic", set()))
    assert not IS_DEEP or "sdot" in found["neon_dotprod"]


@pytest.mark.usefixtures("compiler")
@pytest.mark.skipif(not HAS_STAND_INS, reason="the stand-ins need a processor with AVX-512 BF16")
@pytest.mark.timeout(BUILD_AND_RUN_TIMEOUT_S)
def test_kernels_for_instructions_that_the_processor_lacks(tmp_path: Path) -> None:
    """AMX's tile registers are memory here, and AVX-VNNI is AVX-512 VNNI: see native/stand_ins.h."""
    library, program = tmp_path / "libpagewick_cpu.so", tmp_path / "test_native"
    build_stand_in_library(library)
    build_native_test(program, library)
    output = run_program(program, *STAND_INS, *AMX_FAMILIES)
    assert [line.split()[1] for line in output.splitlines() if line.startswith("amx: ")] == list(AMX_FAMILIES)
    names = ("quantized", "quantized_experts", "tile_registers")
    tests = [str(Path(__file__).with_name(f"test_{name}.py")) for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, STAND_IN_LIBRARY: str(library)}
    result = subprocess.run(
        [*command, "-k", " or ".join((*STAND_INS, "tile_registers"))],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert "skipped" not in result.stdout


def instructions_by_set(objdump: str, library: Path) -> dict[str, set[str]]:
    """Disassemble a library; return the names of the instructions in the kernels of each instruction set."""
    command = (objdump, "-d", "-C", "--no-show-raw-insn", str(library))
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, set[str]] = {}
    current: set[str] = set()
    for line in listing.splitlines():
        if line.endswith(">:"):
            isa = re.search(r"pagewick::(\w+)::", line)
            current = found.setdefault(isa[1] if isa else "", set())
        elif len(parts := line.split("\t")) > 1:
            # An instruction in VEX's encoding that has another one is listed as "{vex} name".
            current.add(parts[1].removeprefix("{vex} ").split(" ")[0])
    return found


@pytest.mark.skipif("avx2" not in ISAS, reason="these are instructions of x86")
@pytest.mark.usefixtures("compiler")
def test_each_instruction_set_has_its_products_of_bytes() -> None:
    """Without them, results would be the same."""
    objdump = shutil.which("objdump")
    assert objdump, "objdump comes with the assembler that compilers need (Debian: binutils)"
    found = instructions_by_set(objdump, LIBRARY_PATH)
    assert {"tdpbssd", "tdpbsud", "vpdpbusd"} <= found["amx"]
    assert [isa for isa in ISAS if "vpdpbusd" in found[isa]] == ["avx_vnni", "avx512_vnni", "avx512_bf16", "amx"]


def test_the_build_needs_no_installed_package() -> None:
    """It runs as a script, before anything is: no module beside it may hide one of Python's own."""
    beside = {path.stem for path in Path(build.__file__).parent.glob("*.py")}
    assert not beside & sys.stdlib_module_names


@pytest.mark.skipif(cpu.library() is None, reason="needs the native library: make install")
@pytest.mark.parametrize("shape", [(0, 5), (7, 0), (0, 0)])
@pytest.mark.parametrize("num_rows", [1, 40])
def test_a_rank_may_have_no_share_of_a_weight(shape: tuple[int, int], num_rows: int) -> None:
    matrix = Matrix.empty(*shape, torch.bfloat16, "cpu")
    x, bias = torch.ones(num_rows, shape[1], dtype=torch.bfloat16), torch.full(shape[:1], 3, dtype=torch.bfloat16)
    assert matrix.linear(x).tolist() == [[0.0] * shape[0]] * num_rows
    assert matrix.linear(x, bias).tolist() == [[3.0] * shape[0]] * num_rows


@pytest.mark.skipif(cpu.library() is None, reason="needs the native library: make install")
def test_rows_that_are_one_number_too_wide() -> None:
    # Packed bfloat16 lies in pairs, so that 37 columns take as much memory as 38.
    with pytest.raises(ValueError, match=r"x \[1, 38\] does not fit"):
        Matrix.empty(8, 37, torch.bfloat16, "cpu").linear(torch.zeros(1, 38, dtype=torch.bfloat16))


@pytest.mark.skipif(cpu.library() is None, reason="needs the native library: make install")
def test_only_the_calls_of_the_recording_thread_are_recorded() -> None:
    """Results that another thread computes meanwhile are neither recorded nor put into the memory of the step."""
    matrix = Matrix.empty(64, 32, torch.float32, "cpu")
    matrix.load(torch.randn(64, 32), 0)
    x, others = torch.randn(3, 32), []

    def record_beside_another() -> list[torch.Tensor]:
        first = matrix.linear(x)
        thread = threading.Thread(target=lambda: others.append(matrix.linear(torch.full((3, 32), 2.0))))
        thread.start()
        thread.join()
        return [first]

    (result,), recorded = record(record_beside_another, StepMemory())
    assert isinstance(recorded, RecordedStep)
    expected, kept = matrix.linear(torch.zeros(3, 32)), others[0].clone()
    x.zero_()
    recorded.replay()
    assert torch.equal(result, expected) and torch.equal(others[0], kept)
