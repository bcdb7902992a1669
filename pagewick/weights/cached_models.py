"""The models in the caches on this disk. Connects to nothing and imports no torch.

The layouts of the caches are described in `hub_settings`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pagewick.config import BUILTIN_MODEL
from pagewick.errors import ModelLoadError, ModelNotFoundError
from pagewick.weights import hub
from pagewick.weights.files import name_some
from pagewick.weights.hub_settings import (
    DOT,
    REVISION_MARK,
    STORAGE_PREFIX,
    HubSettings,
    HuggingFaceSettings,
    ModelScopeSettings,
)


@dataclass(frozen=True, slots=True)
class CachedModel:
    """One model of a cache, with all of its revisions.

    path: directory from which it is loaded; None if no revision is complete. storage: directory that is deleted when
    the model is removed. missing: names of missing files, in words; empty if it is complete. last_used: latest access
    to a file that the disk reports, in seconds since 1970.
    """

    model: str
    hub: str
    revisions: tuple[str, ...]
    path: Path | None
    storage: Path
    num_bytes: int
    missing: str
    last_used: float | None


def cached_models(environment: Mapping[str, str]) -> list[CachedModel]:
    """List all models of both caches, sorted by name."""
    settings = HuggingFaceSettings.from_environment(environment)
    storages = [path for path in _directories(settings.cache_dir) if path.name.startswith(STORAGE_PREFIX)]
    found = [_hugging_face_model(settings, storage) for storage in storages]
    found += _modelscope_models(ModelScopeSettings.from_environment(environment))
    return sorted(found, key=lambda cached: (cached.model.lower(), cached.hub, cached.revisions))


def cached_path(model: str, environment: Mapping[str, str], *, revision: str | None, hub_name: str) -> Path:
    """Return the directory of a complete model, without connecting to anything. Raises ModelNotFoundError."""
    directory = hub.local_directory(model)
    if directory is not None:
        return directory
    hub.check_id(model, revision, hub_name)
    settings = hub.hub_settings(hub_name, environment)
    found = settings.find_cached(model, revision or settings.default_revision)
    if found is None:
        flags = f" --hub {hub_name}" if hub_name != hub.DEFAULT_HUB else ""
        flags += f" --revision {revision}" if revision else ""
        raise ModelNotFoundError(
            f"{model} is not in the cache, or not complete\n  fetch it: pagewick models pull {model}{flags}"
        )
    return found


def find_to_remove(model: str, environment: Mapping[str, str], hub_name: str) -> list[CachedModel]:
    """List every revision of a model, for `remove`. Raises ModelLoadError if there is none."""
    if model == BUILTIN_MODEL:
        raise ModelLoadError(f"{BUILTIN_MODEL} is a part of Pagewick\n  models that were downloaded can be removed")
    found = [cached for cached in cached_models(environment) if (cached.model, cached.hub) == (model, hub_name)]
    if not found:
        raise ModelNotFoundError(f"{model} is not in the cache of {hub_name}\n  see: pagewick models list")
    return found


def remove(cached: CachedModel) -> None:
    """Delete a model from its cache. Raises ModelLoadError if that is not allowed."""
    try:
        if cached.storage.is_symlink():
            cached.storage.unlink()
        else:
            shutil.rmtree(cached.storage)
        shutil.rmtree(cached.storage.parent / ".locks" / cached.storage.name, ignore_errors=True)
    except OSError as error:
        raise ModelLoadError(f"cannot remove {cached.storage}: {error.strerror or error}") from error


def _hugging_face_model(settings: HuggingFaceSettings, storage: Path) -> CachedModel:
    refs = storage / "refs"
    commits = {ref.relative_to(refs).as_posix(): _commit_in(ref) for ref in _files(refs)}
    snapshots = {snapshot.name: snapshot for snapshot in _directories(storage / "snapshots")}
    # The default revision goes first, then other names, then commits without a name.
    names = sorted(commits, key=lambda name: (name != settings.default_revision, name))
    ordered = [snapshots.pop(commit) for name in names if (commit := commits[name]) in snapshots]
    unnamed = tuple(commit[:12] for commit in snapshots)
    reasons = [(snapshot, _describe_missing(settings, snapshot)) for snapshot in [*ordered, *snapshots.values()]]
    # The first complete snapshot is used; if there is none, the first one is described.
    path = next((snapshot for snapshot, missing in reasons if not missing), None)
    missing = "" if path is not None else reasons[0][1] if reasons else "everything"
    if unreadable := [f"refs/{name}" for name in names if commits[name] is None]:
        path, missing = None, f"a readable {name_some(unreadable)}"
    files = [*_files(storage / "blobs"), *_files(storage / "snapshots")]
    return CachedModel(
        model=storage.name.removeprefix(STORAGE_PREFIX).replace("--", "/"),
        hub="huggingface",
        revisions=(*names, *unnamed),
        path=path,
        storage=storage,
        num_bytes=sum(file.lstat().st_size for file in files if not file.is_symlink()),
        missing=missing,
        last_used=_last_used(files),
    )


def _commit_in(ref: Path) -> str | None:
    """Read the commit of a ref; None if it cannot be read, because one damaged model must not hide the others."""
    try:
        return ref.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None


def _modelscope_models(settings: ModelScopeSettings) -> Iterator[CachedModel]:
    for owner in _directories(settings.cache_dir / "models"):
        for storage in _directories(owner):
            if storage.name.startswith("."):
                continue
            name, _, revision = storage.name.partition(REVISION_MARK)
            missing = _describe_missing(settings, storage)
            files = list(_files(storage))
            yield CachedModel(
                model=f"{owner.name}/{name.replace(DOT, '.')}",
                hub="modelscope",
                revisions=(revision or settings.default_revision,),
                path=None if missing else storage,
                storage=storage,
                num_bytes=sum(file.lstat().st_size for file in files),
                missing=missing,
                last_used=_last_used(files),
            )


def _describe_missing(settings: HubSettings, directory: Path) -> str:
    try:
        return name_some(settings.missing(directory))
    except ModelLoadError:
        return "a readable index"


def _last_used(files: Iterable[Path]) -> float | None:
    return max((file.stat().st_atime for file in files if file.exists()), default=None)


def _directories(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if entry.is_dir()) if path.is_dir() else []


def _files(path: Path) -> Iterator[Path]:
    """Yield everything below a directory that is not a directory itself."""
    for directory, _, names in os.walk(path):
        yield from (Path(directory, name) for name in names)
