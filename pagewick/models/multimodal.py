"""The text part of models that also see images or hear; models/vision adds the vision part, where it is known.

The text part has a config.json of its own, the entry text_config, and its tensors may have a prefix. In old files of
Qwen2-VL its entries stand among the others, and in some of text models that were cut out of a larger one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from pagewick.models.config import ModelConfig, architecture_of
from pagewick.models.entries import Entries
from pagewick.models.name_map import NameMap
from pagewick.models.vision.tensor_names import ENCODER_TENSORS

_DTYPES: Final = ("dtype", "torch_dtype")
_OTHER_PARTS: Final = (r"(model\.)?(vision_embedder|audio_tower|embed_audio)\..*", *ENCODER_TENSORS)
_MODEL: Final = r"model\."
# The newest one first.
_NAMES: Final = (
    NameMap(parts=(("model", "model.language_model"),)),
    NameMap(parts=(("model", "language_model.model"), ("lm_head", "language_model.lm_head"))),
    # Qwen2-VL: the names of the text part by itself.
    NameMap(),
)


def text_entries(entries: Entries) -> Entries:
    """Return the entries of the text part; they are empty if the file leaves them out."""
    return entries.child("text_config") or Entries({}, "text_config")


def read_alone(entries: Entries, read: Callable[[Entries], ModelConfig], *, is_tied: bool = False) -> ModelConfig:
    """Read a text model that may be the text part of a larger one by itself.

    Some files still have the larger one's names of tensors, its other parts, or its text_config.
    """
    if "text_config" in entries:
        return read_text_part(entries, read, is_tied=is_tied)
    config = read(entries)
    # Its own names come first: they count where the file's names are not known.
    names = tuple(_joined(outer, inner) for outer in _NAMES[::-1] for inner in config.names)
    return replace(config, names=names, ignored=(*_OTHER_PARTS, *config.ignored))


def read_flat(entries: Entries, read: Callable[[Entries], ModelConfig]) -> ModelConfig:
    """Read the text part of a file that has its entries among the others."""
    config = read(entries)
    names = tuple(_joined(outer, inner) for outer in _NAMES for inner in config.names)
    return replace(config, names=names, ignored=(*_OTHER_PARTS, *config.ignored))


def read_text_part(
    entries: Entries,
    read: Callable[[Entries], ModelConfig],
    *,
    is_tied: bool = False,
    places: tuple[NameMap, ...] = _NAMES,
) -> ModelConfig:
    """Read the text part of a file.

    is_tied: whether the head is tied to the embedding if the file as a whole does not say so. places: where the text
    part may stand in a file.
    """
    if "text_config" not in entries and "hidden_size" in entries:
        # Some programs write text models under the name of the larger one.
        return read_flat(entries, read)
    text = text_entries(entries)
    outer: dict[str, Any] = {"architectures": [architecture_of(entries.values)]}
    if not any(name in text for name in _DTYPES):
        outer |= {name: entries.values[name] for name in _DTYPES if name in entries}
    # Null in the text part means missing: the value of the whole file counts then.
    config = read(text.without_null(outer).filled(outer))
    is_tied = entries.flag("tie_word_embeddings", is_tied)
    names = tuple(_joined(outer, inner) for outer in places for inner in config.names)
    ignored = (*_OTHER_PARTS, *config.ignored, *_in_text_part(config.ignored))
    return replace(config, names=names, ignored=ignored, tie_word_embeddings=is_tied)


def _in_text_part(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Return regular expressions of the names that tensors of a text model have in a larger model."""
    within = [pattern.removeprefix(_MODEL) for pattern in patterns if pattern.startswith(_MODEL)]
    return tuple(rf"({_MODEL}language_model|language_model\.model)\.{pattern}" for pattern in within)


def _joined(outer: NameMap, inner: NameMap) -> NameMap:
    return NameMap(parts=(*outer.parts, *inner.parts))
