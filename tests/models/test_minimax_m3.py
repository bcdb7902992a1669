"""MiniMax-M3 as its published config.json has it, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from pagewick import kernels
from pagewick.config import EngineConfig
from pagewick.doctor.plan import cache_groups
from pagewick.engine.engine import Engine
from pagewick.errors import ConfigError, ModelLoadError
from pagewick.kernels.options import SelectedKeys
from pagewick.layers.config import MoeConfig
from pagewick.models.parts import AttentionConfig
from pagewick.models.registry import read_config
from pagewick.models.tensors import model_tensors
from tests.models.answers import answers, make_prompts, running
from tests.models.checkpoints import write_checkpoint

LAYERS = [0, 0, 0] + [1] * 57
SPARSE: dict[str, Any] = {
    "use_sparse_attention": True, "sparse_index_dim": 128, "sparse_num_index_heads": 4, "sparse_topk_blocks": 16,
    "sparse_block_size": 128, "sparse_score_type": "max", "sparse_init_block": 0, "sparse_local_block": 1,
    "sparse_attention_freq": LAYERS, "sparse_disable_index_value": LAYERS,
}  # fmt: skip
TEXT: dict[str, Any] = {
    "hidden_size": 6144, "intermediate_size": 3072, "num_hidden_layers": 60, "num_attention_heads": 64,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 200064, "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-06, "use_gemma_norm": True, "attention_output_gate": False, "rope_theta": 5000000,
    "rotary_dim": 64, "partial_rotary_factor": 0.5, "hidden_act": "swigluoai", "use_qk_norm": True,
    "qk_norm_type": "per_head", "tie_word_embeddings": False, "dense_intermediate_size": 12288,
    "shared_intermediate_size": 3072, "num_local_experts": 128, "num_experts_per_tok": 4, "n_shared_experts": 1,
    "scoring_func": "sigmoid", "use_routing_bias": True, "routed_scaling_factor": 2.0, "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0, "num_mtp_modules": 7, "moe_layer_freq": LAYERS, "sparse_attention_config": SPARSE,
}  # fmt: skip


def config_of(**text: Any) -> dict[str, Any]:
    return {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"], "model_type": "minimax_m3_vl",
        "torch_dtype": "bfloat16", "text_config": {**TEXT, **text}, "vision_config": {"hidden_size": 1280},
    }  # fmt: skip


def test_all_but_the_first_layers_select_blocks_and_have_experts() -> None:
    model = read_config(config_of())
    attentions = [layer.attention for layer in model.layers if isinstance(layer.attention, AttentionConfig)]
    assert [int(attention.head_blocks is not None) for attention in attentions] == LAYERS
    assert [int(isinstance(layer.mlp, MoeConfig)) for layer in model.layers] == LAYERS
    attention = model.layers[-1].attention
    assert isinstance(attention, AttentionConfig) and attention.head_blocks is not None
    assert (attention.head_blocks.num_heads, attention.head_blocks.top_k, attention.head_blocks.block_size) == (
        4,
        16,
        128,
    )
    assert all(layer.rope is not None and layer.rope.rotary_dim == 64 for layer in model.layers)
    groups = {(group.spec.kind, group.num_layers) for group in cache_groups(model, cache_dtype="bfloat16")}
    assert groups == {("full_attention", 3), ("full_attention", 57), ("index_keys", 57)}


def test_files_have_the_published_names() -> None:
    layer = "language_model.model.layers.3"
    published = {
        f"{layer}.block_sparse_moe.experts.127.w3.weight", f"{layer}.block_sparse_moe.shared_experts.up_proj.weight",
        f"{layer}.block_sparse_moe.e_score_correction_bias", f"{layer}.block_sparse_moe.gate.weight",
        f"{layer}.self_attn.index_q_norm.weight", f"{layer}.self_attn.index_k_proj.weight",
        "language_model.model.layers.0.mlp.gate_proj.weight", "language_model.lm_head.weight",
        "language_model.model.embed_tokens.weight", "language_model.model.norm.weight",
    }  # fmt: skip
    assert {tensor.name for tensor in model_tensors(read_config(config_of()), sorted(published))} > published


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ({"use_gemma_norm": False}, "use_gemma_norm"),
        ({"attention_output_gate": True}, "attention_output_gate"),
        ({"swiglu_limit": 10.0}, "swiglu_limit"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"moe_layer_freq": [1]}, "moe_layer_freq"),
        ({"num_key_value_heads": 2}, "index_n_heads"),
        ({"sparse_attention_config": {**SPARSE, "sparse_score_type": "mean"}}, "sparse_score_type"),
        ({"sparse_attention_config": {**SPARSE, "sparse_init_block": 1}}, "sparse_init_block"),
        ({"sparse_attention_config": {**SPARSE, "sparse_disable_index_value": [0] * 60}}, "sparse_disable_index_value"),
        ({"sparse_attention_config": {**SPARSE, "sparse_local_block": 17}}, "index_local_blocks"),
        ({"layer_types": ["sliding_attention"] * 60}, "layer_types"),
    ],
)
def test_what_is_not_implemented_is_refused(text: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelLoadError, match=named):
        read_config(config_of(**text))


def test_other_blocks_of_the_cache_and_what_they_may_hold(tmp_path: Any) -> None:
    write_checkpoint("minimax-m3", tmp_path)
    options: dict[str, Any] = {"model": str(tmp_path), "dtype": "float32", "device": "cpu", "num_kv_blocks": 64}
    with pytest.raises(ConfigError, match="--kv-cache-dtype int8"):
        Engine(EngineConfig.from_options(**options, kv_cache_dtype="int8"))
    # Blocks of 24 tokens do not divide those of 32 that are selected.
    prompts, found = [[*range(3, 80)], [5, 9]], []
    for block_size in (24, 32):
        with running(tmp_path, block_size=block_size) as engine:
            found.append(answers(engine, prompts, num_tokens=9))
    assert [answer.token_ids for answer in found[0]] == [answer.token_ids for answer in found[1]]


def test_blocks_beyond_the_context_take_no_memory(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may select more blocks, or longer ones, than a sequence has: tokens then see all before them."""
    write_checkpoint("minimax-m3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    widths, select = set(), kernels.select_blocks

    def noted(*args: Any, **named: Any) -> SelectedKeys:
        found = select(*args, **named)
        widths.add(found.slots.shape[2])
        return found

    monkeypatch.setattr(kernels, "select_blocks", noted)
    prompts, found = make_prompts((70, 9)), []
    for name, value in (("index_topk_blocks", 4), ("index_topk_blocks", 2**24), ("index_block_size", 2**24)):
        changed = {**config, "text_config": {**config["text_config"], name: value}}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with running(tmp_path, max_model_len=100) as engine:
            found.append(answers(engine, prompts, num_tokens=5))
    assert widths == {4, 1}
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert one.token_ids == other.token_ids and torch.equal(one.logits, other.logits)
