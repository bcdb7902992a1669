"""GLM-4.1V's and GLM-4.6V's encoder: what test_vision.py does not try, and what their files leave out or have wrong."""

from __future__ import annotations

import json
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


@torch.inference_mode()
def test_squares_of_nine_patches_with_one_picture(tmp_path: Path) -> None:
    """With biases of queries, keys and values."""
    reference = write_checkpoint("glm-4.6v", tmp_path)
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
    # With experts, the heads of published files do not share out hidden_size, and a default is rotated.
    [("Glm4v", HALF, 151343), ("Glm46V", HALF, 151343), ("Glm4vMoe", {"head_dim": 128}, 151363)],
)
def test_what_is_left_out_is_the_default_of_transformers(kind: str, text: dict[str, Any], token: int) -> None:
    """text: changes with which 32 pairs of a head are rotated, as in the default of the sections."""
    usual = json.loads(json.dumps(getattr(transformers, f"{kind}Config")().to_dict()))
    text = {**usual["text_config"], **text}
    config = {**usual, "architectures": [f"{kind}ForConditionalGeneration"], "text_config": text}
    expected = vision_of(config)
    assert (expected.image_token_id, expected.hidden_size, expected.patch_size) == (token, 1536, 14)
    assert expected.intermediate_size == 4096 and expected.merger_size == 13696
    sections = {layer.rope.mrope_section for layer in read_config(config).layers if layer.rope is not None}
    assert sections == {(8, 12, 12)}
    assert vision_of({key: value for key, value in config.items() if key != "image_token_id"}) == expected
    plain = config["vision_config"]
    for key in plain:
        given = {name: value for name, value in plain.items() if name != key}
        assert vision_of({**config, "vision_config": given}) == expected, key
    needed = SIZES | ({"head_dim"} if kind == "Glm4vMoe" else {"rope_parameters"})
    for key in text.keys() - needed:
        given = {name: value for name, value in text.items() if name != key}
        assert read_config({**config, "text_config": given}) == read_config(config), key


def test_the_text_part_may_say_that_the_head_is_tied() -> None:
    for name in ("glm-4.1v", "glm-4.5v"):
        config = entries_of(name)
        config["text_config"]["tie_word_embeddings"] = True
        assert read_config(config).tie_word_embeddings
        assert not read_config(entries_of(name)).tie_word_embeddings


@pytest.mark.parametrize("place", ["model.language_model", "language_model.model", "model"])
def test_a_layer_that_predicts_later_tokens_is_not_used(place: str, tmp_path: Path) -> None:
    """It is ignored wherever the text part stands in a file; the layer behind it is one too many."""
    write_checkpoint("glm-4.5v", tmp_path)
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


def test_experts_with_norms_of_heads_are_refused() -> None:
    config = entries_of("glm-4.5v")
    config["text_config"]["use_qk_norm"] = True
    with pytest.raises(ModelLoadError, match=r"text_config\.use_qk_norm is True, and must be False"):
        read_config(config)
    config["text_config"] |= {"use_qk_norm": False, "model_type": "glm4v_text"}
    with pytest.raises(ModelLoadError, match=r"text_config\.model_type is 'glm4v_text', .* one of glm4v_moe_text"):
        read_config(config)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"vision_config.model_type": "clip"}, r"vision_config\.model_type is 'clip'"),
        ({"vision_config.out_hidden_size": 48}, r"out_hidden_size is 48, and must be the hidden_size of the text part"),
        ({"vision_config.image_size": 3}, r"image_size is 3, and must be at least patch_size \(4\)"),
        ({"vision_config.num_heads": 7}, r"num_heads is 7"),
        ({"text_config.model_type": "glm4v_moe_text"}, r"text_config\.model_type is 'glm4v_moe_text'"),
        ({"text_config.head_dim": 32}, r"head_dim is 32, and must be 16"),
        ({"text_config.attention_bias": False}, r"attention_bias is False, and must be True"),
    ],
)
def test_mistakes_are_named(entries: dict[str, Any], said: str) -> None:
    config = entries_of()
    for name, value in entries.items():
        part, _, inner = name.rpartition(".")
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
