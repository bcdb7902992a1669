"""ApiKeys: the keys that clients must send, and where they come from. Only their digests are kept."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from pagewick.errors import ConfigError
from pagewick.log import get_logger, one_line
from pagewick.server.settings import ServerSettings

# The variables of vLLM and llama.cpp are read as well, so that a deployment that moves here stays locked.
VARIABLES = ("PAGEWICK_API_KEY", "VLLM_API_KEY", "LLAMA_API_KEY")
MIN_KEY_CHARS = 8
# A longer one would leave too little room for other headers.
MAX_KEY_CHARS = 1024
MAX_FILE_BYTES = 2**20

_logger = get_logger(__name__)

_NAMED = re.compile(r"([\w.-]{1,64}):(.*)", re.ASCII)
_PRINTABLE = re.compile(r"[!-~]+")


class _Key(NamedTuple):
    digest: bytes
    id: str


class ApiKeys:
    """The keys of a server; false if it has none. A client is known by the id of the key that it sends."""

    def __init__(self, settings: ServerSettings, environ: Mapping[str, str] = os.environ) -> None:
        """Take all keys of --api-key, --api-key-file and the environment.

        Raises ConfigError for a key that is too short, or a file that is missing, empty or open to others.
        """
        self._file = settings.api_key_file
        self._fixed = [*(_key(key, "--api-key") for key in settings.api_key), *_from_environment(environ)]
        self._keys: tuple[_Key, ...] = ()
        self.reload()

    def reload(self) -> None:
        """Read --api-key-file again. If it cannot be used, keeps the present keys and raises ConfigError."""
        in_file = list(_from_file(self._file)) if self._file is not None else []
        self._keys = _without_doubles([*in_file, *self._fixed])

    def try_reload(self) -> None:
        """Read --api-key-file again, and log whether that changed the keys."""
        try:
            self.reload()
        except ConfigError as error:
            _logger.error("the API keys stay as they are: %s", one_line(error))
        else:
            _logger.info("read the API keys again")

    @property
    def known(self) -> list[tuple[bytes, str]]:
        """The digest and the id of each key."""
        return list(self._keys)

    def take(self, known: Iterable[tuple[bytes, str]]) -> None:
        """Use the keys of another process' ApiKeys from now on."""
        self._keys = tuple(_Key(*key) for key in known)

    def check(self, key: bytes) -> str | None:
        """Return the id of a key that a client sent; None if the key is unknown.

        This takes the same time for every key, known or not: it compares the digests of all.
        """
        digest = _digest(key)
        found = None
        for known in self._keys:
            if hmac.compare_digest(known.digest, digest):
                found = known.id
        return found

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"ApiKeys({', '.join(key.id for key in self._keys)})"


def key_id(digest: bytes) -> str:
    """Return the id of a key without a name, for logs: the same after every start. It does not reveal the key."""
    return "key-" + hashlib.sha256(b"pagewick key id" + digest).hexdigest()[:8]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _key(text: str, origin: str, name: str | None = None) -> _Key:
    # Messages never show a part of the key: they end up in logs.
    if not MIN_KEY_CHARS <= len(text) <= MAX_KEY_CHARS:
        length = "empty" if not text else f"{len(text)} characters long"
        raise ConfigError(
            f"the API key from {origin} is {length}; it must have {MIN_KEY_CHARS} to {MAX_KEY_CHARS} characters "
            "(openssl rand -hex 24 makes a good one)"
        )
    if not _PRINTABLE.fullmatch(text):
        raise ConfigError(f"the API key from {origin} has spaces or non-ASCII characters, which headers cannot carry")
    digest = _digest(text.encode("ascii"))
    return _Key(digest, name or key_id(digest))


def _from_environment(environ: Mapping[str, str]) -> Iterator[_Key]:
    for variable in VARIABLES:
        key = environ.get(variable)
        # An empty one is refused: its owner meant to lock the server, and did not.
        if key is not None:
            yield _key(key, f"the environment variable {variable}")


def _from_file(path: str) -> Iterator[_Key]:
    num_keys = 0
    for number, line in enumerate(_read_private_file(path).splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        num_keys += 1
        named = _NAMED.fullmatch(text)
        name, key = named.groups() if named else (None, text)
        yield _key(key, f"line {number} of {path}", name)
    if not num_keys:
        raise ConfigError(f"--api-key-file {path} has no key; write one per line, as name:key or key")


def _read_private_file(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            # The open file is asked for its mode, so that it cannot be exchanged in between.
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        fix = "check the path; the file has a key on each line"
        raise ConfigError(f"--api-key-file {path} cannot be read ({error.strerror}); {fix}") from None
    # Its group may read it: that is how Kubernetes gives a secret to a user other than root.
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise ConfigError(
            f"--api-key-file {path} is open to other users (mode {stat.S_IMODE(mode):04o}); "
            "chmod 600 it (Kubernetes: defaultMode: 0440 of the secret's volume)"
        )
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"--api-key-file {path} is larger than {MAX_FILE_BYTES // 2**20} MiB; is it the right file?")
    try:
        return content.decode("utf-8-sig")  # a byte order mark is no part of the first key
    except UnicodeDecodeError:
        raise ConfigError(f"--api-key-file {path} is not a text file in UTF-8") from None


def _without_doubles(keys: list[_Key]) -> tuple[_Key, ...]:
    """Return each key once, under its name if it has one. Raises ConfigError for a key with two names."""
    found: dict[bytes, _Key] = {}
    for key in keys:
        known = found.setdefault(key.digest, key)
        if known.id != key.id and key.id != key_id(key.digest):
            if known.id != key_id(key.digest):
                raise ConfigError(f"{known.id} and {key.id} have the same API key; give each client one of its own")
            found[key.digest] = key
    return tuple(found.values())
