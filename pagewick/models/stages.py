"""Divides the layers of a model into stages, which consecutive ranks hold (pipeline parallelism). Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from pagewick.errors import ConfigError
from pagewick.models.config import ModelConfig

_LAYERS: Final = "model.layers."


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a model: the numbers of its layers, and which of the parts before all layers it holds."""

    layers: range
    has_inputs: bool
    has_embedding: bool
    sees_images: bool

    def holds(self, path: str) -> bool:
        """Whether the decoder's tensor of this name is on the ranks of the stage."""
        if path.startswith(_LAYERS):
            return int(path.removeprefix(_LAYERS).partition(".")[0]) in self.layers
        if path.startswith("model.embed_tokens."):
            return self.has_embedding
        if path.startswith("visual."):
            return self.sees_images
        return self.has_inputs or not path.startswith("model.embed_")


def stages_of(config: ModelConfig, num_stages: int) -> list[Stage]:
    """Return the stages of a model. Raises ConfigError; see stage_layers."""
    return [
        Stage(
            layers,
            has_inputs=stage == 0,
            has_embedding=stage == 0 or config.tie_word_embeddings,
            sees_images=stage == 0 or config.image_attention is not None,
        )
        for stage, layers in enumerate(stage_layers(config, num_stages))
    ]


def stage_layers(config: ModelConfig, num_stages: int) -> list[range]:
    """Return the layers of each stage: consecutive, at least one, and as many in each as possible.

    No border lies between a layer and an earlier one from which it reads more than hidden states. If the layers cannot
    be divided equally, the last stages have one more, because the first also has the embedding. Raises ConfigError for
    a model that cannot be divided like that.
    """
    num_layers = config.num_layers
    if num_stages == 1:
        return [range(num_layers)]
    if config.layer_inputs is not None:
        why = "makes an input of each layer from the embedding, which is on one rank; use --tensor-parallel-size"
        raise _refused(num_stages, f"{config.architecture} {why}")
    if config.has_mtp:
        raise _refused(num_stages, "--speculative-method mtp needs all layers on one rank; use ngram, or a draft model")
    forbidden = {border for first, last in _links(config) for border in range(first + 1, last + 1)}
    allowed = [border for border in range(1, num_layers) if border not in forbidden]
    if len(allowed) < num_stages - 1:
        why = " that do not read from each other" if forbidden else ""
        raise _refused(
            num_stages, f"the model can be divided into {len(allowed) + 1} parts of layers{why}; give at most as many"
        )
    borders = [0]
    for stage in range(1, num_stages):
        # Some must be left for the stages behind.
        last = len(allowed) - (num_stages - 1 - stage)
        usable = [border for border in allowed[:last] if border > borders[-1]]
        wanted = num_layers * stage // num_stages
        borders.append(min(usable, key=lambda border: abs(border - wanted)))
    return [range(*pair) for pair in zip(borders, [*borders[1:], num_layers], strict=True)]


def _links(config: ModelConfig) -> Iterator[tuple[int, int]]:
    """Yield (first, last) for layers `last` that read something that layer `first` keeps: keys, selections, outputs."""
    if config.vision is not None and (num_deep := len(config.vision.deepstack_blocks)):
        # The first stage has what the encoder of images adds behind the first layers.
        yield 0, num_deep - 1
    selecting = 0
    for layer_idx, layer in enumerate(config.layers):
        if layer.lender is not None:
            yield layer.lender, layer_idx
        if layer.latent is not None and layer.latent.indexer is not None:
            if layer.latent.indexer.is_shared:
                yield selecting, layer_idx
            else:
                selecting = layer_idx
        if (layer.block or config.block) == "shortcut" and layer.experts is None:
            yield layer_idx - 1, layer_idx


def _refused(num_stages: int, why: str) -> ConfigError:
    return ConfigError(f"--pipeline-parallel-size {num_stages}: {why}")
