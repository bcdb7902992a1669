"""The encoder of Kimi K2.5 against transformers, and what its files leave out, name otherwise or have wrong."""

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
from pagewick.models.vision.merging_config import MoonVisionConfig
from pagewick.models.vision.pixels import PatchReader
from tests.layers.ranks import single_context
from tests.models.checkpoints import VARIANTS, write_checkpoint
from tests.models.test_vision import SIZES, Pixels, build, image_of

NAME, PIXELS = "kimi-k2.5", Pixels(temporal_patch_size=1)
# vision_config as it was published, and what published files say beside it.
PUBLISHED: dict[str, Any] = {
    "init_pos_emb_height": 64, "init_pos_emb_time": 4, "init_pos_emb_width": 64, "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool", "mm_hidden_size": 1152, "mm_projector_type": "patchmerger", "model_type": "",
    "patch_size": 14, "pos_emb_type": "divided_fixed", "projector_hidden_act": "gelu", "projector_ln_eps": 1e-05,
    "text_hidden_size": 7168, "video_attn_type": "spatial_temporal", "vt_hidden_size": 1152,
    "vt_intermediate_size": 4304, "vt_num_attention_heads": 16, "vt_num_hidden_layers": 27,
}  # fmt: skip
OUTER: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"], "ignore_index": -100, "media_placeholder_token_id": 163605,
    "model_type": "kimi_k25", "tie_word_embeddings": False, "use_unified_vision_chunk": True,
    "video_placeholder": "<|kimi_k25_video_placeholder|>",
}  # fmt: skip


def encoder_of(directory: Path) -> PatchReader:
    model = build(directory, single_context())
    assert model.visual is not None
    model.visual.use_pixels(PIXELS)
    return model.visual


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
    config = transformers.Kimi_K25Config(**VARIANTS[NAME].all_entries()).to_dict()
    config = json.loads(json.dumps({**config, "architectures": ["Kimi_K25ForConditionalGeneration"]}))
    for name, value in entries.items():
        part, _, inner = name.rpartition(".")
        (config[part] if part else config)[inner] = value
    return config  # type: ignore[no-any-return]


def vision_of(config: dict[str, Any]) -> MoonVisionConfig:
    found = read_config(config).vision
    assert isinstance(found, MoonVisionConfig)
    return found


@torch.inference_mode()
def test_rows_are_those_of_transformers(tmp_path: Path) -> None:
    """Also of images with as many patches in a row as there are positions, and far more of them."""
    reference, encoder = write_checkpoint(NAME, tmp_path), encoder_of(tmp_path)
    for size in (*SIZES, (24, 24)):
        expected, found = by_transformers(reference, image_of(*size)), encoder(image_of(*size))
        assert float(expected.std()) > 1 and len(expected) == encoder.num_tokens(*size)
        assert found.deepstack.shape == (0, *expected.shape)
        torch.testing.assert_close(found.rows, expected, atol=3e-5, rtol=0)


def with_usual(vision: dict[str, Any], **outer: Any) -> dict[str, Any]:
    """A config.json with transformers' defaults of the text part, of Kimi's width."""
    text = {**json.loads(json.dumps(transformers.DeepseekV3Config().to_dict())), "vocab_size": 163840}
    return {**OUTER, **outer, "text_config": text, "vision_config": vision}


def test_published_entries_and_what_is_left_out() -> None:
    """Published values are transformers' defaults; the file has the encoder's names, and its norm's eps elsewhere."""
    usual = json.loads(json.dumps(transformers.Kimi_K25Config().to_dict()))
    expected = vision_of(with_usual(usual["vision_config"], image_token_id=usual["image_token_id"]))
    assert (expected.num_blocks, expected.hidden_size, expected.intermediate_size) == (27, 1152, 4304)
    assert (expected.projector_eps, expected.projector_size, expected.image_token_id) == (1e-5, 4 * 1152, 163605)
    assert vision_of(with_usual(PUBLISHED)) == vision_of(with_usual({})) == expected
    for key in PUBLISHED:
        given = {name: value for name, value in PUBLISHED.items() if name != key}
        assert vision_of(with_usual(given)) == expected, key
    assert vision_of({**with_usual(PUBLISHED), "media_placeholder_token_id": 7}).image_token_id == 7


def test_published_names_of_entries_are_read_as_those_of_transformers() -> None:
    config = entries_of()
    vision = config["vision_config"]
    given = {
        "vt_hidden_size": vision["hidden_size"], "vt_intermediate_size": vision["intermediate_size"],
        "vt_num_attention_heads": vision["num_attention_heads"], "vt_num_hidden_layers": vision["num_hidden_layers"],
        "init_pos_emb_height": 5, "init_pos_emb_width": 5, "mm_hidden_size": 48, "projector_ln_eps": 1e-3,
        "text_hidden_size": 48, "patch_size": 4, "rope_parameters": vision["rope_parameters"],
    }  # fmt: skip
    outer = {name: value for name, value in config.items() if not name.startswith(("projection_", "image_"))}
    found = vision_of({**outer, "media_placeholder_token_id": 193, "vision_config": given})
    assert found == vision_of(config) and (found.projector_eps, found.rope_theta) == (1e-3, 5e3)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"vision_config.model_type": "moonvit"}, r"vision_config\.model_type is 'moonvit', and must be one of"),
        ({"vision_config.merge_type": "sd2"}, r"vision_config\.merge_type is 'sd2', and must be 'sd2_tpool'"),
        ({"vision_config.pos_emb_type": "learned"}, r"pos_emb_type is 'learned', and must be 'divided_fixed'"),
        ({"vision_config.mm_projector_type": "patchmergerv2"}, r"mm_projector_type is 'patchmergerv2', and must be"),
        ({"vision_config.projector_hidden_act": "silu"}, r"projector_hidden_act is 'silu', and must be 'gelu'"),
        ({"vision_config.pos_emb_width": 6}, r"pos_emb_width is 6, and must be 5: learned positions form a square"),
        ({"vision_config.num_attention_heads": 7}, r"num_attention_heads is 7, and must be a number that cuts"),
        ({"vision_config.merge_kernel_size": [2, 1]}, r"merge_kernel_size is \[2, 1\], and must be two equal numbers"),
        ({"vision_config.rope_parameters": {"rope_type": "yarn"}}, r"rope_parameters\.rope_type is 'yarn'"),
        ({"vision_config.text_hidden_size": 40}, r"text_hidden_size is 40, and must be 48: the hidden_size of the"),
        ({"projection_hidden_size": 1152}, r"projection_hidden_size is 1152, and must be 48: the width of a patch"),
        ({"projection_layer_norm_eps": 0}, r"projection_layer_norm_eps is 0, and must be a number above 0"),
    ],
)
def test_mistakes_are_named(entries: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelLoadError, match=said):
        read_config(entries_of(**entries))


def test_a_vocabulary_without_the_token_reads_text() -> None:
    config = read_config(entries_of(image_token_id=195))
    assert config.vision is None and config.layers == read_config(entries_of()).layers


def test_a_file_without_the_vision_part_reads_no_images(tmp_path: Path) -> None:
    write_checkpoint(NAME, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    text = {name: tensor for name, tensor in tensors.items() if name.startswith("language_model.")}
    save_file(text, file)
    assert build(tmp_path, single_context()).visual is None
    save_file({name: tensor for name, tensor in tensors.items() if "blocks.2.wqkv" not in name}, file)
    with pytest.raises(ModelLoadError, match=r"lacks 2 tensors of this model: .*encoder\.blocks\.2\.wqkv"):
        build(tmp_path, single_context())
    save_file({**tensors, "vision_tower.patch_embed.pos_emb.weight": torch.ones(25, 48)}, file)
    with pytest.raises(ModelLoadError, match=r"pos_emb\.weight: its shape is \[25, 48\], and config.json says"):
        build(tmp_path, single_context())
