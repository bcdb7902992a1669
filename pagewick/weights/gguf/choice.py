"""Which of several GGUF files to load. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pagewick.errors import ModelLoadError
from pagewick.weights.files import CONFIG_NAME, GGUF_SUFFIX, name_some
from pagewick.weights.progress import format_bytes

# Files that belong to a model, but are not the model.
_PARTS_OF_MODELS: Final = ("mmproj", "mtp-")
_PART_NUMBER: Final = re.compile(r"-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


def gguf_in_directory(directory: Path) -> Path | None:
    """Return the GGUF file that a directory without a config.json holds; None if it holds none.

    Raises ModelLoadError if it holds several models.
    """
    try:
        files = {entry.name: entry.stat().st_size for entry in directory.iterdir() if entry.suffix == GGUF_SUFFIX}
        if not files or (directory / CONFIG_NAME).exists():
            return None
    except OSError:
        return None
    models = group_parts({name: size for name, size in files.items() if not name.startswith(_PARTS_OF_MODELS)})
    if len(models) == 1:
        return directory / next(iter(models))
    if not models:
        raise ModelLoadError(
            f"{directory} holds parts of models only: {name_some(sorted(files))}\n  give the model's file"
        )
    listed = [f"{name} ({format_bytes(size)})" for name, size in sorted(models.items())]
    raise ModelLoadError(
        f"{directory} holds {len(models)} models: {name_some(listed)}\n  name one: {directory / min(models)}"
    )


def group_parts(files: Mapping[str, int]) -> dict[str, int]:
    """Return one entry for each model among GGUF files: the name of its first part, and the size of all parts."""
    models: dict[str, int] = {}
    for name, size in files.items():
        match = _PART_NUMBER.search(name)
        first = name if match is None else f"{name[: match.start()]}-00001-of-{match['count']}{GGUF_SUFFIX}"
        models[first] = models.get(first, 0) + size
    return models
