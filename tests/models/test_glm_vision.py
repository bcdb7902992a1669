"""The encoders of GLM-4.1V to 4.6V and GLM-OCR: what test_vision.py does not try, and entries that files leave out."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pagewick.errors import ModelLoadError
from pagewick.models.registry import read_config
from pagewick.models.vision.config import GlmVisionConfig
from tests.layers.ranks import single_context
from tests.models.checkpoints import VARIANTS, write_checkpoint
from tests.models.published import PUBLISHED
from tests.models.test_vision import Pixels, build, by_transformers, compare, image_of


def entries_of(name: str = "glm-4.1v", **entries: Any) -> dict[str, Any]:
    """The config.json that transformers writes, with other entries; None: left out."""
    variant = VARIANTS[name]
    config = getattr(transformers, f"{variant.config}Config")(**variant.all_entries()).to_dict()
    found = {**config, "architectures": [f"{variant.config}ForConditionalGeneration"], **entries}
    return {key: value for key, value in json.loads(json.dumps(found)).items() if value is not None}


def vision_of(config: dict[str, Any]) -> GlmVisionConfig:
    found = read_config(config).vision
    assert isinstance(found, GlmVisionConfig)
    return found


@pytest.mark.parametrize("name", ["glm-4.6v", "glm-ocr-no-bias"])
@torch.inference_mode()
def test_squares_of_nine_patches_with_one_picture(name: str, tmp_path: Path) -> None:
    """With biases of queries, keys and values in the first, and without any in the second."""
    reference = write_checkpoint(name, tmp_path)
    model, pixels = build(tmp_path, single_context()), Pixels(merge_size=3, temporal_patch_size=1)
    assert model.visual is not None
    model.visual.use_pixels(pixels)
    for size in ((12, 12), (60, 12), (36, 84), (96, 60)):
        expected = by_transformers(reference, image_of(*size), pixels)
        assert float(expected.rows.std()) > 0.5
        compare(model.visual(image_of(*size)), expected, 3e-5)


HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
# Sizes: every published file has them.
SIZES = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "moe_intermediate_size", "num_experts_per_tok"}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "text", "token"),
    # With experts, the heads of published files do not share out hidden_size.
    [
        ("Glm4v", HALF, 151343),
        ("Glm46V", HALF, 151343),
        ("Glm4vMoe", {"head_dim": 128}, 151363),
        # The defaults of both parts do not fit together.
        ("GlmOcr", {"hidden_size": 1536, "head_dim": 64}, 59280),
    ],
)
def test_what_is_left_out_is_the_default_of_transformers(kind: str, text: dict[str, Any], token: int) -> None:
    """text: changes with which 32 pairs of a head are rotated, as in the default of the sections."""
    usual = json.loads(json.dumps(getattr(transformers, f"{kind}Config")().to_dict()))
    config = {**usual, "architectures": [f"{kind}ForConditionalGeneration"]}
    config["text_config"] |= text
    expected = vision_of(config)
    assert (expected.image_token_id, expected.patch_size, expected.norm_eps) == (token, 14, 1e-5)
    widths = expected.hidden_size, expected.out_hidden_size, expected.intermediate_size, expected.merger_size
    assert widths == ((1024, 1536, 4096, 4608) if kind == "GlmOcr" else (1536, 4096, 4096, 13696))
    sections = {layer.rope.mrope_section for layer in read_config(config).layers if layer.rope is not None}
    assert sections == {(8, 12, 12)}
    assert vision_of({key: value for key, value in config.items() if key != "image_token_id"}) == expected
    plain = config["vision_config"]
    for key in plain:
        given = {name: value for name, value in plain.items() if name != key}
        assert vision_of({**config, "vision_config": given}) == expected, key
    for key in config["text_config"].keys() - SIZES - text.keys():
        given = {name: value for name, value in config["text_config"].items() if name != key}
        assert read_config({**config, "text_config": given}) == read_config(config), key


def test_a_published_file() -> None:
    config = read_config(PUBLISHED["GLM-OCR"])
    vision = vision_of(PUBLISHED["GLM-OCR"])
    sizes = vision.hidden_size, vision.num_heads, vision.intermediate_size, vision.merger_size, vision.num_blocks
    assert sizes == (1024, 16, 4096, 4608, 24) and vision.positions_per_side is None
    assert vision.has_bias and vision.has_qkv_bias and vision.is_qk_normed
    assert {layer.rope.mrope_section for layer in config.layers if layer.rope is not None} == {(16, 24, 24)}
    # Its further layer predicts later tokens.
    later = "model.language_model.layers.16.eh_proj.weight"
    assert any(re.fullmatch(pattern, later) for pattern in config.ignored_tensors)


def test_the_text_part_may_say_that_the_head_is_tied() -> None:
    for name in ("glm-4.1v", "glm-4.5v", "glm-ocr"):
        config = entries_of(name)
        config["text_config"]["tie_word_embeddings"] = True
        assert read_config(config).tie_word_embeddings
        assert not read_config(entries_of(name)).tie_word_embeddings


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("glm-4.5v", "model.language_model"),
        ("glm-4.5v", "language_model.model"),
        ("glm-4.5v", "model"),
        ("glm-ocr", "model.language_model"),
    ],
)
def test_a_layer_that_predicts_later_tokens_is_not_used(name: str, place: str, tmp_path: Path) -> None:
    """It is ignored wherever the text part stands in a file; the layer behind it is one too many."""
    write_checkpoint(name, tmp_path)
    file = tmp_path / "model.safetensors"
    old = {"model.language_model": place, "model.visual": "visual" if place == "model" else "model.visual"}
    if place == "language_model.model":
        old["lm_head"] = "language_model.lm_head"
    tensors = {}
    for name, tensor in load_file(file).items():
        begin = next((one for one in old if name.startswith(f"{one}.")), "")
        tensors[old.get(begin, "") + name.removeprefix(begin)] = tensor
    later = {f"{place}.layers.3.{name}.weight": torch.ones(2) for name in ("eh_proj", "self_attn.q_proj", "enorm")}
    save_file({**tensors, **later}, file)
    assert build(tmp_path, single_context()).visual is not None
    save_file({**tensors, **later, f"{place}.layers.4.enorm.weight": torch.ones(2)}, file)
    with pytest.raises(ModelLoadError, match=r"the model has no place for 1 tensor: .*layers\.4\.enorm"):
        build(tmp_path, single_context())


@pytest.mark.parametrize(
    ("name", "entries", "said"),
    [
        ("glm-4.1v", {"vision_config.model_type": "clip"}, r"vision_config\.model_type is 'clip'"),
        (
            "glm-4.1v",
            {"vision_config.out_hidden_size": 48},
            r"out_hidden_size is 48, and must be the hidden_size of the text part",
        ),
        ("glm-4.1v", {"vision_config.image_size": 3}, r"image_size is 3, and must be at least patch_size \(4\)"),
        ("glm-4.1v", {"vision_config.num_heads": 7}, r"num_heads is 7"),
        ("glm-4.1v", {"text_config.model_type": "glm4v_moe_text"}, r"text_config\.model_type is 'glm4v_moe_text'"),
        ("glm-4.1v", {"text_config.head_dim": 32}, r"head_dim is 32, and must be 16"),
        ("glm-4.1v", {"text_config.attention_bias": False}, r"attention_bias is False, and must be True"),
        ("glm-4.5v", {"text_config.use_qk_norm": True}, r"text_config\.use_qk_norm is True, and must be False"),
        ("glm-4.5v", {"text_config.model_type": "glm4v_text"}, r"'glm4v_text', and must be one of glm4v_moe_text"),
        ("glm-ocr", {"text_config.attention_bias": True}, r"attention_bias is True, and must be False"),
        ("glm-ocr", {"vision_config.model_type": "glm4v_vision"}, r"'glm4v_vision', and must be one of glm_ocr, glm_"),
        ("glm-ocr", {"vision_config.out_hidden_size": 48}, r"out_hidden_size is 48, and must be the hidden_size of"),
    ],
)
def test_mistakes_are_named(name: str, entries: dict[str, Any], said: str) -> None:
    config = entries_of(name)
    for entry, value in entries.items():
        part, _, inner = entry.rpartition(".")
        config[part][inner] = value
    with pytest.raises(ModelLoadError, match=said):
        read_config(config)


def test_sections_must_cover_all_pairs() -> None:
    config = entries_of()
    config["text_config"]["rope_parameters"]["mrope_section"] = [1, 1, 1]
    with pytest.raises(ModelLoadError, match=r"mrope_section is \[1, 1, 1\], and must be three numbers with the sum 4"):
        read_config(config)
    config["text_config"]["rope_parameters"]["mrope_section"] = [1, 1, 2]
    assert replace(vision_of(config)) == vision_of(entries_of())
