"""Renames what transformers writes as files are published where its own way back loses something."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def publish_olmo_hybrid(directory: Path, config: dict[str, Any]) -> None:
    """Cut convolutions by their channels, and call a norm so in layers of linear attention alone."""

    def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        tensors = _recut(tensors, [keys, keys, values])
        full = "|".join(str(idx) for idx, kind in enumerate(config["layer_types"]) if kind == "full_attention")
        norm = re.compile(rf"(.*layers\.({full})\.)feedforward_layer_norm(\..*)")
        return {norm.sub(r"\1post_attention_layernorm\3", name): tensor for name, tensor in tensors.items()}

    _change(directory, renamed)


def publish_kimi_linear(directory: Path, config: dict[str, Any]) -> None:
    """Give an MLP without experts its usual name."""
    dense = "|".join(str(idx) for idx, kind in enumerate(config["mlp_layer_types"]) if kind == "dense")
    mlp = re.compile(rf"(.*layers\.({dense})\.)block_sparse_moe(\..*)")
    _change(directory, lambda tensors: {mlp.sub(r"\1mlp\3", name): tensor for name, tensor in tensors.items()})


def publish_kimi_k25(directory: Path) -> None:
    """Name layers of Kimi K2.5's text part, patches and the first norm as published files do.

    transformers calls the first ones blocks, as those of images, and adds the names of a part to the other two.
    """
    theirs = {
        "language_model.model.blocks.": "language_model.model.layers.",
        "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
        "model.mm_projector.": "mm_projector.",
    }

    def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, tensor in tensors.items():
            begin = next((one for one in theirs if name.startswith(one)), "")
            found[theirs.get(begin, "") + name.removeprefix(begin)] = tensor
        return found

    _change(directory, renamed)


def publish_bailing_hybrid(directory: Path, config: dict[str, Any]) -> None:
    """Give output projections of linear attention their usual name, and bring queries of low rank to DeepSeek's."""
    linear = "|".join(str(idx) for idx, kind in enumerate(config["layer_types"]) if kind == "linear_attention")
    output = re.compile(rf"(.*layers\.({linear})\.attention\.)dense(\..*)")
    _change(
        directory,
        lambda tensors: {
            output.sub(r"\1o_proj\3", name.replace(".q_proj.q_", ".q_")): tensor for name, tensor in tensors.items()
        },
    )


def publish_deepseek_v4(directory: Path, config: dict[str, Any]) -> None:
    """Take the decoder out of its module, and name what transformers leaves as it calls it."""
    names = {
        r"^model\.": "", r"^embed_tokens": "embed", r"^hc_head\.hc_": "hc_head_", r"\.attn\.norm\.": ".attn.kv_norm.",
    }  # fmt: skip

    def published(name: str) -> str:
        for pattern, replacement in names.items():
            name = re.sub(pattern, replacement, name)
        return name

    _change(directory, lambda tensors: {published(name): tensor for name, tensor in tensors.items()})


def publish_hy_v4(directory: Path) -> None:
    """Put a part of names where published files have it, and call only attention's gates so."""
    names = {
        r"\.hc_pre\.(hc_(attn|mlp)_layer)\.": r".\1.hc_pre.",
        r"\.hc_pre\.hc_head\.": ".hc_head.",
        r"(mlp\..*)linear_gate": r"\1gate_proj",
    }

    def published(name: str) -> str:
        for pattern, replacement in names.items():
            name = re.sub(pattern, replacement, name)
        return name

    _change(directory, lambda tensors: {published(name): tensor for name, tensor in tensors.items()})


def _recut(tensors: dict[str, Tensor], sizes: list[int]) -> dict[str, Tensor]:
    """Return the tensors with convolutions of `sizes` channels."""
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith(".q_conv1d.weight")]:
        names = [name.replace("q_conv1d", f"{kind}_conv1d") for kind in "qkv"]
        parts = torch.cat([tensors[each] for each in names]).split(sizes)
        found |= {each: part.contiguous() for each, part in zip(names, parts, strict=True)}
    return found


def _change(directory: Path, change: Any) -> None:
    paths = sorted(directory.glob("*.safetensors"))
    assert len(paths) == 1, "a tensor in another shard would not be found"
    save_file(change(load_file(paths[0])), paths[0], metadata={"format": "pt"})
