"""Blocks on disk: what was written is read back or is missing, whatever happened to the files in between."""

from __future__ import annotations

import errno
import hashlib
import itertools
import logging
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewick.engine.cache import disk_store
from pagewick.engine.cache.disk_store import DiskStore, hash_key
from pagewick.errors import ConfigError

SIZES = (24, 7)  # bytes of a block, per group
KEYS = [bytes([number]) * 16 for number in range(0xA0, 0xB0)]
KEY = KEYS[0]
HEADER_BYTES = 8 + 4 + 16 + 8 + 16

real_write = os.write


def make_store(
    directory: Path, *, rank: int = 0, fingerprint: str = "cafe", sizes: tuple[int, ...] = SIZES
) -> DiskStore:
    return DiskStore(directory, fingerprint=fingerprint, block_bytes=sizes, share=f"{rank}-of-2")


def content_of(group: int, number: int) -> bytes:
    return random.Random(f"{group} {number}").randbytes(SIZES[group])


def read(store: DiskStore, key: bytes, group: int = 0) -> bytes | None:
    out = bytearray(SIZES[group])
    return bytes(out) if store.read_into(group, key, memoryview(out)) else None


def path_of(directory: Path, key: bytes, group: int = 0) -> Path:
    return directory / "cafe" / "0-of-2" / str(group) / key.hex()[:2] / f"{key.hex()}.kv"


def files_below(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if not path.is_dir())


def put(directory: Path, keys: list[bytes], group: int = 0) -> None:
    with closing(make_store(directory)) as store:
        for number, key in enumerate(keys):
            store.write(group, key, content_of(group, number))


class Gate:
    """Holds the store's thread at its next write to a file, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_reached, self._is_open = threading.Event(), threading.Event()
        monkeypatch.setattr(os, "write", self._write)

    def _write(self, file: int, content: Any) -> int:
        self.is_reached.set()
        assert self._is_open.wait(60)
        return real_write(file, content)

    def open(self) -> None:
        self._is_open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The store's warnings, whether or not logging was set up."""
    found: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno == logging.WARNING:
                found.append(record.getMessage())

    monkeypatch.setattr(disk_store.logger, "handlers", [Collector()])
    monkeypatch.setattr(disk_store.logger, "propagate", False)
    return found


# The content of the files, and their permissions


def test_a_file_is_where_and_what_the_format_says(tmp_path: Path) -> None:
    key, content = bytes(range(0xF0, 0x100)), bytes(range(24))
    with closing(make_store(tmp_path / "new" / "cache")) as store:
        store.write(0, key, memoryview(content))
    name = "f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff"
    file = tmp_path / "new/cache/cafe/0-of-2/0/f0" / f"{name}.kv"
    checksum = hashlib.blake2b(content, digest_size=16).digest()
    expected = b"pagewick" + bytes([1, 0, 0, 0]) + key + bytes([24, 0, 0, 0, 0, 0, 0, 0]) + checksum + content
    assert file.read_bytes() == expected
    assert files_below(tmp_path) == [file]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for directory in itertools.takewhile(lambda parent: parent.name != "new", file.parents):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_a_copy_is_kept(tmp_path: Path, gate: Gate) -> None:
    content = bytearray(24)
    with closing(make_store(tmp_path)) as store:
        store.write(0, KEY, memoryview(content))
        content[:] = b"x" * 24
        gate.open()
        assert read(store, KEY) == bytes(24)
    assert path_of(tmp_path, KEY).read_bytes()[HEADER_BYTES:] == bytes(24)


def test_ranks_groups_and_fingerprints_are_apart(tmp_path: Path) -> None:
    put(tmp_path, [KEY])
    with closing(make_store(tmp_path, rank=1)) as other, closing(make_store(tmp_path, fingerprint="f00d")) as foreign:
        for store in (other, foreign):
            assert store.keys(0) == [] and read(store, KEY) is None
            store.delete(0, KEY)
    with closing(make_store(tmp_path)) as store:
        assert store.keys(0) == [KEY] and store.keys(1) == []
        assert read(store, KEY) == content_of(0, 0) and read(store, KEY, group=1) is None


def test_a_write_in_small_pieces_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", lambda file, content: real_write(file, content[:5]))
    put(tmp_path, [KEY])
    with closing(make_store(tmp_path)) as store:
        assert read(store, KEY) == content_of(0, 0)


# Any sequence of calls

CALLS = st.lists(
    st.tuples(st.sampled_from(["write", "read", "delete", "restart"]), st.integers(0, 1), st.integers(0, 3)),
    max_size=40,
)


@settings(max_examples=60)
@given(calls=CALLS)
def test_any_calls_are_those_of_a_dictionary(calls: list[tuple[str, int, int]]) -> None:
    """... which keeps its items in the order of their use, per group."""
    model: list[dict[bytes, bytes]] = [{}, {}]
    with tempfile.TemporaryDirectory() as name:
        store = make_store(Path(name))
        for number, (call, group, index) in enumerate([*calls, ("restart", 0, 0)]):
            key, items = KEYS[index], model[group]
            if call == "write":
                items.pop(key, None)
                items[key] = content_of(group, number)
                store.write(group, key, items[key])
            elif call == "read":
                assert read(store, key, group) == items.get(key)
                if key in items:
                    items[key] = items.pop(key)
            elif call == "delete":
                items.pop(key, None)
                store.delete(group, key)
            else:
                store.close()
                store = make_store(Path(name))
                assert [store.keys(0), store.keys(1)] == [list(items) for items in model]
        store.close()
        assert len(files_below(Path(name))) == sum(map(len, model))


def test_a_read_of_what_is_still_queued_counts_as_use(tmp_path: Path, gate: Gate) -> None:
    store = make_store(tmp_path)
    for number, key in enumerate(KEYS[:3]):
        store.write(0, key, content_of(0, number))
    assert gate.is_reached.wait(60)
    assert read(store, KEYS[0]) == content_of(0, 0)  # in the thread's hands
    assert read(store, KEYS[1]) == content_of(0, 1)
    gate.open()
    store.close()
    with closing(make_store(tmp_path)) as store:
        assert store.keys(0) == [KEYS[2], KEYS[0], KEYS[1]]


def test_changes_of_a_block_that_is_being_written(tmp_path: Path, gate: Gate) -> None:
    store = make_store(tmp_path)
    for number, key in enumerate(KEYS[:3]):
        store.write(0, key, content_of(0, number))
    assert gate.is_reached.wait(60)
    store.delete(0, KEYS[0])
    store.write(0, KEYS[1], content_of(0, 9))
    store.delete(0, KEYS[2])
    store.write(0, KEYS[2], content_of(0, 8))
    expected = [None, content_of(0, 9), content_of(0, 8)]
    assert [read(store, key) for key in KEYS[:3]] == expected
    gate.open()
    store.close()
    store.close()
    with closing(make_store(tmp_path)) as store:
        assert [read(store, key) for key in KEYS[:3]] == expected


def test_the_queue_is_bounded(tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_store, "MAX_QUEUED_BYTES", 3 * 24 + 23)
    store = make_store(tmp_path)
    num_returned = 0
    had_to_wait: list[int] = []
    has_room = store._has_room

    def watched(num_bytes: int) -> bool:
        if not (result := has_room(num_bytes)):
            had_to_wait.append(num_returned)
            gate.open()  # the only thing that can make room
        return result

    monkeypatch.setattr(store, "_has_room", watched)
    for number, key in enumerate(KEYS[:8]):
        store.write(0, key, content_of(0, number))
        num_returned += 1
    store.close()
    assert had_to_wait[0] == 3
    with closing(make_store(tmp_path)) as store:
        assert store.keys(0) == KEYS[:8]


def test_a_block_larger_than_the_queue_goes_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_store, "MAX_QUEUED_BYTES", 5)
    put(tmp_path, KEYS[:3])
    with closing(make_store(tmp_path)) as store:
        assert store.keys(0) == KEYS[:3]


# Damage


@pytest.mark.parametrize("length", [*range(HEADER_BYTES + 24), HEADER_BYTES + 25])
def test_a_file_of_another_length_is_missing(tmp_path: Path, length: int, warnings: list[str]) -> None:
    put(tmp_path, KEYS[:2])
    damaged = path_of(tmp_path, KEY)
    whole = damaged.read_bytes()
    with closing(make_store(tmp_path)) as store:
        damaged.write_bytes((whole + b"x")[:length])
        assert read(store, KEY) is None and not damaged.exists()
        assert len(warnings) == 1 and str(damaged) in warnings[0]
        assert read(store, KEYS[1]) == content_of(0, 1)
    damaged.write_bytes((whole + b"x")[:length])
    with closing(make_store(tmp_path)) as store:
        assert store.keys(0) == [KEYS[1]] and not damaged.exists()


def test_no_bit_can_be_flipped(tmp_path: Path, warnings: list[str]) -> None:
    put(tmp_path, [KEY])
    damaged = path_of(tmp_path, KEY)
    whole = damaged.read_bytes()
    with closing(make_store(tmp_path)) as store:
        for position, bit in itertools.product(range(len(whole)), range(8)):
            flipped = bytearray(whole)
            flipped[position] ^= 1 << bit
            damaged.write_bytes(flipped)
            assert read(store, KEY) is None and not damaged.exists(), (position, bit)
        damaged.write_bytes(whole)
        assert read(store, KEY) == content_of(0, 0)
    assert len(warnings) == 1  # a bad disk does not fill the log


def test_a_file_under_another_name_is_missing(tmp_path: Path) -> None:
    put(tmp_path, KEYS[:2])
    os.replace(path_of(tmp_path, KEYS[0]), path_of(tmp_path, KEYS[1]))
    with closing(make_store(tmp_path)) as store:
        assert read(store, KEYS[1]) is None
        store.write(0, KEYS[1], content_of(0, 5))
    with closing(make_store(tmp_path)) as store:
        assert read(store, KEYS[1]) == content_of(0, 5)


def test_a_disk_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    put(tmp_path, [KEY])

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with closing(make_store(tmp_path)) as store:
        assert read(store, KEY) is None
    assert not path_of(tmp_path, KEY).exists()
    assert len(warnings) == 1 and "Input/output error" in warnings[0]


def test_no_file_is_deleted_because_it_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    put(tmp_path, [KEY])
    with closing(make_store(tmp_path)) as store, monkeypatch.context() as patch:

        def fail(*_: object, **__: object) -> int:
            raise OSError(errno.EMFILE, "Too many open files")

        patch.setattr(os, "open", fail)
        assert read(store, KEY) is None
        patch.undo()
        assert read(store, KEY) == content_of(0, 0)
    assert len(warnings) == 1 and "Too many open files" in warnings[0]


# Disks that are full


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("num_good_calls", [0, 1])
def test_after_a_failed_write_only_reading_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str], code: int, num_good_calls: int
) -> None:
    put(tmp_path, KEYS[:2])
    calls = itertools.count()

    def fail(file: int, content: Any) -> int:
        if next(calls) < num_good_calls:
            return real_write(file, content)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "write", fail)
    store = make_store(tmp_path)
    assert store.can_write
    for key in KEYS[2:6]:
        store.write(0, key, content_of(0, 2))
    store.delete(0, KEYS[1])
    assert read(store, KEYS[0]) == content_of(0, 0)
    while store.can_write:  # the thread has not come to it yet
        store._thread.join(0.001)
    store.write(0, KEYS[6], content_of(0, 2))
    assert [read(store, key) for key in KEYS[1:7]] == [None] * 6
    store.close()
    assert files_below(tmp_path) == [path_of(tmp_path, KEYS[0])]
    assert len(warnings) == 1
    assert os.strerror(code) in warnings[0] and str(tmp_path) in warnings[0] and "--kv-cache-disk" in warnings[0]
    assert ("free some space" in warnings[0]) == (code in (errno.ENOSPC, errno.EDQUOT))


def test_nobody_waits_for_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_store, "MAX_QUEUED_BYTES", 24)

    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", fail)
    put(tmp_path, KEYS)
    assert files_below(tmp_path) == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_thread_that_has_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_store, "MAX_QUEUED_BYTES", 24)

    def fail(*_: object) -> int:
        raise RuntimeError("not the disk's fault")

    monkeypatch.setattr(os, "write", fail)
    put(tmp_path, KEYS)
    assert files_below(tmp_path) == []


def test_a_failed_delete_stops_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    """Else the directory would grow without bound."""
    put(tmp_path, [KEY])
    store = make_store(tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", fail)
        store.delete(0, KEY)
        store.close()
    assert not store.can_write and len(warnings) == 1 and "Read-only" in warnings[0]


LIMITED = """
import resource, sys
from pathlib import Path
from pagewick.engine.cache.disk_store import DiskStore
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
store = DiskStore(Path(sys.argv[1]), fingerprint="cafe", block_bytes=[24, 7], share="0-of-2")
store.write(1, b"k" * 16, b"7 bytes")
store.write(0, b"k" * 16, b"these are 24 other bytes")
store.close()
print(store.can_write)
"""


def test_a_limit_of_the_system_itself(tmp_path: Path) -> None:
    """The larger block does not fit: its first bytes are taken, then the system refuses."""
    result = run_python(LIMITED, tmp_path, HEADER_BYTES + 9)
    assert result.stdout == "False\n" and result.returncode == 0
    assert files_below(tmp_path) == [path_of(tmp_path, b"k" * 16, group=1)]
    with closing(make_store(tmp_path)) as store:
        assert read(store, b"k" * 16, group=1) == b"7 bytes"


def run_python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


# Crashes

CRASHING = """
import os, signal, sys
from pathlib import Path
from pagewick.engine.cache.disk_store import DiskStore
name, num_bytes = sys.argv[2], int(sys.argv[3])
real_write, real_replace = os.write, os.replace
def die():
    os.kill(os.getpid(), signal.SIGKILL)
def write(file, content):
    global num_bytes
    count = real_write(file, content[:num_bytes]) if num_bytes else die()
    num_bytes -= count
    return count
def replace(*args, **kwargs):
    if name == "before rename":
        die()
    real_replace(*args, **kwargs)
    if name == "after rename":
        die()
if name == "write":
    os.write = write
os.replace = replace
store = DiskStore(Path(sys.argv[1]), fingerprint="cafe", block_bytes=[24, 7], share="0-of-2")
store.write(0, bytes([0xA0]) * 16, b"these are 24 other bytes")
store.close()
"""


@pytest.mark.parametrize(
    ("moment", "num_bytes"),
    [
        ("write", 0),
        ("write", HEADER_BYTES - 1),
        ("write", HEADER_BYTES + 23),
        ("before rename", 0),
        ("after rename", 0),
    ],
)
@pytest.mark.parametrize("had_one", [False, True])
def test_a_crash_while_writing(tmp_path: Path, moment: str, num_bytes: int, had_one: bool) -> None:
    """The block is the old one or the new one, and nothing else stays."""
    if had_one:
        put(tmp_path, [KEY])
    assert run_python(CRASHING, tmp_path, moment, num_bytes).returncode == -signal.SIGKILL
    left = [path.name for path in files_below(tmp_path)]
    assert [name.endswith(".tmp") for name in left].count(True) == (moment != "after rename")
    expected = b"these are 24 other bytes" if moment == "after rename" else content_of(0, 0) if had_one else None
    with closing(make_store(tmp_path)) as store:
        assert store.keys(0) == ([KEY] if expected else [])
        assert files_below(tmp_path) == ([path_of(tmp_path, KEY)] if expected else [])
        assert read(store, KEY) == expected


# Several servers


def test_another_start_leaves_files_that_are_being_written(tmp_path: Path, gate: Gate) -> None:
    writer = make_store(tmp_path)
    writer.write(0, KEY, content_of(0, 3))
    assert gate.is_reached.wait(60)
    (temporary,) = files_below(tmp_path)
    assert temporary.name.endswith(".tmp")
    with closing(make_store(tmp_path)) as other:
        assert other.keys(0) == []
        assert files_below(tmp_path) == [temporary]
        gate.open()
        writer.close()
        assert read(other, KEY) == content_of(0, 3)


def test_a_temporary_file_that_goes_before_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another start can take it for one that a crash has left."""
    real_flock = disk_store.fcntl.flock
    calls = itertools.count()

    def flock(file: int, operation: int) -> None:
        if next(calls) == 0:
            (temporary,) = files_below(tmp_path)
            temporary.unlink()
        real_flock(file, operation)

    monkeypatch.setattr(disk_store.fcntl, "flock", flock)
    put(tmp_path, [KEY])
    assert files_below(tmp_path) == [path_of(tmp_path, KEY)]
    assert next(calls) == 2


BUSY = """
import random, sys
from pathlib import Path
from pagewick.engine.cache.disk_store import DiskStore
dice = random.Random(sys.argv[2])
keys = [bytes([number]) * 16 for number in range(6)]
for _ in range(8):
    store = DiskStore(Path(sys.argv[1]), fingerprint="cafe", block_bytes=[50_000, 7], share="0-of-2")
    assert store.keys(1) == []
    for _ in range(250):
        key, out = dice.choice(keys), bytearray(50_000)
        call = dice.randrange(4)
        if call == 0:
            store.delete(0, key)
        elif call == 1:
            store.write(0, key, key[:1] * 49_999 + bytes([dice.randrange(256)]))
        elif store.read_into(0, key, memoryview(out)):
            assert out[:-1] == key[:1] * 49_999
    assert store.can_write
    store.close()
"""


def test_servers_that_share_a_directory(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", BUSY, str(tmp_path)]
    servers = [subprocess.Popen([*command, str(n)], stderr=subprocess.PIPE, text=True) for n in range(3)]
    for server in servers:
        _, complaints = server.communicate(timeout=60)
        assert (server.returncode, complaints) == (0, "")
    with closing(make_store(tmp_path, sizes=(50_000, 7))) as store:
        files = files_below(tmp_path)
        assert sorted(store.keys(0)) == [bytes.fromhex(file.stem) for file in files] and files
        for file in files:
            key = bytes.fromhex(file.stem)
            out = bytearray(50_000)
            assert store.read_into(0, key, memoryview(out)) and out[:-1] == key[:1] * 49_999


def test_blocks_that_another_server_deletes(tmp_path: Path, warnings: list[str]) -> None:
    put(tmp_path, KEYS[:2])
    with closing(make_store(tmp_path)) as store, closing(make_store(tmp_path)) as other:
        other.delete(0, KEY)
        other.close()
        assert read(store, KEY) is None
        assert read(store, KEYS[1]) == content_of(0, 1)
        store.delete(0, KEY)
    assert warnings == []


# Foreign files in the directory


def test_a_directory_that_leads_out_is_not_followed(tmp_path: Path, warnings: list[str]) -> None:
    outside, directory = tmp_path / "outside", tmp_path / "cache"
    put(directory, [KEY])
    prefix = path_of(directory, KEY).parent
    prefix.rename(outside)
    prefix.symlink_to(outside)
    (outside / f".{KEY.hex()}.0123456789abcdef.tmp").touch()
    before = {path: path.read_bytes() for path in files_below(outside)}
    with closing(make_store(directory)) as store:
        assert store.keys(0) == []
        assert read(store, KEY) is None
        store.write(0, KEY, content_of(0, 1))
    with closing(make_store(directory)) as store:
        store.delete(0, KEY)
    assert {path: path.read_bytes() for path in files_below(outside)} == before
    assert not store.can_write and str(directory) in warnings[-1]


def test_a_file_that_leads_out_is_not_followed(tmp_path: Path) -> None:
    outside, directory = tmp_path / "outside.kv", tmp_path / "cache"
    put(directory, [KEY])
    path_of(directory, KEY).rename(outside)
    whole = outside.read_bytes()
    path_of(directory, KEY).symlink_to(outside)
    with closing(make_store(directory)) as store:
        assert store.keys(0) == []
        assert read(store, KEY) is None
        store.write(0, KEY, content_of(0, 1))
    assert outside.read_bytes() == whole
    with closing(make_store(directory)) as store:
        assert read(store, KEY) == content_of(0, 1)


@pytest.mark.parametrize("level", ["cafe", "cafe/0-of-2", "cafe/0-of-2/1"])
def test_a_link_above_the_blocks_is_refused(tmp_path: Path, level: str) -> None:
    outside, link = tmp_path / "outside", tmp_path / "cache" / level
    outside.mkdir()
    link.parent.mkdir(parents=True)
    link.symlink_to(outside)
    with pytest.raises(ConfigError, match="--kv-cache-disk"):
        make_store(tmp_path / "cache")
    assert list(outside.iterdir()) == []


def test_the_directory_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert hash_key(tmp_path / "link") == hash_key(tmp_path / "real")
    put(tmp_path / "link", [KEY])
    assert path_of(tmp_path / "real", KEY).exists()


def test_what_is_not_ours_does_no_harm_and_stays(tmp_path: Path) -> None:
    put(tmp_path, KEYS[:2])
    group, prefix = path_of(tmp_path, KEY).parents[1], path_of(tmp_path, KEY).parent
    junk = [
        tmp_path / "notes.txt", tmp_path / "cafe" / "x", group / "readme", group / "ff", group / "f",
        prefix / "a0.kv", prefix / f"{KEY.hex()}.kv~", prefix / f"{KEY.hex().upper()}.kv", prefix / f"{KEY.hex()}.kv\n",
        prefix / f"{KEYS[1].hex()}.kv", prefix / f"{KEY.hex()}.tmp", prefix / os.fsdecode(b"\xff\xfe.kv"),
    ]  # fmt: skip
    for path in junk:
        path.write_bytes(b"junk")
    (prefix / f"{KEY.hex()[:-1]}1.kv").mkdir()
    os.mkfifo(prefix / f"{KEY.hex()[:-1]}2.kv")
    os.mkfifo(prefix / f".{KEY.hex()}.0123456789abcdef.tmp")
    (prefix / f".{KEY.hex()}.0123456789abcdee.tmp").symlink_to(tmp_path / "notes.txt")
    # As long as a block's file.
    (prefix / f"{KEY.hex()[:-1]}3.kv").symlink_to("x" * (HEADER_BYTES + 24))
    with closing(make_store(tmp_path)) as store:
        assert store.keys(0) == KEYS[:2]
        for last in (1, 2, 3):
            assert read(store, bytes.fromhex(KEY.hex()[:-1] + str(last))) is None
        assert [read(store, key) for key in KEYS[:2]] == [content_of(0, 0), content_of(0, 1)]
        assert store.can_write
    assert all(path.read_bytes() == b"junk" for path in junk)


@pytest.mark.parametrize("make", [hash_key, make_store])
def test_a_directory_that_cannot_be_used(tmp_path: Path, make: Callable[[Path], object]) -> None:
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/pagewick")):
        with pytest.raises(ConfigError, match=rf"{directory}.*--kv-cache-disk"):
            make(directory)


@pytest.mark.parametrize("make", [hash_key, make_store])
def test_a_directory_that_may_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], object]
) -> None:
    hash_key(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)  # root may write everything
    with pytest.raises(ConfigError, match=r"Permission denied.*--kv-cache-disk"):
        make(tmp_path)


def test_advice_fits_what_is_wrong_with_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    for name, advice in (
        ("file", "a file has this name; give --kv-cache-disk the name of a directory"),
        ("file/below", "a part of this path is a file; give --kv-cache-disk the name of a directory"),
        ("shared", f"chmod go-w {tmp_path}/shared if it is yours, or give --kv-cache-disk a new directory"),
    ):
        with pytest.raises(ConfigError) as refusal:
            hash_key(tmp_path / name)
        assert str(refusal.value).endswith(advice)


# The key of the hashes


def test_the_hash_key_stays(tmp_path: Path) -> None:
    key = hash_key(tmp_path / "a")
    assert len(key) == 32 and hash_key(tmp_path / "a") == key != hash_key(tmp_path / "b")
    assert (tmp_path / "a" / "hash.key").read_bytes() == key
    assert stat.S_IMODE((tmp_path / "a" / "hash.key").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700
    assert [path.name for path in files_below(tmp_path / "a")] == ["hash.key"]


@pytest.mark.parametrize("length", [1, 31, 33, 4096])
def test_a_hash_key_of_another_length_is_refused(tmp_path: Path, length: int) -> None:
    (tmp_path / "hash.key").write_bytes(b"k" * length)
    with pytest.raises(ConfigError, match=r"hash\.key.*32 bytes.*delete it.*--kv-cache-disk"):
        hash_key(tmp_path)
    assert (tmp_path / "hash.key").read_bytes() == b"k" * length


def test_a_crash_before_the_hash_key_was_written(tmp_path: Path) -> None:
    (tmp_path / "hash.key").touch(mode=0o600)
    key = hash_key(tmp_path)
    assert len(key) == 32 and hash_key(tmp_path) == key


def test_a_hash_key_elsewhere_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "hash.key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="--kv-cache-disk"):
        hash_key(tmp_path / "cache")
    assert not (tmp_path / "elsewhere").exists()


def test_servers_that_start_together_get_one_hash_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second comes while the first has not written its key yet."""
    real_flock, token_bytes = disk_store.fcntl.flock, disk_store.secrets.token_bytes
    num_arrived = threading.Semaphore(0)
    keys: list[bytes] = []
    second = threading.Thread(target=lambda: keys.append(hash_key(tmp_path)))

    def flock(file: int, operation: int) -> None:
        num_arrived.release()
        real_flock(file, operation)

    def let_the_second_come(num_bytes: int) -> bytes:
        if second.ident is None:
            second.start()
            assert num_arrived.acquire(timeout=60) and num_arrived.acquire(timeout=60)
        return token_bytes(num_bytes)

    monkeypatch.setattr(disk_store.fcntl, "flock", flock)
    monkeypatch.setattr(disk_store.secrets, "token_bytes", let_the_second_come)
    keys.append(hash_key(tmp_path))
    second.join(60)
    assert keys == [keys[0]] * 2
