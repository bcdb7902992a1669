"""Which GGUF file with a vision part (mmproj) belongs to a GGUF model. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from pagewick.errors import ModelLoadError
from pagewick.log import get_logger
from pagewick.weights.files import GGUF_SUFFIX, name_some
from pagewick.weights.gguf.checkpoint import open_gguf
from pagewick.weights.gguf.choice import GgufModel, vision_parts
from pagewick.weights.gguf.vision_families import TEXT_KINDS
from pagewick.weights.hub_settings import STATE_NAME

# Types of a vision part's weights, best first: bfloat16 is what the authors train in, float32 holds no more, and
# weights in blocks are rounded.
_PREFERRED: Final = ("BF16", "F16", "F32", "Q8_0")

_logger = get_logger(__name__)


def vision_choices(names: Iterable[str], model: str) -> list[str]:
    """Return the vision parts among the files of a repository that may belong to the file `model`, best first.

    They lie in its directory or in one above it; the nearest one counts, then the type that the name says.
    """
    places = [parent.as_posix() for parent in Path(model).parents]

    def rank(name: str) -> tuple[int, int, str]:
        label = GgufModel(name).label
        return (
            places.index(Path(name).parent.as_posix()),
            _PREFERRED.index(label) if label in _PREFERRED else len(_PREFERRED),
            name,
        )

    return sorted((name for name in vision_parts(names) if Path(name).parent.as_posix() in places), key=rank)


def named_vision(names: Iterable[str], model: str, wanted: str) -> str:
    """Return the vision part that `wanted` names, with or without its directory. Raises ModelLoadError.

    names: the files of a repository, `model` the one that holds the text part.
    """
    found = [name for name in vision_choices(names, model) if wanted in (name, name.rpartition("/")[2])]
    if not found:
        there = name_some(vision_choices(names, model)) or "there is none"
        raise ModelLoadError(f"--mmproj {wanted} is neither a file on this disk nor beside {model}\n  there: {there}")
    return found[0]


def vision_of(model: Path, wanted: str | None) -> Path | None:
    """Return the vision part for a GGUF model on this disk; None if there is none that fits.

    wanted: a path, or a name beside the model; None stands for the best one beside it, or in its repository in a cache.
    Raises ModelLoadError for one that is not there, and for one that does not fit the model.
    """
    root = _root(model)
    if wanted is not None:
        path = Path(wanted).expanduser()
        if not path.is_file():
            path = root / named_vision(_names(root, model), model.relative_to(root).as_posix(), wanted)
        open_gguf(model, path, keep_arrays=False)
        return path
    if open_gguf(model, keep_arrays=False).kind not in TEXT_KINDS:
        return None
    names = vision_choices(_names(root, model), model.relative_to(root).as_posix())
    return next((root / name for name in names if _fits(model, root / name)), None)


def explain_not_used(name: str, error: ModelLoadError) -> None:
    """Log why a vision part that nobody named is left alone."""
    _logger.info("%s is not used: %s", name, str(error).partition("\n")[0])


def _fits(model: Path, vision: Path) -> bool:
    try:
        # With the vocabulary, which must have a token that stands for an image.
        checkpoint = open_gguf(model, vision)
        assert checkpoint.vision is not None, "it was opened with one"
        _ = checkpoint.config, checkpoint.pieces, checkpoint.vision.processor_files()
    except ModelLoadError as error:
        explain_not_used(vision.name, error)
        return False
    return True


def _root(model: Path) -> Path:
    """Return the directory of the model's repository if it lies in the cache of a hub, else that of the file."""
    for parent in model.parents:
        if parent.parent.name == "snapshots" or (parent / STATE_NAME).is_file():
            return parent
    return model.parent


def _names(root: Path, model: Path) -> list[str]:
    """Return the GGUF files in the directory of a model and in those above it, up to `root`."""
    places = [parent for parent in model.parents if parent.is_relative_to(root)]
    files = [path for place in places for path in place.glob(f"*{GGUF_SUFFIX}") if path.is_file()]
    return [path.relative_to(root).as_posix() for path in files]
