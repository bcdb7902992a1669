"""The models in the caches on this disk. Connects to nothing and imports no torch.

The layouts of the caches are described in `hub_settings`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from pagewick.config import BUILTIN_MODEL
from pagewick.demo import MODEL_DIR
from pagewick.errors import ModelLoadError, ModelNotFoundError
from pagewick.weights import hub
from pagewick.weights.files import name_some
from pagewick.weights.gguf.choice import complete_models, names_of
from pagewick.weights.hub_settings import (
    DOT,
    REVISION_MARK,
    STORAGE_PREFIX,
    HubSettings,
    HuggingFaceSettings,
    ModelScopeSettings,
)
from pagewick.weights.quantized_cache import QuantizedCache

# Endings of files that show a checkpoint, or a part of a download, beside GGUF models.
_CHECKPOINT_ENDS: Final = (".safetensors", "incomplete")
# In place of a hub's name, for weights that were quantized at load.
QUANTIZED: Final = "quantized"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """One model of a cache: a checkpoint with all of its revisions, or a GGUF model.

    model: the name by which it is loaded. path: directory or file from which it is loaded; None if no revision is
    complete. storage: directory that is deleted when the model is removed; files: the files in it that are deleted if
    it holds other models, too. missing: names of missing files, in words; empty if it is complete. last_used: latest
    access to a file that the disk reports, in seconds since 1970.
    """

    model: str
    hub: str
    revisions: tuple[str, ...]
    path: Path | None
    storage: Path
    num_bytes: int
    missing: str
    last_used: float | None
    files: tuple[Path, ...] = ()


def cached_models(environment: Mapping[str, str]) -> list[CachedModel]:
    """List all models of both caches, sorted by name."""
    settings = HuggingFaceSettings.from_environment(environment)
    storages = [path for path in _directories(settings.cache_dir) if path.name.startswith(STORAGE_PREFIX)]
    found = [model for storage in storages for model in _hugging_face_models(settings, storage)]
    found += _modelscope_models(ModelScopeSettings.from_environment(environment))
    return sorted(found, key=lambda cached: (cached.model.lower(), cached.hub, cached.revisions))


def quantized_models(environment: Mapping[str, str]) -> list[CachedModel]:
    """List the weights that were quantized at load and kept, sorted by name. Their revisions are their formats."""
    found = [
        CachedModel(
            model=_name_of(entry.model),
            hub=QUANTIZED,
            revisions=(entry.mix,),
            path=entry.path,
            storage=entry.path.parent,
            num_bytes=entry.num_bytes,
            missing="",
            last_used=entry.last_used,
            files=(entry.path,),
        )
        for entry in QuantizedCache.of(environment).entries()
    ]
    return sorted(found, key=lambda kept: (kept.model.lower(), kept.revisions))


def cached_path(model: str, environment: Mapping[str, str], *, revision: str | None, hub_name: str) -> Path:
    """Return the directory or GGUF file of a complete model, and connect to nothing. Raises ModelNotFoundError."""
    directory = hub.local_model(model)
    if directory is not None:
        return directory
    wanted = hub.parse_id(model, revision, hub_name)
    settings = hub.hub_settings(hub_name, environment)
    found = settings.find_cached(wanted.repository, revision or settings.default_revision, wanted.gguf)
    if found is None:
        flags = f" --hub {hub_name}" if hub_name != hub.DEFAULT_HUB else ""
        flags += f" --revision {revision}" if revision else ""
        raise ModelNotFoundError(
            f"{model} is not in the cache, or not complete\n  fetch it: pagewick models pull {model}{flags}"
        )
    return found


def find_to_remove(model: str, environment: Mapping[str, str], hub_name: str) -> list[CachedModel]:
    """List every revision of a model, and its quantized weights, for `remove`.

    A repository stands for all of its GGUF models. Raises ModelLoadError if there is none.
    """
    names = {model, str(Path(model).absolute())}
    quantized = [kept for kept in quantized_models(environment) if kept.model in names]
    if model == BUILTIN_MODEL and not quantized:
        raise ModelLoadError(f"{BUILTIN_MODEL} is a part of Pagewick\n  models that were downloaded can be removed")
    there = [cached for cached in cached_models(environment) if cached.hub == hub_name]
    found = [cached for cached in there if _is_called(cached, model)]
    if not found and not quantized:
        raise ModelNotFoundError(f"{model} is not in the cache of {hub_name}\n  see: pagewick models list")
    chosen: list[CachedModel] = []
    for storage in dict.fromkeys(cached.storage for cached in found):
        own = [cached for cached in found if cached.storage == storage]
        is_all = len(own) == len([cached for cached in there if cached.storage == storage])
        # The directory is deleted with the last of its models, together with files that belong to none of them.
        num_bytes = sum(cached.num_bytes for cached in own)
        chosen += [replace(own[0], files=(), num_bytes=num_bytes)] if is_all else own
    return chosen + quantized


def remove(cached: CachedModel) -> None:
    """Delete a model from its cache. Raises ModelLoadError if that is not allowed."""
    try:
        for file in cached.files:
            file.unlink(missing_ok=True)
        if cached.files:
            return
        if cached.storage.is_symlink():
            cached.storage.unlink()
        else:
            shutil.rmtree(cached.storage)
        shutil.rmtree(cached.storage.parent / ".locks" / cached.storage.name, ignore_errors=True)
    except OSError as error:
        raise ModelLoadError(f"cannot remove {cached.storage}: {error.strerror or error}") from error


def _name_of(path: Path) -> str:
    """Return the name of the checkpoint at a path: an id, if it is in Hugging Face's cache."""
    if path == MODEL_DIR:
        return BUILTIN_MODEL
    storage = next((part for part in path.parts if part.startswith(STORAGE_PREFIX)), None)
    return str(path) if storage is None else storage.removeprefix(STORAGE_PREFIX).replace("--", "/")


def _is_called(cached: CachedModel, name: str) -> bool:
    """Whether `name` is a model, its repository, or its GGUF file there; quantizations in upper or lower case."""
    if not cached.files:
        return name == cached.model
    repository = "/".join(cached.model.partition(":")[0].split("/")[:2])
    own, _, label = name.partition(":")
    is_file = name.startswith(f"{repository}/") and str(cached.path).endswith(name.removeprefix(repository))
    return name in (cached.model, repository) or f"{own}:{label.upper()}" == cached.model or is_file


def _hugging_face_models(settings: HuggingFaceSettings, storage: Path) -> Iterator[CachedModel]:
    refs = storage / "refs"
    commits = {ref.relative_to(refs).as_posix(): _commit_in(ref) for ref in _files(refs)}
    snapshots = {snapshot.name: snapshot for snapshot in _directories(storage / "snapshots")}
    # The default revision goes first, then other names, then commits without a name.
    names = sorted(commits, key=lambda name: (name != settings.default_revision, name))
    ordered = [snapshots.pop(commit) for name in names if (commit := commits[name]) in snapshots]
    unnamed = tuple(commit[:12] for commit in snapshots)
    ordered += snapshots.values()
    reasons = [(snapshot, _describe_missing(settings, snapshot)) for snapshot in ordered]
    # The first complete snapshot is used; if there is none, the first one is described.
    path = next((snapshot for snapshot, missing in reasons if not missing), None)
    missing = "" if path is not None else reasons[0][1] if reasons else "everything"
    if unreadable := [f"refs/{name}" for name in names if commits[name] is None]:
        path, missing = None, f"a readable {name_some(unreadable)}"
    cached = CachedModel(
        model=storage.name.removeprefix(STORAGE_PREFIX).replace("--", "/"),
        hub="huggingface",
        revisions=(*names, *unnamed),
        path=path,
        storage=storage,
        num_bytes=0,
        missing=missing,
        last_used=None,
    )
    return _with_gguf(settings, cached, ordered, [*_files(storage / "blobs"), *_files(storage / "snapshots")])


def _with_gguf(
    settings: HubSettings, cached: CachedModel, directories: Sequence[Path], files: Sequence[Path]
) -> Iterator[CachedModel]:
    """Yield the GGUF models in the directories of a model's revisions, and the checkpoint with the other files.

    files: all that there are, each of which is counted once.
    """
    models: dict[str, list[Path]] = {}
    for directory in directories:
        found = complete_models(settings.gguf_files(directory))
        for model, name in names_of(found).items():
            models.setdefault(name, []).extend(directory / file for file in model.files)
    counted: set[Path] = set()
    for name, paths in models.items():
        # The file that a link of the snapshot points to is deleted with the link.
        own = dict.fromkeys(path for link in paths for path in (link, link.resolve()))
        counted |= own.keys()
        yield replace(
            cached,
            model=cached.model + name,
            path=paths[0] if "refs/" not in cached.missing else None,
            missing=cached.missing if "refs/" in cached.missing else "",
            num_bytes=sum(path.lstat().st_size for path in own if not path.is_symlink()),
            last_used=_last_used(own),
            files=tuple(own),
        )
    if models and cached.path is None:
        cached = replace(cached, missing="the rest of a download")
    others = [file for file in files if file not in counted]
    is_checkpoint = cached.path is not None or any(file.name.endswith(_CHECKPOINT_ENDS) for file in others)
    if not models or is_checkpoint:
        size = sum(file.lstat().st_size for file in others if not file.is_symlink())
        yield replace(cached, num_bytes=size, last_used=_last_used(others))


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
            cached = CachedModel(
                model=f"{owner.name}/{name.replace(DOT, '.')}",
                hub="modelscope",
                revisions=(revision or settings.default_revision,),
                path=None if missing else storage,
                storage=storage,
                num_bytes=0,
                missing=missing,
                last_used=None,
            )
            yield from _with_gguf(settings, cached, [storage], list(_files(storage)))


def _describe_missing(settings: HubSettings, directory: Path) -> str:
    if all(entry.name.startswith(".") for entry in directory.iterdir()):
        return "everything"
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
