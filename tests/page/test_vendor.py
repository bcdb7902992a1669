"""The chat page's libraries have the pinned versions and checksums, with licences. Needs no network."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

from pagewick.server.page_routes import PAGE_DIR

VENDOR = PAGE_DIR / "vendor"
PINS = Path(__file__).parents[2] / "vendor"
LIBRARIES = sorted(path for path in VENDOR.iterdir() if path.suffix in (".css", ".js"))
WANTED = json.loads((PINS / "package.json").read_text(encoding="utf-8"))["dependencies"]
LOCKED = json.loads((PINS / "package-lock.json").read_text(encoding="utf-8"))["packages"]

each_library = pytest.mark.parametrize("path", LIBRARIES, ids=lambda path: path.name)


def package_in(path: Path) -> tuple[str, str]:
    """Return the package and the version that the first line of a file names."""
    first_line = path.read_text(encoding="utf-8").partition("\n")[0]
    found = re.fullmatch(r"/\*! (\S+) (\S+); its licence: (\S+) \*/", first_line)
    assert found is not None and found[3] == f"{path.stem}.LICENSE.txt", first_line
    return found[1], found[2]


def test_the_files_have_their_checksums() -> None:
    lines = (VENDOR / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    expected = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in VENDOR.iterdir() if path.suffix}
    assert found == expected


@each_library
def test_every_file_is_of_the_pinned_version(path: Path) -> None:
    package, version = package_in(path)
    assert version == WANTED[package] == LOCKED[f"node_modules/{package}"]["version"]
    assert LOCKED[f"node_modules/{package}"]["integrity"].startswith("sha512-")


def test_every_package_is_pinned_and_shipped() -> None:
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in WANTED.values())
    assert {package_in(path)[0] for path in LIBRARIES} == set(WANTED)


@each_library
def test_every_library_has_its_licence_beside_it(path: Path) -> None:
    text = (VENDOR / f"{path.stem}.LICENSE.txt").read_text(encoding="utf-8")
    assert re.search(r"MIT License|Permission is hereby granted|Apache License|Redistribution and use", text)


@each_library
def test_no_library_makes_code_of_text_or_needs_a_file_that_is_not_shipped(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    forbidden = (
        r"\beval\(|new Function|sourceMappingURL"
        if path.suffix == ".js"
        else r"@font-face|@import|url\((?!['\"]?(?:data:|%23))"
    )
    assert re.findall(forbidden, text) == []
