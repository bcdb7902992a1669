"""The choice of weights that are quantized at load, and of a mix that fits."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pagewick.errors import ConfigError
from pagewick.quantization.plan import choose_mix, plan_quantization


@dataclass(frozen=True)
class Model:
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    num_experts: int = 0


SHAPES = {
    "model.embed_tokens.weight": (100, 256),
    "model.layers.0.self_attn.q_proj.weight": (256, 256),
    "model.layers.0.self_attn.q_proj.bias": (256,),
    "model.layers.0.mlp.gate.weight": (8, 256),
    "model.layers.0.mlp.down_proj.weight": (256, 96),
    "model.layers.0.mlp.up_proj.weight": (96, 256),
    "model.layers.1.mlp.up_proj.weight": (96, 40),
    "model.norm.weight": (256,),
    "lm_head.weight": (100, 256),
}


def test_matrices_are_quantized_and_routers_norms_and_biases_are_not() -> None:
    plan = plan_quantization("q4_k", SHAPES, {}, Model())
    assert plan.formats == {
        "model.embed_tokens.weight": "Q4_K",
        "model.layers.0.self_attn.q_proj.weight": "Q4_K",
        "model.layers.0.mlp.down_proj.weight": "Q5_0",
        "model.layers.0.mlp.up_proj.weight": "Q4_K",
        "lm_head.weight": "Q6_K",
    }
    assert plan.describe_narrow() == "rows too short for Q4_K: 1 in Q5_0, 1 unquantized"


def test_nothing_is_said_where_all_rows_fit() -> None:
    shapes = {name: shape for name, shape in SHAPES.items() if shape[-1] != 40}
    assert plan_quantization("q8_0", shapes, {}, Model()).describe_narrow() == ""


@pytest.mark.parametrize("name", ["model.layers.9", "mtp.layers.0"])
def test_a_predicting_layer_changes_no_format_of_the_others(name: str) -> None:
    """In q4_k_m, the place of a layer among the others decides on the formats of values and outputs of its MLP."""
    layer = {"self_attn.v_proj.weight": (256, 256), "mlp.down_proj.weight": (256, 512)}
    shapes = {f"model.layers.{idx}.{leaf}": shape for idx in range(9) for leaf, shape in layer.items()}
    beside = {f"{name}.{leaf}": shape for leaf, shape in layer.items()} | {f"{name}.eh_proj.weight": (256, 512)}
    alone = plan_quantization("q4_k_m", shapes, {}, Model(num_layers=9)).formats
    assert set(alone.values()) == {"Q4_K", "Q6_K"}
    both = plan_quantization("q4_k_m", shapes, {}, Model(num_layers=9), beside).formats
    assert {key: kind for key, kind in both.items() if key in shapes} == alone
    assert both[f"{name}.eh_proj.weight"] == "Q4_K"
    assert both[f"{name}.mlp.down_proj.weight"] == both[f"{name}.self_attn.v_proj.weight"] == "Q6_K"
    with pytest.raises(ConfigError, match=r"quantized already \(Q8_0\)"):
        plan_quantization("q4_k_m", shapes, {f"{name}.eh_proj.weight": "Q8_0"}, Model(), beside)


def test_a_checkpoint_in_blocks_is_refused_but_a_vector_or_another_tensor_in_blocks_is_not() -> None:
    others = {"model.norm.weight": "Q8_0", "unused.weight": "Q8_0"}
    assert plan_quantization("q8_0", SHAPES, others, Model()).formats
    blocks = {"lm_head.weight": "Q6_K", "model.embed_tokens.weight": "Q4_K"}
    with pytest.raises(ConfigError) as refusal:
        plan_quantization("q8_0", SHAPES, blocks, Model())
    assert str(refusal.value).splitlines() == [
        "--quantization q8_0: this checkpoint is quantized already (Q4_K, Q6_K)",
        "  leave the flag out, or give the model's unquantized checkpoint",
    ]


GIB = 2**30
BYTES: dict[str | None, int] = {
    **{None: 16 * GIB, "q8_0": 8 * GIB, "q6_k": 7 * GIB, "q5_k_m": 6 * GIB},
    **{"q4_k_m": 5 * GIB, "q3_k_m": 4 * GIB, "q2_k": 3 * GIB},
}


@pytest.mark.parametrize(
    ("free", "mix"), [(32, None), (20, "q8_0"), (10.7, "q8_0"), (10, "q6_k"), (6, "q3_k_m"), (1, "q2_k")]
)
def test_the_best_that_leaves_a_quarter_of_the_memory_is_chosen(free: float, mix: str | None) -> None:
    assert choose_mix(BYTES.__getitem__, int(free * GIB), "bfloat16")[0] == mix


def test_the_choice_is_explained_with_numbers_and_leaves_out_what_cannot_be_shared() -> None:
    possible = {**BYTES, "q6_k": None, "q5_k_m": None}
    assert choose_mix(possible.get, 9 * GIB, "bfloat16") == (
        "q4_k_m",
        "9.00 GiB are free, of which weights may take 6.75 GiB; "
        "they take 16.00 GiB in bfloat16, 8.00 GiB in q8_0, 5.00 GiB in q4_k_m",
    )
