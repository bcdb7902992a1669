"""The description of a model on a hub: only config.json and the headers of its files are fetched."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pagewick.errors import ModelLoadError, PagewickError
from pagewick.weights import files
from pagewick.weights.description import Description
from pagewick.weights.gguf.checkpoint import GgufCheckpoint, join_parts, read_part
from pagewick.weights.gguf.choice import GgufModel
from pagewick.weights.gguf.header import GgufHeader, GgufTensor, parse_gguf_header
from pagewick.weights.gguf.vision import VisionFile
from pagewick.weights.gguf.vision_choice import explain_not_used, named_vision, vision_choices
from pagewick.weights.gguf.vision_families import TEXT_KINDS
from pagewick.weights.module_files import ModuleFiles
from pagewick.weights.packed.config import with_side_file
from pagewick.weights.sentence_transformers import with_modules
from pagewick.weights.tensor_headers import gguf_tensors

if TYPE_CHECKING:
    from pagewick.weights.remote import RemoteRepository

_Parsed = TypeVar("_Parsed")


def check_remote(
    repository: RemoteRepository,
    chosen: GgufModel | None,
    check: Callable[[Description], object],
    vision: str | None = None,
) -> None:
    """Call `check` with what a hub says of a model before its weights are downloaded. Raises what it raises.

    chosen: the GGUF model, whose tensors are described by the headers; None for safetensors, which config.json
    describes alone, because a large checkpoint has hundreds of files. vision: the file with the part that sees.
    """
    if chosen is None:
        files.require_config(repository.names, repository.model)
        check(Description(read_remote_config(repository), {}, ()))
        return
    checkpoint = remote_gguf(repository, chosen)
    if vision is not None:
        checkpoint = checkpoint.with_vision(_remote_vision(repository, vision), Path(vision))
    try:
        check(Description(checkpoint.config, {}, tuple(gguf_tensors(checkpoint))))
    except PagewickError as error:
        raise type(error)(checkpoint.reworded(str(error))) from error


def remote_gguf(repository: RemoteRepository, chosen: GgufModel) -> GgufCheckpoint:
    """Read the headers of a GGUF file and of the other parts of its model."""

    def header_of(name: str) -> GgufHeader:
        where = f"{repository.model}/{name}"
        return parse_gguf_header(repository.open(name), repository.size(name), where)

    def read_numbers(tensor: GgufTensor) -> Sequence[float]:
        name = chosen.files[tensor.part]
        return read_part(lambda start, size: repository.read_range(name, start, start + size), tensor)

    where = f"{chosen.first} of the hub's {repository.model}"
    return join_parts(chosen.first, chosen.files, header_of, where, read_numbers)


def remote_gguf_with_images(repository: RemoteRepository, chosen: GgufModel) -> GgufCheckpoint:
    """remote_gguf with the part that sees, if there is one in the repository."""
    text = remote_gguf(repository, chosen)
    name = choose_remote_vision(repository, chosen, None) if text.kind in TEXT_KINDS else None
    return text if name is None else text.with_vision(_remote_vision(repository, name), Path(name))


def choose_remote_vision(
    repository: RemoteRepository, chosen: GgufModel, wanted: str | None, cached: Path | None = None
) -> str | None:
    """Return the file with the part that sees that belongs to a GGUF model; None if there is none that is supported.

    wanted: the file that the user names; one on this disk needs none of the hub's. cached: the model's file, if it is
    on this disk; what lies beside it is not looked at again. Raises ModelLoadError for a name that is not there.
    """
    if wanted is not None:
        is_here = Path(wanted).expanduser().is_file()
        return None if is_here else named_vision(repository.names, chosen.first, wanted)
    for name in vision_choices(repository.names, chosen.first)[:1]:
        if cached is not None and (Path(str(cached).removesuffix(chosen.first)) / name).is_file():
            return name
        try:
            _remote_vision(repository, name)
        except ModelLoadError as error:
            explain_not_used(name, error)
        else:
            return name
    return None


def _remote_vision(repository: RemoteRepository, name: str) -> VisionFile:
    where = f"{repository.model}/{name}"
    return VisionFile.of(parse_gguf_header(repository.open(name), repository.size(name), where), where)


def read_remote_config(repository: RemoteRepository) -> dict[str, Any]:
    """Read config.json on a hub; it gets what files beside it say, as that of a directory. Raises ModelLoadError."""

    def read(name: str) -> dict[str, Any]:
        return read_remote(repository, name, files.read_json_object)

    config = with_side_file(read(files.CONFIG_NAME), repository.names, read)
    return with_modules(config, remote_module_files(repository))


def remote_module_files(repository: RemoteRepository) -> ModuleFiles:
    """Return the files of sentence-transformers on a hub."""

    def read(name: str) -> Any:
        return read_remote(repository, name, files.read_json)

    return ModuleFiles(repository.model, repository.names.__contains__, read)


def read_remote(repository: RemoteRepository, name: str, parse: Callable[[Path], _Parsed]) -> _Parsed:
    """Parse a small file on the hub with the reader of a local file."""
    where = f"{repository.model}/{name}"
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, Path(name).name)
        path.write_bytes(repository.read_all(name))
        try:
            return parse(path)
        except ModelLoadError as error:
            raise ModelLoadError(str(error).replace(str(path), where)) from error
