"""Turns the name of an adapter into a directory or a file: on this disk, in a cache, or on a hub. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from pagewick.errors import ModelLoadError, ModelNotFoundError
from pagewick.weights.description import is_gguf
from pagewick.weights.files import ADAPTER_CONFIG_NAME, GGUF_SUFFIX, name_some, refuse_special_files
from pagewick.weights.hub import DEFAULT_HUB, hub_settings, open_repository, parse_id, path_of

CONFIG_NAME: Final = ADAPTER_CONFIG_NAME
WEIGHTS_NAME: Final = "adapter_model.safetensors"


def resolve_adapter(name: str, *, hub: str = DEFAULT_HUB, token: str | None = None) -> Path:
    """Return the directory or GGUF file of a LoRA adapter, downloaded first if the cache does not hold it.

    name: a path, an id such as owner/name, or a GGUF file of a repository, owner/name/file.gguf. Raises as
    resolve_model does.
    """
    path = path_of(name)
    if path.is_dir():
        refuse_special_files(path)
    if path.is_dir() or is_gguf(path):
        return path
    wanted = parse_id(name, None, hub)
    if wanted.gguf is not None and not wanted.gguf.endswith(GGUF_SUFFIX):
        raise ModelNotFoundError(f"{name} names no adapter; give owner/name, or owner/name/file.gguf")
    files = [CONFIG_NAME, WEIGHTS_NAME] if wanted.gguf is None else [wanted.gguf]
    settings = hub_settings(hub, os.environ, token)
    revision = settings.default_revision
    cached = settings.cached_directory(wanted.repository, revision)
    if settings.offline:
        if cached is not None and all((cached / file).is_file() for file in files):
            return _place(cached, files)
        raise ModelNotFoundError(
            f"HF_HUB_OFFLINE is set, and the adapter {name} is not in the cache ({settings.cache_dir})\n"
            "  start once without HF_HUB_OFFLINE to download it"
        )
    repository = open_repository(settings, wanted.repository, revision)
    if missing := sorted(set(files) - set(repository.names)):
        raise ModelLoadError(
            f"{name} is no LoRA adapter: it has no {name_some(missing)}\n"
            "  give the id of a repository that PEFT's push_to_hub wrote, or name a GGUF file in it"
        )
    return _place(repository.download(None, files), files)


def _place(directory: Path, files: list[str]) -> Path:
    return directory / files[0] if files[0].endswith(GGUF_SUFFIX) else directory
