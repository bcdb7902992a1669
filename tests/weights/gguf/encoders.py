"""Encoders as GGUF files, with the names that llama.cpp's converter gives, written with the `gguf` package."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.models.encoders import ENCODERS, write_encoder
from tests.weights.gguf.encoder_vocabularies import add_values
from tests.weights.gguf.mixes import quantize_rows

# Variant -> entries that differ from it, because files have no key for them.
ENTRIES: Mapping[str, Mapping[str, Any]] = {
    "bert": {},
    "roberta": {},
    "xlm-roberta": {"hidden_act": "gelu"},
    "distilbert": {},
    "nomic-bert": {},
    "modernbert": {},
    "modernbert-biases": {},
    "embedding-gemma": {"query_pre_attn_scalar": 16},
}
_ARCHITECTURES = {
    "nomic-bert": gguf.MODEL_ARCH.NOMIC_BERT,
    "modernbert": gguf.MODEL_ARCH.MODERN_BERT,
    "modernbert-biases": gguf.MODEL_ARCH.MODERN_BERT,
    "embedding-gemma": gguf.MODEL_ARCH.GEMMA_EMBEDDING,
}
_PREFIX = re.compile(r"(bert|roberta|distilbert|model)\.")
_SKIPPED = re.compile(r"pooler\.|embeddings\.position_ids|lm_head\.")


def write_gguf(
    name: str,
    directory: Path,
    task: str = "Model",
    *,
    kind: str = "F32",
    keys: Mapping[str, Any] | None = None,
    vocabulary: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    **entries: Any,
) -> tuple[Path, nn.Module]:
    """Write the file of an encoder of tests.models.encoders; return its path and transformers' model.

    kind: the type of its matrices. keys: further ones, without the architecture; null ones are left out. tensors:
    further ones.
    """
    model = write_encoder(name, directory, task, **{**ENTRIES[name], **entries})
    config: Any = model.config
    architecture = _ARCHITECTURES.get(name, gguf.MODEL_ARCH.BERT)
    path = directory / "model.gguf"
    writer = gguf.GGUFWriter(path, kind_of(name))
    writer.add_type("model")
    found = {**_sizes(config), **_further(name, config), **(keys or {})}
    named = {f"{kind_of(name)}.{key}": value for key, value in found.items() if value is not None}
    add_values(writer, {**named, **(vocabulary or {})})
    for stored, tensor in {**dict(_stored(name, directory, config, architecture)), **(tensors or {})}.items():
        numbers = tensor.detach().to(torch.float32).contiguous().numpy()
        if kind == "F32" or numbers.ndim == 1 or stored in ("position_embd.weight", "token_types.weight"):
            writer.add_tensor(stored, numbers)
        else:
            writer.add_tensor(stored, quantize_rows(numbers, kind), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (directory / "model.safetensors").unlink()
    (directory / "config.json").unlink()
    return path, model


def kind_of(name: str) -> str:
    """general.architecture of a variant's file."""
    return gguf.MODEL_ARCH_NAMES[_ARCHITECTURES.get(name, gguf.MODEL_ARCH.BERT)]


def _offset(name: str, config: Any) -> int:
    """The rows of positions that the converter leaves out."""
    return config.pad_token_id + 1 if name in ("roberta", "xlm-roberta") else 0


def _sizes(config: Any) -> dict[str, Any]:
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", None) or config.hidden_dim,
        "attention.head_count": config.num_attention_heads,
        "block_count": config.num_hidden_layers,
    }


def _further(name: str, config: Any) -> dict[str, Any]:
    if name == "embedding-gemma":
        ropes = config.rope_parameters
        return {
            # As the original file has it, which transformers halves.
            "attention.sliding_window": ENCODERS[name].entries["sliding_window"],
            "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types],
            "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.key_length": config.head_dim,
            "attention.value_length": config.head_dim,
            "rope.freq_base": float(ropes["full_attention"]["rope_theta"]),
            "rope.freq_base_swa": float(ropes["sliding_attention"]["rope_theta"]),
            "pooling_type": 1,
        }
    found: dict[str, Any] = {
        "attention.causal": False,
        "context_length": config.max_position_embeddings - _offset(name, config),
    }
    if name.startswith("modernbert"):
        ropes = config.rope_parameters
        return {
            **found,
            "attention.layer_norm_epsilon": config.norm_eps,
            "attention.sliding_window": config.local_attention,
            # Older files have no such key.
            "attention.sliding_window_pattern": 3 if name == "modernbert" else None,
            "rope.freq_base": float(ropes["full_attention"]["rope_theta"]),
            "rope.freq_base_swa": float(ropes["sliding_attention"]["rope_theta"]),
            "rope.scaling.type": "none",
            "hidden_activation": config.hidden_activation,
        }
    if name == "nomic-bert":
        found["rope.freq_base"] = float(config.rope_parameters["rope_theta"])
    return {**found, "attention.layer_norm_epsilon": 1e-12 if name == "distilbert" else config.layer_norm_eps}


def _stored(name: str, directory: Path, config: Any, architecture: gguf.MODEL_ARCH) -> Iterator[tuple[str, Tensor]]:
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for theirs, tensor in load_file(directory / "model.safetensors").items():
        stem = theirs if name == "embedding-gemma" else _PREFIX.sub("", theirs, count=1)
        if _SKIPPED.match(stem):
            continue
        if stem.startswith("classifier.") and name in ("bert", "distilbert", "modernbert"):
            stem = stem.replace("classifier.", "classifier.out_proj.")
        stored = names.get_name(stem, try_suffixes=(".weight", ".bias"))
        assert stored is not None, theirs
        if stored == "position_embd.weight":
            tensor = tensor[_offset(name, config) :]
        is_offset = name == "embedding-gemma" and stored.endswith("norm.weight")
        yield stored, tensor + 1 if is_offset else tensor
