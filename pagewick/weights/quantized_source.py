"""QuantizedSource: a checkpoint whose weights were quantized at load, by this process or an earlier one."""

from __future__ import annotations

from pathlib import Path

import torch

from pagewick.log import get_logger
from pagewick.quantization.plan import QuantizationPlan
from pagewick.quantization.weight import Pieces
from pagewick.weights.loader import pieces_of
from pagewick.weights.progress import Progress
from pagewick.weights.quantized_cache import QuantizedCache, cache_key
from pagewick.weights.quantized_file import (
    DamagedFileError,
    NewFile,
    QuantizedFile,
    Shapes,
    note_checked,
    stored_shapes,
)
from pagewick.weights.source import TensorSource, WrappedSource
from pagewick.weights.upload import Upload

logger = get_logger(__name__)


class QuantizedSource(WrappedSource):
    """A source with the blocks of some tensors in a file, and the other tensors in the checkpoint."""

    def __init__(self, source: TensorSource, plan: QuantizationPlan, file: QuantizedFile, shapes: Shapes) -> None:
        super().__init__(source)
        self._formats, self._file, self._shapes = plan.formats, file, shapes

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor; rows of a block format count in bytes."""
        return self._shapes.get(name) or self._source.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """Return the data type of a tensor; that of a block format is uint8."""
        return torch.uint8 if name in self._shapes else self._source.dtype(name)

    def stored_type(self, name: str) -> torch.dtype | str:
        """Return the block format to which a tensor was quantized, or the checkpoint's type of it."""
        return self._formats.get(name) or self._source.stored_type(name)

    def get(self, name: str) -> torch.Tensor:
        """Return a tensor, mapped."""
        return self._file.get(name) if name in self._shapes else self._source.get(name)


def quantized_once(
    model: Path,
    source: TensorSource,
    plan: QuantizationPlan,
    cache: QuantizedCache,
    progress: Progress,
    upload: Upload | None = None,
    *,
    mmproj: str | None = None,
) -> QuantizedSource | None:
    """Return the checkpoint `model` with the weights of a plan in blocks: those in the cache, or new ones for it.

    upload: brings weights to the GPU that quantizes them; None: the CPU does. Both write the same bits. mmproj: the
    GGUF file with the part that sees, for a GGUF file.
    Returns None, with a warning, if nothing can be written there. Raises ModelLoadError for weights that cannot be
    quantized.
    """
    shapes = stored_shapes(source, plan.formats)
    new = NewFile(shapes, {"model": str(model.absolute()), "quantization": plan.mix})
    try:
        key = cache_key(model, plan, mmproj)
        while (file := _find(cache, key, shapes)) is None:
            with cache.writing(key, new.num_bytes) as descriptor:
                if descriptor is None:
                    continue
                _write(new, descriptor, source, plan, progress, pieces_of(source, upload))
            file = QuantizedFile(cache.path(key), shapes)
            _note_use(cache, cache.path(key))
            break
    except (OSError, DamagedFileError) as error:
        logger.warning(
            "the quantized weights are not kept in %s, and are quantized again at every start: %s",
            cache.directory, getattr(error, "strerror", error),
        )  # fmt: skip
        return None
    return QuantizedSource(source, plan, file, shapes)


def _find(cache: QuantizedCache, key: str, shapes: Shapes) -> QuantizedFile | None:
    """Return the file of a key, if it is there; a damaged one is deleted."""
    path = cache.path(key)
    try:
        found = QuantizedFile(path, shapes)
    except FileNotFoundError:
        return None
    except DamagedFileError as error:
        logger.warning("%s is damaged (%s); quantizing again", path, str(error).splitlines()[0])
        path.unlink(missing_ok=True)
        return None
    _note_use(cache, path)
    return found


def _note_use(cache: QuantizedCache, path: Path) -> None:
    """Note that a file is used, and that its checksums were right, in this order: the second note has the time."""
    cache.use(path)
    note_checked(path)


def _write(
    new: NewFile, descriptor: int, source: TensorSource, plan: QuantizationPlan, progress: Progress, pieces: Pieces
) -> None:
    shapes = [(source.shape(name), source.dtype(name).itemsize) for name in plan.formats]
    progress.start(f"quantizing weights to {plan.mix}", sum(rows * columns * size for (rows, columns), size in shapes))
    try:
        new.write(descriptor, source, plan.formats, progress, pieces)
    finally:
        progress.stop()
