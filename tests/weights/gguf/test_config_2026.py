"""Keys of files of models of 2026, and what is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewick.cli.quantizing.metadata import metadata_of
from pagewick.errors import ModelLoadError
from pagewick.layers.config import MlaConfig, MoeConfig
from pagewick.layers.state_config import DeltaConfig
from pagewick.models.parts import AttentionConfig, LayerConfig, MlpConfig
from pagewick.models.registry import read_config
from pagewick.weights.gguf.checkpoint import open_gguf
from pagewick.weights.gguf.source import GgufSource
from tests.weights.gguf.mixes import Numbers, rewrite
from tests.weights.gguf.models import write_file
from tests.weights.gguf.test_config import SHAPES, config_of
from tests.weights.gguf.test_export import checkpoint_of, refusal
from tests.weights.gguf.written import write

DELTA: dict[str, Any] = {
    "block_count": 4, "attention.head_count_kv": [0, 0, 1, 0], "attention.key_length_mla": 24,
    "rope.dimension_count": 8,
    "attention.value_length_mla": 12, "attention.kv_lora_rank": 16, "expert_count": 4, "expert_used_count": 2,
    "expert_feed_forward_length": 32, "leading_dense_block_count": 1, "ssm.conv_kernel": 3, "kda.head_dim": 20,
}  # fmt: skip
LING = {**DELTA, "kda.gate_lower_bound": -2.0, "nextn_predict_layers": 1, "rope.freq_base": 5e3, "block_count": 5}
LING["attention.head_count_kv"] = [0, 0, 1, 0, 1]


def complaint_of(kind: str, keys: dict[str, Any], shapes: dict[str, tuple[int, ...]] = SHAPES) -> str:
    with pytest.raises(ModelLoadError) as refused:
        read_config(config_of(keys, kind, shapes))
    return str(refused.value)


@pytest.mark.parametrize(
    ("kind", "key", "value", "complaint"),
    [
        ("hy_v3", "block_count", 2**31 - 1, "2147483647, and must be a whole number from 1 to 1000"),
        ("qwen3", "block_count", False, "False, and must be a whole number from 1 to 1000"),
        ("qwen3", "block_count", [[4]], r"\[4\], and must be a number"),
        ("bailingmoe3", "nextn_predict_layers", 5, r"5, and must be below block_count \(5\)"),
        ("bailingmoe3", "nextn_predict_layers", -1, "-1, and must be a whole number from 0 to 1000"),
        ("bailingmoe3", "expert_feed_forward_length", "x", "'x', and must be a number"),
        ("kimi-linear", "attention.head_count_kv", ["x", 0, 1, 0, 1], "'x', and must be a number"),
        ("qwen3", "rope.dimension_count", math.nan, "nan, and must be a number"),
        ("qwen3", "rope.scaling.type", 5, "5, and must be a text"),
    ],
)
def test_keys_of_the_wrong_type_are_named(kind: str, key: str, value: Any, complaint: str) -> None:
    experts = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
    keys = LING if kind in ("bailingmoe3", "kimi-linear") else experts
    assert re.search(f"{kind}.{key} is {complaint}", complaint_of(kind, {**keys, key: value}))


def test_there_are_as_many_key_heads_as_query_heads_if_no_key_says_it() -> None:
    """As in llama.cpp, and as the rows of files are then read."""
    for kind in ("glm4", "falcon"):
        keys = {"attention.head_count_kv": None, "attention.layer_norm_epsilon": 1e-5}
        assert read_config(config_of(keys, kind)).num_kv_heads == 4
    assert "falcon.attention.head_count_kv is True" in complaint_of(
        "falcon", {"attention.head_count_kv": True, "attention.layer_norm_epsilon": 1e-5}
    )


def test_layers_of_ling_3() -> None:
    model = read_config(config_of(LING, "bailingmoe3"))
    assert [type(layer.attention) for layer in model.layers] == [DeltaConfig, DeltaConfig, MlaConfig, DeltaConfig]
    (delta,) = set(model.deltas)
    assert (delta.num_value_heads, delta.value_dim, delta.conv_size, delta.decay_bound) == (4, 20, 3, -2.0)
    latent = model.layers[2].attention
    assert isinstance(latent, MlaConfig) and (latent.qk_nope_head_dim, latent.v_head_dim) == (16, 12)
    assert latent.q_lora_rank is None and latent.has_head_gates and model.layers[2].rope is not None
    assert isinstance(model.layers[0].mlp, MlpConfig)
    moe = model.layers[1].mlp
    assert isinstance(moe, MoeConfig) and (moe.shared_intermediate_size, moe.activation) == (32, "silu")
    # As in llama.cpp, there are no groups unless a file has them.
    assert (moe.routing.num_groups, moe.routing.top_k_groups) == (1, 1)


def test_bounds_of_ling_3() -> None:
    """A file has a number for each layer, those that predict later tokens included; 0 is none."""
    keys = {**LING, "swiglu_clamp_exp": [0.0, 0.0, 5.0, 4.0, 7.0], "swiglu_clamp_shexp": [0.0, 0.0, 0.0, 7.0, 3.0]}
    mlps = [layer.mlp for layer in read_config(config_of(keys, "bailingmoe3")).layers]
    assert [mlp.activation for mlp in mlps if mlp] == ["silu", "silu", "silu_within5", "silu_within4"]
    assert [mlp.shared_activation for mlp in mlps if isinstance(mlp, MoeConfig)] == ["silu", "silu", "silu_within7"]
    found = complaint_of("bailingmoe3", {**LING, "swiglu_clamp_exp": [0.0, 6.0, 0.0, 0.0, 0.0]})
    assert "expert_swiglu_limit_list is [0.0, 6.0, 0.0, 0.0]" in found
    # llama.cpp bounds the MLPs of such layers by it.
    found = complaint_of("bailingmoe3", {**LING, "swiglu_clamp_shexp": [7.0, 0.0, 0.0, 0.0, 0.0]})
    assert "share_expert_swiglu_limit_list is [7.0, 0.0, 0.0, 0.0]" in found


def test_bounds_of_the_later_layer_of_ling_3() -> None:
    """Models can be used without it if they are not supported."""
    keys = {**LING, "swiglu_clamp_exp": [0.0, 0.0, 5.0, 4.0, 7.0], "swiglu_clamp_shexp": [0.0, 0.0, 0.0, 7.0, 3.0]}
    assert read_config(config_of(keys, "bailingmoe3")).mtp is None
    keys["swiglu_clamp_shexp"][4] = 4.0
    entries = config_of(keys, "bailingmoe3")
    mtp = read_config(entries).mtp
    assert mtp is not None and isinstance(mtp.own, LayerConfig) and isinstance(mtp.own.mlp, MoeConfig)
    assert (mtp.own.mlp.activation, mtp.own.mlp.shared_activation) == ("silu_within7", "silu_within4")
    values, _ = metadata_of(entries, has_mtp=True)
    assert values["bailingmoe3.block_count"] == 5
    assert {key: values[f"bailingmoe3.{key}"] for key in keys if "clamp" in key} == {
        key: bounds for key, bounds in keys.items() if "clamp" in key
    }
    assert len(metadata_of(entries)[0]["bailingmoe3.swiglu_clamp_exp"]) == 4


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"expert_gating_func": 1}, "bailingmoe3.expert_gating_func is 1, which is not supported"),
        ({"attention.head_count_kv": [0, 0, 2, 0, 1]}, "bailingmoe3.attention.head_count_kv is [0, 0, 2, 0], and must"),
        ({"attention.head_count_kv": [0, 0, 0, 0, 1]}, "bailingmoe3.attention.head_count_kv is [0, 0, 0, 0], and must"),
        ({"expert_shared_feed_forward_length": 40}, "bailingmoe3.expert_shared_feed_forward_length is not a multiple"),
        # Ling 3.0 flash VL.
        ({"rope.dimension_sections": [2, 1, 1, 0]}, "bailingmoe3.rope.dimension_sections is [2, 1, 1, 0], which is"),
        ({"swiglu_clamp_exp": [0.0]}, "bailingmoe3.swiglu_clamp_exp is a list of 1, and must have one for each layer"),
    ],
)
def test_what_is_refused_of_ling_3(keys: dict[str, Any], complaint: str) -> None:
    assert f"m.gguf: {complaint}" in complaint_of("bailingmoe3", {**LING, **keys})


def test_ling_3_with_decays_that_have_no_bound_is_not_written(tmp_path: Path) -> None:
    model = checkpoint_of("ling-3-flash", tmp_path / "m")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "kda_safe_gate": False}))
    assert "with decays that have no bound (kda_safe_gate false) has no form in GGUF files" in refusal(model, tmp_path)


def test_layers_of_kimi_linear() -> None:
    model = read_config(config_of(DELTA, "kimi-linear"))
    assert [type(layer.attention) for layer in model.layers] == [DeltaConfig, DeltaConfig, MlaConfig, DeltaConfig]
    assert {layer.rope for layer in model.layers} == {None}
    (delta,) = set(model.deltas)
    assert (delta.num_value_heads, delta.value_dim, delta.gate_rank, delta.decay_bound) == (4, 20, 20, None)
    routing = model.mixtures[0].routing
    assert (routing.num_groups, routing.top_k_groups, routing.renormalize) == (1, 1, True)
    keys = {**DELTA, "expert_group_count": 2, "expert_group_used_count": 1, "expert_weights_scale": 2.5}
    routing = read_config(config_of(keys, "kimi-linear")).mixtures[0].routing
    assert (routing.num_groups, routing.top_k_groups, routing.scaling) == (2, 1, 2.5)
    found = complaint_of("kimi-linear", {**DELTA, "attention.head_count_kv": 1, "expert_gating_func": 1})
    assert "m.gguf: kimi-linear.expert_gating_func is 1, which is not supported" in found


def test_kimi_linear_with_weights_that_are_not_normalised_is_not_written(tmp_path: Path) -> None:
    model = checkpoint_of("kimi-linear", tmp_path / "m")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "moe_renormalize": False}))
    assert "have no key for what config.json says: moe_renormalize false" in refusal(model, tmp_path)


STEP: dict[str, Any] = {
    "block_count": 4, "attention.head_count": [4, 6, 6, 4], "attention.head_count_kv": [2, 2, 2, 2],
    "attention.key_length": 16, "attention.value_length": 16, "attention.sliding_window": 24,
    "attention.sliding_window_pattern": [False, True, True, False, True], "expert_count": 4, "expert_used_count": 2,
    "expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 40, "rope.freq_base": 5e3,
    "rope.freq_base_swa": 1e3,
}  # fmt: skip
SPARSE = {**SHAPES, **{f"blk.{layer}.ffn_gate_inp.weight": (4, 64) for layer in (1, 3, 4)}}


def test_layers_of_step_3_5() -> None:
    """Layers that predict further tokens have entries in lists, too."""
    heads = {"attention.head_count": [4, 6, 6, 4, 6], "attention.head_count_kv": [2] * 5}
    keys = {**STEP, **heads, "block_count": 5, "nextn_predict_layers": 1, "expert_weights_scale": 2.5}
    bounds = {"swiglu_clamp_exp": [0.0, 7.0, 0.0, 0.0, 0.0], "swiglu_clamp_shexp": [16.0, 0.0, 0.0, 7.0, 0.0]}
    model = read_config(config_of({**keys, **bounds}, "step35", SPARSE))
    attentions = [layer.attention for layer in model.layers if isinstance(layer.attention, AttentionConfig)]
    assert [attention.num_heads for attention in attentions] == [4, 6, 6, 4]
    assert {(one.num_kv_heads, one.head_dim, one.qkv_bias) for one in attentions} == {(2, 16, False)}
    assert [layer.window for layer in model.layers] == [None, 24, 24, None]
    # Half of a head turns in layers that see everything.
    ropes = [layer.rope for layer in model.layers if layer.rope is not None]
    assert [(rope.theta, rope.rotary_dim) for rope in ropes] == [(5e3, 8), (1e3, 16), (1e3, 16), (5e3, 8)]
    mlps = [layer.mlp for layer in model.layers]
    assert [mlp.activation for mlp in mlps if mlp] == ["silu_within16", "silu_within7", "silu", "silu"]
    assert isinstance(mlps[2], MlpConfig) and isinstance(mlps[3], MoeConfig)
    assert (mlps[3].shared_activation, mlps[3].shared_intermediate_size) == ("silu_within7", 40)
    assert mlps[3].routing.scaling == 2.5 and mlps[3].routing.renormalize
    turned = read_config(config_of({**STEP, "rope.dimension_count": 8, "rope.dimension_count_swa": 12}, "step35"))
    assert [layer.rope.rotary_dim for layer in turned.layers if layer.rope] == [4, 12, 12, 4]


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"attention.head_count": [4, 6, 8, 4]}, "step35.attention.head_count is different in layers that see as much"),
        ({"attention.head_count": None}, "step35.attention.head_count is missing"),
        ({"attention.head_count_kv": [2, 1, 1, 2]}, "step35.attention.head_count_kv is different in each layer"),
        ({"attention.sliding_window_pattern": None}, "step35.attention.sliding_window_pattern is missing"),
        ({"expert_weights_norm": False}, "step35.expert_weights_norm is false, which is not supported"),
        ({"expert_gating_func": 1}, "step35.expert_gating_func is 1, which is not supported"),
        ({"attention.value_length": 8}, "step35.attention.value_length is another than key_length, which is not"),
    ],
)
def test_what_is_refused_of_step_3_5(keys: dict[str, Any], complaint: str) -> None:
    assert f"m.gguf: {complaint}" in complaint_of("step35", {**STEP, **keys})


MIMO: dict[str, Any] = {
    **{key: value for key, value in STEP.items() if "shared" not in key},
    "attention.head_count": 4, "attention.head_count_kv": [1, 2, 2, 1], "attention.value_length": 12,
    "attention.value_scale": 0.5, "rope.dimension_count": 6, "expert_group_count": 2, "expert_group_used_count": 1,
}  # fmt: skip


def test_layers_of_mimo_v2_flash() -> None:
    sinks = {f"blk.{layer}.attn_sinks.weight": (4,) for layer in (1, 2)}
    model = read_config(config_of(MIMO, "mimo2", {**SPARSE, **sinks}))
    attentions = [layer.attention for layer in model.layers if isinstance(layer.attention, AttentionConfig)]
    assert [(one.num_kv_heads, one.has_sinks) for one in attentions] == [(1, False), (2, True), (2, True), (1, False)]
    assert {(one.num_heads, one.head_dim, one.value_dim, one.value_scale) for one in attentions} == {(4, 16, 12, 0.5)}
    # The number in files does not count the new token itself.
    assert [layer.window for layer in model.layers] == [None, 25, 25, None]
    ropes = [layer.rope for layer in model.layers if layer.rope is not None]
    assert [(rope.theta, rope.rotary_dim) for rope in ropes] == [(5e3, 6), (1e3, 6), (1e3, 6), (5e3, 6)]
    assert [isinstance(layer.mlp, MoeConfig) for layer in model.layers] == [False, True, False, True]
    routing = model.mixtures[0].routing
    assert (routing.num_groups, routing.top_k_groups, routing.renormalize, routing.scaling) == (2, 1, True, 1.0)


FUSED = {**SHAPES, "blk.0.attn_qkv.weight": (96, 64)}


@pytest.mark.parametrize(
    ("keys", "shapes", "complaint"),
    [
        ({"attention.value_scale": None}, SHAPES, "mimo2.attention.value_scale is missing"),
        ({"attention.head_count_kv": [1, 2, 4, 1]}, SHAPES, "mimo2.attention.head_count_kv is different in layers"),
        ({"expert_weights_scale": 2.5}, SHAPES, "mimo2.expert_weights_scale is 2.5, which is not supported"),
        # MiMo-V2.5.
        (
            {},
            FUSED,
            "holds blk.0.attn_qkv.weight: queries, keys and values in one tensor are not supported in files of",
        ),
    ],
)
def test_what_is_refused_of_mimo_v2_flash(
    keys: dict[str, Any], shapes: dict[str, tuple[int, ...]], complaint: str
) -> None:
    assert complaint in complaint_of("mimo2", {**MIMO, **keys}, shapes)


LAGUNA: dict[str, Any] = {
    **{key: value for key, value in STEP.items() if "pattern" not in key},
    "block_count": 5, "attention.head_count": [4, 6, 8, 6, 4], "attention.head_count_kv": 2,
    "leading_dense_block_count": 2, "rope.dimension_count": 8, "rope.dimension_count_swa": 12,
}  # fmt: skip


def test_layers_of_laguna() -> None:
    gates = {**SHAPES, "blk.0.attn_gate.weight": (4, 64)}
    model = read_config(config_of(LAGUNA, "laguna", gates))
    attentions = [layer.attention for layer in model.layers if isinstance(layer.attention, AttentionConfig)]
    assert [attention.num_heads for attention in attentions] == [4, 6, 8, 6, 4]
    assert {(one.num_kv_heads, one.has_head_gates, one.has_number_gates) for one in attentions} == {(2, True, False)}
    assert [layer.window for layer in model.layers] == [None, 24, 24, 24, None]
    assert [layer.rope.rotary_dim for layer in model.layers if layer.rope] == [8, 12, 12, 12, 8]
    assert [isinstance(layer.mlp, MoeConfig) for layer in model.layers] == [False, False, True, True, True]
    for pattern, windows in (
        (3, [None, 24, 24, None, 24]),
        ([True, False, True, False, False], [24, None, 24, None, None]),
    ):
        told = read_config(config_of({**LAGUNA, "attention.sliding_window_pattern": pattern}, "laguna", gates))
        assert [layer.window for layer in told.layers] == windows
    for window in (None, 0):
        keys = {**LAGUNA, "attention.sliding_window": window, "attention.head_count": 4}
        model = read_config(config_of(keys, "laguna", {**SHAPES, "blk.0.attn_gate.weight": (64, 64)}))
        assert {layer.window for layer in model.layers} == {None}
        attention = model.attention
        assert isinstance(attention, AttentionConfig) and (attention.has_head_gates, attention.num_heads) == (False, 4)
        assert attention.has_number_gates


def test_what_is_refused_of_laguna() -> None:
    for keys, complaint in (
        ({"expert_weights_norm": False}, "laguna.expert_weights_norm is false, which is not supported"),
        ({"attention.head_count": None}, "laguna.attention.head_count is missing"),
        ({"attention.value_length": 8}, "laguna.attention.value_length is another than key_length"),
        ({"leading_dense_block_count": None}, "laguna.leading_dense_block_count is missing"),
    ):
        assert f"m.gguf: {complaint}" in complaint_of("laguna", {**LAGUNA, **keys})


def test_laguna_with_windows_in_other_layers_says_so(tmp_path: Path) -> None:
    model = checkpoint_of("laguna-xs", tmp_path / "m")
    config = json.loads((model / "config.json").read_text())
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    (model / "config.json").write_text(json.dumps({**config, "layer_types": kinds}))
    found = open_gguf(write(model, tmp_path / "out.gguf", "f32"))
    assert found.values["laguna.attention.sliding_window_pattern"] == [True, False, True, False]
    assert [layer.window for layer in read_config(found.config).layers] == [21, None, 21, None]


def without_first_sizes(name: str, numbers: Numbers) -> Iterator[tuple[str, Numbers, str]]:
    """Tensors without their first dimensions that are 1, as llama.cpp's own programs store them."""
    while numbers.ndim > 2 and numbers.shape[0] == 1:
        numbers = numbers[0]
    yield name, numbers, "F32"


@pytest.mark.parametrize("name", ["ling-3-flash", "kimi-linear"])
def test_files_of_llama_cpp_have_fewer_dimensions(name: str, tmp_path: Path) -> None:
    path = write_file(name, tmp_path)
    other = rewrite(path, tmp_path / "other.gguf", without_first_sizes)
    with GgufSource(path) as expected, GgufSource(other) as found:
        shapes = [{one.name: one.shape for one in source.checkpoint.tensors} for source in (expected, found)]
        assert sum(shapes[0][key] != shapes[1][key] for key in shapes[0]) > 3
        assert found.names() == expected.names()
        for tensor_name in expected.names():
            assert found.shape(tensor_name) == expected.shape(tensor_name)
            assert torch.equal(found.get(tensor_name), expected.get(tensor_name)), tensor_name
