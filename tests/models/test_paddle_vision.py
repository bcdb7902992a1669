"""The encoder of PaddleOCR-VL against transformers, and what its files leave out, name otherwise or have wrong."""

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
from pagewick.models.registry import read_config
from pagewick.models.vision.merging_config import PaddleVisionConfig
from tests.layers.ranks import single_context
from tests.models.checkpoints import VARIANTS, write_checkpoint
from tests.models.plain_images import encoder_of
from tests.models.test_vision import SIZES, Pixels, build, image_of

NAME, PIXELS = "paddleocr-vl", Pixels(temporal_patch_size=1)
# config.json as it was published first, with the entries of the text part among the others.
PUBLISHED: dict[str, Any] = {
    "architectures": ["PaddleOCRVLForConditionalGeneration"], "attention_probs_dropout_prob": 0.0,
    "compression_ratio": 1.0, "eos_token_id": 2, "head_dim": 128, "hidden_act": "silu", "hidden_dropout_prob": 0.0,
    "hidden_size": 1024, "ignored_index": -100, "image_token_id": 100295, "intermediate_size": 3072,
    "max_position_embeddings": 131072, "max_sequence_length": None, "model_type": "paddleocr_vl",
    "num_attention_heads": 16, "num_hidden_layers": 18, "num_key_value_heads": 2, "pad_token_id": 0,
    "rms_norm_eps": 1e-05, "rope_is_neox_style": True,
    "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
    "rope_theta": 500000, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_3d_rope": True, "use_bias": False, "use_cache": False, "use_flash_attention": False,
    "video_token_id": 101307, "vocab_size": 103424, "weight_share_add_bias": True,
    "vision_config": {
        "architectures": ["SiglipVisionModel"], "attention_dropout": 0.0, "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152, "image_size": 384, "intermediate_size": 4304, "layer_norm_eps": 1e-06,
        "model_type": "paddleocr_vl", "num_attention_heads": 16, "num_channels": 3, "num_hidden_layers": 27,
        "pad_token_id": 0, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "tokens_per_second": 2, "torch_dtype": "bfloat16",
    },
}  # fmt: skip
# Sizes: every published file has them.
SIZES_OF_TEXT = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}


def by_transformers(reference: Any, image: Tensor) -> Tensor:
    """The rows of an image, whose patches [colour, y, x] follow each other row by row."""
    height, width, _ = image.shape
    rows, columns = height // 4, width // 4
    normed = (image.double() / 255 - torch.tensor(PIXELS.mean)) / torch.tensor(PIXELS.std)
    patches = normed.view(rows, 4, columns, 4, 3).permute(0, 2, 4, 1, 3).reshape(-1, 3, 4, 4).to(reference.dtype)
    found = reference.model.get_image_features(patches, torch.tensor([[1, rows, columns]])).pooler_output
    return torch.cat(list(found))


def entries_of(**entries: Any) -> dict[str, Any]:
    """The config.json that transformers writes, with other entries: `part.entry` stands within a part."""
    config = transformers.PaddleOCRVLConfig(**VARIANTS[NAME].all_entries()).to_dict()
    config = json.loads(json.dumps({**config, "architectures": ["PaddleOCRVLForConditionalGeneration"]}))
    for name, value in entries.items():
        part, _, inner = name.rpartition(".")
        (config[part] if part else config)[inner] = value
    return config  # type: ignore[no-any-return]


def vision_of(config: dict[str, Any]) -> PaddleVisionConfig:
    found = read_config(config).vision
    assert isinstance(found, PaddleVisionConfig)
    return found


@torch.inference_mode()
def test_rows_are_those_of_transformers(tmp_path: Path) -> None:
    """Also of images with as many patches in a row as there are positions, and far more of them."""
    reference, encoder = write_checkpoint(NAME, tmp_path), encoder_of(tmp_path, PIXELS)
    for size in (*SIZES, (24, 24)):
        expected, found = by_transformers(reference, image_of(*size)), encoder(image_of(*size))
        assert float(expected.std()) > 1 and len(expected) == encoder.num_tokens(*size)
        assert found.deepstack.shape == (0, *expected.shape)
        torch.testing.assert_close(found.rows, expected, atol=3e-5, rtol=0)


def test_published_entries() -> None:
    found, nested = read_config(PUBLISHED), transformers.PaddleOCRVLConfig(**PUBLISHED).to_dict()
    nested = json.loads(json.dumps({**nested, "architectures": PUBLISHED["architectures"]}))
    assert vision_of(PUBLISHED) == vision_of(nested) and found.layers == read_config(nested).layers
    assert (found.hidden_size, found.num_layers, found.vocab_size) == (1024, 18, 103424)
    assert found.layers[0].rope is not None and found.layers[0].rope.mrope_section == (16, 24, 24)
    # The file has a head.
    assert not found.tie_word_embeddings and read_config(nested).tie_word_embeddings


def test_what_is_left_out_is_the_default_of_transformers() -> None:
    usual = json.loads(json.dumps(transformers.PaddleOCRVLConfig().to_dict()))
    config = {**usual, "architectures": PUBLISHED["architectures"]}
    expected = read_config(config)
    vision = vision_of(config)
    assert (vision.num_blocks, vision.hidden_size, vision.positions_per_side) == (27, 1152, 27)
    assert (vision.image_token_id, vision.projector_size) == (100295, 4 * 1152)
    for key in ("image_token_id", "tie_word_embeddings"):
        assert read_config({name: value for name, value in config.items() if name != key}) == expected, key
    for part, kept in (("vision_config", set()), ("text_config", SIZES_OF_TEXT)):
        for key in config[part].keys() - kept:
            given = {name: value for name, value in config[part].items() if name != key}
            assert read_config({**config, part: given}) == expected, key


def test_either_of_two_entries_ties_the_head() -> None:
    for outer, inner in ((False, False), (True, False), (False, True), (False, None)):
        config = entries_of(**{"tie_word_embeddings": outer, "text_config.tie_word_embeddings": inner})
        if inner is None:
            del config["text_config"]["tie_word_embeddings"]
        known = transformers.PaddleOCRVLConfig(**json.loads(json.dumps(config)))
        assert read_config(config).tie_word_embeddings == known.tie_word_embeddings == (outer or inner is not False)


@torch.inference_mode()
def test_published_files_have_other_names_and_parts_that_no_image_needs(tmp_path: Path) -> None:
    write_checkpoint(NAME, tmp_path)
    image, file = image_of(24, 56), tmp_path / "model.safetensors"
    expected, tensors = encoder_of(tmp_path, PIXELS)(image).rows, load_file(file)
    places = {"model.projector.": "mlp_AR.", "model.visual.": "visual.", "model.language_model.": "model."}
    renamed = {}
    for name, tensor in tensors.items():
        place = next((place for place in places if name.startswith(place)), "")
        renamed[places.get(place, "") + name.removeprefix(place)] = tensor
    assert {name.partition(".")[0] for name in renamed} == {"mlp_AR", "visual", "model", "lm_head"}
    inner = "visual.vision_model."
    others = {
        f"{inner}head.probe": torch.ones(2),
        f"{inner}embeddings.packing_position_embedding.weight": torch.ones(3, 2),
    }
    save_file({**renamed, **others}, file)
    config = json.loads((tmp_path / "config.json").read_text())
    text = {name: value for name, value in config.pop("text_config").items() if name != "model_type"}
    (tmp_path / "config.json").write_text(json.dumps({**text, **config, "use_3d_rope": True}))
    assert torch.equal(encoder_of(tmp_path, PIXELS)(image).rows, expected)
    save_file({name: tensor for name, tensor in renamed.items() if "encoder.layers.1.mlp" not in name}, file)
    with pytest.raises(
        ModelLoadError, match=r"lacks 4 tensors of this model: visual\.vision_model\.encoder\.layers\.1"
    ):
        build(tmp_path, single_context())
    alone = {name: tensor for name, tensor in renamed.items() if not name.startswith(("visual", "mlp_AR"))}
    save_file(alone, file)
    assert build(tmp_path, single_context()).visual is None


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"vision_config.model_type": "siglip"}, r"vision_config\.model_type is 'siglip', and must be one of"),
        ({"vision_config.num_attention_heads": 7}, r"num_attention_heads is 7, and must be a"),
        ({"vision_config.num_attention_heads": 8}, r"num_attention_heads is 8, and must be a number that cuts"),
        ({"vision_config.head_dim": 10}, r"head_dim is 10, and must be 8"),
        ({"vision_config.num_channels": 1}, r"num_channels is 1, and must be 3"),
        ({"vision_config.image_size": 3}, r"image_size is 3, and must be at least patch_size \(4\)"),
        ({"vision_config.hidden_act": "tanh"}, r"hidden_act is 'tanh'"),
        ({"vision_config.rope_parameters": {"rope_type": "yarn"}}, r"rope_parameters\.rope_type is 'yarn'"),
        ({"text_config.model_type": "ernie4_5_moe"}, r"text_config\.model_type is 'ernie4_5_moe', and must be one of"),
        ({"text_config.use_3d_rope": False}, r"use_3d_rope is False, and must be True"),
        ({"text_config.rope_is_neox_style": False}, r"rope_is_neox_style is False, and must be True"),
        (
            {"text_config.rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 4]}},
            r"mrope_section is .*, and must be three numbers with the sum 8",
        ),
    ],
)
def test_mistakes_are_named(entries: dict[str, Any], said: str) -> None:
    read_config(entries_of())
    with pytest.raises(ModelLoadError, match=said):
        read_config(entries_of(**entries))


def test_a_vocabulary_without_the_token_reads_text() -> None:
    config = read_config(entries_of(image_token_id=193))
    assert config.vision is None and config.num_layers == 3
