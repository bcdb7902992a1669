"""Repacking: writes a GPTQ, AWQ or Marlin checkpoint in another layout, with the same numbers to the last bit."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagewick.errors import ConfigError
from pagewick.weights.packed.awq import AwqFormat
from pagewick.weights.packed.gptq import GptqFormat
from pagewick.weights.packed.headers import logical_tensors
from pagewick.weights.packed.integer_format import IntegerFormat
from pagewick.weights.packed.layout import PackedWeight
from pagewick.weights.packed.marlin import AWQ_SUFFIXES, MARLIN_GROUPS, MarlinFormat
from pagewick.weights.progress import Progress
from pagewick.weights.safetensors import SafetensorsSource
from pagewick.weights.transposed import check_none_lies
from pagewick.weights.unfinished import UnfinishedCheckpoint

_LAYER = re.compile(r"\.(\d+)\.")
_HEAD = "lm_head"


@dataclass(frozen=True)
class Repacking:
    """source: a checkpoint. weights: its packed weights, by name. form: the format to write."""

    source: SafetensorsSource
    weights: Mapping[str, PackedWeight]
    form: IntegerFormat

    @property
    def parts(self) -> list[list[PackedWeight]]:
        """The weights of each part that is written: those of a layer; the last part has the other tensors."""
        layers: defaultdict[int, list[PackedWeight]] = defaultdict(list)
        for weight in self.weights.values():
            layers[layer_of(weight.prefix)].append(weight)
        return [layers[number] for number in sorted(layers)]

    @property
    def plain(self) -> list[str]:
        """The names of the tensors that stay as they are."""
        stored = {part.name for weight in self.weights.values() for part in weight.parts.values()}
        return [name for name in self.source.names() if name not in stored]

    @property
    def num_bytes(self) -> int:
        """The size of what is written, or a little more."""
        return sum(info.num_bytes for info in self.source.infos)

    @property
    def num_parts(self) -> int:
        return len(self.parts) + 1

    @property
    def key(self) -> dict[str, str]:
        """The numbers depend on nothing but the source."""
        return {}

    def packed(self, checkpoint: UnfinishedCheckpoint) -> list[str]:
        """Return the prefixes of all weights that are packed."""
        return [weight.prefix for weight in self.weights.values()]

    def entries(self, checkpoint: UnfinishedCheckpoint) -> dict[str, Any]:
        """Return the quantization_config to write."""
        matrices = [name for name in self.plain if len(self.source.shape(name)) == 2]
        return entries_of(self.form, matrices, self.packed(checkpoint))

    def remarks(self, checkpoint: UnfinishedCheckpoint) -> list[str]:
        """Return nothing: all weights are repacked."""
        return []

    def run(self, checkpoint: UnfinishedCheckpoint, progress: Progress) -> None:
        """Write all parts that are missing. Raises ConfigError for a weight that the format cannot hold."""
        parts = self.parts
        sizes = [sum(weight.info.num_bytes for weight in part) for part in parts]
        done = sum(size for index, size in enumerate(sizes) if index in checkpoint.done)
        progress.start(f"writing {checkpoint.path.name}", sum(sizes), done)
        try:
            for index, part in enumerate(parts):
                if index not in checkpoint.done:
                    checkpoint.write(index, self._packed(part))
                    progress.advance(sizes[index])
        finally:
            progress.stop()
        if len(parts) not in checkpoint.done:
            checkpoint.copy(len(parts), self.source, self.plain)

    def _packed(self, weights: Iterable[PackedWeight]) -> dict[str, Any]:
        found = {}
        for weight in weights:
            form = weight.format
            assert isinstance(form, IntegerFormat), "checked before"
            for suffix, tensor in self.form.pack(form.linear(weight, self.source.get)).items():
                found[f"{weight.prefix}{suffix}"] = tensor
            for part in weight.parts.values():
                self.source.release(self.source.get(part.name))
        return found


def planned_repacking(source: SafetensorsSource, path: Path, to: str) -> Repacking | None:
    """Return how to repack a checkpoint; None if its weights are not packed.

    to: gptq, awq or marlin. Raises ConfigError if its weights are in another format than whole numbers, or in one that
    cannot be written like this.
    """
    weights = logical_tensors(source.config(), source.infos).weights
    if not weights:
        return None
    forms = {weight.format for weight in weights.values()}
    first = next(iter(forms))
    if not isinstance(first, IntegerFormat):
        raise ConfigError(
            f"{path} is quantized already: {first.label}\n"
            "  give a GPTQ, AWQ or Marlin checkpoint, or the original, with weights in bfloat16, float16 or float32"
        )
    if len(forms) > 1:
        labels = ", ".join(sorted(form.label for form in forms))
        raise ConfigError(f"{path} has weights in several formats: {labels}\n  repacking wants a single one")
    zeros = _zero_points(first, weights.values(), source) if to != "awq" else set()
    form = _target(first, to, zeros)
    if type(form) is type(first) and form.label == first.label:
        raise ConfigError(f"{path} is {first.label} already\n  choose another format: --to gptq, awq, marlin or gguf")
    for weight in weights.values():
        if reason := form.misfit(*weight.shape):
            raise ConfigError(
                f"{weight.name} cannot be written as {form.label}: {reason}\n"
                "  serve the checkpoint as it is, or choose another format: --to"
            )
    found = Repacking(source, weights, form)
    check_none_lies(source.config(), source.infos, found.plain)
    return found


def _target(form: IntegerFormat, to: str, zeros: Collection[int]) -> IntegerFormat:
    size, bits = form.group_size, form.num_bits
    is_symmetric = set(zeros) == {1 << bits - 1}
    if to == "awq":
        return AwqFormat(size)
    if to == "gptq":
        has_order = isinstance(form, GptqFormat) and form.has_order
        return GptqFormat(bits, size, is_symmetric, has_order, 0 if 0 in zeros else 1)
    if isinstance(form, AwqFormat) and not (is_symmetric and size in MARLIN_GROUPS):
        return AwqFormat(size, has_marlin_zeros=True)
    has_order = isinstance(form, GptqFormat) and form.has_order and size != -1
    check_marlin(bits, size, is_symmetric=is_symmetric, has_order=has_order)
    return MarlinFormat(size, AWQ_SUFFIXES) if isinstance(form, AwqFormat) else MarlinFormat(size)


def check_marlin(bits: int, group_size: int, *, is_symmetric: bool, has_order: bool) -> None:
    """Raise ConfigError unless the format Marlin has numbers of this kind."""
    wrong = [
        *([f"{bits} bits"] if bits != 4 else []),
        *([f"groups of {group_size} columns"] if group_size not in MARLIN_GROUPS else []),
        *(["zero points"] if not is_symmetric else []),
        *(["groups of columns that are not neighbours (act-order)"] if has_order else []),
    ]
    if wrong:
        raise ConfigError(
            f"Marlin checkpoints cannot have {' and '.join(wrong)}\n"
            "  they have symmetric numbers of 4 bits, and groups of 128 columns, or of all (-1); or choose --to gptq"
        )


def _zero_points(form: IntegerFormat, weights: Iterable[PackedWeight], source: SafetensorsSource) -> set[int]:
    """Return the zero points that occur, of all weights."""
    found: set[int] = set()
    for weight in weights:
        counts = torch.bincount(form.integers(weight, source.get).zeros.flatten().long())
        found.update(counts.nonzero().flatten().tolist())
    return found


def layer_of(prefix: str) -> int:
    """Return the number of a weight's layer; -1 if it is in none."""
    match = _LAYER.search(prefix)
    return -1 if match is None else int(match[1])


def entries_of(form: IntegerFormat, matrices: Iterable[str], packed: Collection[str]) -> dict[str, Any]:
    """Return the quantization_config of a checkpoint.

    matrices: the names of its tensors of two dimensions that are not packed. packed: the prefixes of those that are.
    """
    prefixes = (name.removesuffix(".weight") for name in matrices if name.endswith(".weight"))
    # Qwen's layer that predicts further tokens also has a matrix (mtp.fc) outside its layers.
    found = form.entries([prefix for prefix in prefixes if layer_of(prefix) >= 0 or prefix.startswith("mtp.")])
    if any(prefix.rpartition(".")[2] == _HEAD for prefix in packed):
        if _HEAD not in found:
            raise ConfigError(f"{form.label} has no packed {_HEAD}\n  choose another format: --to")
        found[_HEAD] = True
    return found
