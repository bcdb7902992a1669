"""The table of tensors beside the decoder's modules: the same names, the same shapes, the same shares of ranks."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from pagewick.attention.native import NativeBackend
from pagewick.engine.model_loading import num_parameters
from pagewick.layers.config import MoeConfig
from pagewick.layers.context import LayerContext
from pagewick.models.config import ModelConfig
from pagewick.models.decoder import Decoder
from pagewick.models.registry import read_config
from pagewick.models.tensors import model_tensors
from pagewick.parallel.collectives import Collectives
from pagewick.quantization.mixes import is_quantizable, part_of
from pagewick.quantization.unquantized import UnquantizedMethod
from pagewick.weights.loader import build_routes
from tests.models.checkpoints import auto_model
from tests.models.variants import VARIANTS, Variant

# Parts that are not loaded, unless the model reads images.
OTHER_PARTS = re.compile(r"vision_|embed_vision|multi_modal|mm_projector|model\.merger|model\.visual\.")
META = torch.device("meta")


def reference_of(variant: Variant) -> nn.Module:
    """The variant in transformers; its weights take no memory."""
    config = getattr(transformers, f"{variant.config}Config")(**variant.all_entries())
    with META:
        model: nn.Module = auto_model(config).from_config(config)
        variant.patch(model)
    return model


def config_of(variant: Variant) -> ModelConfig:
    """The config.json that transformers writes for the variant."""
    model: Any = reference_of(variant)
    return read_config({**model.config.to_dict(), "architectures": [type(model).__name__]})


def build(config: ModelConfig, rank: int, num_ranks: int) -> Decoder:
    """One rank's modules, whose weights take no memory."""
    context = LayerContext(
        dtype=torch.float32,
        device=META,
        collectives=Collectives(rank, num_ranks),
        backend=NativeBackend(32, "float32"),
        choose_method=lambda prefix: UnquantizedMethod(),
        max_model_len=512,
    )
    return Decoder(context, config)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_table_agrees_with_the_modules(name: str) -> None:
    config = config_of(VARIANTS[name])
    most = 6 if config.vision is None else config.vision.num_heads
    for num_ranks in (size for size in (1, 2, 3, 6) if config.num_heads % size == 0 and size <= most):
        for rank in {0, num_ranks - 1}:
            check_rank(config, rank, num_ranks)
    # Mixes of formats treat these two unlike all others, whatever their names in the file.
    parts = {tensor.path: part_of(tensor.name) for tensor in model_tensors(config)}
    assert parts["model.embed_tokens.weight"] == "embedding"
    assert parts.get("lm_head.weight", "head") == "head"
    routers = [tensor for tensor in model_tensors(config) if tensor.role == "router"]
    assert not [tensor.name for tensor in routers if is_quantizable(tensor.name, tensor.shape)]


def check_rank(config: ModelConfig, rank: int, num_ranks: int) -> None:
    tensors = {tensor.name: tensor for tensor in model_tensors(config, rank=rank, num_ranks=num_ranks)}
    routes = build_routes(build(config, rank, num_ranks))
    assert len(tensors) > 8 and tensors.keys() == routes.keys()
    kept: Counter[Any] = Counter()
    for name, (module, part, leaf) in routes.items():
        # Raises ModelLoadError if the module expects another shape.
        dtype = torch.int64 if tensors[name].role == "table" else torch.float32
        module.load_weight(leaf, torch.empty(tensors[name].shape, dtype=dtype, device=META), part)
        kept[module] += tensors[name].num_kept
    for module, count in kept.items():
        # Some have weights of their own and others in modules within.
        within = sum(num_parameters(child) for child in module.children() if child in kept)
        assert num_parameters(module) - within == count, module


@pytest.mark.parametrize("latent_size", [None, 31])
def test_experts_without_gates(latent_size: int | None) -> None:
    config = config_of(VARIANTS["deepseek-v3"])
    layers = [
        replace(layer, mlp=replace(layer.mlp, is_gated=False, latent_size=latent_size))
        if isinstance(layer.mlp, MoeConfig)
        else layer
        for layer in config.layers
    ]
    config = replace(config, layers=tuple(layers))
    for num_ranks in (1, 2):
        for rank in range(num_ranks):
            check_rank(config, rank, num_ranks)
    width, inner = latent_size or config.hidden_size, config.mixtures[0].intermediate_size
    shapes = {tensor.path: tensor.shape for tensor in model_tensors(config)}
    owner = "model.layers.2.mlp.experts.0."
    of_expert = {path.removeprefix(owner): shape for path, shape in shapes.items() if path.startswith(owner)}
    assert of_expert == {"up_proj.weight": (inner, width), "down_proj.weight": (width, inner)}
    shared = {path.rpartition("expert.")[2] for path in shapes if ".2.mlp.shared_expert." in path}
    assert shared == {"up_proj.weight", "down_proj.weight"}


@pytest.mark.parametrize("name", VARIANTS)
def test_transformers_has_as_many_parameters(name: str) -> None:
    tensors = dict(reference_of(VARIANTS[name]).named_parameters())
    # Corrections of routers, tables of experts, factors of layers and of frequencies, two numbers of xIELU, and limits
    # and standards of Gemma 4's encoder are buffers there.
    tensors |= {
        path: buffer
        for path, buffer in reference_of(VARIANTS[name]).named_buffers()
        if path.endswith(("_bias", "layer_scalar", "_min", "_max", "std_scale", ".beta", ".eps", ".alpha", ".tid2eid"))
    }
    if name == "minicpm-v-4.6-4x":
        # A part that this mode leaves out.
        tensors = {path: tensor for path, tensor in tensors.items() if ".vit_merger." not in path}
    if name in ("llava-1.5", "llava-next"):
        # The model leaves out everything behind the block that makes rows.
        unused = ("vision_tower.encoder.layers.3.", "vision_tower.post_layernorm.")
        tensors = {path: tensor for path, tensor in tensors.items() if not any(part in path for part in unused)}
    if name == "llava-onevision":
        tensors = {path: tensor for path, tensor in tensors.items() if "vision_tower.post_layernorm." not in path}
    config = config_of(VARIANTS[name])
    is_whole = config.vision is not None
    theirs = sum(tensor.numel() for path, tensor in tensors.items() if is_whole or not OTHER_PARTS.search(path))
    # Experts that return their input have gates and ups there, which nothing reads.
    spare = sum(2 * mixture.num_identities * mixture.intermediate_size for mixture in config.mixtures)
    assert sum(tensor.num_elements for tensor in model_tensors(config)) == theirs - spare * config.hidden_size


@pytest.mark.parametrize("name", VARIANTS)
def test_no_tensor_of_a_model_is_ignored(name: str) -> None:
    config = config_of(VARIANTS[name])
    patterns = [re.compile(pattern) for pattern in config.ignored]
    names = [tensor.name for tensor in model_tensors(config)]
    assert not [one for one in names if any(pattern.fullmatch(one) for pattern in patterns)]


@pytest.mark.parametrize("name", VARIANTS)
def test_no_tensor_of_an_encoder_of_images_is_quantized_at_load(name: str) -> None:
    tensors = model_tensors(config_of(VARIANTS[name]))
    assert not [one.name for one in tensors if one.role == "vision" and is_quantizable(one.name, one.shape)]


def test_routers_stay_in_float32() -> None:
    config = config_of(VARIANTS["deepseek-v3"])
    for tensor in model_tensors(config, num_ranks=2):
        size = 4 if ".gate." in tensor.path else 2
        assert tensor.kept_bytes("bfloat16") == size * tensor.num_kept
        assert tensor.kept_bytes("float32") == 4 * tensor.num_kept
