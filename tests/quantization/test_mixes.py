"""Mixes of formats beside those of llama.cpp.

fixtures/mixes.json has what llama.cpp (of llama-cpp-python 0.3.36) chose for the tensors of these models: the results
of its functions tensor_allows_quantization and llama_tensor_get_type (src/llama-quant.cpp), for each model and mix as
runs of "number of tensors, format".
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import NamedTuple

import pytest

from pagewick.errors import ConfigError
from pagewick.number_formats import QUANTIZATIONS
from pagewick.quantization.mixes import MIXES, MixedModel, fitting_type, mix_types

LLAMA_CPP = json.loads((Path(__file__).parent / "fixtures" / "mixes.json").read_text())

# Mixes that llama.cpp does not have.
PLAIN = {"q3_k": "Q3_K", "q4_k": "Q4_K", "q5_k": "Q5_K", "int4": "int4_g128"}


class Model(NamedTuple):
    """A model whose layers have these weights: the end of a name, outputs, inputs, and experts if it has them."""

    facts: MixedModel
    is_tied: bool
    width: int
    layer: tuple[tuple[str, int, int, int], ...]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes as PyTorch has them by names in GGUF files, in the order in which llama.cpp takes them."""
        found: dict[str, tuple[int, ...]] = {
            "output_norm.weight": (self.width,),
            "token_embd.weight": (1000, self.width),
        }
        if not self.is_tied:
            found["output.weight"] = (1000, self.width)
        for layer in range(self.facts.num_layers):
            for name, rows, columns, experts in self.layer:
                found[f"blk.{layer}.{name}.weight"] = (experts, rows, columns) if experts else (rows, columns)
            found[f"blk.{layer}.attn_norm.weight"] = (self.width,)
        return dict(sorted(found.items(), key=lambda item: (layer_of(item[0]), item[0])))


def layer_of(name: str) -> int:
    return int(name.split(".")[1]) if name.startswith("blk.") else -1


def dense(width: int, inner: int, kv: int) -> tuple[tuple[str, int, int, int], ...]:
    attention = (("attn_q", width), ("attn_k", kv), ("attn_v", kv), ("attn_output", width))
    return (
        *((name, rows, width, 0) for name, rows in attention),
        *(("ffn_gate", inner, width, 0), ("ffn_up", inner, width, 0), ("ffn_down", width, inner, 0)),
    )


def experts(width: int, inner: int, kv: int, num: int) -> tuple[tuple[str, int, int, int], ...]:
    return (
        *dense(width, inner, kv)[:4],
        *(("ffn_gate_inp", num, width, 0), ("ffn_gate_exps", inner, width, num), ("ffn_up_exps", inner, width, num)),
        ("ffn_down_exps", width, inner, num),
    )


LATENT = (
    *(("attn_q", 512, 512, 0), ("attn_kv_a_mqa", 96, 512, 0), ("attn_kv_b", 512, 256, 0), ("attn_output", 512, 512, 0)),
    *experts(512, 256, 512, 64)[4:],
    *(("ffn_gate_shexp", 512, 512, 0), ("ffn_up_shexp", 512, 512, 0), ("ffn_down_shexp", 512, 512, 0)),
)
FUSED = (("attn_qkv", 768, 256, 0), ("attn_output", 256, 256, 0), ("ffn_up", 1024, 256, 0), ("ffn_down", 256, 1024, 0))
MODELS = {
    "built-in": Model(MixedModel(5, 4, 2), True, 256, dense(256, 768, 128)),
    "28 tied layers": Model(MixedModel(28, 16, 8), True, 1024, dense(1024, 3072, 1024)),
    "32 layers": Model(MixedModel(32, 32, 8), False, 512, dense(512, 1024, 128)),
    "80 layers": Model(MixedModel(80, 64, 8), False, 512, dense(512, 1024, 64)),
    "80 layers without groups": Model(MixedModel(80, 64, 64), False, 512, dense(512, 1024, 512)),
    "importance": Model(MixedModel(32, 32, 8, has_importance=True), False, 512, dense(512, 1024, 128)),
    "eight experts": Model(MixedModel(32, 32, 8, 8), False, 512, experts(512, 1024, 128, 8)),
    "128 experts": Model(MixedModel(48, 32, 4, 128), False, 512, experts(512, 256, 128, 128)),
    "latent attention": Model(MixedModel(27, 16, 16, 64), False, 512, LATENT),
    "fused projections": Model(MixedModel(12, 4, 4), True, 256, FUSED),
    "narrow": Model(MixedModel(30, 9, 3), True, 576, dense(576, 1536, 192)),
    "too narrow": Model(MixedModel(3, 4, 4), False, 48, dense(48, 80, 48)),
}


def in_runs(formats: dict[str, str | None]) -> str:
    """The formats of tensors, those of one kind in all layers beside each other."""
    ordered = sorted(formats, key=lambda name: (name.split(".")[-2], layer_of(name)))
    runs = itertools.groupby(formats[name] or "F32" for name in ordered)
    return ", ".join(f"{len(list(run))} {name}" for name, run in runs)


@pytest.mark.parametrize("title", MODELS)
def test_formats_are_those_that_llama_cpp_chooses(title: str) -> None:
    model = MODELS[title]
    for mix in set(MIXES) - set(PLAIN):
        assert in_runs(mix_types(mix, model.shapes(), model.facts)) == LLAMA_CPP[title][mix], mix


def test_a_plain_type_is_that_of_all_weights_but_those_that_every_mix_raises() -> None:
    model = MODELS["32 layers"]
    for mix, kind in PLAIN.items():
        found = mix_types(mix, model.shapes(), model.facts)
        others = {name: other for name, other in found.items() if other not in (None, kind)}
        assert others == {"output.weight": "Q6_K"}


# Ends of names in GGUF files -> in transformers.
SEPARATE = {
    **{"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"},
    **{"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"},
    **{"attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm"},
    **{"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
}
MLA = SEPARATE | {
    **{"attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_b": "self_attn.kv_b_proj", "ffn_gate_inp": "mlp.gate"},
    **{f"ffn_{part}_exps": f"mlp.experts.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}
GPT2 = {
    **{"token_embd": "transformer.wte", "output_norm": "transformer.ln_f.norm", "attn_norm": "norm_1"},
    **{"attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
}
PHI = SEPARATE | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
NAMES = {"32 layers": SEPARATE, "28 tied layers": SEPARATE, "latent attention": MLA, "fused projections": GPT2}


@pytest.mark.parametrize(("title", "names"), [*NAMES.items(), ("fused projections", PHI)])
def test_names_of_hugging_face_get_the_formats_of_those_in_gguf_files(title: str, names: dict[str, str]) -> None:
    model = MODELS[title]
    shapes = model.shapes()
    renamed = {name: hugging_face_name(name, names) for name in shapes}
    for mix in MIXES:
        expected = mix_types(mix, shapes, model.facts)
        found = mix_types(mix, {renamed[name]: shape for name, shape in shapes.items()}, model.facts)
        assert {name: found[renamed[name]] for name in shapes} == expected, mix


def hugging_face_name(name: str, names: dict[str, str]) -> str:
    *layer, end, _ = name.split(".")
    return f"model.layers.{layer[1]}.{names[end]}.weight" if layer else f"{names[end]}.weight"


def test_every_mix_can_be_asked_for_by_its_name() -> None:
    assert set(QUANTIZATIONS) == {"auto", *MIXES}


def test_an_unknown_mix_is_refused() -> None:
    with pytest.raises(ConfigError, match="'q4_k_xl' is no mix of quantized formats; choose from: q4_0, "):
        mix_types("q4_k_xl", {}, MixedModel(1, 1, 1))


def test_blocks_that_do_not_fit_give_way_to_smaller_ones() -> None:
    assert [fitting_type(name, 576) for name in ("Q2_K", "Q4_K", "Q5_K", "Q6_K", "Q4_0")] == [
        *("Q4_0", "Q5_0", "Q5_1", "Q8_0", "Q4_0")
    ]
    assert fitting_type("Q4_K", 80) == fitting_type("Q8_0", 80) == fitting_type("int4_g128", 80) == "F16"
    assert [fitting_type("int4_g128", columns) for columns in (640, 576, 96)] == ["int4_g128", "int4_g64", "int4_g32"]
