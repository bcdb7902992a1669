"""Opens the checkpoint at a path as a TensorSource."""

from __future__ import annotations

from pathlib import Path

from pagewick.errors import ModelNotFoundError
from pagewick.weights.files import GGUF_SUFFIX
from pagewick.weights.gguf.source import GgufSource
from pagewick.weights.packed.headers import logical_tensors
from pagewick.weights.packed.source import PackedSource
from pagewick.weights.safetensors import SafetensorsSource
from pagewick.weights.source import TensorSource


def open_source(path: Path, *, mix: str | None = None, mmproj: str | None = None) -> TensorSource:
    """Open a checkpoint: a directory with safetensors, or a GGUF file.

    mix: the one to which weights will be quantized at load, as in PackedSource. mmproj: the GGUF file with the part of
    the model that sees, for a GGUF file.
    Raises ModelNotFoundError if it does not exist, ModelLoadError if its files cannot be used, ConfigError if its
    weights are quantized in a way that is not supported.
    """
    if path.is_file() and path.suffix == GGUF_SUFFIX:
        return GgufSource(path, None if mmproj is None else Path(mmproj))
    if not path.is_dir():
        fix = f"give the directory it is in: {path.parent}" if path.is_file() else "check the path"
        raise ModelNotFoundError(f"{path} is not a directory\n  {fix}")
    source = SafetensorsSource(path)
    weights = logical_tensors(source.config(), source.infos).weights
    return PackedSource(source, weights, mix=mix) if weights else source
