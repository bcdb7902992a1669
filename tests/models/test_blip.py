"""BLIP's config.json and tensors, and its encoder against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pagewick.config import EngineConfig
from pagewick.engine.model_loading import load_model
from pagewick.errors import ModelLoadError
from pagewick.images.settings_files import read_settings
from pagewick.models.registry import read_config
from pagewick.models.vision.config import BlipVisionConfig
from pagewick.parallel.collectives import Collectives
from tests.models.captions import NUM_ROWS, NUM_TOKENS, SIDE, entries_of, values_of, write_captioner
from tests.models.plain_images import encoder_of
from tests.models.test_tensor_table import build as build_rank
from tests.models.test_tensor_table import check_rank
from tests.models.test_vision import image_of

# config.json as it was published with blip-image-captioning-large, without entries that change nothing.
PUBLISHED: dict[str, Any] = {
    "architectures": ["BlipForConditionalGeneration"], "image_text_hidden_size": 256, "initializer_factor": 1.0,
    "logit_scale_init_value": 2.6592, "model_type": "blip", "projection_dim": 512, "torch_dtype": "float32",
    "text_config": {
        "architectures": None, "bos_token_id": 30522, "eos_token_id": 2, "pad_token_id": 0, "sep_token_id": 102,
        "hidden_act": "gelu", "hidden_size": 768, "intermediate_size": 3072, "is_decoder": True,
        "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "blip_text_model",
        "num_attention_heads": 12, "num_hidden_layers": 12, "projection_dim": 768, "vocab_size": 30524,
        "tie_word_embeddings": True, "torch_dtype": None,
    },
    "vision_config": {
        "hidden_act": "gelu", "hidden_size": 1024, "image_size": 384, "intermediate_size": 4096,
        "layer_norm_eps": 1e-05, "model_type": "blip_vision_model", "num_attention_heads": 16, "num_channels": 3,
        "num_hidden_layers": 24, "patch_size": 16, "projection_dim": 512,
    },
}  # fmt: skip


@torch.inference_mode()
def test_rows_are_those_of_transformers(tmp_path: Path) -> None:
    reference = write_captioner(tmp_path)
    encoder = encoder_of(tmp_path, read_settings(tmp_path))
    for turn in (0, 5):
        image = image_of(SIDE, SIDE).roll(turn, 1)
        expected, found = reference.vision_model(values_of(image)).last_hidden_state[0], encoder(image)
        assert found.rows.shape == (NUM_TOKENS, 40) and len(found.deepstack) == 0
        torch.testing.assert_close(found.rows[:NUM_ROWS], expected, atol=3e-5, rtol=0)
        assert not found.rows[NUM_ROWS:].any(), "these fill up blocks"
    with pytest.raises(ValueError, match="and this model reads 24 x 24"):
        encoder(image_of(SIDE, 2 * SIDE))


def test_published_entries() -> None:
    found = read_config(PUBLISHED)
    vision = found.vision
    assert isinstance(vision, BlipVisionConfig) and vision.num_rows == 577 and vision.fixed_tokens == 608
    assert (vision.hidden_size, vision.num_blocks, vision.norm_eps, vision.image_token_id) == (1024, 24, 1e-5, 0)
    assert (found.max_position_embeddings, found.longest_context) == (608 + 512, 608 + 512)
    assert (found.num_heads, found.norm.eps, found.dtype, found.end_token_ids) == (12, 1e-12, "float32", (102,))
    # A text has no more tokens than an image has rows.
    small = {**PUBLISHED, "vision_config": {**PUBLISHED["vision_config"], "image_size": 224}}
    assert read_config(small).max_position_embeddings == 224 + 197


def test_what_is_left_out_is_the_default_of_transformers() -> None:
    usual = json.loads(json.dumps(transformers.BlipConfig().to_dict()))
    config = {**usual, "architectures": PUBLISHED["architectures"]}
    expected = read_config(config)
    assert expected.num_heads == 8 and expected.max_position_embeddings == 608 + 512
    for key in config.keys() - {"architectures"}:
        assert read_config({name: value for name, value in config.items() if name != key}) == expected, key
    for part in ("text_config", "vision_config"):
        for key in config[part]:
            given = {name: value for name, value in config[part].items() if name != key}
            assert read_config({**config, part: given}) == expected, (part, key)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"tie_word_embeddings": False}, r"tie_word_embeddings is False, and must be True"),
        ({"text_config.tie_word_embeddings": False}, r"text_config\.tie_word_embeddings is False"),
        ({"text_config.is_decoder": False}, r"is_decoder is False, and must be True"),
        ({"text_config.num_attention_heads": 7}, r"num_attention_heads is 7, and must be a divisor"),
        ({"text_config.hidden_act": "tanh"}, r"text_config\.hidden_act is 'tanh'"),
        ({"text_config.sep_token_id": 193}, r"sep_token_id is 193, and must be below vocab_size \(193\)"),
        ({"text_config.pad_token_id": 190}, r"pad_token_id is 190, and must be another token than"),
        ({"vision_config.num_attention_heads": 7}, r"vision_config\.num_attention_heads is 7, and must be a divisor"),
        ({"vision_config.image_size": 26}, r"image_size is 26, and must be a multiple of patch_size \(4\)"),
        ({"vision_config.hidden_act": "tanh"}, r"vision_config\.hidden_act is 'tanh'"),
        ({"architectures": ["BlipForQuestionAnswering"]}, r"BlipForQuestionAnswering is not supported"),
        ({"architectures": ["BlipForImageTextRetrieval"]}, r"BlipForImageTextRetrieval is not supported"),
    ],
)
def test_mistakes_are_named(entries: dict[str, Any], said: str) -> None:
    read_config(entries_of())
    with pytest.raises(ModelLoadError, match=said):
        read_config(entries_of(**entries))


def test_the_table_agrees_with_the_modules() -> None:
    config = read_config(entries_of())
    for rank, num_ranks in ((0, 1), (0, 2), (1, 2), (3, 4)):
        check_rank(config, rank, num_ranks)
    paths = {name for name, _ in build_rank(config, 0, 1).named_parameters()}
    assert "model.embed_tokens.bias" in paths


def test_a_tied_head_in_a_file_must_be_the_embedding(tmp_path: Path) -> None:
    """Published files hold it, and numbers of positions, too."""
    write_captioner(tmp_path)
    file, head = tmp_path / "model.safetensors", "text_decoder.cls.predictions"
    tensors = load_file(file)
    whole = {
        **tensors,
        f"{head}.decoder.weight": tensors["text_decoder.bert.embeddings.word_embeddings.weight"].clone(),
        f"{head}.decoder.bias": tensors[f"{head}.bias"].clone(),
        "text_decoder.bert.embeddings.position_ids": torch.arange(41)[None],
    }
    save_file(whole, file)
    load_checked(tmp_path)
    for name in ("decoder.weight", "decoder.bias"):
        changed = whole[f"{head}.{name}"].clone()
        changed.view(-1)[3] += 1
        save_file({**whole, f"{head}.{name}": changed}, file)
        with pytest.raises(ModelLoadError, match=f"{name} differs from"):
            load_checked(tmp_path)


def load_checked(directory: Path) -> None:
    config = EngineConfig(model=str(directory), dtype="float32", device="cpu")
    load_model(config, Collectives.single(), torch.device("cpu"))
