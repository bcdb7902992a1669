"""Gemma 4's encoder and projection against transformers, on several ranks, and from files of both kinds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagewick.errors import ModelLoadError
from pagewick.models.config import ModelConfig
from pagewick.models.decoder import Decoder
from pagewick.models.parts import AttentionConfig
from pagewick.models.registry import read_config
from pagewick.models.vision.config import Gemma4VisionConfig
from pagewick.models.vision.pixels import PatchReader
from pagewick.weights.loader import load_weights
from pagewick.weights.opening import open_source
from tests.layers.ranks import single_context
from tests.models.checkpoints import VARIANTS, write_checkpoint
from tests.models.published_gemma4 import GEMMA4
from tests.models.test_vision import build, image_of

# With limits of products, and squares of 3 x 3 patches; with standards, and squares of 2 x 2.
MERGED = {"gemma-4-multimodal": 3, "gemma-4-31b-multimodal": 2}
NAMES = tuple(MERGED)
# Rows and columns of tokens.
SIZES = ((1, 1), (1, 6), (5, 2), (3, 7), (9, 4))


@dataclass(frozen=True)
class Pixels:
    merge_size: int
    patch_size: int = 4
    temporal_patch_size: int = 1
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    rescale_factor: float = 1 / 255


def encoder_of(model: Decoder, **changes: Any) -> PatchReader:
    assert model.visual is not None
    model.visual.use_pixels(Pixels(model.visual.config.merge_size, **changes))
    return model.visual


def image_for(name: str, rows: int, columns: int) -> Tensor:
    side = 4 * MERGED[name]
    return image_of(rows * side, columns * side)


def by_transformers(reference: Any, image: Tensor, *, padding: int = 0, given: Pixels | None = None) -> Tensor:
    """padding: squares of patches that are added and belong to no image."""
    given = given or Pixels(0)
    normed = (image.double() / 255 - torch.tensor(given.mean)) / torch.tensor(given.std)
    rows, columns = (size // 4 for size in image.shape[:2])
    patches = normed.float().view(rows, 4, columns, 4, 3).transpose(1, 2).reshape(rows * columns, -1)
    places = torch.stack(torch.meshgrid(torch.arange(columns), torch.arange(rows), indexing="xy"), -1).view(-1, 2)
    more = (0, 0, 0, padding * reference.config.vision_config.pooling_kernel_size**2)
    patches, places = torch.nn.functional.pad(patches, more), torch.nn.functional.pad(places, more, value=-1)
    return reference.model.get_image_features(patches[None], places[None]).pooler_output[0]  # type: ignore[no-any-return]


def entries_of(name: str = NAMES[0], **entries: Any) -> dict[str, Any]:
    """The config.json that transformers writes for a variant, with other entries; None: left out."""
    config = transformers.Gemma4Config(**VARIANTS[name].all_entries()).to_dict()
    found = json.loads(json.dumps({**config, "architectures": ["Gemma4ForConditionalGeneration"], **entries}))
    return {key: value for key, value in found.items() if value is not None}


def vision_of(config: dict[str, Any]) -> Gemma4VisionConfig:
    found = read_config(config).vision
    assert isinstance(found, Gemma4VisionConfig)
    return found


@pytest.mark.parametrize("name", NAMES)
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
        torch.testing.assert_close(found.rows, expected, atol=1e-4 * spread, rtol=0)
        # The processor adds patches up to the largest image.
        padded = by_transformers(reference, image, padding=70 - rows * columns)
        torch.testing.assert_close(found.rows, padded, atol=1e-4 * spread, rtol=0)


@torch.inference_mode()
def test_every_part_matters(tmp_path: Path) -> None:
    """Else the tests above would not see that it is missing."""
    name = NAMES[1]
    reference: Any = write_checkpoint(name, tmp_path)
    image = image_for(name, 3, 7)
    exact = by_transformers(reference, image)
    tower = reference.model.vision_tower
    changes = [tower.std_bias, tower.std_scale, tower.patch_embedder.position_embedding_table[1]]
    changes += [tower.encoder.layers[2].self_attn.k_norm.weight, tower.encoder.rotary_emb.inv_freq]
    for weight in changes:
        kept = weight.clone()
        weight[..., ::2].mul_(0.5)
        assert float((by_transformers(reference, image) - exact).abs().max()) > 0.05
        weight.copy_(kept)
    assert torch.equal(by_transformers(reference, image), exact)


@torch.inference_mode()
def test_limits_of_products_matter(tmp_path: Path) -> None:
    reference: Any = write_checkpoint(NAMES[0], tmp_path)
    image = image_for(NAMES[0], 3, 7)
    exact = by_transformers(reference, image)
    names = [name for name, _ in reference.named_buffers() if name.endswith(("_min", "_max"))]
    assert len(names) == 3 * 7 * 4, "blocks, products, limits"
    block = reference.model.vision_tower.encoder.layers[1]
    for product in (block.self_attn.q_proj, block.self_attn.v_proj, block.self_attn.o_proj, block.mlp.down_proj):
        for limit in (product.input_max, product.output_min):
            kept = limit.clone()
            limit.mul_(100)
            assert float((by_transformers(reference, image) - exact).abs().max()) > 0.05
            limit.copy_(kept)


@torch.inference_mode()
def test_a_processor_that_normalises(tmp_path: Path) -> None:
    reference = write_checkpoint(NAMES[1], tmp_path)
    numbers: dict[str, Any] = {"mean": (0.5, 0.4, 0.3), "std": (0.5, 0.6, 0.2)}
    image = image_for(NAMES[1], 3, 5)
    expected = by_transformers(reference, image, given=Pixels(0, **numbers))
    found = encoder_of(build(tmp_path, single_context()), **numbers)(image).rows
    torch.testing.assert_close(found, expected, atol=1e-4 * float(expected.std()), rtol=0)


@torch.inference_mode()
def test_the_vision_part_may_stand_beside_the_text_part(tmp_path: Path) -> None:
    name = NAMES[0]
    write_checkpoint(name, tmp_path)
    image = image_for(name, 3, 7)
    expected = encoder_of(build(tmp_path, single_context()))(image).rows
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    published = {
        "model.vision_tower.patch_embedder.input_proj.weight",
        "model.vision_tower.patch_embedder.position_embedding_table",
        "model.vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight",
        "model.vision_tower.encoder.layers.0.mlp.down_proj.input_max",
        "model.embed_vision.embedding_projection.weight",
    }
    assert published <= tensors.keys()
    # A part that hears is left out.
    renamed = {key.removeprefix("model."): tensor for key, tensor in tensors.items()}
    save_file(renamed | {"audio_tower.x.weight": torch.zeros(2)}, file)
    assert torch.equal(encoder_of(build(tmp_path, single_context()))(image).rows, expected)


def test_a_file_without_the_vision_part_reads_no_images(tmp_path: Path) -> None:
    write_checkpoint(NAMES[1], tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    config = read_config(json.loads((tmp_path / "config.json").read_text()))
    assert config.vision is not None and config.fitted(list(tensors)) == config
    with open_source(tmp_path) as source:
        model = Decoder(single_context(), config.without_vision(), source.names())
        load_weights(model, source)
        assert model.visual is None
    is_of_vision = ("model.vision_tower", "model.embed_vision")
    save_file({key: tensor for key, tensor in tensors.items() if not key.startswith(is_of_vision)}, file)
    assert build(tmp_path, single_context()).visual is None
    save_file({key: tensor for key, tensor in tensors.items() if "std_" not in key}, file)
    with pytest.raises(ModelLoadError, match=r"lacks 2 tensors of this model: .*vision_tower\.std_bias"):
        build(tmp_path, single_context())


def test_limits_must_be_single_numbers(tmp_path: Path) -> None:
    write_checkpoint(NAMES[0], tmp_path)
    file, name = tmp_path / "model.safetensors", "model.vision_tower.encoder.layers.1.mlp.up_proj.output_min"
    save_file({**load_file(file), name: torch.zeros(2)}, file)
    with pytest.raises(ModelLoadError, match=r"up_proj\.output_min: .*\[2\]"):
        build(tmp_path, single_context())


def test_settings_of_another_model_are_refused(tmp_path: Path) -> None:
    write_checkpoint(NAMES[0], tmp_path)
    encoder = encoder_of(build(tmp_path, single_context()))
    said = r"merge_size is 2, and config\.json says 3 \(vision_config\.pooling_kernel_size\)"
    with pytest.raises(ModelLoadError, match=said):
        encoder.use_pixels(Pixels(2))
    with pytest.raises(ModelLoadError, match=r"patch_size is 16, .* says 4 \(vision_config\.patch_size\)"):
        encoder.use_pixels(Pixels(3, patch_size=16))
    for height, width in ((12, 20), (0, 12)):
        with pytest.raises(ValueError, match="whose sides must be multiples of 12"):
            encoder.num_tokens(height, width)


def test_layers_with_a_window_see_images_whole_in_larger_models() -> None:
    def whole(config: ModelConfig) -> list[bool]:
        assert all(isinstance(layer.attention, AttentionConfig) for layer in config.layers)
        return [layer.attention.sees_images_whole for layer in config.layers]  # type: ignore[union-attr]

    config = read_config(entries_of(NAMES[1]))
    assert [layer.window is not None for layer in config.layers] == whole(config) == [True, False, True, False]
    others = (entries_of(NAMES[0]), entries_of(NAMES[1], vision_config=None), entries_of(NAMES[1], image_token_id=199))
    for other in (config.without_vision(), *map(read_config, others)):
        assert not any(whole(other))


def test_tokens_of_images_have_the_inputs_of_the_padding() -> None:
    config = entries_of()
    inputs = read_config(config).layer_inputs
    assert inputs is not None and inputs.image_row == 3
    config["text_config"]["pad_token_id"] = 199
    with pytest.raises(ModelLoadError, match=r"text_config\.pad_token_id is 199, and must be below vocab_size \(199\)"):
        read_config(config)
    del config["text_config"]["pad_token_id"]
    inputs = read_config(config).layer_inputs
    assert inputs is not None and inputs.image_row == transformers.Gemma4TextConfig().pad_token_id == 0


def test_what_is_left_out_is_the_default_of_transformers() -> None:
    usual = {**entries_of(), "vision_config": json.loads(json.dumps(transformers.Gemma4VisionConfig().to_dict()))}
    usual["text_config"] |= {"vocab_size": 258881, "vocab_size_per_layer_input": 258881}
    usual["image_token_id"] = 258880
    expected = vision_of(usual)
    assert (expected.image_token_id, expected.hidden_size, expected.patch_size, expected.merge_size) == (
        *(258880, 768, 16),
        3,
    )
    assert vision_of({key: value for key, value in usual.items() if key != "image_token_id"}) == expected
    plain = usual["vision_config"]
    for key in plain:
        found = vision_of({**usual, "vision_config": {name: value for name, value in plain.items() if name != key}})
        assert found == expected, key
    for rotation in ({}, {"rope_type": "default", "rope_theta": 100.0}, {"rope_type": "axial"}):
        assert vision_of({**usual, "vision_config": {**plain, "rope_parameters": rotation}}) == expected


def test_published_files() -> None:
    """The encoder of E2B and E4B, and that of 26B-A4B and 31B behind the text part of E4B."""
    large = {
        "model_type": "gemma4_vision", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 72, "standardize": True,
    }  # fmt: skip
    for name, entries, sizes in (
        ("gemma-4-E2B", GEMMA4["gemma-4-E2B"]["vision_config"], (768, 1536, 16, 12, 64, 3072, True, False)),
        ("gemma-4-E4B", large, (1152, 2560, 27, 16, 72, 4304, False, True)),
    ):
        vision = vision_of({**GEMMA4[name], "vision_config": entries})
        found = (
            vision.hidden_size, vision.out_hidden_size, vision.num_blocks, vision.num_heads, vision.head_dim,
            vision.intermediate_size, vision.is_clipped, vision.is_standardized,
        )  # fmt: skip
        assert found == sizes
        assert (vision.image_token_id, vision.side, vision.num_positions) == (258880, 48, 10240)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"model_type": "siglip_vision_model"}, r"vision_config\.model_type is 'siglip_vision_model'"),
        ({"head_dim": 16}, r"vision_config\.head_dim is 16, and must be 8: hidden_size / num_attention_heads"),
        ({"num_key_value_heads": 2}, r"num_key_value_heads is 2, and must be 6: num_attention_heads"),
        ({"num_attention_heads": 5}, r"num_attention_heads is 5, and must be a number that cuts"),
        ({"num_attention_heads": 8}, r"num_attention_heads is 8, and must be a number that cuts"),
        ({"attention_bias": True}, r"attention_bias is True, and must be False"),
        ({"patch_size": [4, 4]}, r"patch_size is \[4, 4\]"),
        ({"pooling_kernel_size": 0}, r"pooling_kernel_size is 0"),
        ({"hidden_activation": "mish"}, r"hidden_activation is 'mish'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, r"rope_parameters\.rope_type is 'yarn'"),
        ({"rope_parameters": {"rope_theta": 1}}, r"rope_theta is 1, and must be a number above 1"),
        ({"use_clipped_linears": 1}, r"use_clipped_linears is 1, and must be true or false"),
    ],
)
def test_mistakes_are_named(entries: dict[str, Any], said: str) -> None:
    config = entries_of()
    config["vision_config"] |= entries
    with pytest.raises(ModelLoadError, match=said):
        read_config(config)
    assert read_config(config, language_model_only=True).vision is None


def test_the_unified_architecture_reads_text_only() -> None:
    config = {**entries_of("gemma-4-multimodal"), "architectures": ["Gemma4UnifiedForConditionalGeneration"]}
    config["text_config"] |= {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    assert read_config(config).vision is None
