"""Files of results are written as a whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagewick.cli.replacing_file import write_whole


def test_a_pipe_gets_the_content() -> None:
    reading, writing = os.pipe()
    try:
        write_whole(Path(f"/dev/fd/{writing}"), b"speed")
        assert os.read(reading, 100) == b"speed"
    finally:
        os.close(reading)
        os.close(writing)


def test_a_link_stays_one_and_its_file_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "file").chmod(0o604)
    (tmp_path / "link").symlink_to("file")
    write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_bytes() == b"new"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o604 and len(list(tmp_path.iterdir())) == 2


def test_a_device_that_is_full_stays_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "link", b"speed")
    assert (tmp_path / "link").is_symlink() and Path("/dev/full").exists()
