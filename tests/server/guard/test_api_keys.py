"""API keys: their sources, those that are refused, and that nothing shows them."""

from __future__ import annotations

import hmac
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagewick.errors import ConfigError
from pagewick.server.guard import api_keys
from pagewick.server.guard.api_keys import MAX_FILE_BYTES, VARIABLES, ApiKeys
from pagewick.server.settings import ServerSettings

KEYS = [f"key-number-{number}" for number in range(4)]


def load(environ: dict[str, str] | None = None, **fields: Any) -> ApiKeys:
    return ApiKeys(ServerSettings(served_model_name=("m",), **fields), environ or {})


def key_file(directory: Path, content: str | bytes, mode: int = 0o600) -> str:
    path = directory / "keys"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(mode)
    return str(path)


def test_no_keys_let_nobody_in() -> None:
    keys = load()
    assert not keys and len(keys) == 0
    assert keys.check(b"") is None and keys.check(KEYS[0].encode()) is None


def test_keys_come_from_everywhere(tmp_path: Path) -> None:
    file = key_file(tmp_path, f"\ufeff# who may\n\n  alice:{KEYS[0]}  \r\n{KEYS[1]}\n#{KEYS[3]}\n")
    environ = dict.fromkeys(VARIABLES, KEYS[2]) | {"API_KEY": KEYS[3], "OPENAI_API_KEY": KEYS[3]}
    keys = load(environ, api_key=("from-the-flag", KEYS[1]), api_key_file=file)
    assert len(keys) == 4
    ids = [keys.check(key.encode()) for key in (*KEYS, "from-the-flag")]
    assert ids[0] == "alice" and ids[3] is None
    assert len({*ids}) == 5
    assert keys.check(b"alice") is None and keys.check(f"alice:{KEYS[0]}".encode()) is None
    for variable in VARIABLES:
        assert load({variable: KEYS[0]}).check(KEYS[0].encode()) is not None


def test_ids_are_stable_and_names_win(tmp_path: Path) -> None:
    unnamed = load(api_key=(KEYS[0],)).check(KEYS[0].encode())
    assert unnamed == load({"PAGEWICK_API_KEY": KEYS[0]}).check(KEYS[0].encode())
    assert unnamed is not None and unnamed.startswith("key-") and len(unnamed) == 12
    # The same key twice, once with a name.
    for lines in (f"bob:{KEYS[0]}\n{KEYS[0]}", f"{KEYS[0]}\nbob:{KEYS[0]}"):
        keys = load(api_key=(KEYS[0],), api_key_file=key_file(tmp_path, lines))
        assert len(keys) == 1 and keys.check(KEYS[0].encode()) == "bob"
    # Two keys of one client, while it changes from the one to the other.
    keys = load(api_key_file=key_file(tmp_path, f"bob:{KEYS[0]}\nbob:{KEYS[1]}"))
    assert [keys.check(key.encode()) for key in KEYS[:3]] == ["bob", "bob", None]
    with pytest.raises(ConfigError, match="bob and eve have the same"):
        load(api_key_file=key_file(tmp_path, f"bob:{KEYS[0]}\neve:{KEYS[0]}"))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("", "is empty; it must have 8 to 1024 characters"),
        ("1234567", "is 7 characters long"),
        ("x" * 1025, "1025 characters long"),
        ("with space", "spaces"),
        ("new\nlines\n", "spaces"),
        ("schlüssel", "ASCII"),
        ("nul\0inside", "ASCII"),
    ],
)
def test_bad_keys_are_refused_without_being_shown(key: str, message: str) -> None:
    for origin, make in {
        "--api-key": lambda: load(api_key=(key,)),
        VARIABLES[0]: lambda: load({VARIABLES[0]: key}),
    }.items():
        with pytest.raises(ConfigError, match=message) as caught:
            make()
        assert origin in str(caught.value)
        assert not key or key not in str(caught.value)


def test_bad_files_are_refused(tmp_path: Path) -> None:
    def refused(content: str | bytes, message: str, mode: int = 0o600) -> None:
        with pytest.raises(ConfigError, match=message) as caught:
            load(api_key_file=key_file(tmp_path, content, mode))
        assert KEYS[0] not in str(caught.value)

    refused("", "has no key")
    refused("# nothing\n", "has no key")
    refused(f"{KEYS[0]}\nshort\n", "line 2 of .* is 5 characters long")
    refused("alice:\n", "line 1 of .* is empty")
    refused(b"\xff\xfe" + KEYS[0].encode(), "UTF-8")
    refused(b"x" * (MAX_FILE_BYTES + 1), "larger than 1 MiB")
    for mode in (0o604, 0o602, 0o601, 0o620, 0o644, 0o666):
        refused(KEYS[0], f"open to other users \\(mode {mode:04o}\\); chmod 600", mode)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(api_key_file=str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="cannot be read"):
        load(api_key_file=str(tmp_path))
    for mode in (0o600, 0o400, 0o440):
        assert load(api_key_file=key_file(tmp_path, KEYS[0], mode))
        (tmp_path / "keys").unlink()


def test_keys_may_come_through_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path, 0o600)
    writer = threading.Thread(target=path.write_text, args=(KEYS[0],))
    writer.start()
    assert load(api_key_file=str(path)).check(KEYS[0].encode())
    writer.join()


def test_the_file_is_read_again(tmp_path: Path) -> None:
    file = key_file(tmp_path, KEYS[0])
    keys = load(api_key=(KEYS[2],), api_key_file=file)
    key_file(tmp_path, KEYS[1])
    assert keys.check(KEYS[1].encode()) is None
    keys.reload()
    assert [keys.check(key.encode()) is not None for key in KEYS] == [False, True, True, False]
    # A mistake changes nothing.
    for content, mode in [("", 0o600), (KEYS[3], 0o644), ("short", 0o600)]:
        key_file(tmp_path, content, mode)
        with pytest.raises(ConfigError):
            keys.reload()
        assert [keys.check(key.encode()) is not None for key in KEYS] == [False, True, True, False]


def test_every_key_is_compared_with_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    really_compare = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return really_compare(one, other)

    keys = load(api_key=tuple(KEYS))
    monkeypatch.setattr(api_keys.hmac, "compare_digest", compare)
    for sent in (*KEYS, "", "no key of ours", KEYS[0][:-1]):
        compared.clear()
        keys.check(sent.encode())
        assert len(compared) == len(KEYS)
        # Digests, whose length says nothing.
        assert {len(part) for pair in compared for part in pair} == {32}


def strings_in(value: object) -> Iterator[bytes]:
    seen: set[int] = set()
    open_values = [value]
    while open_values:
        one = open_values.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, str | bytes):
            yield one.encode() if isinstance(one, str) else one
        elif isinstance(one, list | tuple):
            open_values += one
        elif hasattr(one, "__dict__"):
            open_values += vars(one).values()


def test_only_digests_are_kept(tmp_path: Path) -> None:
    keys = load({VARIABLES[0]: KEYS[1]}, api_key=(KEYS[0],), api_key_file=key_file(tmp_path, f"eve:{KEYS[2]}"))
    kept = list(strings_in(keys))
    assert b"eve" in kept
    assert not any(key.encode() in text for key in KEYS for text in kept)
    assert not any(key in repr(keys) for key in KEYS)


def test_another_process_can_use_the_same_keys_without_knowing_them(tmp_path: Path) -> None:
    keys = load({VARIABLES[0]: KEYS[1]}, api_key_file=key_file(tmp_path, f"eve:{KEYS[2]}"))
    others = load({})
    others.take(keys.known)
    assert [others.check(key.encode()) for key in KEYS] == [keys.check(key.encode()) for key in KEYS]
    assert others.check(KEYS[2].encode()) == "eve" and len(others) == 2
    assert not any(key.encode() in text for key in KEYS for text in strings_in(others))
