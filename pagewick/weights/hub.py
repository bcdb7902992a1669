"""Turns a model's name into a directory: built in, on this disk, in a cache, or on a hub (Hugging Face or ModelScope).

Imports no torch, and huggingface_hub only to connect. The environment is read at every call.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from pagewick.config import BUILTIN_MODEL, HUBS
from pagewick.errors import ConfigError, ModelLoadError, ModelNotFoundError
from pagewick.log import get_logger
from pagewick.weights.description import Description, is_gguf
from pagewick.weights.files import (
    GGUF_SUFFIX,
    has_safetensors,
    has_tokenizer,
    name_some,
    refuse_special_files,
    select_metadata,
)
from pagewick.weights.gguf.choice import (
    GgufModel,
    choose,
    complete_models,
    describe_models,
    find_models,
    gguf_in_directory,
    names_of,
)
from pagewick.weights.hub_settings import (
    STORAGE_PREFIX,
    HubSettings,
    HuggingFaceSettings,
    ModelScopeSettings,
    is_commit,
)
from pagewick.weights.progress import Progress, format_bytes
from pagewick.weights.web_addresses import is_address, name_of

if TYPE_CHECKING:
    from pagewick.weights.remote import RemoteRepository

DEFAULT_HUB: Final = HUBS[0]

_MODEL_ID: Final = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
# llama.cpp's form of an id, owner/name:quantization, or a file in a repository.
_GGUF_ID: Final = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(:(?P<label>[\w.-]+)|/(?P<file>[^\\:]+\.gguf))", re.ASCII)
_PATH_STARTS: Final = (".", "/", "~")
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


class ModelId(NamedTuple):
    """A model on a hub. gguf: a quantization or a file of it; None where its repository decides."""

    repository: str
    gguf: str | None

    def __str__(self) -> str:
        is_file = self.gguf is not None and self.gguf.endswith(GGUF_SUFFIX)
        return f"{self.repository}{'/' if is_file else ':'}{self.gguf}" if self.gguf else self.repository


def resolve_model(
    model: str,
    *,
    weight_file: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    progress: Progress | None = None,
    hub: str = DEFAULT_HUB,
    check: Callable[[Description], object] | None = None,
    with_images: bool = False,
    mmproj: str | None = None,
) -> Path:
    """Return the directory or GGUF file of a model, downloaded first if the cache does not hold that model of a hub.

    `model` is the built-in model's name, a directory, a GGUF file, or an id such as `Qwen/Qwen3-0.6B`,
    `unsloth/Qwen3-8B-GGUF:Q8_0` or `unsloth/Qwen3-8B-GGUF/Qwen3-8B-Q8_0.gguf`; a path takes precedence. `weight_file`
    is a GGUF file in that directory or repository. `revision` (branch, tag or commit), `token` and `hub` (one of
    config.HUBS) concern ids only. Only configuration, tokenizer, template and safetensors files are downloaded, or the
    parts of one GGUF file; an interrupted download goes on where it stopped. HF_HUB_OFFLINE forbids all connections.
    Without `progress`, default_progress shows the download. `check` gets the description of a model before its weights
    are downloaded, as check_remote has it, and may raise an error. `with_images`: also download the file with the part
    of a GGUF model that sees, if its repository has one; `mmproj` names one there.

    Raises ModelNotFoundError when there is no such model, ModelLoadError when it cannot be downloaded or used, and
    ConfigError for a malformed revision or an unknown hub; every message names the fix.
    """
    local = local_model(model, weight_file)
    if local is not None:
        return local
    wanted = parse_id(model, revision, hub, weight_file)
    settings = hub_settings(hub, os.environ, token)
    revision = revision or settings.default_revision
    cached = settings.find_cached(wanted.repository, revision, wanted.gguf)
    if settings.offline:
        return cached or _fail_offline(settings, wanted, revision)
    # A commit never changes: there is nothing to ask, unless the repository has to choose a GGUF file.
    is_certain = isinstance(settings, HuggingFaceSettings) and is_commit(revision)
    if cached is not None and is_certain and (wanted.gguf is not None or cached.is_dir()):
        return cached
    try:
        repository = open_repository(settings, wanted.repository, revision)
    except ModelLoadError as error:
        from huggingface_hub.errors import RevisionNotFoundError

        if cached is None or isinstance(error.__cause__, RevisionNotFoundError):
            raise
        reason = type(error.__cause__ or error).__name__
        _logger.warning("using the cached %s: %s does not answer (%s)", wanted, settings.endpoint, reason)
        return cached
    chosen, vision = choose_gguf(repository, wanted.gguf), None
    if chosen is not None and with_images:
        from pagewick.weights.remote_description import choose_remote_vision

        vision = choose_remote_vision(repository, chosen, mmproj, cached)
    if cached is None and check is not None:
        from pagewick.weights.remote_description import check_remote

        check_remote(repository, chosen, check, vision)
    if chosen is not None and wanted.gguf is None:
        _say_what_is_taken(repository, chosen)
    try:
        files = () if chosen is None else (*chosen.files, *([] if vision is None else [vision]))
        directory = repository.download(progress, files)
    except ModelLoadError as error:
        from pagewick.weights.remote import is_forbidden

        if cached is None or not is_forbidden(error.__cause__):
            raise
        _logger.warning(
            "using the cached %s: that of %s may be newer, and %s cannot be written", wanted, settings.endpoint, cached
        )
        return cached
    return directory if chosen is None else directory / chosen.first


def resolve_tokenizer(
    name: str, *, revision: str | None = None, token: str | None = None, hub: str = DEFAULT_HUB
) -> Path:
    """Return the directory or file of a tokenizer: a path, a GGUF file, or the small files of a model on a hub.

    Weights are not downloaded, except those of a GGUF file, which holds both. Raises as resolve_model does.
    """
    path = path_of(name)
    if path.is_file():
        return path
    if local_model(name) is None and parse_id(name, revision, hub).gguf is None:
        settings = hub_settings(hub, os.environ, token)
        revision = revision or settings.default_revision
        directory = settings.cached_directory(name, revision)
        if directory is not None and has_tokenizer({entry.name for entry in directory.iterdir()}):
            return directory
        if not settings.offline:
            repository = open_repository(settings, name, revision)
            if has_tokenizer(repository.names):
                return repository.download(None, select_metadata(repository.names))
    return resolve_model(name, revision=revision, token=token, hub=hub)


def choose_gguf(repository: RemoteRepository, wanted: str | None) -> GgufModel | None:
    """Return the GGUF model of a repository to use; None for its safetensors.

    Safetensors take precedence unless `wanted` names a quantization or a file. Raises ModelLoadError for a model that
    is not there, and if it is not clear which one is meant.
    """
    names = repository.names
    models = find_models(names)
    if wanted is None and (not models or has_safetensors(names)):
        return None
    found = choose(models, wanted, repository.model, lambda name: repository.size(name) if name in names else 0)
    if missing := sorted(set(found.files) - names):
        raise ModelLoadError(
            f"{found.first} in {repository.model} is incomplete; missing: {name_some(missing)}\n  name another file"
        )
    return found


def _say_what_is_taken(repository: RemoteRepository, chosen: GgufModel) -> None:
    models = find_models(repository.names)
    size = format_bytes(sum(map(repository.size, chosen.files)))
    if len(models) > 1:
        _logger.warning(
            "%s holds %d GGUF models, and none is named: using %s (%s)",
            repository.model, len(models), names_of(models)[chosen].lstrip(":/"), size,
        )  # fmt: skip


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


def local_model(model: str, weight_file: str | None = None) -> Path | None:
    """Return the directory of the built-in model, or the directory or GGUF file that `model` names; None for an id.

    A directory that holds one GGUF file instead of a checkpoint stands for that file. weight_file: a GGUF file in the
    directory; a path counts beside an id, too, as vllm.rs has it. Raises ModelLoadError for a directory with a pipe or
    a device in it.
    """
    if model == BUILTIN_MODEL:
        from pagewick.demo import MODEL_DIR

        return MODEL_DIR
    path = path_of(model)
    if not model or is_gguf(path):
        if model and weight_file is not None:
            raise ConfigError(f"{model} is a file already; leave out --weight-file {weight_file}")
        return path if model else None
    if weight_file is not None and (is_gguf(file := path / Path(weight_file).expanduser()) or path.is_dir()):
        return file if is_gguf(file) else _gguf_in(path, weight_file)
    if weight_file is not None and weight_file.startswith(_PATH_STARTS):
        return _gguf_in(path_of(weight_file).parent, path_of(weight_file).name)
    if not path.is_dir():
        return None
    refuse_special_files(path)
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


def parse_id(model: str, revision: str | None, hub: str, weight_file: str | None = None) -> ModelId:
    """Read the name of a model, which is not a path, as an id on `hub`.

    Raises ModelLoadError if it cannot be one, and ConfigError for a malformed revision or an unknown hub.
    """
    path = path_of(model)
    if path.is_file():
        raise ModelLoadError(f"{model} is a file\n  give the directory with config.json: {path.parent}")
    if is_address(model):
        name = name_of(model)
        fix = (
            f"give {name}"
            if name
            else "download it, and give its directory or GGUF file, or an id on a hub: owner/name"
        )
        raise ModelNotFoundError(f"{model[:80]} is an address, not a model\n  {fix}")
    named = _GGUF_ID.fullmatch(model)
    # A directory of that name makes it a path with a mistake in it.
    if named is not None and not model.startswith(_PATH_STARTS) and not Path(model.partition("/")[0]).is_dir():
        if weight_file is not None:
            raise ConfigError(f"{model} names a GGUF file already; leave out --weight-file {weight_file}")
        model, weight_file = named["repository"], named["label"] or named["file"]
        path = path_of(model)
    looks_like_path = model.startswith(_PATH_STARTS) or "\\" in model or model.count("/") > 1
    if looks_like_path or path.suffix in _WEIGHT_SUFFIXES:
        kind = "file" if path.suffix in _WEIGHT_SUFFIXES else "directory"
        raise ModelNotFoundError(f"there is no {kind} {model}\n  {_suggest(path)}")
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
    return ModelId(model, weight_file)


def _gguf_in(directory: Path, name: str) -> Path:
    """Return the file `name` of a directory. Raises ModelLoadError, with what is there, if there is none."""
    found = gguf_in_directory(directory, name) if directory.is_dir() else None
    if found is None:
        raise ModelNotFoundError(f"there is no file {directory / name}\n  {_suggest(directory / name)}")
    return found


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
    siblings = [entry.name for entry in parent.iterdir() if entry.is_dir() or entry.suffix == ".gguf"]
    close = difflib.get_close_matches(path.name, siblings, n=3)
    return f"did you mean {', '.join(str(path.parent / name) for name in close)}?" if close else "check the path"


def _fail_offline(settings: HubSettings, wanted: ModelId, revision: str) -> Path:
    directory = settings.cached_directory(wanted.repository, revision)
    sizes = {} if directory is None else settings.gguf_files(directory)
    lines: list[str] = []
    if directory is None:
        state = f"revision {revision} of {wanted} is not in the cache ({settings.cache_dir})"
    elif wanted.gguf is not None or sizes:
        state = f"{wanted} is not in the cache, or not complete"
        lines = describe_models(complete_models(sizes), sizes.__getitem__)
    else:
        state = f"{wanted} in the cache is incomplete; missing: {name_some(settings.missing(directory))}"
    fix = f"start once without HF_HUB_OFFLINE to download it, or use the built-in {BUILTIN_MODEL}"
    raise ModelNotFoundError("\n  ".join([f"HF_HUB_OFFLINE is set, and {state}", *lines[:4], fix]))
