"""Predicting layers as families' files hold them: their names, and models that have one. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from pagewick.errors import ConfigError
from pagewick.models.config import ModelConfig
from pagewick.models.mtp_config import PATH, MtpConfig
from pagewick.models.name_map import NameMap
from pagewick.models.parts import LayerConfig

# The name of a layer that stands beside the whole model.
_BESIDE: Final = tuple((f"{model}.mtp", "mtp") for model in ("model.language_model", "language_model.model", "model"))


def nextn(num_layers: int, norm: str = "shared_head.norm") -> MtpConfig:
    """Describe such a layer in DeepSeek's files, where it stands behind the model's `num_layers` own layers.

    norm: the name of its last norm.
    """
    path = f"layers.{num_layers}"
    inner = {"fc": "eh_proj", "embedding_norm": "enorm", "hidden_norm": "hnorm", "norm": norm}
    names = (*((f"mtp.{ours}", f"{path}.{theirs}") for ours, theirs in inner.items()), ("mtp.layer", path))
    return MtpConfig(like=num_layers - 1, names=names)


def qwen_mtp(like: int = -1, own: LayerConfig | None = None) -> MtpConfig:
    """Describe such a layer in the files of Qwen3-Next, Qwen3.5 and EXAONE, where it stands beside the whole model.

    like, own: as in MtpConfig.
    """
    inner = {"embedding_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden", "layer": "layers.0"}
    names = (*_BESIDE, *((f"mtp.{ours}", f"mtp.{theirs}") for ours, theirs in inner.items()))
    return MtpConfig(like=like, own=own, names=names)


def mtp_in_halves(own: LayerConfig) -> MtpConfig:
    """Describe such a layer in the files of Nemotron 3, where attention and experts are layers of their own."""
    inner = {
        "fc": "layers.0.eh_proj", "embedding_norm": "layers.0.enorm", "hidden_norm": "layers.0.hnorm",
        "norm": "layers.1.final_layernorm", "layer.input_layernorm": "layers.0.input_layernorm",
        "layer.self_attn": "layers.0.self_attn", "layer": "layers.1",
    }  # fmt: skip
    names = (*_BESIDE, *((f"mtp.{ours}", f"mtp.{theirs}") for ours, theirs in inner.items()))
    return MtpConfig(own=own, names=names)


def offer(config: ModelConfig, mtp: MtpConfig) -> ModelConfig:
    """Return the config of a model whose files may hold this layer; with_mtp makes it a part of it."""
    maps = tuple(NameMap(parts=(*mtp.names, *names.parts)) for names in config.names)
    return replace(config, mtp=mtp, names=maps)


def holds_mtp(config: ModelConfig, tensor_names: Sequence[str]) -> bool:
    """Whether a model has such a layer, and its files hold it. tensor_names: those of its files."""
    return config.mtp is not None and _tensor(config, tensor_names) in tensor_names


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
    if not holds_mtp(config, tensor_names):
        raise ConfigError(
            f"{flag}: the model's files lack the layer that predicts further tokens ({_tensor(config, tensor_names)}); "
            "download the original model, or use ngram"
        )
    return replace(config, has_mtp=True)


def _tensor(config: ModelConfig, tensor_names: Sequence[str]) -> str:
    """Return the name in the files of a tensor that all such layers have."""
    return config.name_map(tensor_names).in_file(f"{PATH}.fc.weight")
