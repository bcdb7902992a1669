"""The encoders of LLaVA's models against transformers, and what their files leave out or have wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

from pagewick.errors import ModelLoadError
from pagewick.images.decoding import prepare
from pagewick.images.settings_files import read_settings
from pagewick.models.registry import read_config
from pagewick.models.vision.merging_config import ClipVisionConfig
from tests.images.pictures import file_of, noise
from tests.layers.ranks import single_context
from tests.models.answers import answers, running
from tests.models.checkpoints import VARIANTS, make_model, save, write_checkpoint
from tests.models.plain_images import encoder_of
from tests.models.test_vision import Pixels, build, image_of

NAME, SEEN = "llava-1.5", 12
PIXELS = Pixels(merge_size=1, temporal_patch_size=1)
# config.json as it was published with LLaVA 1.5 7B.
PUBLISHED: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"], "ignore_index": -100, "image_token_index": 32000,
    "model_type": "llava", "pad_token_id": 32001, "projector_hidden_act": "gelu", "tie_word_embeddings": False,
    "text_config": {
        "_name_or_path": "lmsys/vicuna-7b-v1.5", "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096, "model_type": "llama", "rms_norm_eps": 1e-05, "torch_dtype": "float16",
        "vocab_size": 32064,
    },
    "torch_dtype": "float16",
    "vision_config": {
        "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768,
        "vocab_size": 32000,
    },
    "vision_feature_layer": -2, "vision_feature_select_strategy": "default", "vocab_size": 32064,
}  # fmt: skip


def by_transformers(reference: Any, image: Tensor) -> Tensor:
    """The rows of a picture. The encoder of transformers gets pixels at two edges, too, of which it makes no patch."""
    side = reference.config.vision_config.image_size
    normed = (image.double() / 255 - torch.tensor(PIXELS.mean)) / torch.tensor(PIXELS.std)
    whole = torch.full((1, 3, side, side), 7.0, dtype=reference.dtype)
    whole[0, :, : len(image), : len(image)] = normed.permute(2, 0, 1)
    config = reference.config
    found = reference.model.get_image_features(
        whole,
        vision_feature_layer=config.vision_feature_layer,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
    )
    return found.pooler_output[0]  # type: ignore[no-any-return]


def entries_of(**entries: Any) -> dict[str, Any]:
    """The config.json that transformers writes, with other entries: `part.entry` stands within a part."""
    config = transformers.LlavaConfig(**VARIANTS[NAME].all_entries()).to_dict()
    config = json.loads(json.dumps({**config, "architectures": ["LlavaForConditionalGeneration"]}))
    for name, value in entries.items():
        part, _, inner = name.rpartition(".")
        (config[part] if part else config)[inner] = value
    return config  # type: ignore[no-any-return]


def vision_of(config: dict[str, Any]) -> ClipVisionConfig:
    found = read_config(config).vision
    assert isinstance(found, ClipVisionConfig)
    return found


SIGLIP = {
    **VARIANTS[NAME].entries["vision_config"], "model_type": "siglip_vision_model", "vision_use_head": False,
}  # fmt: skip


@pytest.mark.parametrize(
    "entries",
    [
        {},
        # Rows of several blocks side by side, those ahead of all blocks among them.
        {"vision_feature_layer": [-2, 0, 3]},
        {"vision_feature_layer": -1, "multimodal_projector_bias": False, "projector_hidden_act": "relu"},
        {"vision_config": SIGLIP, "vision_feature_select_strategy": "full", "vision_feature_layer": -1},
        {"vision_config": {**SIGLIP, "vision_use_head": True}, "vision_feature_select_strategy": "full"},
    ],
)
@torch.inference_mode()
def test_rows_are_those_of_transformers(entries: dict[str, Any], tmp_path: Path) -> None:
    reference = make_model(NAME, {**VARIANTS[NAME].all_entries(), **entries})
    save(reference, tmp_path)
    encoder = encoder_of(tmp_path, PIXELS)
    for turn in (0, 5):
        image = image_of(SEEN, SEEN).roll(turn, 1)
        expected, found = by_transformers(reference, image), encoder(image)
        # No norm is behind the blocks, and rows are large.
        scale = float(expected.std())
        assert scale > 10 and found.deepstack.shape == (0, *expected.shape) == (0, 9, 48)
        torch.testing.assert_close(found.rows, expected, atol=1e-5 * scale, rtol=0)
    with pytest.raises(ValueError, match="and this model reads 12 x 12"):
        encoder(image_of(SEEN, 2 * SEEN))


def test_published_entries() -> None:
    known = transformers.LlavaConfig(**PUBLISHED).to_dict()
    known = json.loads(json.dumps({**known, "architectures": PUBLISHED["architectures"]}))
    found, vision = read_config(PUBLISHED), vision_of(PUBLISHED)
    assert vision == vision_of(known) and found.layers == read_config(known).layers
    assert (found.hidden_size, found.num_layers, found.vocab_size, found.tie_word_embeddings) == (
        4096, 32, 32064, False,
    )  # fmt: skip
    # The encoder leaves out the last of 24 blocks, and has 24 x 24 patches.
    assert (vision.num_blocks, vision.features, vision.positions_per_side) == (23, (23,), 24)
    assert (vision.activation, vision.norm_eps, vision.has_first, vision.patch_bias) == (
        "quick_gelu",
        1e-5,
        True,
        False,
    )
    mistral = {"model_type": "mistral", "num_key_value_heads": 8, "rope_theta": 1e6, "vocab_size": 32064}
    qwen2 = {"model_type": "qwen2", "vocab_size": 151936}
    for text in (mistral, qwen2, {**mistral, "tie_word_embeddings": True}):
        config = {**PUBLISHED, "text_config": text}
        known = transformers.LlavaConfig(**json.loads(json.dumps(config))).to_dict()
        known = json.loads(json.dumps({**known, "architectures": PUBLISHED["architectures"]}))
        found = read_config(config)
        assert found.layers == read_config(known).layers and found.hidden_size == 4096
        assert found.tie_word_embeddings == known["tie_word_embeddings"] == ("tie_word_embeddings" in text)


@pytest.mark.parametrize("kind", ["clip_vision_model", "siglip_vision_model"])
def test_what_is_left_out_is_the_default_of_transformers(kind: str) -> None:
    strategy = {} if kind == "clip_vision_model" else {"vision_feature_select_strategy": "full"}
    text = PUBLISHED["text_config"]
    usual = transformers.LlavaConfig(vision_config={"model_type": kind}, text_config=text, **strategy).to_dict()
    config = json.loads(json.dumps({**usual, "architectures": PUBLISHED["architectures"]}))
    expected = vision_of(config)
    assert (expected.num_blocks, expected.hidden_size, expected.image_token_id) == (11, 768, 32000)
    for key in config.keys() - {"architectures", "text_config", "vision_config", *strategy}:
        assert vision_of({name: value for name, value in config.items() if name != key}) == expected, key
    kept = set() if kind == "clip_vision_model" else {"model_type"}
    for key in config["vision_config"].keys() - kept:
        given = {name: value for name, value in config["vision_config"].items() if name != key}
        assert vision_of({**config, "vision_config": given}) == expected, key


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"vision_config.model_type": "dinov2"}, r"vision_config\.model_type is 'dinov2', and must be one of"),
        ({"vision_config.num_attention_heads": 7}, r"num_attention_heads is 7, and must be a divisor"),
        ({"vision_config.num_channels": 1}, r"num_channels is 1, and must be 3"),
        ({"vision_config.image_size": 3}, r"image_size is 3, and must be at least patch_size \(4\)"),
        ({"vision_config.hidden_act": "tanh"}, r"hidden_act is 'tanh'"),
        ({"vision_feature_layer": -6}, r"vision_feature_layer is -6, and must be a number from -5 to 4"),
        ({"vision_feature_layer": [1, 5]}, r"vision_feature_layer is \[1, 5\], and must be a number from -5 to 4"),
        ({"vision_feature_layer": []}, r"vision_feature_layer is \[\], and must be"),
        ({"vision_feature_layer": [1] * 17}, r"vision_feature_layer is .* a list of at most 16"),
        ({"vision_feature_layer": True}, r"vision_feature_layer is True, and must be"),
        ({"vision_feature_select_strategy": "full"}, r"select_strategy is 'full', and must be 'default'"),
        ({"vision_config": SIGLIP}, r"select_strategy is 'default', and must be 'full'"),
        ({"projector_hidden_act": "tanh"}, r"projector_hidden_act is 'tanh'"),
        ({"text_config.model_type": "phi"}, r"text_config\.model_type is 'phi', and must be one of llama, mistral"),
    ],
)
def test_mistakes_are_named(entries: dict[str, Any], said: str) -> None:
    read_config(entries_of())
    with pytest.raises(ModelLoadError, match=said):
        read_config(entries_of(**entries))


def test_a_vocabulary_without_the_token_reads_text() -> None:
    config = read_config(entries_of(image_token_index=193))
    assert config.vision is None and config.layers == read_config(entries_of()).layers


@torch.inference_mode()
def test_files_may_have_other_names_and_no_vision_part(tmp_path: Path) -> None:
    write_checkpoint(NAME, tmp_path)
    image, file = image_of(SEEN, SEEN), tmp_path / "model.safetensors"
    expected, tensors = encoder_of(tmp_path, PIXELS)(image).rows, load_file(file)
    # Published files have the last name of the path to the encoder, and numbers of positions.
    assert sum(name.startswith("vision_tower.encoder.") for name in tensors) == 4 * 16
    for outer, inner in (("", "vision_model."), ("model.", "")):
        place, renamed = f"{outer}vision_tower.{inner}", {}
        for name, tensor in tensors.items():
            name = name.replace("vision_tower.", place)
            renamed[f"{outer}{name}" if name.startswith("multi_modal") else name] = tensor
        save_file({**renamed, f"{place}embeddings.position_ids": torch.arange(10)}, file)
        assert torch.equal(encoder_of(tmp_path, PIXELS)(image).rows, expected)
    save_file({name: tensor for name, tensor in tensors.items() if name.startswith("language_model.")}, file)
    assert build(tmp_path, single_context()).visual is None
    save_file({name: tensor for name, tensor in tensors.items() if "layers.2.mlp.fc1.b" not in name}, file)
    with pytest.raises(ModelLoadError, match=r"lacks 1 tensor of this model: .*encoder\.layers\.2\.mlp\.fc1\.bias"):
        build(tmp_path, single_context())


NEXT = "llava-next"
CANVASES = VARIANTS[NEXT].entries["image_grid_pinpoints"]


@pytest.mark.parametrize(
    "entries",
    [
        {},
        # Tiles of whole patches, and SigLIP's encoder.
        {
            "vision_config": {**SIGLIP, "image_size": 12}, "vision_feature_select_strategy": "full",
            "image_grid_pinpoints": [[12, 24], [24, 24], [36, 24]],
        },
    ],
)  # fmt: skip
@torch.inference_mode()
def test_rows_of_tiles_are_those_of_transformers(entries: dict[str, Any], tmp_path: Path) -> None:
    reference: Any = make_model(NEXT, {**VARIANTS[NEXT].all_entries(), **entries})
    save(reference, tmp_path)
    settings = read_settings(tmp_path)
    encoder, processor = encoder_of(tmp_path, settings), LlavaNextImageProcessorPil.from_pretrained(tmp_path)
    # The last ones have no rows in tiles, and rows without patches.
    for size in ((13, 26), (60, 40), (40, 9), (28, 28), (1, 100), (100, 1)):
        image = noise(*size)
        given = processor([image], return_tensors="pt")
        (expected,) = reference.model.get_image_features(
            **given,
            vision_feature_layer=-2,
            vision_feature_select_strategy=reference.config.vision_feature_select_strategy,
        ).pooler_output
        found = [
            (encoder(pixels) if edges is None else encoder(pixels, edges)).rows
            for one in prepare(file_of(image), settings)
            for pixels, edges in [(torch.from_numpy(one.pixels.copy()), one.edges)]
        ]
        assert len(expected) == settings.num_tokens(*size) == sum(map(len, found))
        scale = float(expected.std())
        torch.testing.assert_close(torch.cat(found), expected, atol=1e-5 * scale, rtol=0)


ONEVISION = "llava-onevision"


@torch.inference_mode()
def test_rows_of_onevision_are_those_of_transformers(tmp_path: Path) -> None:
    """Rows of tiles are shrunk if there are too many; an image that is not alone is a square with one row more."""
    reference: Any = write_checkpoint(ONEVISION, tmp_path)
    settings = read_settings(tmp_path)
    encoder, processor = encoder_of(tmp_path, settings), LlavaOnevisionImageProcessorPil.from_pretrained(tmp_path)
    how = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_2"}
    shapes = set()
    for size in ((13, 26), (60, 40), (90, 90), (28, 28), (1, 100), (100, 1)):
        image = noise(*size)
        for images in ([image], [image, image]):
            given = processor([images], return_tensors="pt")
            expected = reference.model.get_image_features(**given, **how).pooler_output[0]
            own = settings.for_images(len(images))
            found = [
                encoder(torch.from_numpy(one.pixels.copy()), one.edges, has_end=one.has_end).rows
                for one in prepare(file_of(image), own)
            ]
            shapes.add(tuple(map(len, found)))
            assert len(expected) == own.num_tokens(*size) == sum(map(len, found))
            scale = float(expected.std())
            torch.testing.assert_close(torch.cat(found), expected, atol=1e-5 * scale, rtol=0)
    # 9 rows of 6, shrunk to 5 of 3; 9 of 9, to 4 of 4; each with one more.
    assert {(9, 20), (9, 20), (10,)} < shapes


def test_entries_of_onevision() -> None:
    usual = json.loads(json.dumps(transformers.LlavaOnevisionConfig().to_dict()))
    config = {**usual, "architectures": ["LlavaOnevisionForConditionalGeneration"]}
    expected = vision_of(config)
    assert (expected.image_token_id, expected.most_tiles, expected.largest_canvas) == (151646, 9, 2304**2)
    assert (expected.num_blocks, expected.features, expected.positions_per_side) == (26, (26,), 27)
    for key in config.keys() - {"architectures", "text_config", "vision_config"}:
        assert read_config({name: value for name, value in config.items() if name != key}) == read_config(config), key
    for wrong in ("anyres", "anyres_max_0", "anyres_max_100", "pad"):
        with pytest.raises(ModelLoadError, match=r"vision_aspect_ratio is .*, and must be anyres_max_ with a number"):
            read_config({**config, "vision_aspect_ratio": wrong})


def next_of(**entries: Any) -> dict[str, Any]:
    config = transformers.LlavaNextConfig(**VARIANTS[NEXT].all_entries()).to_dict()
    return {**json.loads(json.dumps(config)), "architectures": ["LlavaNextForConditionalGeneration"], **entries}


def test_entries_about_tiles() -> None:
    found = vision_of(next_of())
    assert (found.tile_side, found.largest_canvas, found.most_pixels, found.fixed_pixels) == (14, 784, 784, None)
    usual = {name: value for name, value in PUBLISHED.items() if name != "architectures"}
    found = vision_of({**usual, "architectures": ["LlavaNextForConditionalGeneration"]})
    assert (found.largest_canvas, found.image_size, found.positions_per_side) == (672 * 672, 336, 24)
    for wrong in ([[14, 30]], [[14]], [14], "anyres", [[14, -28]], [[14, 61 * 14]], [[14, True]]):
        with pytest.raises(ModelLoadError, match=r"image_grid_pinpoints is .*, and must be a list of heights and"):
            read_config(next_of(image_grid_pinpoints=wrong))
    with pytest.raises(ModelLoadError, match=r"use_image_newline_parameter is False, and must be True"):
        read_config(next_of(use_image_newline_parameter=False))


def test_an_encoder_without_blocks_starts(tmp_path: Path) -> None:
    save(make_model(NAME, {**VARIANTS[NAME].all_entries(), "vision_feature_layer": 0}), tmp_path)
    with running(tmp_path) as engine:
        assert [len(one.token_ids) for one in answers(engine, [[2, 3]], num_tokens=3)] == [3]


@torch.inference_mode()
def test_a_picture_of_one_column_is_shrunk_to_one(tmp_path: Path) -> None:
    """transformers makes none of it, and raises an error."""
    canvas = [[14 * 20, 14]]
    changes = {"image_grid_pinpoints": canvas, "vision_aspect_ratio": "anyres_max_1"}
    save(make_model(ONEVISION, {**VARIANTS[ONEVISION].all_entries(), **changes}), tmp_path)
    settings = read_settings(tmp_path)
    encoder, image = encoder_of(tmp_path, settings), noise(200, 1)
    whole, tiled = prepare(file_of(image), settings)
    rows = encoder(torch.from_numpy(tiled.pixels.copy()), tiled.edges).rows
    assert len(rows) == tiled.num_tokens and rows.isfinite().all()
    # Each row has a token of the picture, and one more.
    assert tiled.edges is not None and tiled.num_tokens % 2 == 0
    assert whole.num_tokens + tiled.num_tokens == settings.num_tokens(200, 1) <= settings.most_tokens(len)
