"""Models of ModelScope: where they are kept on this disk, and when the hub is asked. Imports no torch.

The cache is laid out as the modelscope package has it: <cache>/models/<owner>/<name>/<file>, with ___ for a dot in the
name. It keeps one version of a model, so a revision other than the default gets a directory <name>@<revision> beside
it. What Pagewick has checked is written to a file of its own in the directory. HF_HUB_OFFLINE holds for this hub, too.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from pagewick.config import BUILTIN_MODEL
from pagewick.errors import ModelLoadError, ModelNotFoundError
from pagewick.weights.files import missing_files, name_some
from pagewick.weights.hub import is_offline
from pagewick.weights.progress import Progress

DEFAULT_REVISION: Final = "master"
STATE_NAME: Final = ".pagewick.json"

_DEFAULT_ENDPOINT: Final = "https://www.modelscope.cn"
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ModelScopeSettings:
    """Where ModelScope is, where its cache is, and who asks."""

    endpoint: str
    cache_dir: Path
    token: str | None = field(repr=False)
    offline: bool

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], token: str | None = None) -> ModelScopeSettings:
        """The variables of the modelscope package: MODELSCOPE_ENDPOINT or _DOMAIN, _CACHE and _API_TOKEN."""
        endpoint = environment.get("MODELSCOPE_ENDPOINT") or environment.get("MODELSCOPE_DOMAIN") or _DEFAULT_ENDPOINT
        cache_dir = environment.get("MODELSCOPE_CACHE")
        token = token or environment.get("MODELSCOPE_API_TOKEN") or ""
        return cls(
            endpoint=(endpoint if "://" in endpoint else f"https://{endpoint}").rstrip("/"),
            cache_dir=Path(os.path.expandvars(cache_dir or "~/.cache/modelscope/hub")).expanduser(),
            token=token.strip() or None,
            offline=is_offline(environment),
        )

    def model_dir(self, model: str, revision: str) -> Path:
        """The directory of one revision of a model."""
        owner, _, name = model.partition("/")
        suffix = "" if revision == DEFAULT_REVISION else f"@{revision.replace('/', '--')}"
        return self.cache_dir / "models" / owner / (name.replace(".", "___") + suffix)


@dataclass(slots=True)
class CacheState:
    """What is known of a model's directory. files: name -> SHA-256 of the files that were found right."""

    is_complete: bool
    files: dict[str, str]

    @classmethod
    def read(cls, directory: Path) -> CacheState | None:
        """What was written last; None if nothing was, or nothing usable."""
        try:
            value = json.loads((directory / STATE_NAME).read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        files = value.get("files") if isinstance(value, dict) else None
        if not isinstance(files, dict) or not all(is_sha256(digest) for digest in files.values()):
            return None
        return cls(value.get("is_complete") is True, files)

    def write(self, directory: Path) -> None:
        """Replace what was written last, in one step."""
        temporary = directory / f"{STATE_NAME}.{os.getpid()}.tmp"
        temporary.write_text(json.dumps(asdict(self)))
        os.replace(temporary, directory / STATE_NAME)


def is_sha256(value: object) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def resolve_model(model: str, revision: str | None, token: str | None, progress: Progress | None) -> Path:
    """The directory of a model of ModelScope, brought up to date first; hub.resolve_model for this hub.

    Raises ModelNotFoundError or ModelLoadError, with the next thing to try.
    """
    if "/" not in model:
        raise ModelNotFoundError(f"{model!r} is not a ModelScope id, which is owner/name\n  check the spelling")
    revision = revision or DEFAULT_REVISION
    settings = ModelScopeSettings.from_environment(os.environ, token)
    cached = find_cached(settings, model, revision)
    if settings.offline:
        return cached or _fail_offline(settings, model, revision)
    from pagewick.weights.modelscope_download import download_model

    return download_model(settings, model, revision, cached, progress)


def find_cached(settings: ModelScopeSettings, model: str, revision: str) -> Path | None:
    """The directory of a revision if it is complete, or None. Connects to nothing."""
    directory = settings.model_dir(model, revision)
    if not directory.is_dir() or _lacks(directory):
        return None
    return directory


def is_complete(directory: Path) -> bool:
    """Whether no update of a directory has stopped half way, as far as Pagewick's own go."""
    state = CacheState.read(directory)
    return state is None or state.is_complete


def _lacks(directory: Path) -> list[str]:
    """Names of files without which a directory is no checkpoint; also if an update has stopped half way."""
    return missing_files(directory) or ([] if is_complete(directory) else ["a part of its newest version"])


def _fail_offline(settings: ModelScopeSettings, model: str, revision: str) -> Path:
    directory = settings.model_dir(model, revision)
    if not directory.is_dir():
        raise ModelNotFoundError(_offline(f"revision {revision} of {model} is not in the cache ({directory})"))
    raise ModelLoadError(_offline(f"{model} in the cache is incomplete; missing: {name_some(_lacks(directory))}"))


def _offline(state: str) -> str:
    return (
        f"HF_HUB_OFFLINE is set, and {state}\n"
        f"  start once without HF_HUB_OFFLINE to download it, or use the built-in {BUILTIN_MODEL}"
    )
