"""Hy4: what its config.json may say, and the names that its files have for tensors."""

from __future__ import annotations

from typing import Any

import pytest

from pagewick.errors import ModelLoadError
from pagewick.models.registry import read_config
from pagewick.models.tensors import model_tensors

CONFIG: dict[str, Any] = {
    "architectures": ["HYV4ForCausalLM"], "dtype": "bfloat16", "enable_ihc": True, "first_k_dense_replace": 1,
    "gated_mla": True, "gating_type": "elementwise", "hc_eps": 1e-06, "hc_magnitude": 2.0, "hc_mult": 4,
    "hidden_act": "silu", "hidden_size": 128, "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048,
    "intermediate_size": 256, "kv_lora_rank": 512, "learnable_sink": True, "model_type": "hy_v4",
    "moe_intermediate_size": 64, "n_group": 1, "n_routed_experts": 8, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 4, "num_experts_per_tok": 2, "num_hidden_layers": 7, "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1, "q_lora_rank": 32, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05, "rope_parameters": {"rope_theta": 10000000.0, "rope_type": "default"},
    "routed_scaling_factor": 2.827, "swiglu_limit": 10.0, "topk_group": 1, "v_head_dim": 256, "vocab_size": 256,
}  # fmt: skip


def test_the_first_two_layers_and_each_fourth_then_have_an_indexer() -> None:
    layers = read_config({**CONFIG, "layer_types": ["deepseek_sparse_attention"] * 7}).layers
    owners = [layer.indexer is not None and not layer.indexer.is_shared for layer in layers]
    assert owners == [True, True, False, False, False, True, False]
    assert all(layer.indexer is not None and layer.indexer.num_last == 64 for layer in layers)


@pytest.mark.parametrize(
    "entries",
    [
        {"enable_ihc": False},
        {"gated_mla": False},
        {"gating_type": "headwise"},
        {"learnable_sink": False},
        {"swiglu_limit": 7.0},
        {"hidden_act": "gelu"},
        {"layer_types": ["full_attention"] * 7},
        {"indexer_types": ["shared"] * 7},
    ],
)
def test_what_is_not_implemented_is_refused(entries: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match=next(iter(entries))):
        read_config({**CONFIG, **entries})


def test_a_file_may_have_each_kind_of_names() -> None:
    config = read_config(CONFIG)
    paths = [tensor.path for tensor in model_tensors(config)]
    files = [[names.in_file(path) for path in paths] for names in config.names]
    for names, found in zip(config.names, files, strict=True):
        assert config.name_map(found) is names
    published, written, computed = ({*found} for found in files)
    layer = "model.layers.0"
    assert published > {
        f"{layer}.hc_attn_layer.hc_pre.hc_fn", f"{layer}.self_attn.linear_gate.weight", "model.hc_head.hc_head_base",
        f"{layer}.self_attn.learnable_sink_param", f"{layer}.mlp.gate_proj.weight",
    }  # fmt: skip
    assert written > {
        f"{layer}.hc_pre.hc_mlp_layer.hc_scale", f"{layer}.mlp.linear_gate.weight", "model.hc_pre.hc_head.hc_head_fn",
    }  # fmt: skip
    assert computed > {f"{layer}.attn_hc.fn", f"{layer}.self_attn.sinks", "model.hc_head.hc_fn"}
