"""LFM2-VL's encoder and projector against transformers, on several ranks, and from files of all ages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagewick.errors import ModelLoadError
from pagewick.models.decoder import Decoder
from pagewick.models.registry import read_config
from pagewick.models.vision.merging_config import MergingSiglipConfig
from pagewick.models.vision.pixels import PatchReader
from tests.layers.ranks import single_context
from tests.models.checkpoints import VARIANTS, write_checkpoint
from tests.models.published_states import PUBLISHED_STATES
from tests.models.test_vision import Pixels, build, image_of

# Patches of a side that become a token.
FACTORS = {"lfm2-vl": 2, "lfm2-vl-plain": 3}
# Tokens: one; one column; not square; as many patches in a row as there are positions; far more of them.
SIZES = ((1, 1), (5, 1), (3, 7), (1, 5), (17, 12))
PIXELS = Pixels(temporal_patch_size=1)


def encoder_of(model: Decoder, factor: int = 2) -> PatchReader:
    assert model.visual is not None
    model.visual.use_pixels(replace(PIXELS, merge_size=factor))
    return model.visual


def by_transformers(reference: Any, image: Tensor, *, num_padded: int = 0) -> Tensor:
    """Rows of an image, which gets `num_padded` patches more that do not count."""
    rows, columns = (length // 4 for length in image.shape[:2])
    normed = (image.double() / 255 - torch.tensor(PIXELS.mean)) / torch.tensor(PIXELS.std)
    patches = normed.view(rows, 4, columns, 4, 3).transpose(1, 2).reshape(rows * columns, -1)
    pixels = torch.cat([patches, patches.new_zeros(num_padded, patches.shape[1])]).unsqueeze(0)
    mask = torch.ones(1, pixels.shape[1], dtype=torch.int64)
    mask[:, rows * columns :] = 0
    found = reference.model.get_image_features(pixels.to(reference.dtype), torch.tensor([[rows, columns]]), mask)
    return found.pooler_output[0]  # type: ignore[no-any-return]


def entries_of(**entries: Any) -> dict[str, Any]:
    """The config.json that transformers writes, with other entries; None: left out."""
    config = transformers.Lfm2VlConfig(**VARIANTS["lfm2-vl"].all_entries()).to_dict()
    found = {**config, "architectures": ["Lfm2VlForConditionalGeneration"], **entries}
    return {key: value for key, value in found.items() if value is not None}


def vision_of(config: dict[str, Any]) -> MergingSiglipConfig:
    found = read_config(config).vision
    assert isinstance(found, MergingSiglipConfig)
    return found


@pytest.mark.parametrize("name", FACTORS)
@torch.inference_mode()
def test_rows_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    reference, factor = write_checkpoint(name, tmp_path), FACTORS[name]
    encoder = encoder_of(build(tmp_path, single_context()), factor)
    for rows, columns in SIZES:
        image = image_of(4 * factor * rows, 4 * factor * columns)
        expected, found = by_transformers(reference, image, num_padded=3), encoder(image)
        spread = float(expected.std())
        assert spread > 0.5 and expected.shape == (rows * columns, 96) and found.deepstack.shape[0] == 0
        torch.testing.assert_close(found.rows, expected, atol=4e-5 * spread, rtol=0)
    with pytest.raises(ValueError, match="multiples of"):
        encoder(image_of(4 * factor, 4))


@pytest.mark.parametrize("has_head", [False, True])
@torch.inference_mode()
def test_names_in_files(has_head: bool, tmp_path: Path) -> None:
    """Published files have a further name on the path to the encoder; a part that no image needs may be there."""
    write_checkpoint("lfm2-vl", tmp_path)
    image = image_of(24, 40)
    expected = encoder_of(build(tmp_path, single_context()))(image).rows
    file, tower = tmp_path / "model.safetensors", "model.vision_tower."
    tensors = load_file(file)
    assert f"{tower}post_layernorm.weight" in tensors
    renamed = {key.replace(tower, f"{tower}vision_model."): tensor for key, tensor in tensors.items()}
    if has_head:
        renamed[f"{tower}vision_model.head.attention.in_proj_bias"] = torch.zeros(3)
    save_file(renamed, file)
    assert torch.equal(encoder_of(build(tmp_path, single_context()))(image).rows, expected)


def test_a_file_without_the_vision_part_reads_no_images(tmp_path: Path) -> None:
    write_checkpoint("lfm2-vl", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({key: tensor for key, tensor in tensors.items() if "language_model" in key}, file)
    assert build(tmp_path, single_context()).visual is None
    save_file({key: tensor for key, tensor in tensors.items() if "multi_modal_projector" not in key}, file)
    with pytest.raises(ModelLoadError, match=r"lacks 6 tensors of this model: .*multi_modal_projector\.layer_norm"):
        build(tmp_path, single_context())


def test_what_is_left_out_is_the_default_of_transformers() -> None:
    text = {**entries_of()["text_config"], "vocab_size": 65536}
    usual = transformers.Lfm2VlConfig().to_dict()
    config = {**usual, "text_config": text, "architectures": ["Lfm2VlForConditionalGeneration"]}
    expected = vision_of(config)
    assert (expected.image_token_id, expected.hidden_size, expected.patch_size) == (396, 768, 16)
    own = ("image_token_id", "projector_hidden_act", "projector_hidden_size", "projector_bias", "downsample_factor")
    for key in (*own, "projector_use_layernorm"):
        assert vision_of({name: value for name, value in config.items() if name != key}) == expected, key
    plain = transformers.Siglip2VisionConfig().to_dict()
    for key in plain:
        found = vision_of({**config, "vision_config": {name: value for name, value in plain.items() if name != key}})
        assert found == expected, key
    assert read_config(config).tie_word_embeddings
    assert not read_config({**config, "tie_embedding": False}).tie_word_embeddings


def test_published_files() -> None:
    vision = vision_of(PUBLISHED_STATES["LFM2-VL-450M"])
    found = (
        vision.image_token_id, vision.hidden_size, vision.out_hidden_size, vision.num_blocks, vision.num_heads,
        vision.intermediate_size, vision.activation, vision.patch_size, vision.side, vision.positions_per_side,
        vision.projector_size, vision.projector_activation, vision.projector_eps,
    )  # fmt: skip
    assert found == (396, 768, 1024, 12, 12, 3072, "gelu_tanh", 16, 32, 16, 2560, "gelu", 1e-5)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"vision_feature_layer": -2}, r"vision_feature_layer is -2, and must be -1"),
        ({"downsample_factor": 17}, r"downsample_factor is 17"),
        ({"vision_config.num_patches": 26}, r"num_patches is 26, and must be a square number"),
        ({"vision_config.model_type": "siglip_vision_model"}, r"vision_config\.model_type is 'siglip_vision_model'"),
        ({"vision_config.num_attention_heads": 7}, r"num_attention_heads is 7, and must be a divisor of hidden_size"),
        ({"vision_config.num_channels": 1}, r"num_channels is 1, and must be 3"),
        ({"text_config.model_type": "qwen3"}, r"text_config\.model_type is 'qwen3'"),
    ],
)
def test_mistakes_are_named(entries: dict[str, Any], said: str) -> None:
    config = json.loads(json.dumps(entries_of()))
    for name, value in entries.items():
        part, _, inner = name.rpartition(".")
        (config[part] if part else config)[inner] = value
    with pytest.raises(ModelLoadError, match=said):
        read_config(config)
