"""The entry vision_config: published files, defaults of transformers, and mistakes that are named."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import transformers

from pagewick.engine.preflight import plan_at_load
from pagewick.errors import ModelLoadError
from pagewick.models.config import ModelConfig
from pagewick.models.registry import read_config
from pagewick.models.tensors import model_tensors
from pagewick.models.vision.config import VisionConfig
from tests.models.published import PUBLISHED
from tests.models.variants import VARIANTS

ARCHITECTURES = {
    "Qwen2VL": "qwen2-vl",
    "Qwen2_5_VL": "qwen2.5-vl-window",
    "Qwen3VL": "qwen3-vl",
    "Qwen3VLMoe": "qwen3-vl-moe",
    "Qwen3_5": "qwen3.5-multimodal",
    "Qwen3_5Moe": "qwen3.5-moe-multimodal",
}


def entries_of(name: str, **vision: Any) -> dict[str, Any]:
    """The config.json of a variant, as transformers writes it, with other entries in vision_config; None: left out."""
    variant = VARIANTS[name]
    config = getattr(transformers, f"{variant.config}Config")(**variant.all_entries()).to_dict()
    kept = {key: value for key, value in {**config["vision_config"], **vision}.items() if value is not None}
    return {**config, "vision_config": kept, "architectures": [f"{variant.config}ForConditionalGeneration"]}


def vision_of(config: ModelConfig) -> VisionConfig:
    assert config.vision is not None
    return config.vision


def axes_of(config: ModelConfig) -> set[tuple[tuple[int, ...], bool]]:
    ropes = [layer.rope for layer in config.layers if layer.rope is not None]
    return {(rope.mrope_section, rope.mrope_interleaved) for rope in ropes}


@pytest.mark.parametrize(
    ("name", "facts", "axes"),
    [
        ("Qwen2-VL-7B-Instruct", (151655, 1280, 3584, 32, 16, 80, 5120, "quick_gelu", 14, None, None), (16, 24, 24)),
        ("Qwen2.5-VL-7B-Instruct", (151655, 1280, 3584, 32, 16, 80, 3420, "silu", 14, None, 4), (16, 24, 24)),
        ("Qwen3-VL-8B-Instruct", (151655, 1152, 4096, 27, 16, 72, 4304, "gelu_tanh", 16, 48, None), (24, 20, 20)),
        ("Qwen3-VL-30B-A3B-Instruct", (151655, 1152, 2048, 27, 16, 72, 4304, "gelu_tanh", 16, 48, None), (24, 20, 20)),
    ],
)
def test_published_files(name: str, facts: tuple[Any, ...], axes: tuple[int, ...]) -> None:
    config = read_config(PUBLISHED[name])
    vision = vision_of(config)
    found = (
        vision.image_token_id, vision.hidden_size, vision.out_hidden_size, vision.num_blocks, vision.num_heads,
        vision.head_dim, vision.intermediate_size, vision.activation, vision.patch_size, vision.positions_per_side,
        vision.window,
    )  # fmt: skip
    assert found == facts
    assert (vision.temporal_patch_size, vision.merge_size) == (2, 2)
    assert vision.deepstack_blocks == ((8, 16, 24) if "Qwen3" in name else ())
    assert vision.full_blocks == ((7, 15, 23, 31) if "2.5" in name else ())
    assert axes_of(config) == {(axes, "Qwen3" in name)}
    assert axes_of(config.without_vision()) == {((), False)}


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_what_is_left_out_is_the_default_of_transformers(family: str) -> None:
    name = ARCHITECTURES[family]
    usual = getattr(transformers, f"{family}Config")().to_dict()["vision_config"]
    usual = {key: value for key, value in usual.items() if value is not None}
    width = "hidden_size" if family == "Qwen2VL" else "out_hidden_size"
    text_size = entries_of(name)["text_config"]["hidden_size"]
    config = entries_of(name) | {"vision_config": {**usual, width: text_size}}
    expected = read_config(config)
    assert expected.vision is not None
    for key in usual.keys() - {width}:
        entries = {other: value for other, value in config["vision_config"].items() if other != key}
        assert read_config({**config, "vision_config": entries}) == expected, key


@pytest.mark.parametrize("name", ARCHITECTURES.values())
def test_text_parts_without_a_description_of_the_encoder_are_as_before(name: str) -> None:
    config = entries_of(name)
    text = read_config({key: value for key, value in config.items() if key != "vision_config"})
    whole = read_config(config)
    assert text.vision is None and axes_of(text) == {((), False)}
    assert whole.without_vision().layers == text.layers
    # A vocabulary that was cut down to tokens of texts.
    assert read_config({**config, "image_token_id": whole.vocab_size}) == text


@pytest.mark.parametrize(
    ("name", "vision", "said"),
    [
        ("qwen3-vl", {"hidden_act": "mish"}, r"vision_config\.hidden_act is 'mish', and must be one of gelu"),
        ("qwen3-vl", {"num_heads": 5}, r"vision_config\.num_heads is 5, and must be a number that cuts the width"),
        ("qwen3-vl", {"num_heads": 24}, r"num_heads is 24, .* \(48\) into multiples of 4"),
        ("qwen3-vl", {"out_hidden_size": 3584}, r"out_hidden_size is 3584, and must be the hidden_size of the text"),
        ("qwen2-vl", {"hidden_size": 5}, r"vision_config\.hidden_size is 5, and must be the hidden_size of the text"),
        ("qwen3.5-multimodal", {"num_position_embeddings": 24}, r"num_position_embeddings is 24, and must be a square"),
        ("qwen3-vl", {"deepstack_visual_indexes": [2, 0]}, r"deepstack_visual_indexes is \[2, 0\], and must be a ris"),
        ("qwen3-vl", {"deepstack_visual_indexes": [3]}, r"a rising list of blocks below depth \(3\)"),
        ("qwen2.5-vl-window", {"window_size": 7}, r"window_size is 7, and must be at least patch_size \* spatial_mer"),
        ("qwen2.5-vl-window", {"in_channels": 1}, r"in_channels is 1, and must be 3: images have three colours"),
        ("qwen2-vl", {"mlp_ratio": 0.001}, r"mlp_ratio is 0\.001, and must be a number that makes the MLP"),
        ("qwen2-vl", {"patch_size": 1000}, r"patch_size is 1000, and must be a whole number from 1 to 256"),
        ("qwen2-vl", {"rope_parameters": {"rope_type": "yarn"}}, r"rope_parameters\.rope_type is 'yarn', and must be"),
        ("qwen2-vl", {"rope_scaling": {"type": "yarn"}}, r"rope_scaling\.type is 'yarn', and must be 'axial'"),
        ("qwen2-vl", {"rope_parameters": None, "rope_theta": 1.0}, r"vision_config\.rope_theta is 1\.0, .* above 1"),
        ("qwen2-vl", {"head_dim": 12}, r"vision_config\.head_dim is 12, and must be 8"),
    ],
)
def test_mistakes_are_named(name: str, vision: dict[str, Any], said: str) -> None:
    read_config(entries_of(name))
    with pytest.raises(ModelLoadError, match=said):
        read_config(entries_of(name, **vision))


@pytest.mark.parametrize(
    "rotation",
    [
        {"rope_theta": 500.0},
        {"rope_parameters": {"rope_type": "axial"}, "rope_theta": 500.0},
        {"rope_parameters": {"rope_theta": 700.0}, "rope_theta": 500.0},
        {"rope_scaling": {"rope_type": "axial"}, "rope_theta": 500.0},
        {"rope_parameters": {"rope_theta": 700.0}, "rope_scaling": {"rope_theta": 500.0}},
    ],
)
@pytest.mark.parametrize("name", ["qwen2-vl", "exaone-4.5", "glm-4.1v"])
def test_the_base_of_the_rotation_may_have_its_old_place(name: str, rotation: dict[str, Any]) -> None:
    config = entries_of(name)
    vision = {key: value for key, value in config["vision_config"].items() if key != "rope_parameters"}
    given = copy.deepcopy(rotation)
    known = getattr(transformers, f"{VARIANTS[name].config}Config")(vision_config={**vision, **rotation})
    expected = known.vision_config.rope_parameters["rope_theta"]
    assert vision_of(read_config({**config, "vision_config": {**vision, **given}})).rope_theta == expected
    assert expected in (500.0, 700.0)


@pytest.mark.parametrize("sections", [[8], [4, 2, 3], [2, 3, 3], [0, 4, 4]])
def test_sections_that_do_not_fit(sections: list[int]) -> None:
    """Two rows and two columns can alternate with four moments; three cannot, as the last one would be pair 8 of 8."""
    config = entries_of("qwen3-vl")
    config["text_config"]["rope_parameters"]["mrope_section"] = sections
    with pytest.raises(ModelLoadError, match=r"mrope_section is .*, and must be three numbers with the sum 8"):
        read_config(config)


def test_the_order_of_the_sections_is_that_of_the_family() -> None:
    for name, flag in (("qwen3-vl", False), ("qwen2-vl", True)):
        config = entries_of(name)
        config["text_config"]["rope_parameters"]["mrope_interleaved"] = flag
        with pytest.raises(ModelLoadError, match=f"mrope_interleaved is {flag}, and must be {not flag}"):
            read_config(config)


def test_a_scaling_of_the_user_keeps_the_sections() -> None:
    scaling = '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}'
    for name in ("qwen3-vl", "qwen2-vl", "qwen3.5-multimodal"):
        config = entries_of(name)
        changed = read_config(config, rope_scaling=scaling)
        assert axes_of(changed) == axes_of(read_config(config)) != {((), False)}
        assert {layer.rope.kind for layer in changed.layers if layer.rope is not None} == {"yarn"}


@pytest.mark.parametrize(
    "name",
    [
        *("Qwen2-VL-7B-Instruct", "Qwen3-VL-8B-Instruct", "Mistral-Small-3.1-24B-Instruct-2503", "gemma-3-4b-it"),
        "gemma-4-E2B",
    ],
)
def test_no_mix_quantizes_the_encoder(name: str) -> None:
    """Its rows would fill the blocks of all of these."""
    config = read_config(PUBLISHED[name])
    tensors = list(model_tensors(config))
    of_vision = [tensor for tensor in tensors if tensor.role == "vision"]
    assert len(of_vision) > 200 and not any(tensor.is_linear for tensor in of_vision)
    for mix in ("q8_0", "q4_k_m", "int4"):
        plan = plan_at_load(mix, config, [tensor.name for tensor in tensors], {})
        assert len(plan.formats) > 7 * config.num_layers
        assert not {tensor.name for tensor in of_vision} & plan.formats.keys()
    assert all(tensor.kept_bytes("bfloat16") == 2 * tensor.num_kept for tensor in of_vision)


def test_the_language_model_alone_needs_no_known_encoder() -> None:
    broken = entries_of("qwen3-vl", hidden_act="none that is known", depth=-1)
    with pytest.raises(ModelLoadError):
        read_config(broken)
    config = read_config(broken, language_model_only=True)
    assert config.vision is None
    assert config == read_config(entries_of("qwen3-vl"), language_model_only=True)
    assert axes_of(config) == {((), False)}
