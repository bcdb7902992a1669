"""Possible and impossible entries of config.json: it is read without torch, and errors name the entry."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from pagewick.errors import ConfigError, ModelLoadError
from pagewick.layers.config import RopeConfig
from pagewick.models.end_tokens import eos_token_ids
from pagewick.models.mistral import _MINISTRAL_ROPE
from pagewick.models.name_map import NameMap
from pagewick.models.parts import AttentionConfig
from pagewick.models.registry import ARCHITECTURES, nearest_to, read_config
from tests.models.published import PUBLISHED

VALID: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "rms_norm_eps": 1e-5,
}
YARN = '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}'


def test_what_is_left_out_has_the_usual_value() -> None:
    config = read_config(VALID)
    attention = config.layers[1].attention
    assert isinstance(attention, AttentionConfig)
    assert (attention.num_kv_heads, attention.head_dim, config.dtype) == (4, 16, "bfloat16")
    assert config.layers[0].rope == RopeConfig(theta=10000.0, kind="default", rotary_dim=16)
    assert not config.tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": None}, "names no architecture"),
        ({"architectures": [3]}, "names no architecture"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"num_attention_heads": 5}, "num_attention_heads is 5"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"torch_dtype": "float8"}, "torch_dtype is 'float8'"),
        ({"hidden_act": "mish"}, "hidden_act is 'mish'"),
        ({"attention_bias": 1}, "attention_bias is 1"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 4.0}}, "spiral"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"rope_theta": 0}, "rope_theta is 0"),
    ],
)
def test_an_impossible_entry_is_an_error_that_names_it(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read_config({**VALID, **changes})


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("MixtralForCausalLM", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
        ("Qwen2ForCausalLM", {"use_mrope": True}, "use_mrope is True"),
        ("Qwen3ForCausalLM", {"layer_types": ["full_attention"]}, "layer_types is"),
        ("Gemma2ForCausalLM", {"layer_types": ["chunked_attention"] * 2}, "chunked_attention is not supported"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "later tokens is not supported"),
        ("DeepseekV2ForCausalLM", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        ("DeepseekV2ForCausalLM", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ("DeepseekV3ForCausalLM", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("DeepseekV3ForCausalLM", {"n_group": 7}, "do not make 7 equal groups"),
        ("GPTBigCodeForCausalLM", {"n_embd": "x", "hidden_size": None}, "n_embd is 'x'"),
    ],
)
def test_what_a_family_does_not_have_is_refused_by_name(
    architecture: str, changes: dict[str, Any], message: str
) -> None:
    sizes = {"num_key_value_heads": 2, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
    windows = {"use_sliding_window": True, "sliding_window": 8}
    with pytest.raises(ModelLoadError, match=message):
        read_config({**VALID, **sizes, **windows, "architectures": [architecture], **changes})


@pytest.mark.parametrize(
    ("text", "whole", "expected"),
    [
        ({"architectures": None, "dtype": None}, {"dtype": "float32"}, "float32"),
        ({"architectures": None, "torch_dtype": None}, {"torch_dtype": "float16"}, "float16"),
        ({"dtype": None, "torch_dtype": "float32"}, {"dtype": "float16"}, "float32"),
        ({"dtype": None}, {"dtype": None, "torch_dtype": None}, "bfloat16"),
    ],
)
def test_the_text_part_of_a_multimodal_file_has_what_the_whole_says(
    text: dict[str, Any], whole: dict[str, Any], expected: str
) -> None:
    architecture = "Gemma3ForConditionalGeneration"
    config = read_config(
        {"architectures": [architecture], "text_config": {**text, "num_key_value_heads": None}, **whole}
    )
    assert (config.architecture, config.dtype) == (architecture, expected)
    attention = config.layers[0].attention
    assert isinstance(attention, AttentionConfig) and attention.num_kv_heads == 8


@pytest.mark.parametrize(
    ("text", "whole", "is_tied"),
    [({}, {}, False), ({"tie_word_embeddings": True}, {}, True), ({}, {"tie_word_embeddings": True}, True)],
)
def test_the_head_of_mistral_small_3_1_is_tied_where_a_part_of_the_file_says_so(
    text: dict[str, Any], whole: dict[str, Any], is_tied: bool
) -> None:
    part = {**VALID, **text, "model_type": None, "num_key_value_heads": 2}
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": {**part, **text, "model_type": None},
    }
    assert read_config({**config, **whole}).tie_word_embeddings == is_tied


def test_ministral_3_without_an_entry_about_rotation() -> None:
    """Its class has such entries as defaults; a scaling of the user's keeps the scale of queries."""
    ministral = {**VALID, "architectures": ["Ministral3ForCausalLM"], "num_key_value_heads": 2}
    (usual,) = {layer.rope for layer in read_config(ministral).layers}
    assert usual is not None
    assert (usual.kind, usual.factor, usual.query_beta, usual.original_max_position_embeddings) == (
        "yarn", 16.0, 0.1, 16384,
    )  # fmt: skip
    scaling = '{"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}'
    config = {**ministral, "rope_parameters": {**_MINISTRAL_ROPE, "rope_theta": 1e6}}
    (changed,) = {layer.rope for layer in read_config(config, rope_scaling=scaling).layers}
    assert changed is not None
    assert (changed.factor, changed.query_beta, changed.original_max_position_embeddings) == (2.0, 0.1, 4096)


def test_the_text_part_of_qwen2_vl_is_tied_where_any_part_of_the_file_says_so() -> None:
    vl = {"architectures": ["Qwen2VLForConditionalGeneration"]}
    text = {**VALID, "num_key_value_heads": 2}
    for config, is_tied in (
        ({**text, **vl}, False),
        ({**text, **vl, "tie_word_embeddings": True}, True),
        ({**vl, "text_config": text}, False),
        ({**vl, "text_config": {**text, "tie_word_embeddings": True}, "tie_word_embeddings": False}, True),
    ):
        assert read_config(config).tie_word_embeddings == is_tied


def test_rope_is_read_in_both_spellings() -> None:
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}}
    ours, theirs = read_config({**VALID, **old}), read_config({**VALID, **new})
    assert ours.layers == theirs.layers
    assert ours.layers[0].rope is not None and ours.layers[0].rope.factor == 2.0
    assert (ours.max_position_embeddings, ours.longest_context) == (2048, 4096)


def test_the_user_may_scale_the_rotary_embedding() -> None:
    config = read_config({**VALID, "max_position_embeddings": 512}, rope_scaling=YARN, rope_theta=5e5)
    rope = config.layers[0].rope
    assert rope is not None and (rope.kind, rope.factor, rope.theta) == ("yarn", 4.0, 5e5)
    assert config.max_position_embeddings == config.longest_context == 2048


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"rope_scaling": "yarn"}, "no JSON object"),
        ({}, {"rope_scaling": "[1]"}, "no JSON object"),
        ({}, {"rope_scaling": '{"rope_type": "yarn"}'}, "--rope-scaling: factor is missing"),
        ({}, {"rope_theta": 0.0}, "--rope-theta is 0"),
        ({"architectures": ["GPTBigCodeForCausalLM"]}, {"rope_theta": 5e5}, "rotates nothing"),
    ],
)
def test_what_the_user_cannot_want_of_it(changes: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config({**VALID, **changes}, **options)


def test_attention_in_chunks_of_positions_ends_with_the_first_chunk() -> None:
    chunks = {"chunk_size": 1000, "local_size": 40, "original_max_position_embeddings": 1000}
    values = {**VALID, "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 4}
    values |= {"max_position_embeddings": 5000}
    assert read_config(values).max_position_embeddings == 5000
    config = read_config({**values, "dual_chunk_attention_config": chunks})
    assert (config.max_position_embeddings, config.longest_context) == (960, 960)
    with pytest.raises(ModelLoadError, match=r"dual_chunk_attention_config\.local_size is 1000"):
        read_config({**values, "dual_chunk_attention_config": {**chunks, "local_size": 1000}})


@pytest.mark.parametrize(
    ("config", "generation_config", "expected"),
    [
        ({}, {}, []),
        ({"eos_token_id": 2}, {}, [2]),
        ({"eos_token_id": 2}, {"eos_token_id": [5, 6]}, [5, 6]),
        ({"eos_token_id": [2, 3]}, {"eos_token_id": None}, [2, 3]),
        ({"eos_token_id": 2}, {"eos_token_id": 0}, [0]),
    ],
)
def test_generation_config_names_the_end_first(
    config: dict[str, Any], generation_config: dict[str, Any], expected: list[int]
) -> None:
    assert eos_token_ids(config, generation_config) == expected


def test_an_error_about_the_end_names_the_file() -> None:
    with pytest.raises(ModelLoadError, match=r"^generation_config\.json: eos_token_id is 'x'.*\n  correct it"):
        eos_token_ids({"eos_token_id": 2}, {"eos_token_id": "x"})
    with pytest.raises(ModelLoadError, match=r"^config\.json: eos_token_id is True"):
        eos_token_ids({"eos_token_id": True}, {})


def test_an_unknown_architecture_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(ModelLoadError, match=r"Qwen4ForCausalLM is not supported; the nearest that is: Qwen3") as error:
        read_config({**VALID, "architectures": ["Qwen4ForCausalLM"]})
    assert str(error.value).splitlines()[1:] == [
        f"  `pagewick models supported` lists all {len(ARCHITECTURES)} architectures that are"
    ]
    with pytest.raises(ModelLoadError, match="its attention is block-sparse"):
        read_config({**VALID, "architectures": ["Phi3SmallForCausalLM"]})
    assert nearest_to("Zzz") == ""


@pytest.mark.parametrize(
    ("architecture", "what"),
    [
        ("ElectraModel", "no output layer, as embedding models"),
        ("ElectraForMaskedLM", "gaps"), ("ElectraForSequenceClassification", "rates texts"),
    ],
)  # fmt: skip
def test_an_architecture_for_another_task_is_not_taken_for_a_misspelt_one(architecture: str, what: str) -> None:
    with pytest.raises(ModelLoadError, match=f"{architecture} is not supported: it .*{what}.* Pagewick only") as error:
        read_config({**VALID, "architectures": [architecture]})
    assert "nearest" not in str(error.value)


def test_layers_with_an_indexer_by_their_frequency() -> None:
    """GLM-5.2's file has both; in it, they agree."""
    config = PUBLISHED["GLM-5.2"]
    found = [read_config(one) for one in (config, {**config, "indexer_types": None})]
    assert found[0].layers == found[1].layers
    latents = [layer.latent for layer in read_config({**config, "indexer_types": None, "index_topk_freq": None}).layers]
    assert not any(latent is None or latent.indexer is None or latent.indexer.is_shared for latent in latents)


def test_names_are_replaced_in_order_and_by_whole_parts() -> None:
    names = NameMap(parts=(("b", "c"), ("a.b", "x"), ("d", "b")))
    assert names.in_file("a.b.weight") == "a.c.weight"
    assert names.in_file("a.d.bb.b") == "a.b.bb.c"


def test_parts_of_a_layer_are_for_its_names_only() -> None:
    """Both halves of a block are one layer of the file, whose number is that of another layer of ours."""
    names = NameMap(parts=(("layers.2.mlp", "layers.1.two"), ("layers.1.two", "x"), ("layers.12", "y"), ("e", "f")))
    assert names.in_file("model.layers.2.mlp.e") == "model.layers.1.two.f"
    assert names.in_file("model.layers.12.mlp.e") == "model.y.mlp.f"
    assert names.in_file("layers.3.e") == "layers.3.f" and names.in_file("layers.2") == "layers.2"


def test_no_family_imports_torch() -> None:
    modules = sorted({target.partition(":")[0] for target in ARCHITECTURES.values()})
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
