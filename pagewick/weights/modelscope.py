"""ModelScope's hub: its settings, and its cache on this disk. Imports no torch and connects to nothing.

The cache is laid out as the modelscope package has it: <cache>/models/<owner>/<name>/<file>, with ___ for a dot in the
name. It keeps one version of a model, so a revision other than the default gets a directory <name>@<revision> beside
it. Pagewick writes to a file of its own in the directory which files it has checked.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, Final

from pagewick.weights.files import missing_files
from pagewick.weights.hub_settings import HubSettings, expand_path, is_offline

STATE_NAME: Final = ".pagewick.json"
DOT: Final = "___"
REVISION_MARK: Final = "@"

_DEFAULT_ENDPOINT: Final = "https://www.modelscope.cn"
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelScopeSettings(HubSettings):
    """The settings of the modelscope package. HF_HUB_OFFLINE holds for this hub, too."""

    default_revision: ClassVar[str] = "master"
    cache_variable: ClassVar[str] = "MODELSCOPE_CACHE"
    endpoint_variable: ClassVar[str] = "MODELSCOPE_ENDPOINT"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], token: str | None = None) -> ModelScopeSettings:
        """Read MODELSCOPE_ENDPOINT or _DOMAIN, _CACHE and _API_TOKEN."""
        endpoint = environment.get("MODELSCOPE_ENDPOINT") or environment.get("MODELSCOPE_DOMAIN") or _DEFAULT_ENDPOINT
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

    def missing(self, directory: Path) -> list[str]:
        """Return the names of missing files, or a remark if an update by Pagewick stopped half way."""
        state = CacheState.read(directory)
        is_current = state is None or state.is_complete
        return missing_files(directory) or ([] if is_current else ["its newest version"])


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
