"""The files of the modules that sentence-transformers puts behind a model, each in a folder of the model's directory.

They are read from this disk or from a hub. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pagewick.errors import ModelLoadError
from pagewick.weights.files import CONFIG_NAME, MODULES_NAME, SINGLE_NAME, is_plain_name, name_some, read_json

PACKAGE: Final = "sentence_transformers"
POOLING: Final = "Pooling"
DENSE: Final = "Dense"
FETCH_AGAIN: Final = "download or copy the file again"

_PICKLE_NAME: Final = "pytorch_model.bin"
_MAX_SIZE: Final = 2**24
_MAX_SHOWN: Final = 100


@dataclass(frozen=True, slots=True)
class ModuleFiles:
    """The files of one model, on this disk or on a hub. where: names the model in messages.

    has: whether there is a file of this name within the model's directory. read: returns the content of a JSON file;
    raises ModelLoadError.
    """

    where: str
    has: Callable[[str], bool]
    read: Callable[[str], Any]

    @classmethod
    def of_directory(cls, directory: Path) -> ModuleFiles:
        """Return those of a directory on this disk."""
        return cls(str(directory), lambda name: (directory / name).is_file(), lambda name: read_json(directory / name))

    def config_of(self, folder: str) -> ModuleEntries:
        """Read the config.json of a module. Raises ModelLoadError."""
        name = f"{folder}/{CONFIG_NAME}"
        self.check([name])
        values = self.read(name)
        if not isinstance(values, dict):
            raise ModelLoadError(f"{self.where}/{name} does not hold a JSON object\n  {FETCH_AGAIN}")
        return ModuleEntries(f"{self.where}/{name}", values)

    def check(self, names: Sequence[str]) -> None:
        """Raise ModelLoadError if any of these files of modules is missing, or a pickle is in its place."""
        missing = [name for name in names if not self.has(name)]
        for name in missing:
            self.refuse_pickle(name)
        if missing:
            raise ModelLoadError(
                f"{self.where} is incomplete: {MODULES_NAME} asks for {name_some(missing)}\n"
                "  download or copy the missing files"
            )

    def refuse_pickle(self, weights: str) -> None:
        """Raise ModelLoadError if a module has its weights in a pickle only. weights: the file where they belong."""
        folder, _, file_name = weights.partition("/")
        if file_name == SINGLE_NAME and not self.has(weights) and self.has(f"{folder}/{_PICKLE_NAME}"):
            raise ModelLoadError(
                f"{self.where}/{folder} holds no safetensors, only a pickle checkpoint: {_PICKLE_NAME}\n"
                "  it is refused, because reading a pickle runs code out of it\n"
                "  convert a model that you trust:\n"
                f'  python -c "from {PACKAGE} import SentenceTransformer as M; '
                f"M('{self.where}').save_pretrained('converted')\""
            )


class ModuleEntries:
    """The entries of a JSON object. Every reader raises ModelLoadError, which names the file and the entry.

    An entry that is null counts as missing. where: names the file.
    """

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self.where = where
        self.values = {key: value for key, value in values.items() if value is not None}

    def text(self, key: str, default: str | None = None) -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def size(self, key: str) -> int:
        """A whole number above 0."""
        value = self.values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MAX_SIZE:
            raise self.wrong(key, f"a whole number from 1 to {_MAX_SIZE}")
        return value

    def folder(self, key: str) -> str:
        """The name of a folder in the model's directory: it cannot lead out of it."""
        if not is_plain_name(value := self.text(key)):
            raise self.wrong(key, "the name of a folder in the model's directory")
        return value

    def wrong(self, key: str, expected: str) -> ModelLoadError:
        """Return the error for an entry that is not as it must be."""
        state = f"is {shown(self.values[key])}; it must be" if key in self.values else "is missing; it must be"
        return ModelLoadError(f"{self.where}: {key} {state} {expected}\n  {FETCH_AGAIN}")


def shown(value: Any) -> str:
    """Return a value as its file has it, cut if it is long, for a message."""
    return json.dumps(value, ensure_ascii=False)[:_MAX_SHOWN]


def kind_of(type_name: Any) -> str:
    """Return the class of a module of sentence-transformers; for other types, all of its name.

    The library has moved its classes: sentence_transformers.models.Pooling has become
    sentence_transformers.sentence_transformer.modules.pooling.Pooling, and both are found in files.
    """
    package, _, rest = str(type_name).partition(".")
    return rest.rpartition(".")[2] if package == PACKAGE and rest else str(type_name)


def named_files(directory: Path) -> tuple[list[str], list[str]]:
    """Return which small files, and which files of weights, modules.json wants in the folders of a directory.

    Entries that cannot be used are skipped: they are refused, with the reason, when the model's configuration is read.
    """
    if not (directory / MODULES_NAME).is_file():
        return [], []
    try:
        listed = read_json(directory / MODULES_NAME)
    except ModelLoadError:
        return [], []
    kinds = {
        path: kind_of(entry.get("type"))
        for entry in (listed if isinstance(listed, list) else [])
        if isinstance(entry, dict) and isinstance(path := entry.get("path"), str) and is_plain_name(path)
    }
    configs = [f"{path}/{CONFIG_NAME}" for path, kind in kinds.items() if kind in (POOLING, DENSE)]
    return configs, [f"{path}/{SINGLE_NAME}" for path, kind in kinds.items() if kind == DENSE]


def missing_module_files(directory: Path) -> list[str]:
    """Return which of the files that modules.json wants a directory lacks."""
    configs, weights = named_files(directory)
    return [name for name in (*configs, *weights) if not (directory / name).exists()]


def may_be_of_module(name: str) -> bool:
    """Whether a file of a repository may be one of a module, which has a folder of its own."""
    folder, _, file_name = name.partition("/")
    return is_plain_name(folder) and file_name in (CONFIG_NAME, SINGLE_NAME, _PICKLE_NAME)
