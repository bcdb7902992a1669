"""InternVL's encoder and projector against transformers, on several ranks, and in published files."""

from __future__ import annotations

import json
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
from pagewick.models.vision.merging_config import InternVisionConfig
from pagewick.models.vision.pixels import PatchReader
from tests.layers.ranks import single_context
from tests.models.checkpoints import VARIANTS, write_checkpoint
from tests.models.test_vision import Pixels, build, image_of

# Variant -> side of a token in patches, side of an image in pixels, hidden size of the decoder.
SIZES = {"internvl": (2, 24, 96), "internvl-6b-moe": (4, 32, 48)}


def pixels_of(name: str) -> Pixels:
    return Pixels(merge_size=SIZES[name][0], temporal_patch_size=1)


def encoder_of(model: Decoder, name: str) -> PatchReader:
    assert model.visual is not None
    model.visual.use_pixels(pixels_of(name))
    return model.visual


def by_transformers(reference: Any, image: Tensor) -> Tensor:
    pixels = Pixels()
    normed = (image.double() / 255 - torch.tensor(pixels.mean)) / torch.tensor(pixels.std)
    whole = normed.permute(2, 0, 1).unsqueeze(0).to(reference.dtype)
    found = reference.model.get_image_features(whole, vision_feature_layer=-1, vision_feature_select_strategy="default")
    return found.pooler_output[0]  # type: ignore[no-any-return]


def entries_of(name: str = "internvl", **entries: Any) -> dict[str, Any]:
    """The config.json that transformers writes, with other entries; None: left out."""
    config = transformers.InternVLConfig(**VARIANTS[name].all_entries()).to_dict()
    found = {**config, "architectures": ["InternVLForConditionalGeneration"], **entries}
    return {key: value for key, value in json.loads(json.dumps(found)).items() if value is not None}


def vision_of(config: dict[str, Any]) -> InternVisionConfig:
    found = read_config(config).vision
    assert isinstance(found, InternVisionConfig)
    return found


@pytest.mark.parametrize("name", SIZES)
@torch.inference_mode()
def test_rows_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    reference = write_checkpoint(name, tmp_path)
    merge_size, side, width = SIZES[name]
    encoder, image = encoder_of(build(tmp_path, single_context()), name), image_of(side, side)
    expected, found = by_transformers(reference, image), encoder(image)
    spread, num_rows = float(expected.std()), (side // 4 // merge_size) ** 2
    assert spread > 0.5 and expected.shape == (num_rows, width) and found.deepstack.shape == (0, num_rows, width)
    torch.testing.assert_close(found.rows, expected, atol=4e-5 * spread, rtol=0)
    for height, width in ((side, 2 * side), (8, 8)):
        with pytest.raises(ValueError, match=f"and this model reads {side} x {side}"):
            encoder(image_of(height, width))


@torch.inference_mode()
def test_names_in_files(tmp_path: Path) -> None:
    """Files of InternVL 3.5 have both parts within the model; a row for hidden patches may be there."""
    write_checkpoint("internvl", tmp_path)
    image = image_of(24, 24)
    expected = encoder_of(build(tmp_path, single_context()), "internvl")(image).rows
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert "vision_tower.embeddings.cls_token" in tensors
    renamed = {
        f"model.{key.replace('language_model.model.', 'language_model.')}": tensor for key, tensor in tensors.items()
    }
    renamed["model.vision_tower.embeddings.mask_token"] = torch.zeros(1, 1, 60)
    save_file(renamed, file)
    assert torch.equal(encoder_of(build(tmp_path, single_context()), "internvl")(image).rows, expected)


def test_a_file_without_the_vision_part_reads_no_images(tmp_path: Path) -> None:
    write_checkpoint("internvl", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({key: tensor for key, tensor in tensors.items() if "language_model" in key}, file)
    assert build(tmp_path, single_context()).visual is None
    save_file({key: tensor for key, tensor in tensors.items() if "multi_modal_projector" not in key}, file)
    with pytest.raises(ModelLoadError, match=r"lacks 6 tensors of this model: .*multi_modal_projector\.layer_norm"):
        build(tmp_path, single_context())
    tensors["vision_tower.embeddings.position_embeddings"] = torch.zeros(1, 36, 60)
    save_file(tensors, file)
    with pytest.raises(ModelLoadError, match=r"position_embeddings.*\[1, 36, 60\].*\[1, 37, 60\]"):
        build(tmp_path, single_context())


def test_what_is_left_out_is_the_default_of_transformers() -> None:
    text = {**entries_of()["text_config"], "vocab_size": 151668}
    usual = json.loads(json.dumps(transformers.InternVLConfig().to_dict()))
    config = {**usual, "text_config": text, "architectures": ["InternVLForConditionalGeneration"]}
    expected = vision_of(config)
    assert (expected.image_token_id, expected.hidden_size, expected.patch_size) == (151667, 1024, 14)
    own = ("image_token_id", "downsample_ratio", "projector_hidden_act", "vision_feature_layer")
    for key in (*own, "vision_feature_select_strategy"):
        assert vision_of({name: value for name, value in config.items() if name != key}) == expected, key
    plain = config["vision_config"]
    for key in plain:
        found = vision_of({**config, "vision_config": {name: value for name, value in plain.items() if name != key}})
        assert found == expected, key


def test_the_text_part_says_whether_the_head_is_tied() -> None:
    """Published files have no such entry beside the parts."""
    for is_tied in (True, False):
        config = entries_of(tie_word_embeddings=None)
        config["text_config"]["tie_word_embeddings"] = is_tied
        assert read_config(config).tie_word_embeddings is is_tied
        assert read_config({**config, "tie_word_embeddings": not is_tied}).tie_word_embeddings is not is_tied


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "qwen3_moe", "llama"])
def test_text_parts(kind: str) -> None:
    text = transformers.AutoConfig.for_model(kind, vocab_size=200, hidden_size=4096, num_hidden_layers=3).to_dict()
    config = read_config(entries_of(text_config=text))
    name = {"qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "llama": "Llama"}[kind]
    alone = read_config({**text, "architectures": [f"{name}ForCausalLM"]})
    assert config.layers == alone.layers and config.vision is not None


# vision_config as the authors' converter writes it for the encoders of 300 million and of 6 billion parameters.
SMALL_ENCODER = {
    "architectures": ["InternVisionModel"], "attention_bias": True, "attention_dropout": 0.0, "dropout": 0.0,
    "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "hidden_size": 1024, "image_size": [448, 448],
    "initializer_factor": 0.1, "initializer_range": 1e-10, "intermediate_size": 4096, "layer_norm_eps": 1e-06,
    "layer_scale_init_value": 0.1, "model_type": "internvl_vision", "norm_type": "layer_norm",
    "num_attention_heads": 16, "num_channels": 3, "num_hidden_layers": 24, "patch_size": [14, 14],
    "projection_dropout": 0.0, "torch_dtype": "bfloat16", "use_absolute_position_embeddings": True,
    "use_mask_token": False, "use_mean_pooling": True, "use_qk_norm": False,
}  # fmt: skip
LARGE_ENCODER = {
    **SMALL_ENCODER, "attention_bias": False, "hidden_size": 3200, "intermediate_size": 12800, "norm_type": "rms_norm",
    "num_attention_heads": 25, "num_hidden_layers": 45, "use_qk_norm": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("encoder", "expected"),
    [
        (SMALL_ENCODER, (1024, 24, 16, 4096, True, False, False)),
        (LARGE_ENCODER, (3200, 45, 25, 12800, False, True, True)),
    ],
)
def test_published_encoders(encoder: dict[str, Any], expected: tuple[Any, ...]) -> None:
    vision = vision_of(entries_of(vision_config=encoder))
    found = (
        vision.hidden_size, vision.num_blocks, vision.num_heads, vision.intermediate_size, vision.has_qkv_bias,
        vision.is_qk_normed, vision.is_rms,
    )  # fmt: skip
    assert found == expected
    others = vision.activation, vision.patch_size, vision.side, vision.positions_per_side, vision.has_norm
    assert others == ("gelu", 14, 28, 32, False) and vision.fixed_pixels == 448**2


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"vision_feature_layer": -2}, r"vision_feature_layer is -2, and must be -1"),
        (
            {"vision_feature_select_strategy": "full"},
            r"vision_feature_select_strategy is 'full', and must be 'default'",
        ),
        ({"downsample_ratio": 0.25}, r"downsample_ratio is 0\.25, and must be 1 divided by a divisor of 6"),
        ({"downsample_ratio": 0.3}, r"downsample_ratio is 0\.3"),
        ({"downsample_ratio": 1e-9}, r"downsample_ratio is 1e-09"),
        ({"vision_config.image_size": [24, 32]}, r"image_size is \[24, 32\], and must be a number, or a list of two"),
        ({"vision_config.image_size": 26}, r"image_size is 26, and must be a multiple of patch_size \(4\)"),
        ({"vision_config.model_type": "clip_vision_model"}, r"vision_config\.model_type is 'clip_vision_model'"),
        ({"vision_config.num_attention_heads": 7}, r"num_attention_heads is 7, and must be a divisor of hidden_size"),
        ({"vision_config.norm_type": "batch_norm"}, r"norm_type is 'batch_norm'"),
        ({"vision_config.use_absolute_position_embeddings": False}, r"use_absolute_position_embeddings is False"),
        ({"text_config.model_type": "internlm2"}, r"text_config\.model_type is 'internlm2'"),
    ],
)
def test_mistakes_are_named(entries: dict[str, Any], said: str) -> None:
    config = entries_of()
    for name, value in entries.items():
        part, _, inner = name.rpartition(".")
        (config[part] if part else config)[inner] = value
    with pytest.raises(ModelLoadError, match=said):
        read_config(config)
