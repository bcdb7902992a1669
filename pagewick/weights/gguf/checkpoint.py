"""GgufCheckpoint: one model in a GGUF file, or in several that belong together. Reads no weights, imports no torch."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from pagewick.errors import ModelLoadError
from pagewick.weights.files import Read, name_some
from pagewick.weights.gguf.architecture import GgufArchitecture
from pagewick.weights.gguf.config import architecture_of, hugging_face_config
from pagewick.weights.gguf.header import GgufHeader, GgufTensor, read_gguf_header
from pagewick.weights.gguf.metadata import Metadata
from pagewick.weights.gguf.pieces import AnyPiece, JoinedPiece, Piece, pieces_of
from pagewick.weights.gguf.vision import VisionFile

_MAX_PARTS: Final = 10_000
_MAX_ROPE_FACTORS: Final = 4096
# general.type of files that hold no model, and their contents.
OTHER_TYPES: Final = {
    "adapter": "a LoRA adapter",
    "mmproj": "the vision part of a model",
    "imatrix": "an importance matrix",
    "controlvector": "a control vector",
    "vocab": "a vocabulary only",
}
# Entries of config.json that do not come from one key alone, and the key that decides most.
_OTHER_ENTRIES: Final = {
    "block_count": "num_hidden_layers",
    "attention.causal": "is_causal",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
    "rope.scaling.type": "rope_scaling",
    "rope.dimension_count": "partial_rotary_factor",
}
_CONFIG_FIX: Final = "config.json and the weights do not belong together; download or copy both again"
_OTHER_ARCHITECTURES: Final = {"clip": "mmproj", "controlvector": "controlvector"}


@dataclass(frozen=True)
class GgufCheckpoint:
    """where: the file, for people. values: the first file's key-values. tensors: those of all files.

    read_numbers: reads one of the small float32 tensors that belong to the configuration. vision: the part that sees,
    whose file is the last one of `paths`; None: the model reads text.
    """

    where: str
    values: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]
    paths: tuple[Path, ...]
    read_numbers: Callable[[GgufTensor], Sequence[float]]
    vision: VisionFile | None = None

    def with_vision(self, vision: VisionFile, path: Path) -> GgufCheckpoint:
        """Add the part that sees, which is in the file `path`. Raises ModelLoadError if it belongs to another model."""
        vision.check_fits(self._metadata)
        part = len(self.paths)
        vision = replace(vision, tensors=tuple(replace(tensor, part=part) for tensor in vision.tensors))
        return replace(self, tensors=(*self.tensors, *vision.tensors), paths=(*self.paths, path), vision=vision)

    @cached_property
    def _text_tensors(self) -> Sequence[GgufTensor]:
        return self.tensors if self.vision is None else self.tensors[: -len(self.vision.tensors)]

    @cached_property
    def _metadata(self) -> Metadata:
        return Metadata(self.values, {tensor.name: tensor.shape for tensor in self._text_tensors}, self.where)

    @property
    def kind(self) -> str:
        """general.architecture; empty if there is none."""
        return str(self.values.get("general.architecture", ""))

    @cached_property
    def architecture(self) -> GgufArchitecture:
        """The meaning of the file's architecture. Raises ModelLoadError if it is not supported."""
        return architecture_of(self._metadata)

    @cached_property
    def _text_config(self) -> dict[str, Any]:
        """The config.json that describes the part that reads text."""
        by_name = {tensor.name: tensor for tensor in self.tensors}
        return hugging_face_config(self._metadata, lambda name: self.read_numbers(by_name[name]))

    @cached_property
    def config(self) -> dict[str, Any]:
        """The config.json that describes the file. Raises ModelLoadError if the file lacks what its model needs."""
        if self.vision is None:
            return self._text_config
        return self.vision.whole_config(self._metadata, self._text_config)

    @cached_property
    def text_pieces(self) -> list[Piece | JoinedPiece]:
        """The tensors of the part that reads text. Raises as `pieces` does."""
        return pieces_of(self._text_tensors, self.architecture, self._text_config, self.where)

    @cached_property
    def pieces(self) -> list[AnyPiece]:
        """The tensors of the checkpoint. Raises ModelLoadError for tensors that the architecture does not have."""
        return [*self.text_pieces, *([] if self.vision is None else self.vision.pieces(self._metadata))]

    def reworded(self, message: str) -> str:
        """Return an error about a config.json as one about this file, with its key in place of the entry."""
        if "general.architecture" not in self.values:
            return message
        if self.vision is not None:
            message = self.vision.reworded(message, f"{self.where}: {self.kind}.rope.dimension_sections")
        named = {entry: key for key, entry in {**self.architecture.entries, **_OTHER_ENTRIES}.items()}

        def key_of(match: re.Match[str]) -> str:
            key = named.get(match[1])
            return f"{self.where}: {match[1] if key is None else f'{self.kind}.{key}'}"

        message = re.sub(r"config\.json: (\w+)", key_of, message).replace(_CONFIG_FIX, "use another file of this model")
        return message.replace("config.json", self.where)


def open_gguf(path: Path, mmproj: str | Path | None = None, *, keep_arrays: bool = True) -> GgufCheckpoint:
    """Open a file on this disk, with the files that belong to it.

    mmproj: the file with the part that sees; None leaves it out. keep_arrays: whether to read the vocabulary, which
    `config` needs if there is such a file. Raises ModelLoadError for malformed, truncated or missing files, for one
    that holds no model, and for a part that belongs to another model.
    """

    def read_numbers(tensor: GgufTensor) -> Sequence[float]:
        with (path.parent / checkpoint.paths[tensor.part]).open("rb") as file:
            file.seek(tensor.offset)
            return unpack_numbers(tensor, file.read(min(tensor.num_bytes, 4 * _MAX_ROPE_FACTORS)))

    names = {entry.name for entry in path.parent.iterdir()}
    checkpoint = join_parts(
        path.name,
        names,
        lambda name: read_gguf_header(path.parent / name, keep_arrays=keep_arrays),
        str(path),
        read_numbers,
    )
    text = replace(checkpoint, paths=tuple(path.parent / name for name in checkpoint.paths))
    return text if mmproj is None else text.with_vision(open_vision(Path(mmproj)), Path(mmproj))


def open_vision(path: Path) -> VisionFile:
    """Open a vision part on this disk. Raises ModelLoadError if it is none, or of a family that is not supported."""
    return VisionFile.of(read_gguf_header(path), str(path))


def join_parts(
    name: str,
    names: Collection[str],
    header_of: Callable[[str], GgufHeader],
    where: str,
    read_numbers: Callable[[GgufTensor], Sequence[float]],
) -> GgufCheckpoint:
    """Read the headers of the file `name` and of the other parts of its model.

    names: all files that are there. header_of: reads the header of one. Paths of the result are the files' names.
    Raises ModelLoadError if parts are missing, or if it is no model.
    """
    header = header_of(name)
    _check_is_model(header.values, where)
    count = header.values.get("split.count", 1)
    parts = [name]
    headers = [header]
    if isinstance(count, int) and 1 < count <= _MAX_PARTS:
        parts = split_names(name, count)
        if missing := sorted(set(parts) - set(names)):
            raise ModelLoadError(
                f"{where} is one of {count} files; missing: {name_some(missing)}\n  put all of them together"
            )
        headers = [header if part == name else header_of(part) for part in parts]
    tensors = [replace(t, part=index) for index, one in enumerate(headers) for t in one.tensors]
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise ModelLoadError(f"a tensor is in two files of {where}\n  keep the files of one model only")
    if not tensors:
        raise ModelLoadError(f"{where} holds a vocabulary only, and no weights\n  use a file that holds the model")
    # Only the first part has all key-values.
    return GgufCheckpoint(where, headers[0].values, tuple(tensors), tuple(map(Path, parts)), read_numbers)


def split_names(name: str, count: int) -> list[str]:
    """Return the names of all `count` files of a GGUF checkpoint, given the name of one. Raises ModelLoadError."""
    stem, dash, rest = name.removesuffix(".gguf").rpartition("-of-")
    first, _, number = stem.rpartition("-")
    if not dash or rest != f"{count:05d}" or len(number) != 5 or not number.isdigit():
        raise ModelLoadError(
            f"{name} is one of {count} files, but its name does not say so\n"
            f"  the first should be NAME-00001-of-{count:05d}.gguf"
        )
    return [f"{first}-{part:05d}-of-{count:05d}.gguf" for part in range(1, count + 1)]


def unpack_numbers(tensor: GgufTensor, data: bytes) -> Sequence[float]:
    """Return the numbers of a float32 tensor, such as the factors of a rotary embedding. Raises ModelLoadError."""
    if tensor.format.name != "F32" or len(data) != tensor.num_bytes:
        raise ModelLoadError(f"{tensor.name} must hold at most {_MAX_ROPE_FACTORS} float32 numbers\n  use another file")
    return struct.unpack(f"<{len(data) // 4}f", data)


def read_part(read: Read, tensor: GgufTensor) -> Sequence[float]:
    """unpack_numbers of a tensor in a file that `read` reads, such as one on a hub."""
    return unpack_numbers(tensor, read(tensor.offset, min(tensor.num_bytes, 4 * _MAX_ROPE_FACTORS)))


def _check_is_model(values: Mapping[str, Any], where: str) -> None:
    kind = str(values.get("general.type", "model"))
    kind = _OTHER_ARCHITECTURES.get(str(values.get("general.architecture")), kind)
    if kind in OTHER_TYPES:
        raise ModelLoadError(f"{where} holds {OTHER_TYPES[kind]}, not a model\n  give the file of the model itself")
