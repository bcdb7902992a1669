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
from pagewick.weights.packed.config import with_side_file
from pagewick.weights.tensor_headers import gguf_tensors

if TYPE_CHECKING:
    from pagewick.weights.remote import RemoteRepository

_Parsed = TypeVar("_Parsed")


def check_remote(
    repository: RemoteRepository, chosen: GgufModel | None, check: Callable[[Description], object]
) -> None:
    """Call `check` with what a hub says of a model before its weights are downloaded. Raises what it raises.

    chosen: the GGUF model, whose tensors are described by the headers; None for safetensors, which config.json
    describes alone, because a large checkpoint has hundreds of files.
    """
    if chosen is None:
        files.require_config(repository.names, repository.model)
        check(Description(read_remote_config(repository), {}, ()))
        return
    checkpoint = remote_gguf(repository, chosen)
    try:
        check(Description(checkpoint.config, {}, tuple(gguf_tensors(checkpoint))))
    except PagewickError as error:
        raise type(error)(checkpoint.reworded(str(error))) from error


def remote_gguf(repository: RemoteRepository, chosen: GgufModel) -> GgufCheckpoint:
    """Read the headers of a GGUF file and of the other parts of its model."""

    def header_of(name: str) -> GgufHeader:
        where = f"{repository.model}/{name}"
        return parse_gguf_header(repository.open(name), repository.size(name), where, keep_arrays=False)

    def read_numbers(tensor: GgufTensor) -> Sequence[float]:
        name = chosen.files[tensor.part]
        return read_part(lambda start, size: repository.read_range(name, start, start + size), tensor)

    where = f"{chosen.first} of the hub's {repository.model}"
    return join_parts(chosen.first, chosen.files, header_of, where, read_numbers)


def read_remote_config(repository: RemoteRepository) -> dict[str, Any]:
    """Read config.json on a hub; it gets the rules of a file beside it. Raises ModelLoadError."""

    def read(name: str) -> dict[str, Any]:
        return read_remote(repository, name, files.read_json_object)

    return with_side_file(read(files.CONFIG_NAME), repository.names, read)


def read_remote(repository: RemoteRepository, name: str, parse: Callable[[Path], _Parsed]) -> _Parsed:
    """Parse a small file on the hub with the reader of a local file."""
    where = f"{repository.model}/{name}"
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, name)
        path.write_bytes(repository.read_all(name))
        try:
            return parse(path)
        except ModelLoadError as error:
            raise ModelLoadError(str(error).replace(str(path), where)) from error
