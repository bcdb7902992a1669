"""Finds the layers of a model that an adapter changes, by the names in the adapter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from pagewick.layers.linear import Linear
from pagewick.layers.lora import LoraLayer
from pagewick.models.decoder import Decoder

# Versions of transformers put a decoder below different modules, and adapters have the names of the one that trained
# them. Encoders of images have layers, too, and lie below others.
_OWNERS: Final = frozenset(("model", "language_model", "transformer", "text_model"))


class AdaptedWeight(NamedTuple):
    """A weight [out_features, in_features] of a checkpoint, and the layer that multiplies it; part: see LoraLayer."""

    layer: LoraLayer
    part: str | None
    shape: tuple[int, int]


def adapted_weights(model: Decoder) -> dict[str, AdaptedWeight]:
    """Return the weights that adapters can change, by short_name of their names in the model's files.

    Where adapters have other names, a weight has both.
    """
    return dict(_adapted_weights(model))


def _adapted_weights(model: Decoder) -> Iterator[tuple[str, AdaptedWeight]]:
    for path, module in model.named_modules():
        if not isinstance(module, Linear) or module.lora is None:
            continue
        for part in module.share.parts:
            owner = path if part.name is None else ".".join([*path.split(".")[:-1], part.name])
            weight = AdaptedWeight(module.lora, part.name, (part.num_rows, module.share.in_features))
            for name_of in (model.name_in_file, model.name_in_adapter):
                yield short_name(name_of(f"{owner}.weight").removesuffix(".weight")), weight


def lora_layers(weights: Mapping[str, AdaptedWeight]) -> list[LoraLayer]:
    """Return the layers of weights, each once."""
    return list({id(weight.layer): weight.layer for weight in weights.values()}.values())


def short_name(name: str) -> str:
    """Return a weight's name without the modules that hold the decoder: `layers.0.self_attn.q_proj`."""
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in _OWNERS:
        del parts[0]
    return ".".join(parts)
