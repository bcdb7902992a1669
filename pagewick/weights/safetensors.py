"""Safetensors checkpoints: one file, or shards with an index. Tensors are mapped, never read as a whole.

Format: https://huggingface.co/docs/safetensors. The safetensors library checks headers (offsets in bounds,
no overlap, no holes); what is added here is everything about several files, and messages that help.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch
from safetensors import SafetensorError, safe_open

from pagewick.errors import ModelLoadError
from pagewick.weights.files import (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    INDEX_NAME,
    name_some,
    needs_index,
    read_index,
    read_json_object,
    select_weights,
)
from pagewick.weights.tensor_headers import TensorInfo, with_stored_dtype

_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_GIT_LFS_POINTER: Final = b"version https://git-lfs"


class SafetensorsSource:
    """The safetensors checkpoint in a directory; a TensorSource.

    Opening reads the headers only. Raises ModelLoadError for a missing, truncated or damaged file, for a name
    in the index that its file does not have, for a tensor in two files, and for a dtype that torch lacks.
    """

    def __init__(self, directory: Path) -> None:
        names = {entry.name for entry in directory.iterdir()}
        index = read_index(directory / INDEX_NAME) if needs_index(names) else None
        file_names = select_weights(names, index, str(directory))
        self._config = read_json_object(directory / CONFIG_NAME)
        advice = directory / GENERATION_CONFIG_NAME
        self._generation_config = read_json_object(advice) if advice.exists() else {}
        self._files = {name: _open_file(directory / name) for name in file_names}
        self._file_of = self._assign(directory, index)
        self._check_dtypes(directory)

    def names(self) -> Sequence[str]:
        """All tensor names: file by file, by offset inside a file."""
        return tuple(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Data type of a tensor, from the header."""
        return _DTYPES[self._slice(name).get_dtype()]

    def stored_type(self, name: str) -> torch.dtype:
        """The same: there are no other formats in these files."""
        return self.dtype(name)

    def get(self, name: str) -> torch.Tensor:
        """A tensor whose memory is the mapped file; no byte is read before it is used."""
        tensor: torch.Tensor = self._files[self._file_of[name]].get_tensor(name)
        return tensor

    def release(self, tensor: torch.Tensor) -> None:
        """Drop the tensor's pages from this process; the file stays in the system's page cache."""
        _drop_pages(tensor)

    def config(self) -> dict[str, Any]:
        """`config.json` as it is, but for a dtype that it does not say."""
        return with_stored_dtype(self._config, (self._slice(name).get_dtype() for name in self._file_of))

    def generation_config(self) -> dict[str, Any]:
        """`generation_config.json` as it is; empty if there is none."""
        return dict(self._generation_config)

    def close(self) -> None:
        """Forget the files; each mapping ends when its last tensor is gone."""
        self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _slice(self, name: str) -> Any:
        return self._files[self._file_of[name]].get_slice(name)

    def _assign(self, directory: Path, index: dict[str, str] | None) -> dict[str, str]:
        """Tensor name -> file name, in file order; the index decides where there is one."""
        file_of: dict[str, str] = {}
        for file_name, file in self._files.items():
            for name in file.offset_keys():
                if index is not None and index.get(name) != file_name:
                    continue
                if name in file_of:
                    raise ModelLoadError(
                        f"{name} is in two files of {directory}: {file_of[name]} and {file_name}\n"
                        "  keep the files of one checkpoint only"
                    )
                file_of[name] = file_name
        missing = [f"{name} ({file})" for name, file in (index or {}).items() if name not in file_of]
        if missing:
            raise ModelLoadError(
                f"{directory / INDEX_NAME} lists tensors that their files do not hold: {name_some(missing)}\n"
                "  the files are of different versions; download or copy all of them again"
            )
        return file_of

    def _check_dtypes(self, directory: Path) -> None:
        _check_known({name: self._slice(name).get_dtype() for name in self._file_of}, directory)


def described_tensors(tensors: Iterable[TensorInfo]) -> dict[str, torch.Tensor]:
    """Tensors of which only the headers are known, on the meta device. Raises ModelLoadError for odd dtypes."""
    found = list(tensors)
    _check_known({tensor.name: tensor.dtype for tensor in found}, "the checkpoint")
    return {one.name: torch.empty(one.shape, dtype=_DTYPES[one.dtype], device="meta") for one in found}


def _check_known(dtypes: Mapping[str, str], where: object) -> None:
    unknown = [f"{name} ({dtype})" for name, dtype in dtypes.items() if dtype not in _DTYPES]
    if unknown:
        raise ModelLoadError(
            f"{where} holds tensors of a data type that is not supported: {name_some(unknown)}\n"
            f"  supported: {', '.join(_DTYPES)}"
        )


def _open_file(path: Path) -> Any:
    """The library's handle of one file; its header has been read and checked."""
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        with path.open("rb") as file:
            if file.read(len(_GIT_LFS_POINTER)) == _GIT_LFS_POINTER:
                raise ModelLoadError(
                    f"{path} is a Git LFS pointer, not the weights themselves\n"
                    f"  fetch them: git -C {path.parent} lfs pull"
                ) from error
        raise ModelLoadError(
            f"{path} is truncated or damaged ({path.stat().st_size} bytes; {error})\n"
            "  delete it, then download or copy it again"
        ) from error
    except OSError as error:
        raise ModelLoadError(f"cannot open {path}: {error.strerror or error}\n  check the file") from error


def _drop_pages(tensor: torch.Tensor) -> None:
    """madvise(MADV_DONTNEED) on the whole pages inside a tensor that is mapped from a file.

    Only whole pages inside: should a tensor ever not be mapped, nothing but its own bytes, which the caller
    has given up, can be lost. The library offers no call for this, so libc is asked directly.
    """
    if sys.platform != "linux":  # elsewhere the advice means something else, or nothing
        return
    begin = math.ceil(tensor.data_ptr() / mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        madvise(begin, end - begin, mmap.MADV_DONTNEED)
