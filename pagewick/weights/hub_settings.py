"""HubSettings: a hub's address, its cache on this disk, and the user's token. Imports no torch, connects to nothing.

The environment is read at every call, in the way that each hub's own package reads it.

Hugging Face's cache (https://huggingface.co/docs/huggingface_hub/guides/manage-cache) has blobs/<etag>,
snapshots/<commit>/<name> linking to it, refs/<revision> holding the commit.

ModelScope's is laid out as the modelscope package has it: <cache>/models/<owner>/<name>/<file>, with ___ for a dot in
the name. It keeps one version of a model, so a revision other than the default gets a directory <name>@<revision>
beside it. Pagewick writes to a file of its own in the directory which files it has checked.
"""

from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar, Final, Self

from pagewick.weights.files import GGUF_SUFFIX, missing_files
from pagewick.weights.gguf.choice import candidates, complete_models
from pagewick.weights.module_files import missing_module_files
from pagewick.weights.progress import is_true

_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_HUGGING_FACE: Final = "https://huggingface.co"
_MODELSCOPE: Final = "https://www.modelscope.cn"
STORAGE_PREFIX: Final = "models--"  # of a model's directory in Hugging Face's cache
# In ModelScope's cache: Pagewick's notes, the replacement for a dot, and the mark before a revision.
STATE_NAME: Final = ".pagewick.json"
DOT: Final = "___"
REVISION_MARK: Final = "@"


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
        return missing_files(directory) + missing_module_files(directory)

    def gguf_files(self, directory: Path) -> dict[str, int]:
        """Return the sizes of the complete GGUF files in a directory of the cache, by their names within it."""
        found = {path.relative_to(directory).as_posix(): path for path in directory.rglob(f"*{GGUF_SUFFIX}")}
        return {name: path.stat().st_size for name, path in found.items() if path.is_file() and name[0] != "."}

    def find_cached(self, model: str, revision: str, gguf: str | None = None) -> Path | None:
        """Return the directory of a complete revision in the cache, or None.

        It may be a complete GGUF file instead: the one that `gguf` names, or, where there is nothing else, the best.
        """
        directory = self.cached_directory(model, revision)
        if directory is None or (gguf is None and not self.missing(directory)):
            return directory
        found = candidates(complete_models(self.gguf_files(directory)), gguf)
        return directory / found[0].first if len(found) == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceSettings(HubSettings):
    """The settings of huggingface_hub. token_path: file with the token of a login."""

    default_revision: ClassVar[str] = "main"
    cache_variable: ClassVar[str] = "HF_HOME"
    endpoint_variable: ClassVar[str] = "HF_ENDPOINT"

    token_path: Path

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], token: str | None = None) -> HuggingFaceSettings:
        """Read HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_TOKEN_PATH, HF_ENDPOINT, HF_HUB_OFFLINE and their older names."""
        cache_home = expand_path(environment.get("XDG_CACHE_HOME") or "~/.cache")
        home = expand_path(environment.get("HF_HOME") or str(cache_home / "huggingface"))
        cache_dir = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
        token = token or environment.get("HF_TOKEN") or environment.get("HUGGING_FACE_HUB_TOKEN") or ""
        return cls(
            endpoint=(environment.get("HF_ENDPOINT") or _HUGGING_FACE).rstrip("/"),
            cache_dir=expand_path(cache_dir or str(home / "hub")),
            token_path=expand_path(environment.get("HF_TOKEN_PATH") or str(home / "token")),
            token=token.strip() or None,
            offline=is_offline(environment),
        )

    def storage_dir(self, model: str) -> Path:
        """Return the directory of the cache that holds one model's blobs/, refs/ and snapshots/."""
        return self.cache_dir / f"{STORAGE_PREFIX}{model.replace('/', '--')}"

    def cached_directory(self, model: str, revision: str) -> Path | None:
        """Return the snapshot of a revision, complete or not; None if there is none."""
        storage = self.storage_dir(model)
        commit = revision
        if not is_commit(revision):
            ref = storage / "refs" / revision
            commit = ref.read_text().strip() if ref.is_file() else ""
        snapshot = storage / "snapshots" / commit
        return snapshot if is_commit(commit) and snapshot.is_dir() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelScopeSettings(HubSettings):
    """The settings of the modelscope package. HF_HUB_OFFLINE holds for this hub, too."""

    default_revision: ClassVar[str] = "master"
    cache_variable: ClassVar[str] = "MODELSCOPE_CACHE"
    endpoint_variable: ClassVar[str] = "MODELSCOPE_ENDPOINT"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], token: str | None = None) -> ModelScopeSettings:
        """Read MODELSCOPE_ENDPOINT or _DOMAIN, _CACHE and _API_TOKEN."""
        endpoint = environment.get("MODELSCOPE_ENDPOINT") or environment.get("MODELSCOPE_DOMAIN") or _MODELSCOPE
        token = token or environment.get("MODELSCOPE_API_TOKEN") or ""
        return cls(
            endpoint=(endpoint if "://" in endpoint else f"https://{endpoint}").rstrip("/"),
            cache_dir=expand_path(environment.get("MODELSCOPE_CACHE") or "~/.cache/modelscope/hub"),
            token=token.strip() or None,
            offline=is_offline(environment),
        )

    def model_dir(self, model: str, revision: str) -> Path:
        """Return where a revision of a model belongs."""
        owner, _, name = model.partition("/")
        suffix = "" if revision == self.default_revision else f"{REVISION_MARK}{revision.replace('/', '--')}"
        return self.cache_dir / "models" / owner / (name.replace(".", DOT) + suffix)

    def cached_directory(self, model: str, revision: str) -> Path | None:
        """Return the directory of a revision, complete or not; None if there is none."""
        directory = self.model_dir(model, revision)
        return directory if directory.is_dir() else None

    def gguf_files(self, directory: Path) -> dict[str, int]:
        """Leave out files that an update by Pagewick was to replace."""
        state, sizes = CacheState.read(directory), HubSettings.gguf_files(self, directory)
        return sizes if state is None else {name: size for name, size in sizes.items() if name in state.files}

    def missing(self, directory: Path) -> list[str]:
        """Return the names of missing files, or a remark if an update by Pagewick stopped half way."""
        state = CacheState.read(directory)
        is_current = state is None or state.is_complete
        return HubSettings.missing(self, directory) or ([] if is_current else ["its newest version"])


@dataclass(slots=True)
class CacheState:
    """Pagewick's notes on a model's directory. files: name -> SHA-256 of the files whose hash was right."""

    is_complete: bool
    files: dict[str, str]

    @classmethod
    def read(cls, directory: Path) -> CacheState | None:
        """Read the notes; None if there are none or they cannot be used."""
        try:
            value = json.loads((directory / STATE_NAME).read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        files = value.get("files") if isinstance(value, dict) else None
        if not isinstance(files, dict) or not all(is_sha256(digest) for digest in files.values()):
            return None
        return cls(value.get("is_complete") is True, files)

    def write(self, directory: Path) -> None:
        """Replace the notes in one step."""
        temporary = directory / f"{STATE_NAME}.{os.getpid()}.tmp"
        temporary.write_text(json.dumps(asdict(self)))
        os.replace(temporary, directory / STATE_NAME)


def is_sha256(value: object) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def is_offline(environment: Mapping[str, str]) -> bool:
    """Whether the environment forbids connections to any hub."""
    return is_true(environment.get("HF_HUB_OFFLINE") or environment.get("TRANSFORMERS_OFFLINE"))


def is_commit(revision: str) -> bool:
    """Whether a revision is the full hash of a commit."""
    return _COMMIT.fullmatch(revision) is not None


def expand_path(text: str) -> Path:
    """Return a path in which variables and the home directory are filled in."""
    return Path(os.path.expandvars(text)).expanduser()
