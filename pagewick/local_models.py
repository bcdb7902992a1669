"""Turns the models that a config names into directories and files on this disk."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from pagewick.config import EngineConfig
from pagewick.engine.preflight import WeightBytes, check_description, check_models
from pagewick.errors import ConfigError, ModelLoadError
from pagewick.log import get_logger
from pagewick.number_formats import MARLIN
from pagewick.weights.description import GGUF, Description, describe, is_gguf, weights_kind
from pagewick.weights.files import GGUF_SUFFIX, INDEX_NAME, needs_index, printable, read_index, select_weights
from pagewick.weights.gguf.checkpoint import open_gguf
from pagewick.weights.gguf.choice import complete_models
from pagewick.weights.gguf.vision_choice import vision_of
from pagewick.weights.gguf.vision_families import SEEING_KINDS
from pagewick.weights.hub import DEFAULT_HUB, resolve_model, resolve_tokenizer
from pagewick.weights.lora.finding import resolve_adapter
from pagewick.weights.packed.config import quant_method

# Levels of directories in which models are looked for: a model may lie in its owner's directory.
_MAX_DEPTH = 3
_PART_NUMBER = re.compile(r"-\d{5}-of-\d{5}$")

logger = get_logger(__name__)


def with_local_models(config: EngineConfig, hf_token: str | bool | None = None) -> EngineConfig:
    """Replace the models that a config names by local directories; downloads those that are not on this disk.

    hf_token: in place of HF_TOKEN, if it is a text. Raises ModelLoadError, ConfigError.
    """
    token = hf_token if isinstance(hf_token, str) else None
    find = partial(resolve_model, hub=config.hub, token=token, check=check_description)

    def check(description: Description) -> None:
        # A GGUF file is described by its tensors, safetensors by config.json alone.
        kind = GGUF if description.tensors else quant_method(description.config)
        check_description(description, config.for_weights(kind).quantization)

    model = find(
        config.model,
        weight_file=config.weight_file,
        revision=config.revision,
        check=check,
        with_images=not config.language_model_only,
        mmproj=config.mmproj,
    )
    kind = "" if config.quantization is None else weights_kind(model)
    stored = {tensor.dtype for tensor in describe(model).tensors} if config.quantization == MARLIN else ()
    found = replace(
        config.for_weights(kind, stored), model=str(model), weight_file=None, mmproj=_vision_of(config, model)
    )
    if config.quantization == MARLIN:
        result = "the weights are quantized to it" if found.quantization else "the weights keep their levels"
        logger.info("Marlin's layout is for CUDA kernels; --quantization marlin is int4 here, and %s", result)
    if config.tokenizer is not None:
        with _named("--tokenizer"):
            found = replace(found, tokenizer=str(resolve_tokenizer(config.tokenizer, hub=config.hub, token=token)))
    if config.speculative_model is not None:
        with _named("--speculative-model"):
            found = replace(found, speculative_model=str(find(config.speculative_model)))
    paths = dict[str, str]()
    for name, path in config.adapter_paths.items():
        with _named(f"--lora-modules {name}" if name else "--lora"):
            paths[name] = str(local_adapter(path, config.hub, token))
    if paths:
        found = replace(found, lora=paths.pop("", None), lora_modules=tuple("=".join(one) for one in paths.items()))
    return found


def checked_local_models(config: EngineConfig) -> EngineConfig:
    """Do what with_local_models does, and check the descriptions and the tensors' headers of the models found."""
    found = with_local_models(config)
    check_models(found)
    return found


@contextmanager
def _named(flag: str) -> Iterator[None]:
    """Put the flag before the message of an error, which would seem to be about the model itself."""
    try:
        yield
    except ModelLoadError as error:
        error.args = (f"{flag}: {error}",)
        raise


def local_adapter(name: str, hub: str = DEFAULT_HUB, token: str | None = None) -> Path:
    """Return the directory or file of a LoRA adapter, downloaded from a hub if it is not on this disk.

    Raises ModelLoadError and ConfigError.
    """
    return resolve_adapter(name, hub=hub, token=token)


def weight_bytes(config: EngineConfig) -> int:
    """Return the memory for the weights of all ranks of a config whose models are on this disk.

    0 if the choice of a quantization depends on the memory that is free. Raises ConfigError and ModelLoadError.
    """
    if config.quantization == "auto":
        return 0
    num_ranks = config.tensor_parallel_size
    return config.num_ranks * WeightBytes.of(config, num_ranks, check_models(config)).all


def weight_files(model: Path) -> list[Path]:
    """Return the files that the loader reads weights from, of a directory or of a GGUF file with its other parts.

    Empty if they are not on this disk, or not complete.
    """
    if model.suffix == GGUF_SUFFIX:
        if (part := _PART_NUMBER.search(model.stem)) is None:
            return [model]
        beginning, count = model.stem[: part.start()], part[0].rpartition("-")[2]
        return sorted(model.parent.glob(f"{glob.escape(beginning)}-?????-of-{count}{GGUF_SUFFIX}"))
    try:
        names = [entry.name for entry in model.iterdir()]
        index = read_index(model / INDEX_NAME) if needs_index(names) else None
        return [model / name for name in select_weights(names, index, str(model))]
    except (ModelLoadError, OSError):
        return []


def models_in(directory: Path) -> dict[str, Path]:
    """Return the models in a directory, by name: directories with a config.json, and GGUF files.

    A file's name is its own without the suffix, or that of its directory if it is the only model there. Directories in
    between, such as those of the models' owners, are a part of the name. A link to a directory above itself is left
    out, and so are names that are not UTF-8, which no request could have. Raises ConfigError if there is no such
    directory.
    """
    if (directory / "config.json").is_file():
        raise ConfigError(f"--models-dir {directory} is a model itself; serve it as MODEL, or name the directory above")
    try:
        return _models_below(directory, "", _MAX_DEPTH)
    except OSError as error:
        raise ConfigError(f"cannot read the models in {directory}: {error.strerror}; check --models-dir") from None


def _is_readable(directory: Path) -> bool:
    """Whether the models in a directory can be read; otherwise the log says why not."""
    try:
        next(directory.iterdir(), None)
    except OSError as error:
        logger.warning("the models in %s are left out: %s", directory, error.strerror)
        return False
    return True


def _has_text_name(entry: Path) -> bool:
    """Whether a name is UTF-8; otherwise the log says that the entry is left out."""
    try:
        entry.name.encode()
    except UnicodeEncodeError:
        logger.warning("%s is left out: its name is not UTF-8; rename it", printable(str(entry)))
        return False
    return True


def _models_below(directory: Path, prefix: str, depth: int) -> dict[str, Path]:
    shown = (entry for entry in directory.iterdir() if not entry.name.startswith("."))
    entries = sorted(filter(_has_text_name, shown))
    found: dict[str, Path] = {}
    here = directory.resolve()
    for below in (entry for entry in entries if entry.is_dir() and not here.is_relative_to(entry.resolve())):
        name = prefix + below.name
        if (below / "config.json").is_file():
            found[name] = below
        elif depth > 1 and _is_readable(below):
            inside = _models_below(below, f"{name}/", depth - 1)
            files = [path for path in inside.values() if is_gguf(path) and path.parent == below]
            found |= {name: files[0]} if len(files) == len(inside) == 1 else inside
    for model in complete_models([entry.name for entry in entries if entry.is_file()]):
        name = prefix + _PART_NUMBER.sub("", model.first.removesuffix(".gguf"))
        found[name if name not in found else f"{prefix}{model.first}"] = directory / model.first
    return found


def _vision_of(config: EngineConfig, model: Path) -> str | None:
    """Return the file with the part that sees for a GGUF file on this disk, and say so; None: there is none.

    Raises ConfigError if one is given for a model that has no such file, and ModelLoadError for one that does not fit.
    """
    if not is_gguf(model):
        if config.mmproj is not None:
            raise ConfigError(
                f"--mmproj {config.mmproj} is for GGUF files, and {model} is a directory, which holds the part that "
                "sees, too\n  leave it out"
            )
        return None
    if config.language_model_only:
        return None
    found = vision_of(model, config.mmproj)
    if found is not None:
        logger.info("images are read with %s", found.name)
    elif open_gguf(model, keep_arrays=False).kind in SEEING_KINDS:
        logger.info("images are refused: there is no mmproj file for %s; give one with --mmproj", model.name)
    return None if found is None else str(found)
