"""From a model's name to a directory: built in, on this disk, in a cache, or on a hub (Hugging Face or ModelScope).

Imports no torch, and huggingface_hub only to connect. The environment is read at every call.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pagewick.config import BUILTIN_MODEL, HUBS
from pagewick.errors import ConfigError, ModelLoadError, ModelNotFoundError
from pagewick.log import get_logger
from pagewick.weights.description import is_gguf
from pagewick.weights.files import name_some
from pagewick.weights.gguf.choice import gguf_in_directory
from pagewick.weights.hub_settings import (
    STORAGE_PREFIX,
    HubSettings,
    HuggingFaceSettings,
    ModelScopeSettings,
    is_commit,
)
from pagewick.weights.progress import Progress

if TYPE_CHECKING:
    from pagewick.weights.remote import RemoteRepository

DEFAULT_HUB: Final = HUBS[0]

_MODEL_ID: Final = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
# llama.cpp's form of an id: owner/name:quantization.
_QUANTIZED_ID: Final = re.compile(r"([\w.-]+/[\w.-]+):([\w.-]+)", re.ASCII)
# The usual form of names -> the only owner who publishes models with such names.
_OWNERS: Final = (
    (r"Qwen[23](\.5)?-[\d.]+B(-A[\d.]+B)?(-Base|-Instruct|-Chat|-Instruct-2507|-Thinking-2507)?", "Qwen"),
    (r"Meta-Llama-3(\.1)?-\d+B(-Instruct)?|Llama-(2-\d+b(-chat)?-hf|3\.\d-\d+B(-Instruct)?)", "meta-llama"),
    (r"gemma-(2-|3-)?\d+m?b(-it|-pt)?", "google"),
    (r"(Mistral|Mixtral)-(8x)?\d+B-(Instruct-)?v0\.\d", "mistralai"),
    (r"DeepSeek-(V2|V2-Lite|V3|R1)(-Chat|-0324|-0528|-Base)?", "deepseek-ai"),
    (r"Phi-3(\.5)?-(mini|medium)-\d*k?-?instruct|phi-[124]|phi-1_5", "microsoft"),
)
_REVISION: Final = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*", re.ASCII)
_WEIGHT_SUFFIXES: Final = (".safetensors", ".gguf", ".bin", ".pt", ".pth")

_logger = get_logger(__name__)


def resolve_model(
    model: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    progress: Progress | None = None,
    hub: str = DEFAULT_HUB,
) -> Path:
    """Return the directory of a model, downloaded first if it is an id on a hub that the cache does not hold.

    `model` is the built-in model's name, a directory, or an id such as `Qwen/Qwen3-0.6B`; a directory goes
    first. `revision` (branch, tag or commit), `token` and `hub` (one of config.HUBS) concern ids only. Only
    configuration, tokenizer, template and safetensors files are downloaded; an interrupted download goes on where
    it stopped. HF_HUB_OFFLINE forbids all connections. Without `progress`, default_progress shows the download.

    Raises ModelNotFoundError when there is no such model, ModelLoadError when it cannot be downloaded or used, and
    ConfigError for a malformed revision or an unknown hub; every message names the fix.
    """
    directory = local_directory(model)
    if directory is not None:
        return directory
    check_id(model, revision, hub)
    settings = hub_settings(hub, os.environ, token)
    revision = revision or settings.default_revision
    cached = settings.find_cached(model, revision)
    if settings.offline:
        return cached or _fail_offline(settings, model, revision)
    if cached is not None and isinstance(settings, HuggingFaceSettings) and is_commit(revision):
        return cached  # a commit never changes: nothing to ask
    try:
        repository = open_repository(settings, model, revision)
    except ModelLoadError as error:
        from huggingface_hub.errors import RevisionNotFoundError

        if cached is None or isinstance(error.__cause__, RevisionNotFoundError):
            raise
        reason = type(error.__cause__ or error).__name__
        _logger.warning("using the cached %s: %s does not answer (%s)", model, settings.endpoint, reason)
        return cached
    return repository.download(progress)


def hub_settings(hub: str, environment: Mapping[str, str], token: str | None = None) -> HubSettings:
    """Read the settings of one of config.HUBS."""
    kind = ModelScopeSettings if hub == "modelscope" else HuggingFaceSettings
    return kind.from_environment(environment, token)


def open_repository(settings: HubSettings, model: str, revision: str) -> RemoteRepository:
    """Ask a hub for the files of a model's revision. Raises ModelNotFoundError or ModelLoadError."""
    if isinstance(settings, ModelScopeSettings):
        from pagewick.weights.modelscope_download import ModelScopeRepository

        return ModelScopeRepository(settings, model, revision)
    from pagewick.weights.huggingface_download import HuggingFaceRepository

    assert isinstance(settings, HuggingFaceSettings)
    return HuggingFaceRepository(settings, model, revision)


def local_directory(model: str) -> Path | None:
    """Return the directory of the built-in model, or the directory or GGUF file that `model` names; None for an id.

    A directory that holds one GGUF file instead of a checkpoint stands for that file.
    """
    if model == BUILTIN_MODEL:
        from pagewick.demo import MODEL_DIR

        return MODEL_DIR
    path = path_of(model)
    if not model or is_gguf(path):
        return path if model else None
    if not path.is_dir():
        return None
    return gguf_in_directory(path) or path


def path_of(model: str) -> Path:
    """Read `model` as a path. Raises ModelNotFoundError if the system allows no such path."""
    try:
        path = Path(model).expanduser()
        path.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelNotFoundError(f"{model[:80]!r} is no model ({reason}); give a directory or an id") from None
    return path


def check_id(model: str, revision: str | None, hub: str) -> None:
    """Check that a model which is no directory can be an id on `hub`.

    Raises ModelLoadError if it cannot, and ConfigError for a malformed revision or an unknown hub.
    """
    path = path_of(model)
    if path.is_file():
        raise ModelLoadError(f"{model} is a file\n  give the directory with config.json: {path.parent}")
    looks_like_path = model.startswith((".", "/", "~")) or "\\" in model or model.count("/") > 1
    if looks_like_path or path.suffix in _WEIGHT_SUFFIXES:
        raise ModelNotFoundError(f"there is no directory {model}\n  {_suggest(path)}")
    if _QUANTIZED_ID.fullmatch(model):
        raise ModelLoadError(
            f"{model} asks for a GGUF file on a hub, which is not supported yet\n  download the file, and give its path"
        )
    if not _MODEL_ID.fullmatch(model) or "--" in model or ".." in model:
        raise ModelNotFoundError(
            f"{model!r} is neither a directory nor a Hugging Face id, which is owner/name\n  check the spelling"
        )
    if revision and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise ConfigError(f"revision {revision!r} is not a branch, tag or commit; the default is 'main'")
    if hub not in HUBS:
        raise ConfigError(f"--hub must be one of {', '.join(HUBS)}; got {hub!r}")
    if "/" not in model:
        kind = "ModelScope" if hub == "modelscope" else "Hugging Face"
        raise ModelNotFoundError(
            f"there is no directory {model}, and {kind} ids are owner/name\n  {_suggest_owner(model, hub)}"
        )


def _suggest_owner(name: str, hub: str) -> str:
    """Propose the id of a model whose owner is certain: it is in the cache, or its name has one owner's usual form."""
    cached: list[str] = []
    if hub == DEFAULT_HUB:
        cache_dir = HuggingFaceSettings.from_environment(os.environ).cache_dir
        storages = cache_dir.glob(f"{STORAGE_PREFIX}*--{name}") if cache_dir.is_dir() else ()
        cached = sorted(storage.name.removeprefix(STORAGE_PREFIX).partition("--")[0] for storage in storages)
    owners = cached or [owner for form, owner in _OWNERS if re.fullmatch(form, name)]
    if owners:
        return f"did you mean {owners[0]}/{name}?"
    return f"copy the id from the model's page; one looks like Qwen/Qwen3-0.6B, and {BUILTIN_MODEL} is built in"


def _suggest(path: Path) -> str:
    """Name what exists nearest to a missing path."""
    parent = path.absolute().parent
    if not parent.is_dir():
        return f"there is no {parent} either; check the path"
    siblings = [entry.name for entry in parent.iterdir() if entry.is_dir()]
    close = difflib.get_close_matches(path.name, siblings, n=3)
    return f"did you mean {', '.join(str(path.parent / name) for name in close)}?" if close else "check the path"


def _fail_offline(settings: HubSettings, model: str, revision: str) -> Path:
    directory = settings.cached_directory(model, revision)
    if directory is None:
        state = f"revision {revision} of {model} is not in the cache ({settings.cache_dir})"
    else:
        state = f"{model} in the cache is incomplete; missing: {name_some(settings.missing(directory))}"
    raise ModelNotFoundError(
        f"HF_HUB_OFFLINE is set, and {state}\n"
        f"  start once without HF_HUB_OFFLINE to download it, or use the built-in {BUILTIN_MODEL}"
    )
