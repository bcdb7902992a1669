"""Safetensors checkpoints: one file, or shards with an index. Tensors are mapped, never read as a whole.

Format: https://huggingface.co/docs/safetensors. The headers are read by tensor_headers, the tensors by the library.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from pagewick.errors import ModelLoadError
from pagewick.weights.dense_tensors import checkpoint_tensors, name_in_file
from pagewick.weights.description import directory_config
from pagewick.weights.files import GENERATION_CONFIG_NAME, name_some, read_json_object
from pagewick.weights.mapped import release_pages
from pagewick.weights.packed.config import read_config
from pagewick.weights.source import TensorSource
from pagewick.weights.stacked import separated, stacked_parts
from pagewick.weights.tensor_headers import TensorInfo, with_stored_dtype
from pagewick.weights.transposed import transposed_names, upright

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


DTYPE_WORDS: Final = {dtype: word for word, dtype in _DTYPES.items()}
"""Data type -> the format's word."""


class SafetensorsSource(TensorSource):
    """The safetensors checkpoint in a directory.

    Opening reads the headers only. Raises ModelLoadError for a missing, truncated or damaged file, for a name
    in the index that its file does not have, for a tensor in two files, and for a dtype that torch lacks.
    has_modules: whether it includes the modules of sentence-transformers beside it, which have files of their own.
    """

    def __init__(self, directory: Path, *, has_modules: bool = True) -> None:
        config = directory_config(directory) if has_modules else read_config(directory)
        self._config = config
        self._tensors = {tensor.name: tensor for tensor in checkpoint_tensors(directory, config)}
        unknown = [f"{t.name} ({t.dtype})" for t in self._tensors.values() if t.dtype not in _DTYPES]
        if unknown:
            raise ModelLoadError(
                f"{directory} holds tensors of a data type that is not supported: {name_some(unknown)}\n"
                f"  supported: {', '.join(_DTYPES)}"
            )
        self._of_experts = stacked_parts(self._config, self._tensors.values())
        self._transposed = transposed_names(self._config, self._tensors.values())
        seen = upright(self._config, separated(self._config, self._tensors.values()))
        self._infos = {tensor.name: tensor for tensor in seen}
        advice = directory / GENERATION_CONFIG_NAME
        self._generation_config = read_json_object(advice) if advice.exists() else {}
        file_names = dict.fromkeys(tensor.file_name for tensor in self._tensors.values())
        self._files = {name: _open_file(directory / name) for name in file_names}

    @property
    def infos(self) -> Collection[TensorInfo]:
        """The headers of all tensors, in the order of `names`."""
        return self._infos.values()

    def names(self) -> Sequence[str]:
        """Return all tensor names: file by file, by offset inside a file. A stack of experts is a tensor for each."""
        return tuple(self._infos)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, from the header."""
        return self._infos[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the data type of a tensor, from the header."""
        return _DTYPES[self._infos[name].dtype]

    def get(self, name: str) -> torch.Tensor:
        """Return a tensor whose memory is the mapped file; no byte is read before it is used.

        A single expert's tensor in a stack may have to be copied, and a weight that lies transposed is.
        """
        if (part := self._of_experts.get(name)) is not None:
            stack = self.get(part.stack)
            found = part.of(stack)
            if found.data_ptr() < stack.data_ptr() or found.data_ptr() >= stack.data_ptr() + stack.nbytes:
                release_pages(stack[part.expert])
            return found
        info = self._tensors[name]
        tensor: torch.Tensor = self._files[info.file_name].get_tensor(name_in_file(info))
        if name in self._transposed:
            lying, tensor = tensor, tensor.T.contiguous()
            release_pages(lying)
        return tensor

    def release(self, tensor: torch.Tensor) -> None:
        """Free the memory from a tensor's first number to its last: between them lie others of the same stack."""
        if tensor.numel():
            last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            release_pages(tensor.as_strided((last + 1,), (1,)))

    def config(self) -> dict[str, Any]:
        """Return `config.json`, with the stored dtype if it names none."""
        return with_stored_dtype(self._config, self._tensors.values())

    def generation_config(self) -> dict[str, Any]:
        """Return `generation_config.json`; empty if there is none."""
        return dict(self._generation_config)

    def close(self) -> None:
        """Forget the files; each mapping ends when its last tensor is gone."""
        self._files.clear()


def _open_file(path: Path) -> Any:
    """Open a file with the library, which checks the header: offsets in bounds, no overlap, no holes."""
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(
            f"{path} is truncated or damaged ({path.stat().st_size} bytes; {error})\n"
            "  delete it, then download or copy it again"
        ) from error
