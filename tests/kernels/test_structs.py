"""The Python side of the library's C ABI is what the headers say: generated, committed, and laid out alike."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from pagewick.errors import ConfigError
from pagewick.kernels.cpu import build, structs, structs_from_headers
from pagewick.kernels.cpu.binding import LIBRARY_PATH, Operation, load
from tests.kernels.conftest import required_library

ARGS = [value for name, value in vars(structs).items() if name.endswith("Args")]


def test_the_committed_module_is_what_the_headers_give() -> None:
    committed = structs_from_headers.OUTPUT.read_text(encoding="utf-8")
    assert committed == structs_from_headers.generate(), "run `make structs`"


def test_every_struct_is_laid_out_as_the_compiler_does_it(tmp_path: Path) -> None:
    assert len(ARGS) > 15
    try:
        compiler = build.find_compiler()
    except ConfigError as error:
        pytest.skip(str(error))
    headers = sorted(path.name for path in structs_from_headers.SOURCE_DIR.glob("*.h") if "Args {" in path.read_text())
    lines = ["#include <cstddef>", *(f'#include "{name}"' for name in headers), "using namespace pagewick;"]
    for each in ARGS:
        lines.append(f"static_assert(sizeof({each.__name__}) == {ctypes.sizeof(each)});")
        for name, *_ in each._fields_:
            field = getattr(each, name)
            lines.append(f"static_assert(offsetof({each.__name__}, {name}) == {field.offset});")
            lines.append(f"static_assert(sizeof({each.__name__}::{name}) == {field.size});")
    source = tmp_path / "layout.cpp"
    source.write_text("\n".join(lines) + "\n")
    command = (compiler, "-std=c++17", "-fsyntax-only", f"-I{structs_from_headers.SOURCE_DIR}", str(source))
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_library_has_every_operation_with_arguments_of_this_size() -> None:
    library = required_library()
    handle = ctypes.CDLL(str(LIBRARY_PATH))
    for name, args in structs.OPERATIONS.items():
        assert handle.pw_args_size(library.operation(name)) == ctypes.sizeof(args), name
    with pytest.raises(ValueError, match="no operation 'square_root'"):
        library.operation("square_root")


@pytest.mark.parametrize("name", ["rms_norm", "square_root"])
def test_a_library_with_other_arguments_or_operations_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    required_library()
    for variable in ("PAGEWICK_NATIVE", "PAGEWICK_CPU_ISA"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setitem(structs.OPERATIONS, name, structs.PackArgs)
    assert load() == (None, "libpagewick_cpu.so was built from other sources; run `make install`")


def test_arguments_are_checked() -> None:
    with pytest.raises(AttributeError, match="strides"):
        structs.PackArgs(strides=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        structs.PackArgs(dtype=1.5)  # type: ignore[call-arg, arg-type]
    with pytest.raises(AssertionError, match="route takes RouteArgs"):
        Operation("route", structs.PackArgs)


HEADER = """
#pragma once
#include "base.h"

enum class Kind : int32_t { kPlain = 0, kSumOfTwo = 3 };

// A struct that is none of the ABI's: std::vector<int> fields;
struct Unit {
  int64_t first;
};

struct InnerArgs {
  const float* weights;  // [n], or null
  Kind kind;
};

struct OuterArgs {
  InnerArgs inner;
  Shape shape;
  double factor;
  int64_t* out;
};
"""
BASE = """
constexpr int kAbiVersion = 7;
constexpr int64_t kMaxStreams = 8;
constexpr int64_t kPanelRows = 64;
enum Shape : int32_t { kWide = 1 };
"""
OPERATIONS = """
#define PW_OPERATION(name, Args) {#name, sizeof(Args)}
    PW_OPERATION(inner, InnerArgs),
    PW_EXPECTED(outer, OuterArgs, expect_outer),
"""


def generated(tmp_path: Path, *, header: str = HEADER, base: str = BASE, operations: str = OPERATIONS) -> str:
    for name, text in {"a.h": header, "base.h": base, "ops.cpp": operations}.items():
        (tmp_path / name).write_text(text)
    return structs_from_headers.generate(tmp_path)


def test_what_is_made_of_headers(tmp_path: Path) -> None:
    text = generated(tmp_path)
    assert text.startswith(structs_from_headers.HEAD)
    assert (
        text.removeprefix(structs_from_headers.HEAD)
        == """ABI_VERSION = 7
MAX_STREAMS = 8
PANEL_ROWS = 64

class Shape(IntEnum):
    WIDE = 1

class Kind(IntEnum):
    PLAIN = 0; SUM_OF_TWO = 3

@laid_out
class InnerArgs(Structure):
    weights: Address; kind: Int32

@laid_out
class OuterArgs(Structure):
    inner: InnerArgs; shape: Int32; factor: Double; out: Address

# The argument struct of each operation.
OPERATIONS: dict[str, type[Structure]] = {
    "inner": InnerArgs, "outer": OuterArgs
}
"""
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"header": HEADER.replace("double factor", "double factor[2]")}, r"OuterArgs has a field that cannot be read"),
        ({"header": HEADER.replace("double factor", "size_t factor")}, "OuterArgs.factor has a type .* size_t"),
        ({"base": BASE.replace("kPanelRows = 64", "kPanelRows = 8 * 8")}, "no header defines kPanelRows"),
        ({"operations": OPERATIONS.replace("OuterArgs", "OtherArgs")}, "outer takes OtherArgs, which no header"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generated(tmp_path, **changes)
