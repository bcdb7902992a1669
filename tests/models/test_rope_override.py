"""--rope-scaling and --rope-theta: a checkpoint responds as if its config.json had these entries."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewick.errors import ConfigError
from pagewick.layers.config import RopeConfig
from pagewick.models.registry import read_config
from tests.models.answers import answers, judge, make_prompts, running
from tests.models.checkpoints import VARIANTS, make_model, write_checkpoint
from tests.models.published import PUBLISHED

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
# variant, options, where its config.json has the rope, and what stands there then.
OVERRIDES: list[tuple[str, dict[str, Any], tuple[str, ...], dict[str, Any]]] = [
    ("llama", {"rope_scaling": YARN}, (), {**YARN, "rope_theta": 10000.0}),
    ("llama-linear-rope", {"rope_theta": 3000.0}, (), {"rope_type": "linear", "rope_theta": 3000.0, "factor": 4.0}),
    ("llama3-rope", {"rope_scaling": YARN, "rope_theta": 3000.0}, (), {**YARN, "rope_theta": 3000.0}),
    (
        "gemma-3-pattern",
        {"rope_scaling": {"type": "linear", "factor": 3.0}},
        ("full_attention",),
        {"rope_type": "linear", "rope_theta": 1e6, "factor": 3.0},
    ),
    (
        "deepseek-v3-plain",
        {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.9}},
        (),
        {**YARN, "rope_theta": 10000.0, "mscale": 1.0, "mscale_all_dim": 0.9},
    ),
    (
        "phi-1",
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        (),
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0, "partial_rotary_factor": 0.5},
    ),
]


def test_the_context_is_that_of_layers_that_see_everything() -> None:
    entries = {**PUBLISHED["gemma-3-1b-it"], "max_position_embeddings": 4096}
    yarn = '{"rope_type": "yarn", "factor": 4.0}'
    config = read_config(entries, rope_scaling=yarn)
    assert (config.layers[0].window, config.layers[5].window) == (512, None)
    assert config.max_position_embeddings == config.longest_context == 4 * 4096


def test_bases_of_single_layers_stay_the_files() -> None:
    entries = {**VARIANTS["granite-swash"].all_entries(), "architectures": ["GraniteSWAForCausalLM"]}
    with pytest.raises(ConfigError, match="--rope-theta: each layer of this model has a base of its own"):
        read_config(entries, rope_theta=5e4)
    assert read_config({**entries, "layer_rope_theta": None}, rope_theta=5e4).layers[0].rope == RopeConfig(
        theta=5e4, kind="default", rotary_dim=16
    )


@pytest.mark.parametrize(("name", "options", "place", "rope"), OVERRIDES, ids=[row[0] for row in OVERRIDES])
def test_it_is_as_if_the_file_said_so(
    name: str, options: dict[str, Any], place: tuple[str, ...], rope: dict[str, Any], tmp_path: Path
) -> None:
    prompts = make_prompts((3, 80))
    plain = write_checkpoint(name, tmp_path)
    entries = copy.deepcopy(VARIANTS[name].all_entries())
    ropes = entries.setdefault("rope_parameters", {})
    entries["rope_parameters"] = {**ropes, **dict.fromkeys(place, rope)} if place else rope
    with running(tmp_path, **options) as engine:
        found = answers(engine, prompts, num_tokens=5)
    expected = judge(make_model(name, entries), prompts, found)
    without = judge(plain, prompts, found)
    tolerance = VARIANTS[name].tolerance
    for answer, logits, other in zip(found, expected, without, strict=True):
        torch.testing.assert_close(answer.logits, logits, atol=tolerance, rtol=0)
        assert (answer.logits - other).abs().max() > 100 * tolerance
