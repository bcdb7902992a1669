"""Which models the caches on this disk hold. Connects to nothing and imports no torch.

Hugging Face's cache is documented at https://huggingface.co/docs/huggingface_hub/guides/manage-cache; ModelScope's is
described in `modelscope`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pagewick.config import BUILTIN_MODEL
from pagewick.errors import ModelLoadError, ModelNotFoundError
from pagewick.weights import hub, modelscope
from pagewick.weights.files import missing_files, name_some
from pagewick.weights.hub import HubSettings
from pagewick.weights.modelscope import ModelScopeSettings

_PREFIX: Final = "models--"
_REVISION_MARK: Final = "@"
_DOT: Final = "___"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """One model of a cache, with all that was kept of it.

    path: the directory that is used; None if nothing of it is complete. storage: the one that goes when it is removed.
    missing: what it lacks, in words; empty if it is complete. last_used: seconds since 1970, as the disk knows it.
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
    """All models of both caches, by name."""
    found = [*_of_hugging_face(HubSettings.from_environment(environment).cache_dir)]
    found += _of_modelscope(ModelScopeSettings.from_environment(environment))
    return sorted(found, key=lambda cached: (cached.model.lower(), cached.hub, cached.revisions))


def cached_path(model: str, environment: Mapping[str, str], *, revision: str | None, hub_name: str) -> Path:
    """The directory of a model, without connecting to anything. Raises ModelLoadError if it is not here as a whole."""
    directory = hub.local_directory(model)
    if directory is not None:
        return directory
    hub.check_id(model, revision, hub_name)
    if hub_name == "modelscope":
        settings = ModelScopeSettings.from_environment(environment)
        found = modelscope.find_cached(settings, model, revision or modelscope.DEFAULT_REVISION)
    else:
        found = hub.find_cached(HubSettings.from_environment(environment), model, revision or hub.DEFAULT_REVISION)
    if found is None:
        flags = f" --hub {hub_name}" if hub_name != hub.DEFAULT_HUB else ""
        flags += f" --revision {revision}" if revision else ""
        raise ModelNotFoundError(
            f"{model} is not in the cache, or not complete\n  fetch it: pagewick models pull {model}{flags}"
        )
    return found


def find_to_remove(model: str, environment: Mapping[str, str], hub_name: str) -> list[CachedModel]:
    """What `remove` will take away: every revision of a model. Raises ModelLoadError if there is nothing."""
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


def _of_hugging_face(cache_dir: Path) -> Iterator[CachedModel]:
    for storage in _directories(cache_dir):
        if storage.name.startswith(_PREFIX):
            yield _hugging_face_model(storage)


def _hugging_face_model(storage: Path) -> CachedModel:
    refs = storage / "refs"
    commits = {ref.relative_to(refs).as_posix(): _commit_in(ref) for ref in _files(refs)}
    snapshots = {snapshot.name: snapshot for snapshot in _directories(storage / "snapshots")}
    # The default revision goes first, then other names, then commits without a name.
    names = sorted(commits, key=lambda name: (name != hub.DEFAULT_REVISION, name))
    ordered = [snapshots.pop(commit) for name in names if (commit := commits[name]) in snapshots]
    unnamed = tuple(commit[:12] for commit in snapshots)
    path, missing = _first_complete([*ordered, *snapshots.values()])
    if unreadable := [f"refs/{name}" for name in names if commits[name] is None]:
        path, missing = None, f"a readable {name_some(unreadable)}"
    files = [*_files(storage / "blobs"), *_files(storage / "snapshots")]
    return CachedModel(
        model=storage.name.removeprefix(_PREFIX).replace("--", "/"),
        hub="huggingface",
        revisions=(*names, *unnamed),
        path=path,
        storage=storage,
        num_bytes=sum(file.lstat().st_size for file in files if not file.is_symlink()),
        missing=missing,
        last_used=_last_used(files),
    )


def _commit_in(ref: Path) -> str | None:
    """None if it cannot be read: one damaged model is not to hide the others."""
    try:
        return ref.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None


def _of_modelscope(settings: ModelScopeSettings) -> Iterator[CachedModel]:
    for owner in _directories(settings.cache_dir / "models"):
        for storage in _directories(owner):
            if storage.name.startswith("."):
                continue
            name, _, revision = storage.name.partition(_REVISION_MARK)
            missing = _describe_missing(storage) or ("" if modelscope.is_complete(storage) else "its newest version")
            files = list(_files(storage))
            yield CachedModel(
                model=f"{owner.name}/{name.replace(_DOT, '.')}",
                hub="modelscope",
                revisions=(revision or modelscope.DEFAULT_REVISION,),
                path=None if missing else storage,
                storage=storage,
                num_bytes=sum(file.lstat().st_size for file in files),
                missing=missing,
                last_used=_last_used(files),
            )


def _first_complete(snapshots: list[Path]) -> tuple[Path | None, str]:
    """The first snapshot that is a whole checkpoint, and else what the first one lacks."""
    reasons = [(snapshot, _describe_missing(snapshot)) for snapshot in snapshots]
    for snapshot, missing in reasons:
        if not missing:
            return snapshot, ""
    return None, reasons[0][1] if reasons else "everything"


def _describe_missing(directory: Path) -> str:
    try:
        return name_some(missing_files(directory))
    except ModelLoadError:
        return "a readable index"


def _last_used(files: Iterable[Path]) -> float | None:
    return max((file.stat().st_atime for file in files if file.exists()), default=None)


def _directories(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if entry.is_dir()) if path.is_dir() else []


def _files(path: Path) -> Iterator[Path]:
    """Everything below a directory that is no directory."""
    for directory, _, names in os.walk(path):
        yield from (Path(directory, name) for name in names)
