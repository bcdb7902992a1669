"""Keys of files with Mamba or short convolutions in most layers, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pagewick.errors import ModelLoadError
from pagewick.layers.config import MoeConfig
from pagewick.layers.state_config import ChannelScanConfig, ConvolutionConfig, MambaConfig
from pagewick.models.parts import AttentionConfig, MlpConfig
from pagewick.models.registry import read_config
from pagewick.weights.gguf.checkpoint import open_gguf
from pagewick.weights.gguf.config import architecture_of, hugging_face_config
from pagewick.weights.gguf.metadata import Metadata
from tests.models.answers import answers, make_prompts, running
from tests.weights.gguf.mixes import Numbers, rewrite
from tests.weights.gguf.models import VOCAB_SIZE, write_file
from tests.weights.gguf.test_export import checkpoint_of, refusal

SIZES = {
    "block_count": 4, "context_length": 512, "embedding_length": 64, "feed_forward_length": 96,
    "attention.head_count": 4, "attention.head_count_kv": [0, 2, 0, 2], "attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip
STATE = {"ssm.conv_kernel": 4, "ssm.state_size": 8, "ssm.group_count": 2, "ssm.time_step_rank": 8}
GRANITE = {**SIZES, **STATE, "ssm.inner_size": 128, "attention.scale": 0.5}
ALONE = {
    "block_count": 4, "context_length": 512, "embedding_length": 64, "feed_forward_length": 0, "ssm.inner_size": 128,
    "attention.head_count": 0, "attention.layer_norm_rms_epsilon": 1e-3,
}  # fmt: skip
KEYS: dict[str, dict[str, Any]] = {
    "lfm2": {**SIZES, "shortconv.l_cache": 3},
    "lfm2moe": {**SIZES, "shortconv.l_cache": 3, "expert_count": 4, "expert_used_count": 2},
    "granite": {**SIZES, "attention.head_count_kv": 2},
    "granitehybrid": GRANITE,
    "jamba": {**SIZES, **STATE, "ssm.inner_size": 128, "expert_count": 4, "expert_used_count": 2},
    "mamba": {**ALONE, "ssm.conv_kernel": 4, "ssm.state_size": 8, "ssm.time_step_rank": 8},
    "mamba2": {**ALONE, **STATE},
    "nemotron_h": {**SIZES, **STATE, "ssm.inner_size": 64, "feed_forward_length": [0, 0, 96, 0]},
}


def metadata_of(kind: str, *, mixed: tuple[int, ...] = (), **changes: Any) -> Metadata:
    """mixed: layers with experts."""
    given = {**KEYS[kind], **{key.replace("__", "."): value for key, value in changes.items()}}
    values = {f"{kind}.{key}": value for key, value in given.items() if value is not None}
    shapes = {"token_embd.weight": (50, 64), "output.weight": (50, 64), "blk.0.ffn_up.weight": (80, 64)}
    shapes |= {f"blk.{layer}.ffn_gate_inp.weight": (4, 64) for layer in mixed}
    return Metadata({"general.architecture": kind, **values}, shapes, "m.gguf")


def config_of(kind: str, *, mixed: tuple[int, ...] = (), **changes: Any) -> dict[str, Any]:
    return hugging_face_config(metadata_of(kind, mixed=mixed, **changes), lambda name: [])


def test_kinds_of_layers() -> None:
    convolution, attention = read_config(config_of("lfm2")).layers[:2]
    assert isinstance(convolution.attention, ConvolutionConfig) and convolution.attention.conv_size == 3
    assert isinstance(attention.mlp, MlpConfig) and attention.mlp.intermediate_size == 96
    mamba, _, mlp, full = read_config(config_of("nemotron_h")).layers
    assert isinstance(mamba.attention, MambaConfig) and mamba.attention.head_dim == 8 and mamba.mlp is None
    assert mlp.attention is None and full.mlp is None and full.rope is None


def test_granite_4() -> None:
    """The size of the MLP is that of its tensors, as the converter writes two sizes."""
    model = read_config(config_of("granitehybrid", rope__scaling__finetuned=False))
    assert [layer.rope for layer in model.layers] == [None] * 4
    assert isinstance(model.layers[0].mlp, MlpConfig) and model.layers[0].mlp.intermediate_size == 80
    # Files without the key rotate, as in llama.cpp.
    assert read_config(config_of("granitehybrid")).layers[1].rope is not None
    bamba = metadata_of("granitehybrid", attention__scale=None)
    assert architecture_of(bamba).name == "BambaForCausalLM"
    plain = read_config(config_of("granitehybrid", attention__scale=None, logit_scale=2.0))
    assert plain.architecture == "GraniteMoeHybridForCausalLM" and plain.attention.softmax_scale == 0.25


@pytest.mark.parametrize(
    ("heads", "mixed"),
    [([0, 2, 0, 2], (1, 3)), ([0, 2, 0, 0], (0, 2)), ([2, 0, 0, 0], (3,)), ([2, 2, 2, 2], (0, 1, 2, 3))],
)
def test_layers_of_jamba(heads: list[int], mixed: tuple[int, ...]) -> None:
    model = read_config(config_of("jamba", mixed=mixed, attention__head_count_kv=heads))
    assert [isinstance(layer.attention, AttentionConfig) for layer in model.layers] == [count > 0 for count in heads]
    assert [isinstance(layer.mlp, MoeConfig) for layer in model.layers] == [layer in mixed for layer in range(4)]
    (scan,) = {layer.attention for layer in model.layers if layer.states} or {None}
    assert scan is None or (isinstance(scan, ChannelScanConfig) and (scan.num_channels, scan.step_rank) == (128, 8))
    assert read_config(config_of("jamba", attention__head_count_kv=heads)).mixtures == []


def test_mamba_alone() -> None:
    """FalconMamba is of the same architecture. The eps of its inner norms has no key, and is that of the model."""
    (scan,) = {layer.attention for layer in read_config(config_of("mamba")).layers}
    assert isinstance(scan, ChannelScanConfig)
    assert (scan.num_channels, scan.state_dim, scan.step_rank, scan.norm_eps) == (128, 8, 8, None)
    falcon = config_of("mamba", ssm__dt_b_c_rms=True)
    (scan,) = {layer.attention for layer in read_config(falcon).layers}
    assert falcon["architectures"] == ["FalconMambaForCausalLM"]
    assert isinstance(scan, ChannelScanConfig) and scan.norm_eps == 1e-6
    (mamba,) = {layer.attention for layer in read_config(config_of("mamba2")).layers}
    assert isinstance(mamba, MambaConfig)
    assert (mamba.num_heads, mamba.head_dim, mamba.num_groups, mamba.norm_eps) == (8, 16, 2, 1e-3)
    # Models with attention cannot leave out its heads.
    with pytest.raises(ModelLoadError, match="num_attention_heads is 0"):
        read_config(config_of("granitehybrid", attention__head_count=0))


def test_nemotron_has_one_of_two_keys_for_eps_and_layers_that_predict_further_tokens() -> None:
    changes = {"attention__layer_norm_rms_epsilon": None, "attention__layer_norm_epsilon": 1e-3}
    config = config_of("nemotron_h", **changes, nextn_predict_layers=1)
    assert (config["layer_norm_epsilon"], config["num_hidden_layers"]) == (1e-3, 3)
    both = config_of("nemotron_h", attention__layer_norm_epsilon=1e-3)
    assert both["layer_norm_epsilon"] == 1e-5


@pytest.mark.parametrize(
    ("kind", "changes", "complaint"),
    [
        ("lfm2", {"attention__head_count_kv": None}, r"lfm2\.attention\.head_count_kv is missing"),
        ("lfm2", {"attention__head_count_kv": [0, 0, 0, 0]}, "0 for every layer, and some layer must have attention"),
        ("lfm2", {"attention__head_count_kv": [0, 2, 1, 0]}, "different in layers with attention, which is not"),
        ("lfm2", {"attention__head_count_kv": [0, 2]}, "a list of 2, and must have one for each layer"),
        ("lfm2", {"attention__sliding_window": 128}, r"lfm2\.attention\.sliding_window is 128, which is not"),
        ("lfm2moe", {"expert_gating_func": 1}, r"lfm2moe\.expert_gating_func is 1, which is not supported"),
        ("granite", {"rope__scaling__finetuned": False}, r"granite\.rope\.scaling\.finetuned is false, so that heads"),
        ("granitehybrid", {"ssm__inner_size": 96}, r"ssm\.inner_size is no multiple of embedding_length, which is not"),
        ("granitehybrid", {"ssm__time_step_rank": 5}, r"ssm\.inner_size is no multiple of ssm\.time_step_rank"),
        ("jamba", {"attention__head_count_kv": [2, 2, 0, 2]}, "not periodic, or experts are not: it is not supported"),
        ("jamba", {"mixed": (0, 1, 3)}, "not periodic, or experts are not: it is not supported"),
        ("jamba", {"ssm__inner_size": 96}, r"ssm\.inner_size is no multiple of embedding_length, which is not"),
        ("mamba", {"ssm__inner_size": None}, r"mamba\.ssm\.inner_size is missing"),
        ("mamba2", {"ssm__inner_size": 96}, r"ssm\.inner_size is no multiple of embedding_length, which is not"),
        ("mamba2", {"ssm__time_step_rank": 5}, r"ssm\.inner_size is no multiple of ssm\.time_step_rank"),
        ("nemotron_h", {"feed_forward_length": None}, r"nemotron_h\.feed_forward_length is missing"),
        ("nemotron_h", {"feed_forward_length": [64, 0, 96, 0]}, "different in some layers, which is not supported"),
        ("nemotron_h", {"attention__layer_norm_rms_epsilon": None}, r"layer_norm_rms_epsilon is missing"),
    ],
)
def test_what_is_refused(kind: str, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"^m\.gguf: .*{complaint}"):
        config_of(kind, **changes)


def test_the_last_norm_of_lfm2_has_two_names(tmp_path: Path) -> None:
    path = write_file("lfm2", tmp_path)

    def change(name: str, numbers: Numbers) -> list[tuple[str, Numbers, str]]:
        return [(name.replace("token_embd_norm", "output_norm"), numbers, "F32")]

    other = rewrite(path, tmp_path / "other.gguf", change)
    assert {piece.name for piece in open_gguf(other).pieces} == {piece.name for piece in open_gguf(path).pieces}
    with running(other) as engine:
        (answer,) = answers(engine, make_prompts((5,), vocab_size=VOCAB_SIZE), num_tokens=2)
    assert len(answer.token_ids) == 2


@pytest.mark.parametrize(
    ("name", "entries", "complaint"),
    [
        ("granite-4-h-moe", {"layer_types": ["full_attention"] * 2}, "without Mamba in any layer, has no form in GGUF"),
        (
            "nemotron-3-latents",
            {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
            "an MLP in",
        ),
        ("nemotron-h", {"mlp_hidden_act": "silu"}, r'no key for what config\.json says: .*"?silu'),
        ("lfm2-moe", {"routed_scaling_factor": 2.0}, r"no key for .*: routed_scaling_factor 2\.0"),
        ("granite-4", {"position_embedding_type": "nope"}, "no key for .*its rotary embedding"),
    ],
)
def test_models_that_files_cannot_describe(name: str, entries: dict[str, Any], complaint: str, tmp_path: Path) -> None:

    model = checkpoint_of(name, tmp_path / "m")
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    assert re.search(complaint, refusal(model, tmp_path))
