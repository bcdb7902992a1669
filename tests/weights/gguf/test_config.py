"""Keys of published GGUF files that few files have, and what the config.json amounts to that we make of them."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from pagewick.errors import ModelLoadError
from pagewick.layers.config import MoeConfig
from pagewick.models.parts import AltUpConfig, AttentionConfig, MlpConfig
from pagewick.models.registry import read_config
from pagewick.weights.gguf.config import hugging_face_config
from pagewick.weights.gguf.metadata import Metadata

SHAPES = {"token_embd.weight": (50, 64), "output.weight": (50, 64)}
SIZES = {
    "block_count": 1, "context_length": 512, "embedding_length": 64, "feed_forward_length": 96,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip
YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 128}
COMPUTED = 1 + 0.1 * math.log(4)


def config_of(keys: dict[str, Any], kind: str = "qwen3", shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, Any]:
    values = {f"{kind}.{key}": value for key, value in {**SIZES, **keys}.items()}
    return hugging_face_config(Metadata({"general.architecture": kind, **values}, shapes, "m.gguf"), lambda name: [])


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        (None, None, COMPUTED),
        # DeepSeek-R1-0528-Qwen3-8B.
        ("yarn_attn_factor", 0.8782488562869419, 1.0),
        ("yarn_attn_factor", 1.25, 1.25),
        ("attn_factor", 0.5, 0.5 * COMPUTED),
        ("yarn_ext_factor", 1.0, COMPUTED),
    ],
)
def test_the_factor_of_attention_with_yarn(key: str | None, value: float, expected: float) -> None:
    scaling = {**YARN, **({} if key is None else {key: value})}
    config = config_of({f"rope.scaling.{name}": given for name, given in scaling.items()})
    rope = read_config(config).layers[0].rope
    assert rope is not None
    assert rope.attention_factor == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "key", "value", "harmless"),
    [
        ("llama", "rope.dimension_sections", [8, 12, 12, 0], [0, 0, 0, 0]),
        ("llama", "attention.temperature_scale", 0.1, 0.0),
        ("llama", "attention.clamp_kqv", 8.0, 0.0),
        ("llama", "attention.max_alibi_bias", 8.0, 0.0),
        ("qwen3", "rope.scaling.yarn_ext_factor", 0.5, -1.0),
    ],
)
def test_what_would_compute_something_else_is_refused(kind: str, key: str, value: object, harmless: object) -> None:
    with pytest.raises(ModelLoadError, match=rf"m\.gguf: {kind}\.{key} is .*, which is not supported\n  use another"):
        config_of({key: value}, kind)
    assert config_of({key: harmless}, kind) == config_of({}, kind)


@pytest.mark.parametrize(("kind", "pooling"), [("qwen3", 2), ("qwen3", 5), ("llama", 4), ("qwen2", 4)])
def test_other_poolings_are_refused_although_the_tensors_are_those_of_another_model(kind: str, pooling: int) -> None:
    with pytest.raises(ModelLoadError, match=rf"or a reranker whose {kind}\.pooling_type is {pooling}\n.*of the mean"):
        config_of({"pooling_type": pooling}, kind)


def test_a_reranker_without_its_head_is_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"a reranker, by its qwen3\.pooling_type, without cls\.output\.weight"):
        config_of({"pooling_type": 4}, "qwen3")


def test_an_embedding_model_says_how_it_pools() -> None:
    plain = config_of({}, "qwen3")
    assert config_of({"pooling_type": 0}, "qwen3") == plain and read_config(plain).embedding == ""
    for value, pooling in ((1, "mean"), (3, "last")):
        assert read_config(config_of({"pooling_type": value}, "qwen3")).embedding == pooling


STATE = {"ssm.conv_kernel": 4, "ssm.state_size": 8, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 48}


def test_which_layers_of_qwen35_have_linear_attention() -> None:
    keys = {**STATE, "block_count": 5, "nextn_predict_layers": 1, "rope.dimension_sections": [11, 11, 10, 0]}
    usual = config_of(keys, "qwen35")
    assert (usual["num_hidden_layers"], usual["linear_value_head_dim"], "layer_types" in usual) == (4, 12, False)
    told = config_of({**keys, "attention.recurrent_layers": [True, False, True, False, False]}, "qwen35")
    assert told["layer_types"] == ["linear_attention", "full_attention"] * 2
    with pytest.raises(ModelLoadError, match=r"qwen35\.attention\.recurrent_layers is a list of 2, and must have one"):
        config_of({**keys, "attention.recurrent_layers": [True, False]}, "qwen35")


GEMMA4 = {
    **SIZES, "block_count": 3, "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4, "attention.sliding_window": 8,
    "attention.key_length": 32, "attention.key_length_swa": 16, "attention.sliding_window_pattern": [True, True, False],
    "attention.head_count_kv": [2, 2, 1], "feed_forward_length": [96, 96, 96],
}  # fmt: skip


def gemma4_of(factors: list[float], **keys: Any) -> dict[str, Any]:
    values = {f"gemma4.{key}": value for key, value in {**GEMMA4, **keys}.items() if value is not None}
    metadata = Metadata(
        {"general.architecture": "gemma4", **values}, {**SHAPES, "rope_freqs.weight": (len(factors),)}, "m.gguf"
    )
    return hugging_face_config(metadata, lambda name: factors)


def test_heads_of_gemma_4() -> None:
    model = read_config(gemma4_of([1.0] * 4 + [1e30] * 12))
    first, last = model.layers[0], model.layers[2]
    assert (first.attention.head_dim, first.attention.num_kv_heads, first.window) == (16, 2, 8)  # type: ignore[union-attr]
    assert (last.attention.head_dim, last.attention.num_kv_heads, last.window) == (32, 1, None)  # type: ignore[union-attr]
    assert last.rope is not None and (last.rope.kind, last.rope.rotary_dim) == ("proportional", 8)


@pytest.mark.parametrize(
    ("factors", "keys", "complaint"),
    [
        ([1.0] * 8, {}, r"rope_freqs\.weight must hold a 1 for each pair that turns"),
        ([2.0] * 8 + [1e30] * 8, {}, r"rope_freqs\.weight must hold a 1"),
        ([1e30] * 8 + [1.0] * 8, {}, r"rope_freqs\.weight must hold a 1"),
        (
            [1.0] * 16,
            {"feed_forward_length": [96, 192, 96]},
            r"gemma4\.feed_forward_length is different in some layers",
        ),
        ([1.0] * 16, {"feed_forward_length": None}, r"gemma4\.feed_forward_length is missing"),
        ([1.0] * 16, {"rope.dimension_count_swa": 8}, r"gemma4\.rope\.dimension_count_swa is another than the size"),
        ([1.0] * 16, {"attention.key_length_swa": None}, r"gemma4\.attention\.key_length_swa is missing"),
    ],
)
def test_what_no_gemma_4_has_is_refused(factors: list[float], keys: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelLoadError, match=complaint):
        gemma4_of(factors, **keys)


GEMMA3N = {
    **SIZES, "block_count": 12, "attention.sliding_window": 8, "rope.freq_base": 1e6, "altup.num_inputs": 4,
    "embedding_length_per_layer_input": 8, "attention.shared_kv_layers": 2,
}  # fmt: skip
KEYS = "attention.shared_kv_layers"
TABLES = {"per_layer_token_embd.weight": (97, 96), "blk.0.laurel_l.weight": (5, 96)}


def gemma3n_of(shapes: dict[str, tuple[int, ...]], **keys: Any) -> dict[str, Any]:
    values = {f"gemma3n.{key}": value for key, value in {**GEMMA3N, **keys}.items() if value is not None}
    metadata = Metadata({"general.architecture": "gemma3n", **values}, {**SHAPES, **shapes}, "m.gguf")
    return hugging_face_config(metadata, lambda name: [])


def test_layers_of_gemma_3n() -> None:
    usual = read_config(gemma3n_of(TABLES))
    assert [index for index, layer in enumerate(usual.layers) if layer.window is None] == [4, 9]
    assert [layer.mlp.sparsity for layer in usual.layers] == [0.95] * 10 + [0.0] * 2  # type: ignore[union-attr]
    assert usual.altup == AltUpConfig(num_streams=4, laurel_rank=5)
    assert [layer.lender for layer in usual.layers[9:]] == [None, 8, 8]
    told = read_config(
        gemma3n_of(
            TABLES,
            feed_forward_length=[96, 64] * 6,
            activation_sparsity_scale=[0.8416212, -math.inf] + [-math.inf] * 10,
            **{"attention.sliding_window_pattern": [True, False] * 6, "rope.freq_base_swa": 5e3},
        )
    )
    mlps = [layer.mlp for layer in told.layers[:2]]
    assert [mlp.intermediate_size for mlp in mlps] == [96, 64]  # type: ignore[union-attr]
    assert [mlp.sparsity for mlp in mlps] == pytest.approx([0.8, 0.0])  # type: ignore[union-attr]
    assert [layer.rope.theta for layer in told.layers[:2] if layer.rope] == [5e3, 1e6]
    # By llama.cpp's default, 20 layers have keys of their own.
    assert all(layer.lender is None for layer in read_config(gemma3n_of(TABLES, **{KEYS: None})).layers)


@pytest.mark.parametrize("name", TABLES)
def test_a_file_of_gemma_3n_without_a_tensor_that_tells_a_size_is_refused(name: str) -> None:
    with pytest.raises(ModelLoadError, match=f"holds no {re.escape(name)}"):
        gemma3n_of({other: shape for other, shape in TABLES.items() if other != name})


WINDOW = {"block_count": 4, "attention.sliding_window": 8}


@pytest.mark.parametrize(
    ("kind", "keys", "windows"),
    [
        ("olmo2", {"block_count": 4}, [None] * 4),
        ("olmo2", WINDOW, [8, 8, 8, None]),
        ("olmo2", {**WINDOW, "attention.sliding_window_pattern": 2}, [8, None, 8, None]),
        ("olmo2", {**WINDOW, "attention.sliding_window_pattern": [False, True, True, False]}, [None, 8, 8, None]),
        ("exaone4", {"block_count": 4}, [None] * 4),
        ("exaone4", WINDOW, [8, 8, 8, None]),
        # The first files of the 32B.
        ("exaone4", {"block_count": 64}, [4096, 4096, 4096, None] * 16),
        ("cohere2", {**WINDOW, "attention.layer_norm_epsilon": 1e-5}, [8, 8, 8, None]),
    ],
)
def test_which_layers_have_a_window(kind: str, keys: dict[str, Any], windows: list[int | None]) -> None:
    model = read_config(config_of(keys, kind))
    assert [layer.window for layer in model.layers] == windows


def test_only_some_layers_of_olmo_3_are_scaled() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 128}
    keys = {**WINDOW, "rope.freq_base": 5e5, **{f"rope.scaling.{name}": value for name, value in scaling.items()}}
    ropes = [layer.rope for layer in read_config(config_of(keys, "olmo2")).layers]
    assert [(rope.kind, rope.theta) for rope in ropes if rope is not None] == [("default", 5e5)] * 3 + [("yarn", 5e5)]


def test_a_file_of_hy3_may_hold_a_layer_that_predicts_further_tokens() -> None:
    keys = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32, "block_count": 3}
    shapes = {**SHAPES, "blk.1.ffn_gate_inp.weight": (4, 64), "blk.2.ffn_gate_inp.weight": (4, 64)}
    config = read_config(config_of({**keys, "nextn_predict_layers": 1}, "hy_v3", shapes))
    assert config.num_layers == 2
    name = f"model.layers.{config.num_layers}.enorm.weight"
    assert any(re.fullmatch(pattern, name) for pattern in config.ignored_tensors)
    assert config.mtp is not None


def test_experts_of_hy3() -> None:
    """A file has the size of the shared ones together, and its tensors tell which layers have experts."""
    keys = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32, "block_count": 2}
    sizes = {None: 32, 32: 32, 64: 64}
    for size, expected in sizes.items():
        given = {} if size is None else {"expert_shared_feed_forward_length": size}
        shapes = {**SHAPES, "blk.0.ffn_gate_inp.weight": (4, 64)}
        first, second = (layer.mlp for layer in read_config(config_of({**keys, **given}, "hy_v3", shapes)).layers)
        assert isinstance(first, MoeConfig) and first.shared_intermediate_size == expected
        assert isinstance(second, MlpConfig) and second.intermediate_size == 96
    with pytest.raises(ModelLoadError, match=r"hy_v3\.expert_shared_feed_forward_length is not a multiple"):
        config_of({**keys, "expert_shared_feed_forward_length": 40}, "hy_v3")


def test_files_of_mistral_3_with_and_without_scaled_queries() -> None:
    yarn = {f"rope.scaling.{name}": value for name, value in YARN.items()}
    keys = {**yarn, "rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.1}
    rope = read_config(config_of(keys, "mistral3")).layers[0].rope
    assert rope is not None and (rope.query_beta, rope.attention_factor, rope.mscale_all_dim) == (0.1, 1.0, 1.0)
    plain = config_of({}, "mistral3")
    assert plain["architectures"] == ["LlamaForCausalLM"] and read_config(plain).layers[0].window is None
    with pytest.raises(ModelLoadError, match=r"mistral3\.rope\.scaling\.type is not yarn, and scores are scaled"):
        config_of({"attention.temperature_scale": 0.1}, "mistral3")


@pytest.mark.parametrize("kind", ["qwen2vl", "qwen3vl", "qwen3vlmoe"])
def test_axes_of_images_do_not_matter_for_text(kind: str) -> None:
    keys = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32} if kind.endswith("moe") else {}
    with_axes = config_of({**keys, "rope.dimension_sections": [2, 3, 3, 0], "n_deepstack_layers": 3}, kind)
    assert with_axes == config_of(keys, kind)
    assert not read_config(with_axes).architecture.endswith("ForConditionalGeneration")


def test_layers_of_glm_5_with_an_indexer() -> None:
    keys = {
        "block_count": 4, "nextn_predict_layers": 1, "attention.q_lora_rank": 16, "attention.kv_lora_rank": 16,
        "attention.key_length_mla": 24, "attention.value_length_mla": 16, "rope.dimension_count": 8,
        "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32, "expert_shared_count": 1,
        "attention.indexer.head_count": 4, "attention.indexer.key_length": 16, "attention.indexer.top_k": 9,
    }  # fmt: skip
    # The last flag is that of a layer which predicts later tokens.
    config = config_of({**keys, "attention.indexer.types": [True, False, True, True]}, "glm-dsa")
    assert config["indexer_types"] == ["full", "shared", "full"]
    indexers = [layer.latent.indexer for layer in read_config(config).layers if layer.latent is not None]
    assert [indexer is not None and indexer.is_shared for indexer in indexers] == [False, True, False]
    # Files of GLM-5 and 5.1 do not say it.
    assert "indexer_types" not in config_of(keys, "glm-dsa")
    with pytest.raises(ModelLoadError, match=r"glm-dsa.attention.indexer.types is a list of 2, and must have one"):
        config_of({**keys, "attention.indexer.types": [True, False]}, "glm-dsa")


@pytest.mark.parametrize(
    ("num_kv_heads", "shapes", "block", "num_read"),
    [
        (1, {}, "parallel", 1),
        # 11B, whose layers have one norm.
        (2, {}, "parallel", 2),
        (2, {"blk.0.attn_norm_2.weight": (64,)}, "parallel_norms", 2),
    ],
)
def test_falcons_are_told_by_their_key_heads_and_norms(
    num_kv_heads: int, shapes: dict[str, tuple[int, ...]], block: str, num_read: int
) -> None:
    keys = {**SIZES, "attention.head_count_kv": num_kv_heads, "attention.layer_norm_epsilon": 1e-5}
    values = {"general.architecture": "falcon", **{f"falcon.{key}": value for key, value in keys.items()}}
    model = read_config(hugging_face_config(Metadata(values, {**SHAPES, **shapes}, "m.gguf"), lambda name: []))
    assert (model.block, model.num_kv_heads, model.tie_word_embeddings) == (block, num_read, False)


def test_olmo_limits_queries_keys_and_values() -> None:
    keys = {"attention.layer_norm_epsilon": 1e-5}
    attention = read_config(config_of({**keys, "attention.clamp_kqv": 8.0}, "olmo")).attention
    assert isinstance(attention, AttentionConfig) and attention.qkv_limit == 8.0
    attention = read_config(config_of(keys, "olmo")).attention
    assert isinstance(attention, AttentionConfig) and attention.qkv_limit is None


COHERE2MOE = {
    "logit_scale": 0.5, "attention.sliding_window": 8, "expert_count": 4, "expert_used_count": 2, "block_count": 4,
    "expert_feed_forward_length": 32, "leading_dense_block_count": 1,
}  # fmt: skip


def test_experts_of_command_a_plus() -> None:
    model = read_config(config_of(COHERE2MOE, "cohere2moe"))
    assert [layer.window for layer in model.layers] == [8, 8, 8, None]
    assert isinstance(model.layers[0].mlp, MlpConfig) and model.layers[0].mlp.intermediate_size == 96
    (moe,) = {layer.mlp for layer in model.layers[1:]}
    assert isinstance(moe, MoeConfig) and (moe.intermediate_size, moe.routing.scoring) == (32, "sigmoid")
    softmax = read_config(config_of({**COHERE2MOE, "expert_gating_func": 1}, "cohere2moe"))
    assert softmax.mixtures[0].routing.scoring == "softmax"
    for keys, complaint in (
        ({"expert_gating_func": 4}, r"cohere2moe\.expert_gating_func is 4, which is not supported"),
        ({"expert_weights_scale": 2.5}, r"cohere2moe\.expert_weights_scale is 2\.5, which is not supported"),
        ({"attention.layer_norm_rms_epsilon": None}, r"cohere2moe\.attention\.layer_norm_epsilon is missing"),
    ):
        with pytest.raises(ModelLoadError, match=rf"m\.gguf: {complaint}"):
            config_of({**COHERE2MOE, **keys}, "cohere2moe")


def test_phi_3_5_moe_has_a_head_with_a_bias_if_the_file_has_one() -> None:
    keys = {"expert_count": 4, "expert_used_count": 2, "attention.sliding_window": 0}
    found = [config_of(keys, "phimoe", shapes) for shapes in (SHAPES, {**SHAPES, "output.bias": (50,)})]
    assert [read_config(one).head_bias for one in found] == [False, True]
    assert {read_config(one).layers[0].window for one in found} == {None}
