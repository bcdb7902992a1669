"""The release workflow calls scripts that exist, with no more rights than it needs; release/check finds faults."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.architecture.source import ROOT

WORKFLOW: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))
STEPS = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
LIBRARY = "pagewick/kernels/cpu/libpagewick_cpu.so"
NAME = "pagewick-0.1.0-py3-none-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl"


def test_every_step_is_a_script_of_the_repository() -> None:
    for step in STEPS:
        if "run" in step:
            program, *rest = step["run"].split()
            assert os.access(ROOT / program, os.X_OK) or (program == "make" and rest == ["install"]), step["run"]
        else:
            assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", step["uses"]), step["uses"]
            assert step["uses"].startswith("actions/checkout") <= (step["with"].get("persist-credentials") is False)


def test_only_publishing_has_an_identity_and_it_waits_for_all_else() -> None:
    assert WORKFLOW["permissions"] == {}
    for name, job in WORKFLOW["jobs"].items():
        wanted = {"contents": "read"} | ({"id-token": "write"} if name == "publish" else {})
        assert job["permissions"] == wanted
    assert set(WORKFLOW["jobs"]["publish"]["needs"]) == set(WORKFLOW["jobs"]) - {"publish"}
    assert WORKFLOW["jobs"]["publish"]["if"] == "github.ref_type == 'tag'"
    runs = [step["run"] for step in WORKFLOW["jobs"]["publish"]["steps"] if "run" in step]
    assert [run.split()[0] for run in runs] == ["release/check", "release/publish"]
    machines = [one["machine"] for one in WORKFLOW["jobs"]["build"]["strategy"]["matrix"]["include"]]
    assert machines == ["x86_64", "aarch64"]


def elf(machine: int) -> bytes:
    return b"\x7fELF" + bytes(14) + machine.to_bytes(2, "little")


@pytest.fixture(scope="module")
def package() -> dict[str, bytes]:
    listed = subprocess.run(["git", "ls-files", "pagewick"], cwd=ROOT, capture_output=True, text=True, check=True)
    return dict.fromkeys(listed.stdout.splitlines(), b"") | {LIBRARY: elf(62)}


Checked = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def checked(tmp_path: Path) -> Checked:
    """Returns a function that runs release/check on a wheel with these files."""

    def check(name: str, files: dict[str, bytes], *flags: str) -> subprocess.CompletedProcess[str]:
        with zipfile.ZipFile(tmp_path / name, "w") as wheel:
            for path, content in {**files, "pagewick-0.1.0.dist-info/METADATA": b""}.items():
                wheel.writestr(path, content)
        command = [sys.executable, str(ROOT / "release" / "check"), str(tmp_path), *flags]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    return check


def test_a_good_wheel_passes(checked: Checked, package: dict[str, bytes]) -> None:
    done = checked(NAME, package)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("pagewick-0.1.0-py3-none-linux_x86_64.whl", {}, "is not named"),
        (NAME.replace("x86_64", "aarch64"), {}, "of another machine"),
        (NAME, {LIBRARY: b"no library"}, "has no native library"),
        (NAME, {"tests/conftest.py": b""}, "has tests/conftest.py, which is no file of the package"),
        (NAME, {"pagewick/server/app.py": None}, "lacks pagewick/server/app.py"),
    ],
)
def test_the_check_finds_faults(
    checked: Checked, package: dict[str, bytes], name: str, change: dict[str, bytes | None], expected: str
) -> None:
    files = {path: content for path, content in {**package, **change}.items() if content is not None}
    done = checked(name, files)
    assert done.returncode == 1 and expected in done.stderr


def test_an_incomplete_or_unfinished_release_is_refused(checked: Checked, package: dict[str, bytes]) -> None:
    done = checked(NAME, package, "--complete", "--tag", "v9.9.9")
    assert done.returncode == 1
    for fault in (
        "no source archive",
        "no wheel for aarch64",
        "is not of version 9.9.9",
        "no section [9.9.9] with a date",
    ):
        assert fault in done.stderr
    assert "no wheel for x86_64" not in done.stderr


def test_a_broken_link_fails_the_build_of_the_site() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (command,) = re.findall(r"mkdocs build.*", makefile)
    # --quiet would hide the warnings from --strict, too.
    assert command == "mkdocs build --strict"
    validation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["validation"]
    assert validation["nav"]["omitted_files"] == "warn"
    assert {validation["links"][fault] for fault in ("not_found", "anchors", "absolute_links")} == {"warn"}
