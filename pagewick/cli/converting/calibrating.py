"""Calibrating: quantizes a checkpoint whose weights are numbers, layer by layer. Each layer is written as a part."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from torch import Tensor

from pagewick.calibration.quantizing import quantize_layers
from pagewick.cli.converting.repacking import entries_of
from pagewick.errors import ConfigError
from pagewick.models.config import ModelConfig
from pagewick.models.mtp_offers import holds_mtp
from pagewick.models.registry import read_config
from pagewick.models.tensor_sizes import ModelTensor
from pagewick.models.tensors import model_tensors
from pagewick.quantization.calibrated.results import GROUP_SIZES, LayerResult, Recipe
from pagewick.weights.files import name_some
from pagewick.weights.packed.headers import logical_tensors
from pagewick.weights.packed.integer_format import IntegerFormat
from pagewick.weights.packed.marlin import MarlinFormat
from pagewick.weights.progress import Progress
from pagewick.weights.safetensors import SafetensorsSource
from pagewick.weights.transposed import check_none_lies
from pagewick.weights.unfinished import UnfinishedCheckpoint

# Texts of a part, beside its tensors.
_UNQUANTIZED: Final = "unquantized"
_REMARKS: Final = "remarks"


@dataclass(frozen=True)
class Calibration:
    """source: a checkpoint whose weights are numbers. form: the format to write. token_ids: the text, in sequences."""

    source: SafetensorsSource
    form: IntegerFormat
    recipe: Recipe
    token_ids: Sequence[Sequence[int]]

    @property
    def num_parts(self) -> int:
        """One for each layer, and one for the other tensors."""
        return self._model.num_layers + 1

    @property
    def num_bytes(self) -> int:
        """The size of what is written, or a little more."""
        linears = {tensor.name: tensor.shape for tensor in self._linears}
        return sum(
            self._planned_bytes(info.name, linears[info.name]) if info.name in linears else info.num_bytes
            for info in self.source.infos
        )

    @property
    def key(self) -> dict[str, str]:
        """The recipe and the text, on which the numbers depend besides the source."""
        digest = hashlib.blake2b(json.dumps([list(ids) for ids in self.token_ids]).encode(), digest_size=16)
        return {"recipe": json.dumps(asdict(self.recipe), sort_keys=True), "text": digest.hexdigest()}

    def check(self) -> None:
        """Raise ConfigError for an encoder, a model that writes captions, a group that does not divide the columns of a
        weight, or one that a layout cannot hold.
        """
        if self._model.encoder is not None or self._model.image_attention is not None:
            kind = "is an encoder" if self._model.encoder is not None else "reads no text without an image"
            raise ConfigError(
                f"{self._model.architecture} {kind}, and only decoders are written in this format\n"
                "  quantize it while it is loaded: pagewick serve MODEL --quantization q8_0"
            )
        size = self.recipe.group_size
        if undivided := [one for one in self._linears if size != -1 and one.shape[1] % size]:
            columns = math.gcd(*(one.shape[1] for one in self._linears))
            fix = next((str(other) for other in GROUP_SIZES if other < size and columns % other == 0), "-1")
            raise ConfigError(
                f"groups of {size} columns do not divide {_sizes(undivided)}\n  choose other groups: --group {fix}"
            )
        misfits = [one for one in self._linears if self._misfit(one.shape)]
        check_none_lies(self.source.config(), self.source.infos, (one.name for one in misfits))
        if misfits and isinstance(self.form, MarlinFormat):
            raise ConfigError(
                f"{self.form.label} cannot hold {_sizes(misfits)}: rows must be multiples of 64, columns of 128\n"
                "  choose --to gptq, whose weights other kernels read, too"
            )
        if len(misfits) == len(self._linears):
            raise ConfigError(f"{self.form.label} cannot hold {_sizes(misfits)}\n  choose another format: --to")

    def run(self, checkpoint: UnfinishedCheckpoint, progress: Progress) -> None:
        """Write all parts that are missing. Raises ConfigError if the disk is full."""

        def keep(layer_idx: int, result: LayerResult) -> None:
            packed = {
                f"{linear.name}{suffix}": tensor
                for linear in result.linears
                for suffix, tensor in self.form.pack(linear).items()
            }
            texts = {_UNQUANTIZED: dict(result.unquantized), _REMARKS: dict(result.remarks)}
            texts_of_part = {name: json.dumps(reasons) for name, reasons in texts.items()}
            checkpoint.write(layer_idx, {**packed, **result.tensors}, texts_of_part)

        def finished(layer_idx: int) -> LayerResult | None:
            return self._result(checkpoint, layer_idx) if layer_idx in checkpoint.done else None

        quantize_layers(
            self.source, self.recipe, self.token_ids, on_layer=keep, finished=finished,
            left_out=lambda name, shape: self._misfit(shape) or None, progress=progress,
        )  # fmt: skip
        if self.num_parts - 1 not in checkpoint.done:
            checkpoint.copy(self.num_parts - 1, self.source, self._rest(checkpoint))

    def entries(self, checkpoint: UnfinishedCheckpoint) -> dict[str, Any]:
        """Return the quantization_config, once all parts are there."""
        packed = self.packed(checkpoint)
        plain = [name for name in self.source.names() if name.removesuffix(".weight") not in packed]
        return entries_of(self.form, [name for name in plain if len(self.source.shape(name)) == 2], packed)

    def remarks(self, checkpoint: UnfinishedCheckpoint) -> list[str]:
        """Return what people should know about the weights, once all parts are there."""
        found: dict[str, dict[str, list[str]]] = {_UNQUANTIZED: {}, _REMARKS: {}}
        for index in range(self.num_parts - 1):
            texts = checkpoint.texts(index)
            for kind, by_reason in found.items():
                for name, reason in json.loads(texts[kind]).items():
                    by_reason.setdefault(reason, []).append(name)
        verbs = {_UNQUANTIZED: "not quantized:", _REMARKS: "quantized"}
        predicting = "the layer that predicts further tokens is not quantized: it is none of those that read the text"
        return [predicting] * holds_mtp(self._model, self.source.names()) + [
            f"{name_some(names)} {'is' if len(names) == 1 else 'are'} {verbs[kind]} {reason}"
            for kind, by_reason in found.items()
            for reason, names in by_reason.items()
        ]

    @property
    def _model(self) -> ModelConfig:
        return read_config(self.source.config())

    @property
    def _linears(self) -> list[ModelTensor]:
        return [tensor for tensor in model_tensors(self._model, self.source.names()) if tensor.is_linear]

    def _misfit(self, shape: Sequence[int]) -> str:
        rows, columns = shape
        return self.form.misfit(rows, columns)

    def _planned_bytes(self, name: str, shape: Sequence[int]) -> int:
        rows, columns = shape
        if self._misfit(shape):
            return rows * columns * self.source.dtype(name).itemsize
        return self.form.planned(name, rows, columns).num_bytes

    def _parts(self, checkpoint: UnfinishedCheckpoint, layer_idx: int) -> tuple[Mapping[str, Any], list[str]]:
        """Return the packed weights of a layer that is written, and the names of its plain tensors."""
        infos = checkpoint.infos(layer_idx)
        config = {"quantization_config": self.form.entries([])}
        has_packed = any(not info.name.endswith((".weight", ".bias")) for info in infos)
        weights = logical_tensors(config, infos).weights if has_packed else {}
        packed = {part.name for weight in weights.values() for part in weight.parts.values()}
        return weights, [info.name for info in infos if info.name not in packed]

    def _result(self, checkpoint: UnfinishedCheckpoint, layer_idx: int) -> LayerResult:
        """Read a layer that is written."""
        weights, plain = self._parts(checkpoint, layer_idx)
        get, texts = checkpoint.reader(layer_idx), checkpoint.texts(layer_idx)
        tensors: dict[str, Tensor] = {name: get(name) for name in plain}
        linears = tuple(self.form.linear(weight, get) for weight in weights.values())
        return LayerResult(linears, tensors, json.loads(texts[_UNQUANTIZED]), json.loads(texts[_REMARKS]))

    def packed(self, checkpoint: UnfinishedCheckpoint) -> list[str]:
        """Return the prefixes of all weights that are written packed."""
        layers = (self._parts(checkpoint, index)[0] for index in range(self.num_parts - 1))
        return [weight.prefix for weights in layers for weight in weights.values()]

    def _rest(self, checkpoint: UnfinishedCheckpoint) -> list[str]:
        """Return the names of the source's tensors that no layer has replaced."""
        replaced = {f"{prefix}.weight" for prefix in self.packed(checkpoint)}
        for index in range(self.num_parts - 1):
            replaced.update(self._parts(checkpoint, index)[1])
        return [name for name in self.source.names() if name not in replaced]


def _sizes(tensors: Iterable[ModelTensor]) -> str:
    return name_some(f"{one.name.removesuffix('.weight')} ({one.shape[0]} x {one.shape[1]})" for one in tensors)
