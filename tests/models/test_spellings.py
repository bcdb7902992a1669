"""The spelling of config.json from before transformers 5, which checkpoints on the hub have, means the same."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from pagewick.models.registry import read_config
from tests.models.checkpoints import VARIANTS, write_checkpoint

# Differences between the two spellings, which transformers brings into the new one.
SPELT = ("rope_parameters", "layer_types", "original_max_position_embeddings")
_WITH_TYPES = {
    "exaone4", "ministral", "exaone_moe", "qwen3_next", "qwen3_5_text", "granitemoehybrid", "granitemoe_swa", "lfm2",
    "lfm2_moe", "gemma3n_text", "cohere2_moe",
}  # fmt: skip

# The base of the rotation and the part that is rotated, in families with other names for them.
_OLD_NAMES = {"gpt_neox": ("rotary_emb_base", "rotary_pct")}


def in_old_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """Rewrite config.json with rope_theta and rope_scaling, torch_dtype, and no layer_types."""
    old = {name: value for name, value in config.items() if name not in ("dtype", "layer_types", "rope_parameters")}
    if config["model_type"] in _WITH_TYPES:
        # transformers needs it where there is no window, for windows or linear attention in other layers than usual, or
        # where there is none.
        old["layer_types"] = config["layer_types"]
    if "time_step_limit" in config:
        old["time_step_limit"] = [0.0, math.inf]
    if config.get("dtype") is not None:
        old["torch_dtype"] = config["dtype"]
    if "text_config" in config:
        old["text_config"] = in_old_spelling(config["text_config"])
    if "num_local_experts" in config and config["model_type"] == "qwen3_moe":
        old["num_experts"] = old.pop("num_local_experts")
    if "rope_parameters" not in config:
        return old
    rope = dict(config["rope_parameters"])
    if "full_attention" in rope:
        if config["model_type"] != "olmo3":
            old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
            old["sliding_window_pattern"] = config["layer_types"].index("full_attention") + 1
        rope = dict(rope["full_attention"])
    theta, part = _OLD_NAMES.get(config["model_type"], ("rope_theta", "partial_rotary_factor"))
    old[theta] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        old[part] = rope.pop("partial_rotary_factor")
    if config["model_type"] == "phi3":
        rope.pop("original_max_position_embeddings", None)
    kind = rope.pop("rope_type")
    key = "rope_type" if kind == "llama3" or config["model_type"].startswith(("gemma3", "olmo3")) else "type"
    old["rope_scaling"] = None if kind == "default" and not rope else {key: kind, **rope}
    return old


# These families are younger than the new spelling.
_YOUNGER = (
    "gemma-4", "lfm3", "mellum-2", "laguna", "step-3.7", "mimo-v2-flash", "deepseek-v4", "qwen4", "minimax-m3",
    # Its own code has other names for all entries.
    "moondream",
)  # fmt: skip


@pytest.mark.parametrize("name", [name for name in VARIANTS if not name.startswith(_YOUNGER)])
def test_old_and_new_files_are_read_alike(name: str, tmp_path: Path) -> None:
    write_checkpoint(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    old = in_old_spelling(config)
    assert old != config
    known = getattr(transformers, f"{VARIANTS[name].config}Config").from_dict(old).to_dict()
    if "text_config" not in config:
        (known.get("rope_parameters") or {}).pop("type", None)
        assert {entry: known.get(entry) for entry in SPELT} == {entry: config.get(entry) for entry in SPELT}
    assert read_config(old) == read_config(config)


def test_step_is_read_as_published(tmp_path: Path) -> None:
    """Entries have other names, and lists an entry for each layer, also for those that predict later tokens."""
    write_checkpoint("step-3.7", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    text = dict(VARIANTS["step-3.7"].all_entries()["text_config"])
    names = {
        "num_key_value_heads": "num_attention_groups", "n_routed_experts": "moe_num_experts",
        "num_experts_per_tok": "moe_top_k", "share_expert_dim": "share_expert_dims",
    }  # fmt: skip
    published = {names.get(name, name): value for name, value in text.items()} | {"num_nextn_predict_layers": 2}
    for name, value in published.items():
        if isinstance(value, list):
            published[name] = [*value, value[1], value[1]]
    published |= {"yarn_only_types": ["full_attention"], "use_rope_layers": [True] * 7}
    found, expected = read_config({**config, "text_config": published}), read_config(config)
    assert r"model\.layers\.(5|6)\..*" in found.ignored
    assert replace(found, ignored=(), dtype="") == replace(expected, ignored=(), dtype="")


def test_mimo_is_read_as_published(tmp_path: Path) -> None:
    """Layers with a window have entries of their own, and lists of 0 and 1 tell the kinds of layers."""
    write_checkpoint("mimo-v2-flash", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config["rope_parameters"]
    rope["sliding_attention"]["partial_rotary_factor"] = rope["full_attention"]["partial_rotary_factor"]
    expected = read_config({**config, "mlp_layer_types": ["dense", *["sparse"] * 3], "routed_scaling_factor": 1.0})
    for name in ("layer_types", "mlp_layer_types", "rms_norm_eps", "rope_parameters", "sliding_window"):
        config.pop(name, None)
    published = config | {
        "hybrid_layer_pattern": [0, 1, 1, 0], "moe_layer_freq": [0, 1, 1, 1], "layernorm_epsilon": 1e-3,
        "sliding_window_size": 21, "sliding_window": 21, "rope_theta": 50000, "swa_rope_theta": 3000,
        "partial_rotary_factor": 0.334, "swa_num_attention_heads": 6, "swa_num_key_value_heads": 2,
        "swa_head_dim": 24, "swa_v_head_dim": 16, "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False, "n_shared_experts": None, "routed_scaling_factor": None,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "attention_chunk_size": 21, "hybrid_block_size": None,
    }  # fmt: skip
    assert read_config(published) == expected
