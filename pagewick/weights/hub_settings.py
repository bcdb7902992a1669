"""HubSettings: a hub's address, its cache on this disk, and the user's token. Imports no torch, connects to nothing."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final, Self

from pagewick.weights.files import missing_files

_TRUE: Final = frozenset({"1", "ON", "YES", "TRUE"})
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSettings(ABC):
    """The settings of one hub, from the variables of that hub's own package.

    default_revision: branch that is used if the user names none. cache_variable, endpoint_variable: environment
    variables that error messages name. offline: no hub may be connected to.
    """

    default_revision: ClassVar[str]
    cache_variable: ClassVar[str]
    endpoint_variable: ClassVar[str]

    endpoint: str
    cache_dir: Path
    token: str | None = field(repr=False)
    offline: bool

    @classmethod
    @abstractmethod
    def from_environment(cls, environment: Mapping[str, str], token: str | None = None) -> Self:
        """Read the variables of the hub's own package, with its names, defaults and precedence."""

    @abstractmethod
    def cached_directory(self, model: str, revision: str) -> Path | None:
        """Return the directory of a revision in the cache, complete or not; None if there is none."""

    def missing(self, directory: Path) -> list[str]:
        """Return the names of missing files in a directory of the cache; empty if it is a complete checkpoint."""
        return missing_files(directory)

    def find_cached(self, model: str, revision: str) -> Path | None:
        """Return the directory of a complete revision in the cache, or None."""
        directory = self.cached_directory(model, revision)
        return None if directory is None or self.missing(directory) else directory


def is_offline(environment: Mapping[str, str]) -> bool:
    """Whether the environment forbids connections to any hub."""
    return is_true(environment.get("HF_HUB_OFFLINE") or environment.get("TRANSFORMERS_OFFLINE"))


def is_true(value: str | None) -> bool:
    """Whether the value of a variable switches something on, as huggingface_hub reads it."""
    return (value or "").upper() in _TRUE


def is_commit(revision: str) -> bool:
    """Whether a revision is the full hash of a commit."""
    return _COMMIT.fullmatch(revision) is not None


def expand_path(text: str) -> Path:
    """Return a path in which variables and the home directory are filled in."""
    return Path(os.path.expandvars(text)).expanduser()
