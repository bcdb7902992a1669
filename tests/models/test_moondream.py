"""Moondream 2: its encoder against SigLIP's of transformers, its published files, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagewick.engine.step_memory import StepLimits, image_bytes
from pagewick.errors import ConfigError, ModelLoadError
from pagewick.images.decoding import pictures_of
from pagewick.images.settings_files import read_settings
from pagewick.models.config import ModelConfig
from pagewick.models.end_tokens import eos_token_ids
from pagewick.models.parts import AttentionConfig, MlpConfig
from pagewick.models.registry import read_config
from pagewick.models.tensors import model_tensors
from pagewick.models.vision.merging_config import CropVisionConfig
from pagewick.models.vision.pixels import PatchReader
from pagewick.quantization.mixes import is_quantizable, part_of
from tests.images.pictures import noise
from tests.layers.ranks import single_context
from tests.models.checkpoints import write_checkpoint
from tests.models.encoders_on_ranks import encoded_on_ranks
from tests.models.moondream import Reference
from tests.models.test_tensor_table import check_rank
from tests.models.test_vision import build

# These images are cut into 4, 1, 5, 4 and 1 crops.
PICTURES = [noise(*size) for size in ((15, 17), (9, 40), (61, 12), (40, 200), (3, 5))]
PUBLISHED: dict[str, Any] = {
    "architectures": ["HfMoondream"], "auto_map": {"AutoConfig": "hf_moondream.HfConfig"}, "config": {},
    "model_type": "moondream1", "torch_dtype": "bfloat16", "transformers_version": "4.44.0",
}  # fmt: skip


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    directory = tmp_path_factory.mktemp("moondream")
    return directory, Reference(directory, write_checkpoint("moondream", directory))


def encoder_of(directory: Path, dtype: torch.dtype) -> PatchReader:
    visual = build(directory, replace(single_context(), dtype=dtype)).visual
    assert visual is not None
    visual.use_pixels(read_settings(directory))
    return visual


def pictures(directory: Path) -> Sequence[Tensor]:
    settings = read_settings(directory)
    return [torch.from_numpy(np.array(pictures_of(one, settings)[0].pixels)) for one in PICTURES]


@torch.inference_mode()
def test_rows_are_those_of_the_reference(reference: tuple[Path, Reference]) -> None:
    directory, by = reference
    encoder = encoder_of(directory, torch.float32)
    for image, pixels in zip(PICTURES, pictures(directory), strict=True):
        expected, found = by.rows(image), encoder(pixels)
        scale = float(expected.std())
        assert scale > 1 and found.deepstack.shape == (0, *expected.shape) == (0, 25, 96)
        torch.testing.assert_close(found.rows, expected, atol=1e-5 * scale, rtol=0)
    with pytest.raises(ValueError, match="a picture of 20 x 12 pixels"):
        encoder(torch.zeros(20, 12, 3, dtype=torch.uint8))


@torch.inference_mode()
def test_bfloat16_is_as_precise_as_the_reference(reference: tuple[Path, Reference]) -> None:
    directory, by = reference
    half = Reference(directory, by.phi, torch.bfloat16)
    encoder, errors = encoder_of(directory, torch.bfloat16), []
    for image, pixels in zip(PICTURES, pictures(directory), strict=True):
        exact = by.rows(image)
        errors.append(
            [float((rows.float() - exact).square().mean()) for rows in (encoder(pixels).rows, half.rows(image))]
        )
    ours, theirs = (sum(column) for column in zip(*errors, strict=True))
    assert ours <= 1.2 * theirs


def test_ranks_share_the_heads(reference: tuple[Path, Reference]) -> None:
    directory, by = reference
    for number in (2, 3):
        for found in encoded_on_ranks(directory, number, pictures(directory)[0], read_settings(directory)):
            torch.testing.assert_close(found.rows, by.rows(PICTURES[0]), atol=1e-4, rtol=0)
    with pytest.raises(ConfigError, match="more than the vision encoder's 3 attention heads"):
        encoded_on_ranks(directory, 4, pictures(directory)[0], read_settings(directory))


def test_the_table_agrees_with_the_modules(reference: tuple[Path, Reference]) -> None:
    config = read_config(json.loads((reference[0] / "config.json").read_text()))
    for num_ranks in (1, 2, 3):
        for rank in {0, num_ranks - 1}:
            check_rank(config, rank, num_ranks)
    names = {tensor.path: tensor.name for tensor in model_tensors(config)}
    parts = {path: part_of(name) for path, name in names.items()}
    assert parts["model.embed_tokens.weight"] == "embedding" and parts["lm_head.weight"] == "head"
    assert parts["model.layers.0.self_attn.qkv_proj.weight"] == "values"
    assert parts["model.layers.0.self_attn.o_proj.weight"] == "attention output"
    assert parts["model.layers.0.mlp.down_proj.weight"] == "down"
    assert is_quantizable(names["model.embed_tokens.weight"], (2, 2))
    assert not is_quantizable(names["visual.blocks.0.attn.qkv.weight"], (2, 2))


def test_names_without_the_class_around_them(reference: tuple[Path, Reference], tmp_path: Path) -> None:
    directory, by = reference
    tensors = load_file(directory / "model.safetensors")
    save_file({name.removeprefix("model."): one for name, one in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    with torch.inference_mode():
        found = encoder_of(tmp_path, torch.float32)(pictures(directory)[0]).rows
    torch.testing.assert_close(found, by.rows(PICTURES[0]), atol=1e-4, rtol=0)


def test_published_entries() -> None:
    found = read_config(PUBLISHED)
    assert (found.hidden_size, found.num_layers, found.vocab_size, found.max_position_embeddings) == (
        2048, 24, 51200, 2048,
    )  # fmt: skip
    assert (found.dtype, found.head_bias, found.tie_word_embeddings, found.block) == (
        "bfloat16", True, False, "parallel",
    )  # fmt: skip
    layer = found.layers[-1]
    assert isinstance(layer.attention, AttentionConfig) and isinstance(layer.mlp, MlpConfig) and layer.rope is not None
    assert (layer.attention.num_heads, layer.attention.num_kv_heads, layer.attention.head_dim) == (32, 32, 64)
    assert (layer.mlp.intermediate_size, layer.rope.rotary_dim, layer.rope.theta) == (8192, 32, 10000.0)
    vision = found.vision
    assert isinstance(vision, CropVisionConfig) and vision.image_token_id == 6
    assert (vision.hidden_size, vision.num_blocks, vision.num_heads, vision.intermediate_size) == (1152, 27, 16, 4304)
    assert (vision.fixed_tokens, vision.num_leading, vision.merged_size, vision.projector_size) == (729, 1, 2304, 8192)
    assert len(vision.picture_sizes) == 35 and vision.most_pixels == 756 * (12 * 266 + 112)
    assert all(isinstance(one.attention, AttentionConfig) and one.attention.sees_images_whole for one in found.layers)
    # By the published count, 1.9 billion with the part for points.
    assert 1.8e9 < sum(tensor.num_elements for tensor in model_tensors(found)) < 1.9e9
    limits = StepLimits(num_tokens=2048, num_logits=8, context=2048, element_bytes=2, image_pixels=vision.most_pixels)
    assert 50e6 < image_bytes(found, limits) < 1e9


def test_the_end_is_the_configs_token() -> None:
    assert eos_token_ids(PUBLISHED, {"eos_token_id": 50256}) == [0]
    assert eos_token_ids({**PUBLISHED, "config": {"tokenizer": {"eos_id": 5}}}, {}) == [5]
    with pytest.raises(ModelLoadError, match="config is 3, and must be an object"):
        eos_token_ids({**PUBLISHED, "config": 3}, {})


def test_a_users_rotation_has_an_effect() -> None:
    def theta_of(config: ModelConfig) -> float:
        rope = config.layers[0].rope
        assert rope is not None
        return rope.theta

    assert theta_of(read_config(PUBLISHED, rope_theta=5000.0)) == 5000.0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "moondream3"}, "model_type is 'moondream3'"),
        ({"config": {"moe": {}}}, r"config\.moe"),
        ({"config": {"text": {"moe": {}}}}, r"config\.text\.moe"),
        ({"config": {"vision": {"size": 2}}}, r"config\.vision\.size"),
        ({"config": {"tokenizer": {"pad_id": 2}}}, r"config\.tokenizer\.pad_id"),
        ({"config": {"tokenizer": {"size_id": 51200}}}, r"config\.tokenizer\.size_id is 51200"),
        ({"config": {"tokenizer": {"templates": {"gaze": {}}}}}, r"config\.tokenizer\.templates\.gaze"),
        ({"config": {"tokenizer": {"templates": {"query": [1]}}}}, r"templates\.query is \[1\], and must be an object"),
        ({"config": {"tokenizer": {"templates": {"query": {"suffix": 3}}}}}, r"templates\.query\.suffix is 3"),
        ({"config": {"tokenizer": {"templates": {"caption": {"long": [51200]}}}}}, "caption.long .* below the size"),
        ({"config": {"text": {"group_size": 128}}}, "group_size is 128"),
        ({"config": {"text": {"prefix_attn": 0}}}, "prefix_attn is 0, and must be 730"),
        ({"config": {"text": {"dim": 2176}}}, "proj_out_dim is 2048, and must be 2176"),
        ({"config": {"text": {"n_heads": 30}}}, "n_heads"),
        ({"config": {"text": {"n_kv_heads": 5}}}, "n_kv_heads is 5"),
        ({"config": {"text": {"dim": 2080, "n_heads": 80, "n_kv_heads": 80}}}, "n_heads is 80"),
        ({"config": {"vision": {"in_channels": 1}}}, "in_channels is 1"),
        ({"config": {"vision": {"enc_n_heads": 15}}}, "enc_n_heads is 15"),
        ({"config": {"vision": {"crop_size": 380}}}, "crop_size is 380"),
        ({"config": {"vision": {"overlap_margin": 14}}}, "overlap_margin is 14"),
        ({"architectures": ["Moondream"]}, "Moondream as first published; use a revision of 2025-06-21"),
    ],
)
def test_what_is_not_implemented_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelLoadError, match=named):
        read_config({**PUBLISHED, **changes})
