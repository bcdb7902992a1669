"""VisionKeys: the key-values and shapes of a GGUF file with the part of a model that sees. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Final, NamedTuple

from pagewick.errors import ModelLoadError
from pagewick.weights.gguf.header import GgufArray, GgufTensor
from pagewick.weights.gguf.vision_families import FAMILIES
from pagewick.weights.gguf.vision_family import VisionFamily

NUMBERED: Final = re.compile(r"v\.(?P<kind>blk|deepstack)\.(?P<block>\d{1,6})\.(?P<stem>[a-z0-9_]+)", re.ASCII)


class ProcessorFiles(NamedTuple):
    """The files that say how a model wants its images.

    image: preprocessor_config.json. config: the entries of config.json that count. processor: processor_config.json.
    """

    image: Mapping[str, Any]
    config: Mapping[str, Any] = {}
    processor: Mapping[str, Any] = {}


@dataclass(frozen=True)
class VisionKeys:
    """where: the file, for people. values: its key-values. tensors: all of them.

    The family must be a known one.
    """

    where: str
    values: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]

    @property
    def projector(self) -> str:
        """clip.projector_type; empty if there is none."""
        return str(self.values.get("clip.projector_type", self.values.get("clip.vision.projector_type", "")))

    @property
    def family(self) -> VisionFamily:
        return FAMILIES[self.projector]

    @cached_property
    def out_size(self) -> int:
        """Width of the rows that the text part gets. In the first files of Qwen2-VL the key is 0."""
        if self.family.output is not None:
            return self.shape(self.family.output)[-1]
        key = "clip.vision.projection_dim"
        return self.shape("mm.2.weight")[0] if self.values.get(key) == 0 else self.count("projection_dim")

    @cached_property
    def deepstack(self) -> list[int]:
        """Blocks whose output the first layers of the text part get: those that have tensors for it.

        Files have a key for it, too, but its value is whatever config.json has, even in families without such blocks.
        """
        found = (NUMBERED.match(tensor.name) for tensor in self.tensors)
        return sorted({int(match["block"]) for match in found if match is not None and match["kind"] == "deepstack"})

    @cached_property
    def is_swapped(self) -> bool:
        """Whether the two projections of MLPs have each other's names, as in the first files of Qwen2-VL."""
        if self.projector == "qwen3vl_merger":
            return False
        up, down = (self.shape(f"v.blk.0.ffn_{name}.weight") for name in ("up", "down"))
        width = self.count("embedding_length")
        return down[-1] == width and up[-1] != width

    @cached_property
    def depth(self) -> int:
        """The number of blocks, which is that in the file. Raises ModelLoadError for a key that says otherwise."""
        if (depth := self.count("block_count")) > len(self.tensors):
            raise self.wrong("block_count", f"{depth}, more than the tensors of the file")
        found = (NUMBERED.match(tensor.name) for tensor in self.tensors)
        last = max((int(match["block"]) for match in found if match is not None and match["kind"] == "blk"), default=0)
        if last >= depth:
            raise self.wrong("block_count", f"{depth}, and the file also holds v.blk.{last}, which is not supported")
        return depth

    @cached_property
    def inner_size(self) -> int:
        """The width of MLPs. The key feed_forward_length is another number in files of Qwen2-VL."""
        return int(prod(self.shape("v.blk.0.ffn_up.weight")) // self.count("embedding_length"))

    def merge_size(self, default: int | None = None) -> int:
        """Return how many patches along a side become a row, in a square image of the file's size.

        Raises ModelLoadError unless they divide the patches of that image. default: as in `count`.
        """
        per_side = self.count("image_size") // self.count("patch_size")
        merged = self.count("projector.scale_factor", default)
        if not per_side or per_side % merged:
            raise self.wrong(
                "projector.scale_factor", f"{merged}, which does not divide {per_side} patches along a side"
            )
        return merged

    @property
    def names(self) -> frozenset[str]:
        """Those of all tensors."""
        return frozenset(tensor.name for tensor in self.tensors)

    def shape(self, name: str) -> Sequence[int]:
        """Return the shape of a tensor, outermost first. Raises ModelLoadError if the file has no such tensor."""
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor.shape
        raise ModelLoadError(f"{self.where} holds no {name}\n  use another file of this model")

    def count(self, key: str, default: int | None = None) -> int:
        """Return clip.vision.KEY, a whole number from 1. Raises ModelLoadError for another value."""
        value = self.values.get(f"clip.vision.{key}", default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(key, "missing" if value is None else f"{value!r:.80}, and must be a whole number from 1")
        return value

    def channels(self, key: str) -> Any:
        """Return clip.vision.KEY, a list of numbers. Raises ModelLoadError if there is none."""
        value = self.values.get(f"clip.vision.{key}")
        if value is None or isinstance(value, GgufArray):
            raise self.wrong(key, "missing, and must be three numbers")
        return value

    def wrong(self, key: str, problem: str, *, is_whole: bool = False) -> ModelLoadError:
        """Return the error about a key, which is_whole says to name the whole of."""
        key = key if is_whole else f"clip.vision.{key}"
        return ModelLoadError(f"{self.where}: {key} is {problem}\n  use another file of this model")
