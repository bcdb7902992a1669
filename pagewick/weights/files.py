"""The files of a checkpoint, chosen by name, and its small JSON files. Imports no torch.

The hubs use it to choose what to download and the sources to choose what to open, so that both always agree.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from pagewick.errors import ModelLoadError

ADAPTER_CONFIG_NAME: Final = "adapter_config.json"
CONFIG_NAME: Final = "config.json"
GENERATION_CONFIG_NAME: Final = "generation_config.json"
SINGLE_NAME: Final = "model.safetensors"
INDEX_NAME: Final = "model.safetensors.index.json"
GGUF_SUFFIX: Final = ".gguf"
# Lists the modules of sentence-transformers (weights/sentence_transformers.py).
MODULES_NAME: Final = "modules.json"

# Everything but weights that a model needs. Never code (*.py) and never pickles.
_METADATA_PATTERNS: Final = (
    CONFIG_NAME,
    MODULES_NAME,
    "generation_config.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "tokenizer*.json",
    "tekken.json",
    "tokenizer.model",
    "tiktoken.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "chat_template*",
    "preprocessor_config.json",
    "processor_config.json",
)
# A tokenizer is read from the first of these groups whose files all exist (pagewick/text/tokenizer_files.py).
_TOKENIZERS: Final = (
    ("tokenizer.json",), ("tekken.json",), ("tokenizer.model",), ("tiktoken.model",), ("vocab.json", "merges.txt"),
    ("vocab.txt",),
)  # fmt: skip
_PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SHARD_NUMBER: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors")
_MAX_CONFIG_BYTES: Final = 16 * 2**20
_MAX_INDEX_BYTES: Final = 256 * 2**20
_MAX_SHARDS: Final = 10_000
_FETCH_AGAIN: Final = "download or copy the file again"
_MAX_NAMED: Final = 5
_MAX_NAME_CHARS: Final = 200


Read = Callable[[int, int], bytes]
"""(offset, number of bytes) -> those bytes of a file; fewer only at its end."""

_Parsed = TypeVar("_Parsed")


def name_some(names: Iterable[str]) -> str:
    """Join the first five names and the number of the others, for an error message."""
    listed = list(names)
    more = len(listed) - _MAX_NAMED
    return ", ".join(map(printable, listed[:_MAX_NAMED])) + (f" and {more} more" if more > 0 else "")


def printable(name: str) -> str:
    """Return a name from a file for an error message: in one line, without control characters, and not too long."""
    name = "".join(character if character.isprintable() else "?" for character in name[: _MAX_NAME_CHARS + 1])
    return name if len(name) <= _MAX_NAME_CHARS else f"{name[:_MAX_NAME_CHARS]}..."


def is_plain_name(name: str) -> bool:
    """Whether `name` is a file name and nothing else: it cannot lead out of its directory."""
    return name not in ("", ".", "..") and not any(character in name for character in "/\\\0")


def select_metadata(names: Iterable[str]) -> list[str]:
    """Return the configuration, tokenizer and template files among `names`, without subdirectories."""
    plain = [name for name in names if is_plain_name(name) and not name.endswith(_PICKLE_SUFFIXES)]
    return sorted(n for n in plain if any(fnmatch.fnmatchcase(n, p) for p in _METADATA_PATTERNS))


def has_tokenizer(names: Collection[str]) -> bool:
    """Whether `names` include all files of a tokenizer."""
    return any(all(name in names for name in group) for group in _TOKENIZERS)


def has_safetensors(names: Collection[str]) -> bool:
    """Whether `names` include the weights of a safetensors checkpoint, an index that lists them, or a part of them."""
    return INDEX_NAME in names or bool(_all_weights(names, None))


def needs_index(names: Collection[str]) -> bool:
    """Whether the index says which weight files to use; as in transformers, an unsharded file takes precedence."""
    return SINGLE_NAME not in names and INDEX_NAME in names


def require_config(names: Collection[str], model: str) -> None:
    """Raise ModelLoadError unless there is a config.json among the files of a model."""
    if CONFIG_NAME not in names:
        raise ModelLoadError(f"{model} has no {CONFIG_NAME}\n  use a repository for transformers")


def select_weights(names: Collection[str], index: Mapping[str, str] | None, where: str) -> list[str]:
    """Return the safetensors files among `names` that hold the model, sorted.

    `index` (tensor name -> file name) is given exactly if needs_index(names); `where` names the checkpoint in
    messages. Raises ModelLoadError when files are missing or there is none in a format that works.
    """
    wanted = _all_weights(names, index)
    if not wanted:
        raise ModelLoadError(explain_no_weights(names, where))
    if missing := sorted(wanted.difference(names)):
        raise ModelLoadError(
            f"the checkpoint in {where} is incomplete; missing: {name_some(missing)}\n"
            "  download or copy these files again"
        )
    return sorted(wanted)


def refuse_special_files(directory: Path) -> None:
    """Raise ModelLoadError for a pipe, a device or a socket in a directory, or behind a link: reading may never end.

    A repository that git clones may have such links.
    """
    for entry in directory.iterdir():
        with suppress(OSError):
            if entry.exists() and not entry.is_file() and not entry.is_dir():
                raise ModelLoadError(
                    f"{entry} is a pipe, a device or a socket, and must be a file\n"
                    "  delete it, and get the model from a source that you trust"
                )


def missing_files(directory: Path) -> list[str]:
    """Return the names of the files that a directory lacks to be a checkpoint; empty if it is complete."""
    names = {entry.name for entry in directory.iterdir() if entry.exists()}  # exists() is false for a dangling link
    if CONFIG_NAME not in names:
        return [CONFIG_NAME]
    index = read_index(directory / INDEX_NAME) if needs_index(names) else None
    return sorted((_all_weights(names, index) or {SINGLE_NAME}) - names)


def read_json_object(
    path: Path,
    max_bytes: int = _MAX_CONFIG_BYTES,
    make_object: Callable[[list[tuple[str, Any]]], dict[str, Any]] = dict,
) -> dict[str, Any]:
    """Read the JSON object in a configuration file; `make_object` builds each object from its pairs.

    Raises ModelLoadError if the file cannot be used.
    """
    value = read_json(path, max_bytes, make_object)
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} does not hold a JSON object\n  {_FETCH_AGAIN}")
    return value


def read_json(
    path: Path,
    max_bytes: int = _MAX_CONFIG_BYTES,
    make_object: Callable[[list[tuple[str, Any]]], dict[str, Any]] = dict,
) -> Any:
    """Read a configuration file as read_json_object does, whatever it holds."""
    try:
        if path.stat().st_size > max_bytes:
            raise ModelLoadError(f"{path} is larger than {max_bytes} bytes; it cannot be what its name says")
        return json.loads(path.read_bytes(), object_pairs_hook=make_object)
    except FileNotFoundError:
        raise ModelLoadError(f"{path} is missing\n  download or copy the model's files again") from None
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON ({error})\n  {_FETCH_AGAIN}") from error


def parse_file(path: Path, parse: Callable[[Read, int, str], _Parsed]) -> _Parsed:
    """Return parse(read, size, where) for a file on this disk; `where` is its path.

    Raises ModelLoadError if the file cannot be read, and as `parse` does.
    """
    try:
        with path.open("rb") as file:

            def read(offset: int, num_bytes: int) -> bytes:
                file.seek(offset)
                return file.read(num_bytes)

            return parse(read, path.stat().st_size, str(path))
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror or error}\n  check the file") from error


def read_index(path: Path) -> dict[str, str]:
    """Read tensor name -> file name from `model.safetensors.index.json`. Raises ModelLoadError.

    File names are checked to be plain: an index cannot make us read outside its directory. Symbolic links are allowed,
    because the Hugging Face cache consists of them.
    """
    weight_map = read_json_object(path, _MAX_INDEX_BYTES, _unique_keys).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{path} has no weight_map\n  {_FETCH_AGAIN}")
    for tensor, file_name in weight_map.items():
        if not isinstance(file_name, str) or not is_plain_name(file_name):
            raise ModelLoadError(
                f"{path} puts {tensor} into {file_name!r}, which is not a plain file name\n"
                "  a shard must lie beside its index; get the checkpoint from a source that you trust"
            )
    return weight_map


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a tensor that the index lists twice: json would silently take the last file."""
    unique = dict(pairs)
    if len(unique) != len(pairs):
        ((name, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"{name} is listed twice")
    return unique


def _all_weights(names: Collection[str], index: Mapping[str, str] | None) -> set[str]:
    """Return the weight files that a checkpoint should have; empty if it has none.

    Without an index these are the safetensors files among `names` and the missing ones of a numbered set.
    """
    if SINGLE_NAME in names:
        return {SINGLE_NAME}
    if index is not None:
        return set(index.values())
    found = {n for n in names if n.endswith(".safetensors") and is_plain_name(n)}
    found = {n for n in found if not n.startswith("adapter_")}
    # Some repositories hold the same weights a second time in their authors' own layout.
    found = {n for n in found if not n.startswith("consolidated")} or found
    wanted = set(found)
    for name in found:
        if match := _SHARD_NUMBER.fullmatch(name):
            stem, count = match["stem"], match["count"]
            numbers = range(1, min(int(count), _MAX_SHARDS) + 1)
            wanted |= {f"{stem}-{i:0{len(count)}d}-of-{count}.safetensors" for i in numbers}
    return wanted


def explain_no_weights(names: Collection[str], where: str) -> str:
    """Say which other files were found, why Pagewick does not read them, and what to do instead."""
    if any(n.startswith("adapter_model") for n in names):
        return f"{where} holds a LoRA adapter\n  give the base model, and the adapter with --lora"
    if pickles := sorted(n for n in names if n.endswith(_PICKLE_SUFFIXES)):
        return (
            f"{where} holds no safetensors, only pickle checkpoints: {name_some(pickles)}\n"
            "  they are refused, because reading a pickle runs code out of it\n"
            "  convert one that you trust, then copy all other files beside it (of an encoder, import AutoModel):\n"
            '  python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{where}').save_pretrained('converted')\""
        )
    return (
        f"{where} holds no weights; found: {name_some(sorted(names)) or 'nothing'}\n"
        "  Pagewick reads config.json and *.safetensors, as Hugging Face repositories have them"
    )
