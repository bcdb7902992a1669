"""ModelConfig: what config.json may say, and what it must not."""

from __future__ import annotations

from typing import Any

import pytest

from pagewick.errors import ModelLoadError
from pagewick.layers.rope_config import RopeConfig
from pagewick.models.config import ModelConfig, eos_token_ids
from pagewick.models.registry import model_class

VALID: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "rms_norm_eps": 1e-5,
}


def test_what_is_left_out_has_the_usual_value() -> None:
    config = ModelConfig.from_hf(VALID)
    assert (config.num_kv_heads, config.head_dim, config.dtype) == (4, 16, "bfloat16")
    assert config.rope == RopeConfig(theta=10000.0)
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
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling 'yarn' is not supported yet"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"rope_theta": 0}, "rope_theta is 0"),
    ],
)
def test_an_impossible_entry_is_an_error_that_names_it(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        ModelConfig.from_hf({**VALID, **changes})


def test_rope_is_read_in_both_spellings() -> None:
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}}
    expected = RopeConfig(theta=5e5, kind="linear", factor=2.0)
    assert ModelConfig.from_hf({**VALID, **old}).rope == ModelConfig.from_hf({**VALID, **new}).rope == expected


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


def test_an_unknown_architecture_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ModelLoadError, match=r"FalconForCausalLM is not supported yet; supported: Llama.*Qwen3"):
        model_class("FalconForCausalLM")
