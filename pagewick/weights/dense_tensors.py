"""The tensors of linear layers that sentence-transformers puts behind a model, from the files in their folders.

They have the folder's name before their own, such as 2_Dense.linear.weight. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from pagewick.errors import ModelLoadError
from pagewick.weights.files import name_some
from pagewick.weights.module_files import ModuleFiles
from pagewick.weights.sentence_transformers import DenseModule, dense_modules
from pagewick.weights.tensor_headers import TensorInfo, directory_tensors, file_tensors

_DTYPES: Final = ("F64", "F32", "F16", "BF16")


def checkpoint_tensors(directory: Path, config: Mapping[str, Any]) -> list[TensorInfo]:
    """List what directory_tensors lists, and the tensors of the layers that config names behind them.

    config: of description.directory_config. Raises as directory_tensors does.
    """
    tensors = directory_tensors(directory)
    return with_dense_tensors(
        tensors, config, ModuleFiles.of_directory(directory), lambda name: file_tensors(directory / name)
    )


def with_dense_tensors(
    tensors: Iterable[TensorInfo],
    config: Mapping[str, Any],
    files: ModuleFiles,
    tensors_of: Callable[[str], list[TensorInfo]],
) -> list[TensorInfo]:
    """Return the tensors of a checkpoint with those of the layers that config names. tensors_of: reads a file's header.

    Raises ModelLoadError for a file that is missing or does not hold such a layer, and for a name that is there twice.
    """
    found = list(tensors)
    for module in dense_modules(config):
        files.check([module.file_name])
        found += _of_module(module, tensors_of(module.file_name), f"{files.where}/{module.file_name}")
    names = [tensor.name for tensor in found]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ModelLoadError(f"{twice} is in two files of {files.where}\n  keep the files of one checkpoint only")
    return found


def name_in_file(tensor: TensorInfo) -> str:
    """Return the name that a tensor has in its file."""
    return tensor.name.removeprefix(f"{tensor.file_name.rpartition('/')[0]}.")


def _of_module(module: DenseModule, tensors: Iterable[TensorInfo], where: str) -> list[TensorInfo]:
    expected: dict[str, tuple[int, ...]] = {"linear.weight": (module.out_features, module.in_features)}
    if module.bias:
        expected["linear.bias"] = (module.out_features,)
    found = {tensor.name: tensor for tensor in tensors}
    if {name: tensor.shape for name, tensor in found.items()} != expected:
        raise ModelLoadError(
            f"{where} holds {_shapes({tensor.name: tensor.shape for tensor in found.values()})}; "
            f"by its config.json, it must hold {_shapes(expected)}\n"
            "  the files do not belong together; download or copy both again"
        )
    if wrong := next((tensor for tensor in found.values() if tensor.dtype not in _DTYPES), None):
        raise ModelLoadError(
            f"{where}: {wrong.name} is stored as {wrong.dtype}, not as plain numbers ({', '.join(_DTYPES)})\n"
            "  use the files of the model's authors"
        )
    return [
        replace(tensor, name=f"{module.name}.{tensor.name}", file_name=module.file_name) for tensor in found.values()
    ]


def _shapes(tensors: Mapping[str, tuple[int, ...]]) -> str:
    return name_some(f"{name} {list(shape)}" for name, shape in tensors.items()) or "nothing"
