"""From a model's name to a directory: built in, on this disk, in a cache, or on a hub (Hugging Face or ModelScope).

Imports no torch, and huggingface_hub only to download. The environment is read at every call, in the way
that huggingface_hub reads it once at import: HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pagewick.config import BUILTIN_MODEL, HUBS
from pagewick.errors import ConfigError, ModelLoadError, ModelNotFoundError
from pagewick.weights.files import missing_files, name_some
from pagewick.weights.progress import Progress

DEFAULT_HUB: Final = HUBS[0]
DEFAULT_REVISION: Final = "main"

_DEFAULT_ENDPOINT: Final = "https://huggingface.co"
_TRUE: Final = frozenset({"1", "ON", "YES", "TRUE"})
_MODEL_ID: Final = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_REVISION: Final = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*", re.ASCII)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_WEIGHT_SUFFIXES: Final = (".safetensors", ".gguf", ".bin", ".pt", ".pth")


@dataclass(frozen=True, slots=True)
class HubSettings:
    """Where the hub is, where its cache is, and who asks."""

    endpoint: str
    cache_dir: Path
    token_path: Path
    token: str | None = field(repr=False)
    offline: bool

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], token: str | None = None) -> HubSettings:
        """The variables of huggingface_hub, with its names, defaults and precedence."""
        home = _path(environment.get("HF_HOME")) or (
            (_path(environment.get("XDG_CACHE_HOME")) or Path.home() / ".cache") / "huggingface"
        )
        cache_dir = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
        token = token or environment.get("HF_TOKEN") or environment.get("HUGGING_FACE_HUB_TOKEN") or ""
        return cls(
            endpoint=(environment.get("HF_ENDPOINT") or _DEFAULT_ENDPOINT).rstrip("/"),
            cache_dir=_path(cache_dir) or home / "hub",
            token_path=_path(environment.get("HF_TOKEN_PATH")) or home / "token",
            token=token.strip() or None,
            offline=is_offline(environment),
        )

    def storage_dir(self, model: str) -> Path:
        """The cache's directory for one model: blobs/, refs/ and snapshots/ are in it."""
        return self.cache_dir / f"models--{model.replace('/', '--')}"


def resolve_model(
    model: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    progress: Progress | None = None,
    hub: str = DEFAULT_HUB,
) -> Path:
    """The directory of a model, downloaded first if it is an id on a hub that the cache does not hold.

    `model` is the built-in model's name, a directory, or an id such as `Qwen/Qwen3-0.6B`; a directory goes
    first. `revision` (branch, tag or commit), `token` and `hub` (one of config.HUBS) concern ids only. Only
    configuration, tokenizer, template and safetensors files are downloaded; an interrupted download goes on where
    it stopped. With HF_HUB_OFFLINE nothing is connected to. Without `progress`, default_progress shows what happens.

    Raises ModelNotFoundError when there is no such model, ModelLoadError when it cannot be had or used, and
    ConfigError for a malformed revision or an unknown hub; every message says what to do.
    """
    directory = local_directory(model)
    if directory is not None:
        return directory
    check_id(model, revision, hub)
    if hub == "modelscope":
        from pagewick.weights import modelscope

        return modelscope.resolve_model(model, revision, token, progress)
    revision = revision or DEFAULT_REVISION
    settings = HubSettings.from_environment(os.environ, token)
    cached = find_cached(settings, model, revision)
    if settings.offline:
        return cached or _fail_offline(settings, model, revision)
    if cached is not None and is_commit(revision):
        return cached  # a commit never changes: nothing to ask
    from pagewick.weights.download import download_model

    return download_model(settings, model, revision, cached, progress)


def is_offline(environment: Mapping[str, str]) -> bool:
    """Whether the environment forbids connections to any hub."""
    value = environment.get("HF_HUB_OFFLINE") or environment.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in _TRUE


def local_directory(model: str) -> Path | None:
    """The directory of the built-in model, or the one that `model` names; None if it can only be an id."""
    if model == BUILTIN_MODEL:
        from pagewick.demo import MODEL_DIR

        return MODEL_DIR
    path = path_of(model)
    return path if model and path.is_dir() else None


def path_of(model: str) -> Path:
    """What `model` means as a path. Raises ModelNotFoundError if no path can be called that."""
    try:
        path = Path(model).expanduser()
        path.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelNotFoundError(f"{model[:80]!r} is no model ({reason}); give a directory or an id") from None
    return path


def check_id(model: str, revision: str | None, hub: str) -> None:
    """Raises ModelLoadError unless `model`, which is no directory, can be an id, and ConfigError for the others."""
    _refuse_paths(model, path_of(model))
    if revision and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise ConfigError(f"revision {revision!r} is not a branch, tag or commit; the default is 'main'")
    if hub not in HUBS:
        raise ConfigError(f"--hub must be one of {', '.join(HUBS)}; got {hub!r}")


def is_commit(revision: str) -> bool:
    """Whether a revision is the full hash of a commit."""
    return _COMMIT.fullmatch(revision) is not None


def find_cached(settings: HubSettings, model: str, revision: str) -> Path | None:
    """The complete cached snapshot of a revision, or None. Connects to nothing."""
    snapshot = _snapshot(settings, model, revision)
    return None if snapshot is None or missing_files(snapshot) else snapshot


def _snapshot(settings: HubSettings, model: str, revision: str) -> Path | None:
    storage = settings.storage_dir(model)
    commit = revision
    if not _COMMIT.fullmatch(revision):
        ref = storage / "refs" / revision
        commit = ref.read_text().strip() if ref.is_file() else ""
    snapshot = storage / "snapshots" / commit
    return snapshot if _COMMIT.fullmatch(commit) and snapshot.is_dir() else None


def _fail_offline(settings: HubSettings, model: str, revision: str) -> Path:
    snapshot = _snapshot(settings, model, revision)
    if snapshot is None:
        state = f"revision {revision} of {model} is not in the cache ({settings.cache_dir})"
    else:
        state = f"{model} in the cache is incomplete; missing: {name_some(missing_files(snapshot))}"
    raise ModelNotFoundError(
        f"HF_HUB_OFFLINE is set, and {state}\n"
        f"  start once without HF_HUB_OFFLINE to download it, or use the built-in {BUILTIN_MODEL}"
    )


def _refuse_paths(model: str, path: Path) -> None:
    """Raise if `model` is the name of a file, or looks like a path or like nothing at all."""
    if path.is_file():
        if path.suffix == ".gguf":
            raise ModelLoadError(f"{model} is a GGUF file, which is not supported yet\n  use a safetensors model")
        raise ModelLoadError(f"{model} is a file\n  give the directory with config.json: {path.parent}")
    looks_like_path = model.startswith((".", "/", "~")) or "\\" in model or model.count("/") > 1
    if looks_like_path or path.suffix in _WEIGHT_SUFFIXES:
        raise ModelNotFoundError(f"there is no directory {model}\n  {_suggest(path)}")
    if not _MODEL_ID.fullmatch(model) or "--" in model or ".." in model:
        raise ModelNotFoundError(
            f"{model!r} is neither a directory nor a Hugging Face id, which is owner/name\n  check the spelling"
        )


def _suggest(path: Path) -> str:
    """The nearest thing to a missing path that exists."""
    parent = path.absolute().parent
    if not parent.is_dir():
        return f"there is no {parent} either; check the path"
    siblings = [entry.name for entry in parent.iterdir() if entry.is_dir()]
    close = difflib.get_close_matches(path.name, siblings, n=3)
    return f"did you mean {', '.join(str(path.parent / name) for name in close)}?" if close else "check the path"


def _path(text: str | None) -> Path | None:
    return Path(os.path.expandvars(text)).expanduser() if text else None
