"""Rotary embeddings read from a config.json, against those that transformers reads from the same file."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, Gemma3TextConfig, LlamaConfig, Phi3Config, PhiConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pagewick.errors import ConfigError, ModelLoadError
from pagewick.layers.config import RopeConfig
from pagewick.layers.rotary import inverse_frequencies
from pagewick.models.entries import Entries
from pagewick.models.registry import read_config
from pagewick.models.rope_entries import override_rope, read_rope
from tests.models.published import PUBLISHED

HEAD_DIM = 24
MAX_POSITION = 4096
SHORT = [1.0 + 0.05 * pair for pair in range(HEAD_DIM // 2)]
LONG = [1.5 + 0.9 * pair for pair in range(HEAD_DIM // 2)]
LONGROPE = {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}
YARN = {"rope_type": "yarn", "factor": 7.0, "original_max_position_embeddings": 600}
DEEPSEEK = {**YARN, "beta_fast": 20, "beta_slow": 0.5, "mscale": 0.9, "mscale_all_dim": 0.6}
LLAMA3 = {"rope_type": "llama3", "factor": 9.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0}
SCALINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "default": {"rope_type": "default"},
    "linear": {"type": "linear", "factor": 2.5},
    "linear-with-its-original-length": {"type": "linear", "factor": 2, "original_max_position_embeddings": 2048},
    "dynamic": {"type": "dynamic", "factor": 3.5},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 700},
    "llama3-of-all-positions": LLAMA3,
    "yarn": YARN,
    "yarn-both-names": {**YARN, "type": "yarn"},
    "yarn-finetuned": {**YARN, "finetuned": True},
    "yarn-by-ratio": {**YARN, "factor": None},
    "yarn-that-shrinks": {**YARN, "factor": 0.5},
    "yarn-of-all-positions": {"rope_type": "yarn", "factor": 3.0},
    "yarn-attention-factor": {**YARN, "attention_factor": 1.77, "mscale": 0.5, "mscale_all_dim": 0.6},
    "yarn-mscale": DEEPSEEK,
    "yarn-mscale-alone": {**YARN, "mscale": 0.9},
    "yarn-mscale-zero": {**YARN, "mscale": 0.9, "mscale_all_dim": 0},
    "yarn-untruncated": {**YARN, "truncate": False},
    "longrope": {**LONGROPE, "original_max_position_embeddings": 512},
    "longrope-factor": {**LONGROPE, "original_max_position_embeddings": 512, "factor": 5.0},
    "longrope-attention-factor": {**LONGROPE, "original_max_position_embeddings": 512, "attention_factor": 1.4},
    "longrope-of-all-positions": LONGROPE,
}


def file_of(scaling: dict[str, Any], *, new: bool, **entries: Any) -> dict[str, Any]:
    """The config after a round trip through JSON."""
    config: dict[str, Any] = {"max_position_embeddings": MAX_POSITION, "head_dim": HEAD_DIM, **entries}
    if new:
        config["rope_parameters"] = {"rope_type": scaling.get("type", "default"), "rope_theta": 7777.5, **scaling}
    else:
        config |= {"rope_theta": 7777.5, "rope_scaling": scaling or None}
    return dict(json.loads(json.dumps(config)))


def read(config: dict[str, Any] | Any, **options: Any) -> RopeConfig:
    options = {"head_dim": HEAD_DIM, "max_position_embeddings": MAX_POSITION, **options}
    return read_rope(Entries(config), **options)


def agree(found: RopeConfig, config: PreTrainedConfig, layer_type: str | None = None) -> None:
    """Frequencies and attention factor are those of transformers, to the bit."""
    parameters = config.rope_parameters[layer_type] if layer_type else config.rope_parameters
    assert found.kind == parameters["rope_type"]
    assert found.theta == parameters["rope_theta"]
    if found.kind == "default":
        dim = found.rotary_dim
        expected = 1.0 / (parameters["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim))
        assert torch.equal(inverse_frequencies(found), expected)
        return
    for is_long in (False, True) if found.kind == "longrope" else (False,):
        length = parameters.get("original_max_position_embeddings", 0) + 1 if is_long else None
        function = ROPE_INIT_FUNCTIONS[found.kind]
        frequencies, attention_factor = function(config, torch.device("cpu"), length, layer_type=layer_type)
        assert torch.equal(inverse_frequencies(found, is_long=is_long), frequencies)
        assert found.attention_factor == attention_factor


@pytest.mark.parametrize("new", [False, True], ids=["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", SCALINGS)
def test_both_spellings_mean_what_they_mean_to_transformers(name: str, new: bool) -> None:
    config = file_of(SCALINGS[name], new=new, hidden_size=4 * HEAD_DIM, num_attention_heads=4)
    found = read(config)
    agree(found, LlamaConfig(**copy.deepcopy(config)))
    assert found.rotary_dim == HEAD_DIM
    assert not found.interleaved
    assert hash(found) == hash(read(config))


def test_what_transformers_saves_is_read_back() -> None:
    for scaling in SCALINGS.values():
        theirs = LlamaConfig(**file_of(scaling, new=False, hidden_size=96, num_attention_heads=4))
        saved = json.loads(theirs.to_json_string(use_diff=False))
        assert "rope_parameters" in saved
        agree(read(saved), theirs)


@pytest.mark.parametrize("new", [False, True], ids=["rope_scaling", "rope_parameters"])
def test_attn_factor_multiplies_yarns_factor(new: bool) -> None:
    """It is not attention_factor, which replaces the factor; transformers knows only that one."""
    plain = read(file_of(DEEPSEEK, new=new)).attention_factor
    changed = read(file_of({**DEEPSEEK, "attn_factor": 0.7, "extrapolation_factor": 1}, new=new))
    assert changed.attention_factor == pytest.approx(0.7 * plain)
    assert changed.mscale_all_dim == DEEPSEEK["mscale_all_dim"]


def test_dynamic_leaves_all_positions_of_the_file_alone() -> None:
    found = read(file_of({"type": "dynamic", "factor": 3.5}, new=False))
    assert (found.original_max_position_embeddings, found.factor) == (MAX_POSITION, 3.5)
    read(file_of({"type": "dynamic", "factor": 3.5, "original_max_position_embeddings": MAX_POSITION}, new=False))
    with pytest.raises(ModelLoadError, match=r"rope_scaling\.original_max_position_embeddings is 2048, .*\(4096\)"):
        read(file_of({"type": "dynamic", "factor": 3.5, "original_max_position_embeddings": 2048}, new=False))


@pytest.mark.parametrize("partial", [1.0, 0.75])
@pytest.mark.parametrize("name", ["su", "longrope"])
def test_phi3_has_the_original_length_beside_the_scaling(name: str, partial: float) -> None:
    pairs = int(HEAD_DIM * partial) // 2
    scaling = {"type": name, "short_factor": SHORT[:pairs], "long_factor": LONG[:pairs]}
    beside = {"original_max_position_embeddings": 128, "partial_rotary_factor": partial}
    config = file_of(scaling, new=False, hidden_size=96, num_attention_heads=4, **beside)
    found = read(config)
    assert found.attention_factor == math.sqrt(1 + math.log(MAX_POSITION / 128) / math.log(128))
    assert (found.factor, found.rotary_dim) == (32.0, 2 * pairs)
    # transformers knows su in its own way; the numbers are the same.
    config["rope_scaling"]["type"] = "longrope"
    theirs = Phi3Config(**copy.deepcopy(config))
    agree(found, theirs)
    agree(read(json.loads(theirs.to_json_string(use_diff=False))), theirs)


def test_partial_rotation_in_each_spelling() -> None:
    for spelling in ({"partial_rotary_factor": 0.5}, {"rotary_pct": 0.5}):
        assert read(file_of({}, new=False, **spelling)).rotary_dim == 12
    assert read(file_of({"partial_rotary_factor": 0.25}, new=True)).rotary_dim == 6
    assert read({}, default_partial_rotary_factor=0.34).rotary_dim == 8
    assert read(file_of({}, new=False, partial_rotary_factor=0.5), rotary_dim=10).rotary_dim == 10
    theirs = PhiConfig(hidden_size=96, num_attention_heads=4, partial_rotary_factor=0.5)
    assert read(json.loads(theirs.to_json_string(use_diff=False))).rotary_dim == 12


@pytest.mark.parametrize("partial", [0.0, 1.01, 0.01, 0.3])
def test_a_part_of_a_head_that_cannot_be_rotated_is_refused(partial: float) -> None:
    with pytest.raises(ModelLoadError, match=f"config.json: partial_rotary_factor is {partial}, and must be"):
        read({"partial_rotary_factor": partial})


def test_deepseeks_numbers() -> None:
    config = {"qk_rope_head_dim": HEAD_DIM, "qk_nope_head_dim": 10, "num_attention_heads": 4, "hidden_size": 60}
    config |= {"rope_theta": 7777.5, "rope_scaling": {**DEEPSEEK, "type": "yarn"}, "max_position_embeddings": 4096}
    found = read(config, interleaved=True)
    assert found.interleaved
    assert found.mscale_all_dim == 0.6
    agree(found, DeepseekV3Config(**copy.deepcopy(config)))


GEMMA = {"hidden_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 4}
GEMMA_ROPES = {
    "bare": {},
    "old": {"rope_theta": 5e5, "rope_local_base_freq": 300.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "new": {
        "rope_parameters": {
            "full_attention": {**YARN, "rope_theta": 4e5},
            "sliding_attention": {"rope_type": "linear", "rope_theta": 400.0, "factor": 2.0},
        }
    },
    "new-with-one": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 4e5}}},
}


@pytest.mark.parametrize("name", GEMMA_ROPES)
def test_layer_types_have_ropes_of_their_own(name: str) -> None:
    config = {**GEMMA, **GEMMA_ROPES[name], "head_dim": HEAD_DIM, "max_position_embeddings": MAX_POSITION}
    theirs = Gemma3TextConfig(**copy.deepcopy(config))
    for file in (config, json.loads(theirs.to_json_string(use_diff=False))):
        for layer_type, theta in (("full_attention", 1e6), ("sliding_attention", 1e4)):
            agree(read(file, layer_type=layer_type, default_theta=theta), theirs, layer_type)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"type": "ntk-by-parts"}, r"rope_scaling\.type is 'ntk-by-parts', .* yarn, longrope: other"),
    "kind-not-a-string": ({"rope_type": 3}, r"rope_scaling\.rope_type is 3, and must be a string"),
    "kind-missing": ({"factor": 2.0}, r"rope_scaling\.rope_type is missing"),
    "kinds": ({"rope_type": "default", "type": "linear"}, r"rope_scaling\.type is 'linear', .* rope_type, default"),
    "mrope": ({"type": "mrope", "mrope_section": [16, 24, 24]}, r"rope_scaling\.type is 'mrope'"),
    "mrope-section": ({"type": "default", "mrope_section": [2]}, r"rope_scaling\.mrope_section is \[2\], .* left out"),
    "key-of-another-kind": ({"type": "linear", "factor": 2, "beta_fast": 3}, r"rope_scaling\.beta_fast is 3"),
    "unknown-key": ({**YARN, "llama_4_scaling_beta": 0.1}, r"rope_scaling\.llama_4_scaling_beta is 0\.1"),
    "no-factor": ({"type": "linear"}, r"rope_scaling\.factor is missing"),
    "factor": ({"type": "dynamic", "factor": -1}, r"rope_scaling\.factor is -1, and must be a number above 0"),
    "dynamic-factor": (
        {"type": "dynamic", "factor": 0.99},
        r"rope_scaling\.factor is 0\.99, and must be a number from 1 with dynamic rope",
    ),
    "infinite": ({"type": "linear", "factor": math.inf}, r"rope_scaling\.factor is inf"),
    "llama3": ({**LLAMA3, "high_freq_factor": 1.5}, r"high_freq_factor is 1\.5, .* above low_freq_factor \(1\.5\)"),
    "llama3-factor": ({"type": "llama3", "low_freq_factor": 1, "high_freq_factor": 2}, r"factor is missing"),
    "betas": ({**YARN, "beta_fast": 0.5}, r"beta_fast is 0\.5, and must be at least beta_slow \(1\.0\)"),
    "fast": ({**YARN, "beta_fast": 1e308}, r"beta_fast is 1e\+308, and must be at most 1000000000\.0"),
    "slow": ({**YARN, "beta_slow": 5e-324}, r"beta_slow is 5e-324, and must be at least 1e-09"),
    "mscale": ({**YARN, "mscale": -0.1}, r"mscale is -0\.1, and must be a number from 0"),
    "attn-factor": ({**YARN, "attn_factor": 0}, r"attn_factor is 0, and must be a number above 0"),
    "both-factors": ({**YARN, "attn_factor": 0.7, "attention_factor": 1}, r"attn_factor is 0\.7, .* left out beside"),
    "extrapolation": ({**YARN, "extrapolation_factor": 0.5}, r"extrapolation_factor is 0\.5, and must be 1"),
    "truncate": ({**YARN, "truncate": "no"}, r"truncate is 'no', and must be true or false"),
    "original": ({**YARN, "original_max_position_embeddings": 1}, r"embeddings is 1, .* whole number above 1"),
    "no-long": ({"type": "longrope", "short_factor": SHORT}, r"long_factor is missing, and must be a list"),
    "zero": ({**LONGROPE, "short_factor": [0.0] * 12}, r"short_factor is \[0\.0, .* numbers above 0"),
    "lengths": (
        {**LONGROPE, "long_factor": LONG[:-1]},
        r"long_factor has 11 numbers, and must have 12: half of the 24",
    ),
    "theta": (
        {"rope_type": "default", "rope_theta": 1},
        r"rope_scaling\.rope_theta is 1, and must be a number above 1",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_implemented_or_impossible_is_named(name: str) -> None:
    scaling, message = WRONG[name]
    with pytest.raises(ModelLoadError, match=f"config.json: .*{message}"):
        read({"rope_scaling": scaling})
    with pytest.raises(ModelLoadError, match=message.replace("rope_scaling", "rope_parameters")):
        read({"rope_parameters": scaling})


def test_contradictions_are_named() -> None:
    for config, message in (
        ({"rope_scaling": [1]}, r"rope_scaling is \[1\], and must be an object"),
        ({"rope_theta": "big"}, r"rope_theta is 'big'"),
        ({"rope_scaling": YARN, "original_max_position_embeddings": 500}, r"is 500, and must be the same .*\(600\)"),
        (
            {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}},
            r"rope_scaling is .* rope_type 'default'",
        ),
        ({"rope_parameters": {"full_attention": YARN}}, "rope_parameters is .* all layers rotate alike"),
    ):
        with pytest.raises(ModelLoadError, match=message):
            read(config)
    with pytest.raises(ModelLoadError, match=r"rope_parameters is .* such as full_attention"):
        read({"rope_parameters": YARN}, layer_type="full_attention")
    with pytest.raises(ModelLoadError, match="dynamic rope needs at least 4 rotated values"):
        read({"rope_scaling": {"type": "dynamic", "factor": 2}}, rotary_dim=2)


@pytest.mark.parametrize("new", [False, True], ids=["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", SCALINGS)
def test_the_users_scaling_replaces_the_files(name: str, new: bool) -> None:
    """The user's setting acts as if the file had it, whatever the file had before."""
    scaling = SCALINGS[name]
    if not scaling:
        return
    expected = read(file_of(scaling, new=new, partial_rotary_factor=1.0))
    for before in SCALINGS.values():
        config = file_of(before, new=new, partial_rotary_factor=1.0)
        untouched = copy.deepcopy(config)
        assert read(override_rope(config, scaling, None)) == expected
        assert config == untouched


@pytest.mark.parametrize("new", [False, True], ids=["rope_scaling", "rope_parameters"])
def test_the_users_theta_replaces_the_files(new: bool) -> None:
    for scaling in (*SCALINGS.values(), {"type": "linear", "factor": 2.0, "rope_theta": 9.5}):
        config = file_of(scaling, new=new)
        before, after = read(config), read(override_rope(config, None, 123.0))
        assert after.theta == 123.0
        assert (after.kind, after.factor) == (before.kind, before.factor)
        assert read(override_rope(config, DEEPSEEK, 123.0)) == read(file_of({**DEEPSEEK, "rope_theta": 123.0}, new=new))
    config = file_of({}, new=new)
    assert override_rope(config, None, None) is config
    assert read(override_rope(config, {**YARN, "rope_theta": 55.0}, 55.0)).theta == 55.0
    assert read(override_rope({}, None, 55.0)).theta == 55.0


def test_the_users_original_length_counts_beside_the_scaling_too() -> None:
    config = file_of(LONGROPE, new=False, original_max_position_embeddings=128)
    found = read(override_rope(config, YARN, None))
    assert (found.kind, found.original_max_position_embeddings) == ("yarn", 600)
    found = read(override_rope(config, {**LONGROPE, "long_factor": SHORT}, None))
    assert (found.long_factor, found.original_max_position_embeddings) == (tuple(SHORT), 128)


def test_the_users_scaling_leaves_no_trace_of_another() -> None:
    linear = {"rope_type": "linear", "factor": 2.0}
    partial = {**linear, "partial_rotary_factor": 0.5}
    both = override_rope({"rope_scaling": linear, "rope_parameters": partial}, YARN, None)
    assert read(both) == read({"rope_scaling": YARN, "partial_rotary_factor": 0.5})
    assert read(override_rope({"rope_scaling": partial}, {"type": "default"}, None)).rotary_dim == 12
    sliding_alone = override_rope({"rope_parameters": {"sliding_attention": linear}}, YARN, None)
    assert read(sliding_alone, layer_type="full_attention").kind == "yarn"


@pytest.mark.parametrize("name", GEMMA_ROPES)
@pytest.mark.parametrize("nested", [False, True])
def test_sliding_layers_and_other_parts_keep_theirs(name: str, nested: bool) -> None:
    config: dict[str, Any] = {**GEMMA_ROPES[name], "original_max_position_embeddings": None}
    whole = {"text_config": config, "rope_theta": 3.0} if nested else config
    changed = override_rope(whole, YARN, 44.0)
    if nested:
        assert changed["rope_theta"] == 3.0
        changed = changed["text_config"]
    full = read(changed, layer_type="full_attention")
    assert (full.kind, full.theta, full.factor) == ("yarn", 44.0, 7.0)
    sliding = {"layer_type": "sliding_attention", "default_theta": 1e4}
    assert read(changed, **sliding) == read(config, **sliding)


@pytest.mark.parametrize("name", [name for name in WRONG if name not in ("lengths",)])
def test_a_users_scaling_that_makes_no_sense_is_refused(name: str) -> None:
    scaling, message = WRONG[name]
    message = message.replace(r"rope_scaling\.", "")
    with pytest.raises(ConfigError, match=f"--rope-scaling: .*{message}"):
        override_rope(file_of({}, new=True), scaling, None)


def test_a_users_theta_that_makes_no_sense_is_refused() -> None:
    for theta in (0.0, 1.0, -3.0, math.nan, math.inf, True):
        with pytest.raises(ConfigError, match=r"--rope-theta is .*, and must be a number above 1"):
            override_rope({}, None, theta)
    with pytest.raises(ConfigError, match=r"--rope-theta is 5\.0, but --rope-scaling has rope_theta 6\.0"):
        override_rope({}, {**YARN, "rope_theta": 6.0}, 5.0)
    with pytest.raises(ConfigError, match=r"--rope-scaling is \[\], and must be an object"):
        override_rope({}, [], None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--rope-scaling: rope_type is missing"):
        override_rope({}, {}, None)


@pytest.mark.parametrize(
    ("rotation", "theta"),
    [
        ({}, 10000.0),
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_theta": None}, None),
        ({"rope_parameters": None}, None),
        ({"rope_parameters": None, "rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_type": "default"}}, 10000.0),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": None}, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, None),
        ({"rope_parameters": {"rope_type": None}}, None),
    ],
)
def test_olmo_hybrid_rotates_nothing_where_its_file_has_a_null(rotation: dict[str, Any], theta: float | None) -> None:
    values = {name: value for name, value in PUBLISHED["Olmo-Hybrid-7B"].items() if name != "rope_parameters"}
    rope = read_config({**values, **rotation}).layers[3].rope
    assert (None if rope is None else rope.theta) == theta
