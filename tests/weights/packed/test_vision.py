"""Checkpoints whose text part is packed: their encoder of images is not, and has the numbers of the file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewick.config import EngineConfig
from pagewick.engine.preflight import check_models
from pagewick.models.registry import read_config
from pagewick.models.tensors import model_tensors
from pagewick.weights.opening import open_source
from tests.layers.ranks import single_context
from tests.models import test_pixtral as pixtral
from tests.models.checkpoints import make_model
from tests.models.test_vision import by_transformers, compare, encoder_of, image_of
from tests.models.variants import VARIANTS
from tests.weights.packed import byte_writers
from tests.weights.packed.harness import Writer, load, write_packed
from tests.weights.packed.test_readers import AWQ
from tests.weights.packed.writers import awq

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
# As the published files name the encoder: each of its layers, or all of it.
LAYERS = [
    *(f"model.visual.blocks.{block}.{layer}" for block in range(3) for layer in ("attn.qkv", "attn.proj", "mlp.fc1")),
    *(f"model.visual.blocks.{block}.mlp.linear_fc{number}" for block in range(3) for number in (1, 2)),
    *(
        f"model.visual.{merger}.linear_fc{number}"
        for merger in ("merger", "deepstack_merger_list.0")
        for number in (1, 2)
    ),
    *(f"model.visual.deepstack_merger_list.1.linear_fc{number}" for number in (1, 2)),
    "model.visual.patch_embed.proj",
    "model.visual.pos_embed",
    "lm_head",
]


def fp8(prefix: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    parts, numbers = byte_writers.fp8(weight)
    return {f"{prefix}{leaf}": tensor for leaf, tensor in parts.items()}, numbers


def entries_of(name: str) -> dict[str, Any]:
    """A text part whose rows groups of 128 fill, with the encoder's output as wide."""
    entries = VARIANTS[name].all_entries()
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_hidden_layers": 2}
    text = {**entries["text_config"], **sizes}
    text = {key: value for key, value in text.items() if key not in ("rope_parameters", "layer_types")}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]}
    return {"text_config": text, "vision_config": {**entries["vision_config"], "out_hidden_size": 128}}


def is_of_text(prefix: str) -> bool:
    return "_proj" in prefix and not re.search("visual|vision_tower|multi_modal", prefix)


CASES = [
    pytest.param("qwen3-vl", {**FP8, "modules_to_not_convert": LAYERS}, fp8, id="fp8"),
    pytest.param("qwen2.5-vl-window", {**AWQ, "modules_to_not_convert": ["visual"]}, awq(), id="awq"),
]


@pytest.mark.parametrize(("name", "quantization", "write"), CASES)
@torch.inference_mode()
def test_the_encoder_is_left_out(name: str, quantization: dict[str, Any], write: Writer, tmp_path: Path) -> None:
    written = write_packed(tmp_path, quantization, write, name=name, entries=entries_of(name), is_packed=is_of_text)
    assert len(written.packed) == 14
    check_models(EngineConfig(model=str(tmp_path)))
    with open_source(tmp_path) as source:
        config = read_config(source.config())
        table = [tensor for tensor in model_tensors(config, source.names()) if tensor.role == "vision"]
        assert len(table) > 30
        assert {source.stored_type(tensor.name) for tensor in table} == {torch.float32}
    encoder = encoder_of(load(single_context(), tmp_path))
    reference = make_model(name, {**VARIANTS[name].all_entries(), **entries_of(name)})
    image = image_of(24, 56)
    compare(encoder(image), by_transformers(reference, image), 3e-5)


@torch.inference_mode()
def test_the_encoder_of_mistral_is_left_out(tmp_path: Path) -> None:
    """As in the FP8 checkpoints of Ministral 3."""
    name = "mistral-small-3.1"
    variant = VARIANTS[name].all_entries()
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_hidden_layers": 2}
    entries = {"text_config": {**variant["text_config"], **sizes}}
    left_out = ["model.vision_tower", "model.multi_modal_projector", "lm_head"]
    quantization = {**FP8, "modules_to_not_convert": left_out}
    written = write_packed(tmp_path, quantization, fp8, name=name, entries=entries, is_packed=is_of_text)
    assert len(written.packed) == 14
    check_models(EngineConfig(model=str(tmp_path)))
    encoder = pixtral.encoder_of(load(single_context(), tmp_path))
    image = pixtral.image_for(name, 3, 7)
    expected = pixtral.by_transformers(make_model(name, {**variant, **entries}), image)
    torch.testing.assert_close(encoder(image).rows, expected, atol=2e-4, rtol=0)
