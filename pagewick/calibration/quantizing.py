"""quantize_layers: a checkpoint's decoder layers, one after the other, quantized by the inputs that they get."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Final

import torch
from torch import Tensor

from pagewick.calibration.folding import LayerTensors, absorb
from pagewick.calibration.inputs import InputSums
from pagewick.calibration.layer import States, TextRunner, batches_of
from pagewick.calibration.stages import Fold, NormAbsorber, Point, Stage, stages_of
from pagewick.errors import ConfigError
from pagewick.models.config import ModelConfig
from pagewick.models.registry import read_config
from pagewick.quantization.calibrated.awq import Reader, search_factors
from pagewick.quantization.calibrated.gptq import quantize_gptq
from pagewick.quantization.calibrated.results import LayerResult, Recipe
from pagewick.quantization.calibrated.rounding import round_to_nearest
from pagewick.weights.progress import Progress
from pagewick.weights.source import TensorSource

# A weight with fewer rows of inputs is rounded to nearest: so few rows say little about other inputs.
LEAST_ROWS: Final = 64

LeftOut = Callable[[str, tuple[int, int]], str | None]


def nothing_finished(layer_idx: int) -> LayerResult | None:
    """No layer has been quantized earlier."""
    return None


def quantize_all(name: str, shape: tuple[int, int]) -> str | None:
    """Leave no weight out."""
    return None


def quantize_layers(
    source: TensorSource,
    recipe: Recipe,
    token_ids: Sequence[Sequence[int]],
    *,
    on_layer: Callable[[int, LayerResult], None],
    finished: Callable[[int], LayerResult | None] = nothing_finished,
    left_out: LeftOut = quantize_all,
    progress: Progress | None = None,
) -> None:
    """Quantize every decoder layer of a checkpoint and hand each to `on_layer(layer_idx, result)`, in order.

    source: an opened checkpoint whose weights are numbers (open_source, as_numbers=True). token_ids: the text, as
    sequences that begin as a text does. It is not read if the method is rtn.
    finished: returns the result of a layer that an earlier run has kept, with the tensors to the last bit, and None
    for others. Such a layer is only run; `on_layer` is not called for it, and later layers get the same bits as in an
    uninterrupted run.
    left_out: returns the reason why a weight, given its name without ".weight" and its shape, is not quantized, or
    None. Weights whose columns are not a multiple of the group are left out anyway.
    progress: is told of the bytes of the weights that are done. One layer, in float32, is in memory at a time, besides
    the hidden states of the text.

    Raises ConfigError for a text that the model cannot read, or weights that are not numbers, ModelLoadError for a
    damaged checkpoint.
    """
    config = read_config(source.config())
    batches = [] if recipe.method == "rtn" else batches_of(token_ids, config)
    if recipe.method != "rtn" and (num_tokens := sum(map(len, token_ids))) < LEAST_ROWS:
        raise ConfigError(f"the text has {num_tokens} tokens, and at least {LEAST_ROWS} are needed; give a longer text")
    work = _Work(source, config, recipe, TextRunner(source, config, batches), left_out, progress or Progress())
    work.start_progress()
    try:
        states = work.runner.embed() if batches else []
        for layer_idx in range(config.num_layers):
            if result := finished(layer_idx):
                states = work.pass_finished(layer_idx, result, states)
            else:
                tensors, states = work.quantize(layer_idx, states)
                on_layer(layer_idx, tensors.result())
    finally:
        work.progress.stop()


class _Work:
    """Quantizes layers of a checkpoint."""

    def __init__(
        self,
        source: TensorSource,
        config: ModelConfig,
        recipe: Recipe,
        runner: TextRunner,
        left_out: LeftOut,
        progress: Progress,
    ) -> None:
        self._source, self._config, self._recipe = source, config, recipe
        self.runner, self._left_out, self.progress = runner, left_out, progress

    def start_progress(self) -> None:
        names = [name for layer_idx in range(self._config.num_layers) for name in self._weights(layer_idx)]
        self.progress.start("quantizing", sum(map(self._num_bytes, names)))

    def pass_finished(self, layer_idx: int, result: LayerResult, states: States) -> States:
        """Return the outputs of a layer that an earlier run has quantized."""
        self.progress.advance(sum(map(self._num_bytes, self._weights(layer_idx))))
        return self._outputs(layer_idx, LayerTensors.of_result(self._source.get, result), states)

    @torch.inference_mode()
    def quantize(self, layer_idx: int, states: States) -> tuple[LayerTensors, States]:
        """Return the layer's tensors, and its outputs with them; no outputs for the last layer."""
        tensors = LayerTensors(self._source.get, partial(self.runner.name, layer_idx))
        for name in self._weights(layer_idx):
            if reason := self._reason(name):
                tensors.unquantized[name] = reason
                self.progress.advance(self._num_bytes(name))
        for stage in stages_of(self._config, self._config.layers[layer_idx]):
            sums = self._observe(layer_idx, tensors, stage, states)
            for fold in stage:
                self._quantize_fold(fold, tensors, sums)
        return tensors, self._outputs(layer_idx, tensors, states)

    def _outputs(self, layer_idx: int, tensors: LayerTensors, states: States) -> States:
        """Return the layer's outputs; none for the last layer, or if there is no text."""
        if layer_idx == self._config.num_layers - 1:
            return []
        return list(self.runner.run(layer_idx, tensors.get, states)) if states else []

    def _observe(self, layer_idx: int, tensors: LayerTensors, stage: Stage, states: States) -> InputSums:
        """Run the layer up to the stage's weights."""
        keys = [key for fold in stage for point in fold.points if (key := _key(point, tensors)) is not None]
        sums = InputSums([f"{key}.weight" for key in keys])
        if states and keys:
            for _ in self.runner.run(layer_idx, tensors.get, states, sums):
                pass
        return sums

    def _quantize_fold(self, fold: Fold, tensors: LayerTensors, sums: InputSums) -> None:
        factors = self._fold_factors(fold, tensors, sums) if self._recipe.method == "awq" else None
        for point in fold.points:
            if (key := _key(point, tensors)) is not None:
                gram, inputs = None, sums.pop(f"{key}.weight")
                if inputs.num_rows >= LEAST_ROWS:
                    gram = inputs.gram()
                    gram = gram if factors is None else gram / factors / factors.unsqueeze(1)
                elif self._recipe.method != "rtn":
                    remark = f"by rounding to nearest, because {inputs.num_rows} tokens of the text use it; "
                    remark += f"{LEAST_ROWS} must"
                    tensors.remarks |= {tensors.name(path): remark for path in point.weights}
                self._quantize_point(point, tensors, gram, factors)
            elif factors is not None:
                for path in point.weights:
                    tensors.change(f"{path}.weight", tensors.weight(path) * factors)

    def _quantize_point(self, point: Point, tensors: LayerTensors, gram: Tensor | None, factors: Tensor | None) -> None:
        """Quantize weights of equal inputs together. gram: of inputs divided by the factors; None: too few inputs."""
        wanted = [path for path in point.weights if tensors.name(path) not in tensors.unquantized]
        weights = [tensors.weight(path) for path in wanted]
        stacked = torch.cat(weights) if factors is None else torch.cat(weights) * factors
        if gram is not None and (self._recipe.method == "gptq" or self._recipe.compensation):
            levels = quantize_gptq(stacked, gram, self._recipe)
        else:
            levels = round_to_nearest(stacked, self._recipe, gram)
        first = 0
        for path, weight in zip(wanted, weights, strict=True):
            name, rows = tensors.name(path), slice(first, first := first + len(weight))
            tensors.linears[name] = levels.named(name, rows, self._recipe, factors)
            self.progress.advance(self._num_bytes(name))
        if factors is not None:
            for path in set(point.weights) - set(wanted):
                tensors.change(f"{path}.weight", tensors.weight(path) * factors)

    def _fold_factors(self, fold: Fold, tensors: LayerTensors, sums: InputSums) -> Tensor | None:
        """Search for the factors of a fold's columns, and divide the absorber by them; None if there are none."""
        wanted = {
            path: sums[f"{key}.weight"]
            for point in fold.points
            if (key := _key(point, tensors)) is not None
            for path in point.weights
            if tensors.name(path) not in tensors.unquantized
        }
        readers = [
            Reader(tensors.weight(path), of_path) for path, of_path in wanted.items() if of_path.num_rows >= LEAST_ROWS
        ]
        if fold.absorber is None:
            tensors.remarks |= {tensors.name(path): f"without AWQ's factors, because {fold.reason}" for path in wanted}
        if fold.absorber is None or not readers:
            return None
        # Weights that stay as they are must not be rounded once more.
        others = isinstance(fold.absorber, NormAbsorber) and bool(fold.absorber.readers)
        others |= len(wanted) < sum(len(point.weights) for point in fold.points)
        factors = search_factors(readers, self._recipe, powers_of_two=others)
        return absorb(fold.absorber, factors, tensors)

    def _weights(self, layer_idx: int) -> list[str]:
        """Return the names of the layer's weights without ".weight"."""
        stages = stages_of(self._config, self._config.layers[layer_idx])
        points = [point for stage in stages for fold in stage for point in fold.points]
        return [self.runner.name(layer_idx, path) for point in points for path in point.weights]

    def _reason(self, name: str) -> str | None:
        """Return why a weight is not quantized. Raises ConfigError if it is quantized already."""
        kind, shape = self._source.stored_type(f"{name}.weight"), self._source.shape(f"{name}.weight")
        if isinstance(kind, str) or not kind.is_floating_point or kind.itemsize < 2:
            raise ConfigError(f"{name}.weight is quantized already ({kind}); give the unquantized checkpoint")
        rows, columns = shape
        if columns % self._recipe.columns_per_group(columns):
            return f"its {columns} columns are not a multiple of the group of {self._recipe.group_size}"
        return self._left_out(name, (rows, columns))

    def _num_bytes(self, name: str) -> int:
        shape, dtype = self._source.shape(f"{name}.weight"), self._source.dtype(f"{name}.weight")
        return prod(shape) * dtype.itemsize


def _key(point: Point, tensors: LayerTensors) -> str | None:
    """Return a point's first quantized weight; the sums of the point's inputs are kept under its name."""
    names = (tensors.name(path) for path in point.weights)
    return next((name for name in names if name not in tensors.unquantized), None)
