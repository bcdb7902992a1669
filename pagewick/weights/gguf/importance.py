"""Importance matrices: for each column of a weight, the mean square of what it is multiplied by.

Format: a GGUF file of llama.cpp's (tools/imatrix) with two tensors for each weight: NAME.in_sum2, the sums of squares,
[columns] or [experts, columns], and NAME.counts, the number of tokens that each sum is of. The older format (.dat) has
the means times a number of chunks.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from pagewick.errors import ConfigError, ModelLoadError
from pagewick.weights.files import name_some
from pagewick.weights.gguf.header import FORMATS_BY_NAME, read_gguf_header
from pagewick.weights.gguf.writing import header_bytes, new_file, padding, place_tensors

# Keys that say in a quantized file what its importance came from.
IMPORTANCE_KEYS: Final = {"file": "quantize.imatrix.file", "entries": "quantize.imatrix.entries_count"}
_SUMS, _COUNTS = ".in_sum2", ".counts"
_MAX_LEGACY_BYTES: Final = 2**30
_MAX_NAME_BYTES: Final = 2**10
# Weights that are multiplied by nothing, or only looked up: they have no importance.
_WITHOUT: Final = ("token_embd.weight", "output.weight", "per_layer_token_embd.weight")
_FIX: Final = "make one with pagewick imatrix MODEL --text FILE"


Sums = Mapping[str, tuple[Tensor, Tensor]]
"""Name of a weight in GGUF files -> sums of squares [experts, columns], and the number of tokens [experts]; experts is
1 where there are none."""


@dataclass(frozen=True)
class Importance:
    """means: name of a weight in GGUF files -> mean squares [columns], or [experts, columns]. name: of its file."""

    means: Mapping[str, Tensor]
    name: str

    def of_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, Tensor], list[str]]:
        """Return the importance of these tensors, and the names of those that should have some and have none.

        Raises ConfigError if the matrix belongs to another model.
        """
        missing = [name for name in shapes if name not in self.means and name not in _WITHOUT]
        if missing and not shapes.keys() & self.means.keys():
            raise ConfigError(f"{self.name} has no importance for {name_some(missing)}\n  it belongs to another model")
        found = {}
        for name in shapes:
            if name not in self.means:
                continue
            means, shape = self.means[name], (*shapes[name][:-2], shapes[name][-1])
            if means.numel() != torch.Size(shape).numel():
                raise ConfigError(
                    f"{self.name} has {means.numel()} numbers for {name}, whose columns are {list(shape)}\n"
                    "  it belongs to another model"
                )
            found[name] = means.view(shape)
        return found, missing


def read_importance(path: Path) -> Importance:
    """Read a file in either format. Raises ConfigError if it is no importance matrix, or holds impossible numbers."""
    try:
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
        means = _read_gguf(path) if is_gguf else _read_legacy(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}\n  {_FIX}") from None
    except ModelLoadError as error:
        raise ConfigError(str(error)) from None
    if not means or not all((numbers.isfinite() & (numbers >= 0)).all() for numbers in means.values()):
        raise ConfigError(f"{path} holds no importance matrix, or one with impossible numbers\n  {_FIX}")
    return Importance(means, path.name)


def write_importance(path: Path, seen: Sums, text: str, num_chunks: int, chunk_size: int, *, is_forced: bool) -> None:
    """Write a file in the newer format. text: the file that was read, as num_chunks pieces of chunk_size tokens."""
    contents: dict[str, Tensor] = {}
    for name, (sums, counts) in seen.items():
        contents[f"{name}{_SUMS}"] = sums.float()
        contents[f"{name}{_COUNTS}"] = counts.float().view(-1, 1)
    tensors = place_tensors(
        {name: tuple(numbers.shape) for name, numbers in contents.items()},
        dict.fromkeys(contents, FORMATS_BY_NAME["F32"]),
    )
    values = {
        "general.type": "imatrix",
        "imatrix.datasets": [text],
        "imatrix.chunk_count": num_chunks,
        "imatrix.chunk_size": chunk_size,
    }
    header = header_bytes(values, tensors)
    with new_file(path, len(header) + sum(tensor.num_bytes for tensor in tensors), is_forced=is_forced) as file:
        file.write(header)
        for tensor in tensors:
            file.write(contents[tensor.name].contiguous().numpy().tobytes() + padding(tensor))


def _read_gguf(path: Path) -> dict[str, Tensor]:
    header = read_gguf_header(path)
    if header.values.get("general.type") != "imatrix":
        raise ConfigError(f"{path} is a GGUF file, and no importance matrix\n  {_FIX}")
    with path.open("rb") as file:
        numbers = {}
        for tensor in header.tensors:
            if tensor.format.name != "F32":
                raise ConfigError(f"{path}: {tensor.name} is {tensor.format.name}, and must be F32\n  {_FIX}")
            file.seek(tensor.offset)
            content = torch.frombuffer(bytearray(file.read(tensor.num_bytes)), dtype=torch.float32)
            numbers[tensor.name] = content.view(-1, tensor.shape[-1])
    names = [name.removesuffix(_SUMS) for name in numbers if name.endswith(_SUMS)]
    if missing := [name for name in names if f"{name}{_COUNTS}" not in numbers]:
        raise ConfigError(f"{path} has no {missing[0]}{_COUNTS}\n  {_FIX}")
    return {name: _means(numbers[f"{name}{_SUMS}"], numbers[f"{name}{_COUNTS}"]) for name in names}


def _means(sums: Tensor, counts: Tensor) -> Tensor:
    """Return [experts, columns]; all columns of an expert that no token chose count alike."""
    counts = counts.view(-1, 1)
    return torch.where(counts > 0, sums / counts.clamp(min=1), torch.ones_like(sums))


def _read_legacy(path: Path) -> dict[str, Tensor]:
    """int32 count; then for each weight: int32 length, name, int32 calls, int32 size, float32 numbers."""
    if path.stat().st_size > _MAX_LEGACY_BYTES:
        raise ConfigError(f"{path} is too large for an importance matrix\n  {_FIX}")
    content, found, position = path.read_bytes(), {}, 4

    def number() -> int:
        nonlocal position
        (value,) = struct.unpack_from("<i", content, position)
        position += 4
        if value < 0:
            raise ValueError(value)
        return int(value)

    try:
        (num_entries,) = struct.unpack_from("<i", content)
        for _ in range(num_entries):
            length = number()
            if length > _MAX_NAME_BYTES:
                raise ValueError(length)
            name = content[position : position + length].decode()
            position += length
            num_calls, size = max(1, number()), number()
            numbers = torch.frombuffer(bytearray(content[position : position + 4 * size]), dtype=torch.float32)
            if len(numbers) != size:
                raise ValueError(size)
            found[name] = numbers / num_calls
            position += 4 * size
    except (struct.error, ValueError, RuntimeError):
        raise ConfigError(f"{path} is no importance matrix, or it is cut off\n  {_FIX}") from None
    return found
