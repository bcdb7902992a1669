"""Any config.json, and any rope setting of the user, gives a model or an error that names the cause."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest

from pagewick.errors import ConfigError, ModelLoadError
from pagewick.models.config import ModelConfig
from pagewick.models.end_tokens import eos_token_ids
from pagewick.models.registry import read_config
from tests.models.published import PUBLISHED

NUM_MUTATIONS = 400
# Values of every type that JSON has, with the limits of what numbers are made of.
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 2**24, 2**24 + 1, 2**63, 10**400, -(10**400), 0.0, -0.0, 0.5, 1.5, 1e16,
    1e308, 5e-324, float("nan"), float("inf"), "", "x", "silu", "yarn", "sliding_attention", "\ud800", [], [1], [[1]],
    [None], [1e308] * 48, ["full_attention"], {}, {"a": 1}, {"type": ["x"]}, {"rope_type": "yarn", "factor": 1e308},
    {"rope_type": "dynamic", "factor": 2}, {"full_attention": {}}, {"full_attention": None},
]  # fmt: skip
ENTRIES = (
    "rope_scaling", "rope_parameters", "layer_types", "text_config", "head_dim", "num_key_value_heads",
    "sliding_window", "original_max_position_embeddings", "partial_rotary_factor", "rotary_pct", "use_sliding_window",
    "mlp_only_layers", "num_nextn_predict_layers", "dtype",
)  # fmt: skip
OVERRIDES = (
    '{"rope_type": "linear", "factor": 1e308}',
    '{"rope_type": "yarn", "factor": 4.0}',
    '{"rope_type": "longrope", "factor": 2, "short_factor": [1], "long_factor": [1]}',
    "[" * 100_000,
)


def mangled(config: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """A copy in which one to three entries, at any depth, are removed or replaced."""
    changed = copy.deepcopy(config)
    for _ in range(chance.randint(1, 3)):
        inner = changed
        while any(below := [value for value in inner.values() if isinstance(value, dict)]) and chance.random() < 0.4:
            inner = chance.choice(below)
        name = chance.choice([*inner, *inner, *ENTRIES])
        inner[name] = copy.deepcopy(chance.choice(ODD))
        if chance.random() < 0.1:
            del inner[name]
    return changed


@pytest.mark.parametrize("seed", range(5))
def test_every_file_is_a_model_or_an_error_that_says_why(seed: int) -> None:
    chance = random.Random(seed)
    num_read = 0
    for _ in range(NUM_MUTATIONS):
        config = mangled(PUBLISHED[chance.choice(list(PUBLISHED))], chance)
        wanted: dict[str, Any] = {}
        if chance.random() < 0.25:
            wanted["rope_scaling"] = chance.choice([*OVERRIDES, json.dumps(chance.choice(ODD))])
            wanted["rope_theta"] = chance.choice([None, 1e6, 0.5, float("nan")])
        try:
            assert isinstance(read_config(config, **wanted), ModelConfig)
            eos_token_ids(config, {})
            num_read += 1
        except (ConfigError, ModelLoadError) as error:
            assert 10 < len(str(error)) < 1000
    assert NUM_MUTATIONS // 10 < num_read < NUM_MUTATIONS * 9 // 10


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
        ({"partial_rotary_factor": 1e308}, "partial_rotary_factor is 1e[+]308, and must be a part"),
    ],
)
def test_a_number_that_is_too_large_to_compute_with_is_refused(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read_config({**PUBLISHED["Llama-2-7b-hf"], **entries})


@pytest.mark.parametrize(("alpha", "theta"), [(1e308, 1e4), (1e200, 1e200)])
def test_a_factor_of_the_base_that_is_too_large_to_compute_with_is_refused(alpha: float, theta: float) -> None:
    scaling = {"type": "dynamic", "alpha": alpha, "rope_theta": theta}
    hunyuan = {**PUBLISHED["Llama-2-7b-hf"], "architectures": ["HunYuanDenseV1ForCausalLM"], "head_dim": 128}
    with pytest.raises(ModelLoadError, match=r"alpha is 1e[+].*so small that the base of frequencies is finite"):
        read_config({**hunyuan, "rope_scaling": scaling})


def test_as_many_layers_that_predict_later_tokens_as_there_can_be_layers() -> None:
    with pytest.raises(ModelLoadError, match="num_nextn_predict_layers is 1001"):
        read_config({**PUBLISHED["DeepSeek-R1"], "num_nextn_predict_layers": 1001})


def test_a_scaling_without_end_has_a_longest_context() -> None:
    scaling = {"rope_type": "linear", "factor": 1e308}
    assert read_config({**PUBLISHED["Llama-2-7b-hf"], "rope_scaling": scaling}).longest_context == 2**24
