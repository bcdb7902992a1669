"""NameMap: the names that a family's files have for tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class NameMap:
    """The file's names of tensors. parts: (ours, theirs), parts of dotted names, which are replaced in this order.

    A part that is replaced by "" is left out. One with a layer, such as layers.3.mlp, is for our names of that layer.
    """

    parts: tuple[tuple[str, str], ...] = ()

    def in_file(self, name: str) -> str:
        dotted = f".{name}."
        for ours, theirs in self._by_layer.get(_layer_in(name), self._by_layer[""]):
            dotted = dotted.replace(ours, theirs)
        return dotted[1:-1]

    @cached_property
    def _by_layer(self) -> Mapping[str, Sequence[tuple[str, str]]]:
        """The parts for the names of each layer that is mentioned, and of no other; a model may have 400 parts."""
        layers = {"", *(_layer_in(ours) for ours, _ in self.parts)}
        return {
            layer: [
                (f".{ours}.", f".{theirs}." if theirs else ".")
                for ours, theirs in self.parts
                if _layer_in(ours) in ("", layer)
            ]
            for layer in layers
        }

    def bare(self) -> NameMap:
        """Return the names in a file of the model without its output layer, which transformers calls model."""
        return NameMap(parts=(*self.parts, ("model", "")))


def _layer_in(name: str) -> str:
    found = _LAYER.search(name)
    return found[1] if found else ""
