"""quantize_layers: a checkpoint's decoder layers, one after the other, quantized by the inputs that they get."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagewick.quantization.calibrated.results import LayerResult, Recipe
from pagewick.weights.progress import Progress
from pagewick.weights.source import TensorSource


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
    left_out: Callable[[str, tuple[int, int]], str | None] = quantize_all,
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
    raise NotImplementedError
