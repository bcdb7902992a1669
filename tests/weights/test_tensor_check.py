"""A checkpoint's headers beside its config.json: mistakes are found before any weights are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest

from pagewick.demo import MODEL_DIR
from pagewick.errors import ModelLoadError
from pagewick.models.registry import read_config
from pagewick.models.tensors import model_tensors
from pagewick.weights.tensor_check import check_headers
from pagewick.weights.tensor_headers import TensorInfo, directory_tensors

CONFIG: dict[str, Any] = json.loads((MODEL_DIR / "config.json").read_text(encoding="utf-8"))
TENSORS = {tensor.name: tensor for tensor in directory_tensors(MODEL_DIR)}
NAME = "model.layers.3.mlp.up_proj.weight"
MIXTURE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1,
    "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 31, "num_experts": 5,
    "num_experts_per_tok": 2, "moe_intermediate_size": 7, "max_position_embeddings": 64, "tie_word_embeddings": True,
    "norm_topk_prob": True,
}  # fmt: skip
SHAPES = {
    "model.embed_tokens.weight": (31, 24), "model.norm.weight": (24,), "self_attn.q_proj.weight": (24, 24),
    "self_attn.k_proj.weight": (8, 24), "self_attn.v_proj.weight": (8, 24), "self_attn.o_proj.weight": (24, 24),
    "self_attn.q_norm.weight": (8,), "self_attn.k_norm.weight": (8,), "input_layernorm.weight": (24,),
    "post_attention_layernorm.weight": (24,), "mlp.gate.weight": (5, 24),
    **{f"mlp.experts.{i}.{part}_proj.weight": (7, 24) for i in range(5) for part in ("gate", "up")},
    **{f"mlp.experts.{i}.down_proj.weight": (24, 7) for i in range(5)},
}  # fmt: skip


def check_tensors(config: dict[str, Any], tensors: Collection[TensorInfo]) -> None:
    model = read_config(config)
    expected = {tensor.name: tensor.shape for tensor in model_tensors(model, [tensor.name for tensor in tensors])}
    check_headers(expected, tensors, model.ignored_tensors)


def changed(**fields: object) -> Callable[[dict[str, TensorInfo]], None]:
    def change(tensors: dict[str, TensorInfo]) -> None:
        tensors[NAME] = replace(tensors[NAME], **fields)  # type: ignore[arg-type]

    return change


def extra(tensors: dict[str, TensorInfo]) -> None:
    tensors["model.layers.5.mlp.up_proj.weight"] = replace(tensors[NAME], name="model.layers.5.mlp.up_proj.weight")


def stray_bias(tensors: dict[str, TensorInfo]) -> None:
    tensors["model.layers.3.mlp.router.bias"] = TensorInfo("model.layers.3.mlp.router.bias", "F16", (5,), 10)


def test_a_bias_of_a_weight_without_one_is_left_to_the_loader() -> None:
    name = NAME.replace(".weight", ".bias")
    check_tensors(CONFIG, [*TENSORS.values(), TensorInfo(name, "F16", (768,), 1536)])


def test_the_built_in_model_is_whole() -> None:
    check_tensors(CONFIG, TENSORS.values())


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda tensors: tensors.pop(NAME), f"lacks 1 tensor of this model: {NAME}\n.*do not belong together"),
        (stray_bias, r"no place for 1 tensor: model.layers.3.mlp.router.bias"),
        (extra, r"no place for 1 tensor: model.layers.5.mlp.up_proj.weight\n.*do not belong together"),
        (
            changed(shape=(768, 255)),
            rf"load {NAME}: its shape is \[768, 255\], and config.json says \[768, 256\]\n.*do",
        ),
        (changed(dtype="I8"), f"load {NAME}: it is stored as I8, and must be one of BF16, F16, F32, F64"),
        (changed(dtype="F4"), f"load {NAME}: it is stored as F4"),
    ],
)
def test_what_loading_would_refuse(change: Callable[[dict[str, TensorInfo]], None], complaint: str) -> None:
    tensors = dict(TENSORS)
    change(tensors)
    with pytest.raises(ModelLoadError, match=complaint):
        check_tensors(CONFIG, tensors.values())


@pytest.mark.parametrize("is_tied", [True, False])
def test_an_embedding_model_is_told_from_a_broken_checkpoint(is_tied: bool) -> None:
    """Qwen3-Embedding has the architecture of a model that generates text, and no output layer."""
    tensors = [replace(one, name=name.removeprefix("model.")) for name, one in TENSORS.items() if "lm_head" not in name]
    config = {**CONFIG, "tie_word_embeddings": is_tied}
    check_tensors(config, tensors)
    with pytest.raises(ModelLoadError, match="do not belong together"):
        check_tensors(config, tensors[1:])


def test_every_expert_is_looked_at() -> None:
    names = {name if name.startswith("model") else f"model.layers.0.{name}": shape for name, shape in SHAPES.items()}
    tensors = {name: TensorInfo(name, "BF16", shape, 0) for name, shape in names.items()}
    check_tensors(MIXTURE, tensors.values())
    name = "model.layers.0.mlp.experts.4.down_proj.weight"
    tensors[name] = replace(tensors[name], shape=(24, 8))
    with pytest.raises(ModelLoadError, match=rf"cannot load {name}: its shape is \[24, 8\]"):
        check_tensors(MIXTURE, tensors.values())
    del tensors[name]
    with pytest.raises(ModelLoadError, match=f"lacks 1 tensor of this model: {name}"):
        check_tensors(MIXTURE, tensors.values())
