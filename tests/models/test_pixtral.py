"""Pixtral's encoder with the projectors of Mistral 3 and LightOnOCR, against transformers and on several ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
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
from pagewick.models.vision.config import PixtralConfig
from pagewick.models.vision.pixels import PatchReader
from pagewick.weights.loader import load_weights
from pagewick.weights.opening import open_source
from tests.layers.ranks import single_context
from tests.models.checkpoints import VARIANTS, make_model, write_checkpoint
from tests.models.published import PUBLISHED
from tests.models.test_vision import Pixels, build, image_of

# Squares of 2 x 2 patches, and of 3 x 3; and single patches.
NAMES = ("mistral-small-3.1", "ministral-3-multimodal")
MERGED = {
    "mistral-small-3.1": 2, "ministral-3-multimodal": 3, "mistral-large-4": 2, "pixtral-12b": 1, "lighton-ocr": 2,
}  # fmt: skip
# Rows and columns of tokens. transformers' projector drops the only row of an image of one token.
SIZES = ((1, 2), (5, 1), (3, 7), (9, 4))


def encoder_of(model: Decoder) -> PatchReader:
    assert model.visual is not None
    model.visual.use_pixels(pixels_of(model.visual.config.merge_size))
    return model.visual


def pixels_of(merge_size: int) -> Pixels:
    return Pixels(merge_size=merge_size, temporal_patch_size=1)


def image_for(name: str, rows: int, columns: int) -> Tensor:
    side = 4 * MERGED[name]
    return image_of(rows * side, columns * side)


def by_transformers(reference: Any, image: Tensor) -> Tensor:
    given = Pixels()
    normed = (image.double() / 255 - torch.tensor(given.mean)) / torch.tensor(given.std)
    pixels, sizes = normed.permute(2, 0, 1).unsqueeze(0).float(), torch.tensor([image.shape[:2]])
    options = {} if reference.config.model_type == "lighton_ocr" else {"vision_feature_layer": -1}
    found = reference.model.get_image_features(pixels, image_sizes=sizes, **options)
    return found.pooler_output[0]  # type: ignore[no-any-return]


@contextmanager
def without_onednn() -> Iterator[None]:
    """oneDNN's convolution in bfloat16 reads memory that nobody has written if its result has one column (AMX)."""
    before = torch.backends.mkldnn.set_flags(_enabled=False)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(_enabled=before[0])


def entries_of(name: str, **entries: Any) -> dict[str, Any]:
    """The config.json that transformers writes for a variant, with other entries; None: left out."""
    config = transformers.Mistral3Config(**VARIANTS[name].all_entries()).to_dict()
    found = {**config, "architectures": ["Mistral3ForConditionalGeneration"], **entries}
    return {key: value for key, value in found.items() if value is not None}


def vision_of(config: dict[str, Any]) -> PixtralConfig:
    found = read_config(config).vision
    assert isinstance(found, PixtralConfig)
    return found


@pytest.mark.parametrize("name", MERGED)
@torch.inference_mode()
def test_rows_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    reference = write_checkpoint(name, tmp_path)
    encoder = encoder_of(build(tmp_path, single_context()))
    for rows, columns in SIZES:
        image = image_for(name, rows, columns)
        expected = by_transformers(reference, image)
        spread = float(expected.std())
        assert spread > 1
        found = encoder(image)
        assert len(expected) == rows * columns and found.deepstack.shape == (0, *expected.shape)
        torch.testing.assert_close(found.rows, expected, atol=4e-5 * spread, rtol=0)


@torch.inference_mode()
def test_patches_that_fill_no_square_are_seen(tmp_path: Path) -> None:
    """LightOnOCR's images may have a row and a column of patches more than its squares of 2 x 2."""
    reference = write_checkpoint("lighton-ocr", tmp_path)
    encoder = encoder_of(build(tmp_path, single_context()))
    for height, width in ((12, 8), (8, 12), (12, 12), (28, 60), (60, 24)):
        image = image_of(height, width)
        found = encoder(image).rows
        assert len(found) == encoder.num_tokens(height, width) == height // 8 * (width // 8)
        torch.testing.assert_close(found, by_transformers(reference, image), atol=1e-4, rtol=0)
        whole = encoder(image[: height // 8 * 8, : width // 8 * 8].contiguous()).rows
        assert float((whole - found).abs().amax(-1).min()) > 0.01, "the rest matters"
    for size in ((4, 40), (40, 4), (10, 8)):
        with pytest.raises(ValueError, match="whose sides must be multiples of 4"):
            encoder.num_tokens(*size)


@torch.inference_mode()
def test_files_may_have_the_newer_names(tmp_path: Path) -> None:
    name = NAMES[0]
    write_checkpoint(name, tmp_path)
    image = image_for(name, 3, 7)
    expected = encoder_of(build(tmp_path, single_context()))(image).rows
    file = tmp_path / "model.safetensors"
    older = load_file(file)
    assert {"vision_tower.ln_pre.weight", "language_model.model.norm.weight"} <= older.keys()
    newer = {
        key.removeprefix("language_model.")
        if "lm_head" in key
        else "model." + key.replace("language_model.model.", "language_model."): tensor
        for key, tensor in older.items()
    }
    assert {"model.vision_tower.ln_pre.weight", "model.language_model.norm.weight", "lm_head.weight"} <= newer.keys()
    save_file(newer, file)
    assert torch.equal(encoder_of(build(tmp_path, single_context()))(image).rows, expected)


def test_a_file_without_the_vision_part_reads_no_images(tmp_path: Path) -> None:
    write_checkpoint(NAMES[0], tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    config = read_config(json.loads((tmp_path / "config.json").read_text()))
    assert config.vision is not None and config.fitted(list(tensors)) == config
    with open_source(tmp_path) as source:
        model = Decoder(single_context(), config.without_vision(), source.names())
        load_weights(model, source)
        assert model.visual is None
    is_of_vision = ("vision_tower", "multi_modal_projector")
    save_file({key: tensor for key, tensor in tensors.items() if not key.startswith(is_of_vision)}, file)
    assert build(tmp_path, single_context()).visual is None
    save_file({key: tensor for key, tensor in tensors.items() if "multi_modal_projector" not in key}, file)
    with pytest.raises(ModelLoadError, match=r"lacks 4 tensors of this model: .*multi_modal_projector\.linear_1"):
        build(tmp_path, single_context())


def test_settings_of_another_model_are_refused(tmp_path: Path) -> None:
    write_checkpoint(NAMES[0], tmp_path)
    encoder = encoder_of(build(tmp_path, single_context()))
    for given, said in (
        (pixels_of(1), r"merge_size is 1, and config\.json says 2 \(spatial_merge_size\)"),
        (replace(pixels_of(2), patch_size=14), r"patch_size is 14, .* says 4 \(vision_config\.patch_size\)"),
        (Pixels(), r"temporal_patch_size is 2"),
    ):
        with pytest.raises(ModelLoadError, match=said):
            encoder.use_pixels(given)


def test_what_is_left_out_is_the_default_of_transformers() -> None:
    usual = transformers.Mistral3Config().to_dict()
    # The text part is tested elsewhere, and is smaller here.
    text = entries_of(NAMES[0])["text_config"]
    config = {**usual, "text_config": text, "architectures": ["Mistral3ForConditionalGeneration"]}
    expected = vision_of(config)
    assert (expected.image_token_id, expected.merge_size, expected.projector_activation) == (10, 2, "gelu")
    left_out = ("image_token_index", "projector_hidden_act", "vision_feature_layer", "multimodal_projector_bias")
    for key in (*left_out, "spatial_merge_size"):
        assert vision_of({name: value for name, value in config.items() if name != key}) == expected, key
    plain = transformers.PixtralVisionConfig().to_dict()
    expected = vision_of({**config, "vision_config": plain})
    assert (expected.hidden_size, expected.patch_size, expected.rope_theta) == (1024, 16, 1e4)
    for key in plain:
        found = vision_of({**config, "vision_config": {name: value for name, value in plain.items() if name != key}})
        assert found == expected, key


@pytest.mark.parametrize("name", ["Mistral-Small-3.1-24B-Instruct-2503", "Ministral-3-8B-Instruct-2512"])
def test_published_files(name: str) -> None:
    vision = vision_of(PUBLISHED[name])
    found = (
        vision.image_token_id, vision.hidden_size, vision.out_hidden_size, vision.num_blocks, vision.num_heads,
        vision.head_dim, vision.intermediate_size, vision.activation, vision.patch_size, vision.side, vision.rope_theta,
        vision.projector_eps, vision.projector_activation, vision.projector_bias,
    )  # fmt: skip
    width = 5120 if "Small" in name else 4096
    assert found == (10, 1024, width, 24, 16, 64, 4096, "silu", 14, 28, 1e4, 1e-5, "gelu", False)


def test_the_spellings_of_entries() -> None:
    config = entries_of(NAMES[0])
    expected = vision_of(config)
    assert (expected.image_token_id, expected.rope_theta) == (190, 100.0)
    renamed = entries_of(NAMES[0], image_token_index=None, image_token_id=190)
    assert vision_of(renamed) == expected
    for rotation in ({"rope_theta": 100.0}, {"rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}}):
        kept = {key: value for key, value in config["vision_config"].items() if key != "rope_parameters"}
        assert vision_of({**config, "vision_config": {**kept, **rotation}}) == expected
    assert read_config({**config, "image_token_index": 193}).vision is None
    assert read_config(entries_of(NAMES[0], vision_config=None)).vision is None


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"vision_feature_layer": -2}, r"vision_feature_layer is -2, and must be -1: images are read from the"),
        ({"vision_feature_layer": [-1, -2]}, r"vision_feature_layer is \[-1, -2\]"),
        ({"projector_hidden_act": "mish"}, r"projector_hidden_act is 'mish'"),
        ({"spatial_merge_size": 0}, r"spatial_merge_size is 0"),
        ({"vision_config.model_type": "siglip_vision_model"}, r"vision_config\.model_type is 'siglip_vision_model'"),
        ({"vision_config.head_dim": 16}, r"vision_config\.head_dim is 16, and must be 8: hidden_size / num_att"),
        ({"vision_config.num_attention_heads": 5}, r"num_attention_heads is 5, and must be a number that cuts"),
        ({"vision_config.num_channels": 1}, r"num_channels is 1, and must be 3"),
        ({"vision_config.patch_size": [4, 4]}, r"patch_size is \[4, 4\]"),
        ({"vision_config.rope_parameters": {"rope_type": "yarn"}}, r"rope_parameters\.rope_type is 'yarn'"),
        ({"vision_config.rope_parameters": {"rope_theta": 1}}, r"rope_theta is 1, and must be a number above 1"),
    ],
)
def test_mistakes_are_named(entries: dict[str, Any], said: str) -> None:
    config = entries_of(NAMES[0])
    for name, value in entries.items():
        _, _, inner = name.partition("vision_config.")
        (config["vision_config"] if inner else config)[inner or name] = value
    with pytest.raises(ModelLoadError, match=said):
        read_config(config)


def test_variants_differ_in_what_they_test() -> None:
    first, second = (make_model(name).config for name in NAMES)
    for entry in ("spatial_merge_size", "multimodal_projector_bias", "projector_hidden_act"):
        assert getattr(first, entry) != getattr(second, entry)


def lighton_of(**entries: Any) -> dict[str, Any]:
    """The config.json that transformers writes for LightOnOCR's kind of model, with other entries; None: left out."""
    config = transformers.LightOnOcrConfig(**VARIANTS["lighton-ocr"].all_entries()).to_dict()
    found = {**config, "architectures": ["LightOnOcrForConditionalGeneration"], **entries}
    return {key: value for key, value in found.items() if value is not None}


def test_lighton_has_the_defaults_of_transformers() -> None:
    usual = transformers.LightOnOcrConfig().to_dict()
    config = {**usual, "architectures": ["LightOnOcrForConditionalGeneration"]}
    expected = vision_of(config)
    assert (expected.image_token_id, expected.merge_size, expected.hidden_size) == (151655, 2, 1024)
    assert (expected.side, expected.step, expected.pixels_per_token) == (28, 14, 42**2)
    assert (expected.projector_eps, expected.projector_bias, expected.has_row_breaks) == (1e-6, False, False)
    assert read_config(config).tie_word_embeddings
    for key in ("image_token_id", "spatial_merge_size", "tie_word_embeddings"):
        left_out = {name: value for name, value in config.items() if name != key}
        assert read_config(left_out) == read_config(config), key


def test_the_entries_of_published_files_of_lighton() -> None:
    """They have another name of the architecture, and entries of Mistral 3."""
    expected = read_config(lighton_of())
    published = lighton_of(
        architectures=["LightOnOCRForConditionalGeneration"], model_type="mistral3", projector_hidden_act="gelu",
        multimodal_projector_bias=False, vision_feature_layer=-1, image_token_id=None, image_token_index=190,
    )  # fmt: skip
    assert replace(read_config(published), architecture="") == replace(expected, architecture="")
    # Without a description of the encoder, its tensors are not used.
    text = read_config(lighton_of(vision_config=None))
    assert text.vision is None
    for name in ("model.vision_encoder.ln_pre.weight", "model.vision_projection.norm.weight"):
        assert any(re.fullmatch(pattern, name) for pattern in text.ignored_tensors)
        assert not any(re.fullmatch(pattern, name) for pattern in expected.ignored_tensors)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"vision_feature_layer": -2}, r"vision_feature_layer is -2, and must be -1"),
        ({"projector_hidden_act": "silu"}, r"projector_hidden_act is 'silu', and must be 'gelu'"),
        ({"multimodal_projector_bias": True}, r"multimodal_projector_bias is True, and must be False"),
        ({"text_config": {"model_type": "mistral"}}, r"text_config\.model_type is 'mistral', and must be one of qwen3"),
        ({"vision_config": {"model_type": "clip"}}, r"vision_config\.model_type is 'clip'"),
    ],
)
def test_mistakes_in_files_of_lighton_are_named(entries: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelLoadError, match=said):
        read_config(lighton_of(**entries))


def llava_of(**entries: Any) -> dict[str, Any]:
    """The config.json that transformers writes for Pixtral 12B's kind of model."""
    config = transformers.LlavaConfig(**VARIANTS["pixtral-12b"].all_entries()).to_dict()
    return {**config, "architectures": ["LlavaForConditionalGeneration"], **entries}


def test_without_a_merger_each_patch_becomes_a_row() -> None:
    vision = vision_of(llava_of())
    assert (vision.merge_size, vision.projector_eps, vision.projector_bias) == (1, None, True)
    assert (vision.image_token_id, vision.side, vision.activation) == (190, 4, "silu")
    assert read_config(llava_of(vision_config=None)).vision is None
    defaults = {key: value for key, value in llava_of().items() if key != "multimodal_projector_bias"}
    assert vision_of(defaults).projector_bias, "transformers' default"


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"vision_config": {"model_type": "dinov2"}}, r"vision_config\.model_type is 'dinov2'"),
        ({"vision_config": {"hidden_size": 48}}, r"select_strategy is 'full', and must be 'default'"),
        ({"text_config": {"model_type": "llama", "hidden_size": 64}}, r"text_config\.model_type is 'llama'"),
        ({"vision_feature_layer": -2}, r"vision_feature_layer is -2, and must be -1"),
        ({"vision_feature_layer": None}, r"vision_feature_layer is missing, and must be -1"),
        ({"vision_feature_select_strategy": "default"}, r"vision_feature_select_strategy is 'default'.*must be 'full'"),
    ],
)
def test_other_models_of_that_architecture_are_refused(entries: dict[str, Any], said: str) -> None:
    config = {key: value for key, value in llava_of(**entries).items() if value is not None}
    with pytest.raises(ModelLoadError, match=said):
        read_config(config)
