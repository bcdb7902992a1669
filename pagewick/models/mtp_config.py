"""MtpConfig: a layer with which a model predicts further tokens, which serve as draft tokens. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pagewick.errors import ConfigError
from pagewick.models.name_map import NameMap
from pagewick.models.parts import LayerConfig

if TYPE_CHECKING:
    from pagewick.models.config import ModelConfig

PATH = "model.mtp"
"""The decoder's name of the layer and of what is around it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpConfig:
    """Multi-token prediction, as in DeepSeek-V3 (arXiv:2412.19437, section 2.2), with one layer.

    Let h be a token's hidden states behind the model's last norm, and e the embedding of the token after it. The logits
    of the token after these two are head(norm(y)), with y = layer(fc [norm_e(e), norm_h(h)]) and the model's own head.
    In place of h, the prediction after that reads y, or norm(y) if has_normed_chain, since the model has not computed
    that token.

    like: the number of the model's layer that it is like. names: (ours, theirs), parts of the names of its tensors.
    """

    like: int
    names: tuple[tuple[str, str], ...]
    has_normed_chain: bool = False

    def layer(self, config: ModelConfig) -> LayerConfig:
        """Return the layer. If it selects keys, it has an indexer of its own, even where layers share theirs."""
        layer = config.layers[self.like]
        if layer.latent is None or layer.latent.indexer is None:
            return layer
        indexer = replace(layer.latent.indexer, is_shared=False)
        return replace(layer, attention=replace(layer.latent, indexer=indexer))


def nextn(num_layers: int) -> MtpConfig:
    """Describe such a layer in DeepSeek's files, where it stands behind the model's `num_layers` own layers."""
    path = f"layers.{num_layers}"
    inner = {"fc": "eh_proj", "embedding_norm": "enorm", "hidden_norm": "hnorm", "norm": "shared_head.norm"}
    names = (*((f"mtp.{ours}", f"{path}.{theirs}") for ours, theirs in inner.items()), ("mtp.layer", path))
    return MtpConfig(like=num_layers - 1, names=names)


def qwen_mtp(like: int) -> MtpConfig:
    """Describe such a layer in the files of Qwen3-Next and Qwen3.5, where it stands beside the whole model."""
    outside = tuple((f"{model}.mtp", "mtp") for model in ("model.language_model", "language_model.model", "model"))
    inner = {"embedding_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden", "layer": "layers.0"}
    names = (*outside, *((f"mtp.{ours}", f"mtp.{theirs}") for ours, theirs in inner.items()))
    return MtpConfig(like=like, names=names, has_normed_chain=True)


def offer(config: ModelConfig, mtp: MtpConfig) -> ModelConfig:
    """Return the config of a model whose files may hold this layer; with_mtp makes it a part of it."""
    maps = tuple(NameMap(parts=(*mtp.names, *names.parts)) for names in config.names)
    return replace(config, mtp=mtp, names=maps)


def with_mtp(config: ModelConfig, tensor_names: Sequence[str]) -> ModelConfig:
    """Return the config of a model that has this layer. tensor_names: those of its files.

    Raises ConfigError for a model that has no such layer, or whose files lack it.
    """
    flag = "--speculative-method mtp"
    if config.mtp is None:
        raise ConfigError(
            f"{flag}: {config.architecture} has no layer that predicts further tokens, or none that Pagewick can use; "
            "use ngram, or a --speculative-model"
        )
    if (name := config.name_map(tensor_names).in_file(f"{PATH}.fc.weight")) not in tensor_names:
        raise ConfigError(
            f"{flag}: the model's files lack the layer that predicts further tokens ({name}); download the original "
            "model, or use ngram"
        )
    return replace(config, has_mtp=True)
