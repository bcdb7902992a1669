"""Which block format each weight of a model gets in a mix, such as q4_k_m: llama.cpp's rules as tables. No torch.

A mix has a format for most weights, and others for those parts whose errors cost most. q3_k, q4_k, q5_k and int4 are
not llama.cpp's: all weights have one format, but those that get another one in every mix, such as the vocabulary head.
Names are those of Hugging Face or of GGUF files. Source of the rules: https://github.com/ggml-org/llama.cpp,
src/llama-quant.cpp.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from pagewick.errors import ConfigError
from pagewick.quantization.block_formats import BLOCK_FORMATS

# Mix -> the format of weights that no rule below names.
MIXES: Final[Mapping[str, str]] = {
    "q4_0": "Q4_0",
    "q4_1": "Q4_1",
    "q5_0": "Q5_0",
    "q5_1": "Q5_1",
    "q8_0": "Q8_0",
    "q2_k": "Q2_K",
    "q2_k_s": "Q2_K",
    "q3_k": "Q3_K",
    "q3_k_s": "Q3_K",
    "q3_k_m": "Q3_K",
    "q3_k_l": "Q3_K",
    "q4_k": "Q4_K",
    "q4_k_s": "Q4_K",
    "q4_k_m": "Q4_K",
    "q5_k": "Q5_K",
    "q5_k_s": "Q5_K",
    "q5_k_m": "Q5_K",
    "q6_k": "Q6_K",
    "int4": "int4_g128",
}
# Part of a model -> the end of its weights' names, in GGUF files and in checkpoints of Hugging Face's.
_ENDINGS: Final[Mapping[str, Sequence[str]]] = {
    "head": ("output", "lm_head", "embed_out", "head"),
    "embedding": (
        *("token_embd", "per_layer_token_embd", "embed_tokens", "wte", "word_embeddings", "embed_in"),
        "tok_embeddings",
        # Mamba's names, Mamba-2's, and DeepSeek V4's.
        *("backbone.embeddings", "backbone.embedding", "embed"),
    ),
    "values": (
        *("attn_v", "attn_qkv", "attn_kv_b", "v_proj", "qkv_proj", "query_key_value", "kv_b_proj"),
        *("c_attn", "Wqkv", "in_proj_qkv", "wkv_b", "attn.qkv"),
    ),
    "keys": ("attn_k", "k_proj"),
    "attention output": (
        *("attn_output", "o_proj", "attn.c_proj", "attention.dense", "self_attn.dense", "attn.out_proj"),
        *("self_attn.out_proj", "self_attention.dense", "attention.wo", "wo_b", "attn.proj"),
    ),
    "down": ("ffn_down", "down_proj", "ffn_down_exps", "ffn_down_shexp", "mlp.c_proj", "fc2", "dense_4h_to_h", "w2"),
}
_DOTTED_ENDINGS: Final = {part: tuple(f".{ending}" for ending in endings) for part, endings in _ENDINGS.items()}
# Weights that stay as they are: norms, routers, tables of positions, heads of labels and other small ones, and
# encoders of images.
_UNQUANTIZED: Final = re.compile(
    r"norm|(^|\.)(ffn_gate_inp(_shexp)?|gate(\.wg)?|router(\.(layer|proj|classifier))?|shared_expert_gate|ssm_conv1d)\.weight$"
    r"|(^|\.)indexer\.(weights_)?proj\.weight$"
    r"|(^|\.)(wpe|embed_positions|position_embd|token_types)\.weight$"
    r"|^(score|cls\.output)\.weight$"
    r"|conv1d|shortconv\.conv|altup|laurel|per_layer_model_proj|attn_rel_b"
    r"|(^|\.)(visual|vision(_(tower|model|encoder|projection))?|(multi_modal|mm)_projector|embed_vision|connector|merger)\."
    r"|^((model\.)?projector|mlp_AR|patch_merger|vision_language_adapter)\."
)
# A table of embeddings whose name in Moondream's files has no ending.
_TABLE: Final = "text.wte"
_LAYER: Final = re.compile(r"(?:^|\.)(?:blk|layers|h|blocks)\.(\d+)\.")

# Part -> mix -> formats, each with the layers that have it; the first that fits is taken.
_RULES: Final[Mapping[str, Mapping[str, Sequence[tuple[str, str]]]]] = {
    "values": {
        "q2_k": (("with groups of 4 heads", "Q4_K"), ("all", "Q3_K")),
        "q2_k_s": (("with groups of 4 heads", "Q4_K"),),
        "q3_k_m": (("first 2", "Q5_K"), ("all", "Q4_K")),
        "q3_k_l": (("all", "Q5_K"),),
        "q4_k_s": (("first 4", "Q5_K"),),
        "q4_k_m": (("outer and every third", "Q6_K"),),
        "q5_k_m": (("outer and every third", "Q6_K"),),
    },
    "down": {
        "q2_k": (("all", "Q3_K"),),
        "q2_k_s": (("first eighth", "Q4_K"),),
        "q3_k_m": (("first sixteenth", "Q5_K"), ("all", "Q4_K")),
        "q3_k_l": (("all", "Q5_K"),),
        "q4_k_s": (("first eighth", "Q5_K"),),
        "q4_k_m": (("outer and every third", "Q6_K"),),
        "q5_k_m": (("outer and every third", "Q6_K"),),
        "q4_0": (("first eighth with importance", "Q4_1"),),
        "q5_0": (("first eighth with importance", "Q5_1"),),
    },
    "attention output": {
        "q2_k": (("all", "Q3_K"),),
        "q3_k_m": (("all", "Q4_K"),),
        "q3_k_l": (("all", "Q5_K"),),
    },
}
# With eight experts, attention is a small part of the weights.
_EIGHT_EXPERTS: Final = frozenset({"q2_k", "q3_k_s", "q3_k_m", "q4_k_s", "q4_k_m"})
# Format with large blocks -> the one for weights whose width does not fit them.
_NARROW: Final = {
    **{"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"},
    **{"int4_g128": "int4_g64", "int4_g64": "int4_g32"},
}


@dataclass(frozen=True)
class MixedModel:
    """The facts about a model that the rules need. num_experts: 0 for none."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    num_experts: int = 0
    has_importance: bool = False


def mix_types(
    mix: str,
    shapes: Mapping[str, Sequence[int]],
    model: MixedModel,
    beside: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> dict[str, str | None]:
    """Return the format of every tensor; None: it stays as it is. F16: no format has blocks that fit.

    shapes: by name, as PyTorch has them, of all the model's tensors. beside: of a predicting layer's, which stands
    behind the model's own, whatever its name. They change no format of the others, so that the model computes the same
    with this layer and without it. Raises ConfigError for an unknown mix.
    """
    found = MixedWeights(shapes, model).types(mix)
    if beside:
        behind = {f"layers.{model.num_layers}.{name}": name for name in beside}
        places = {place: beside[name] for place, name in behind.items()}
        types = MixedWeights({**shapes, **places}, model).types(mix)
        found |= {name: types[place] for place, name in behind.items()}
    return found


class MixedWeights:
    """The tensors of a model in the order in which the rules count them, which is the same for all mixes.

    shapes: see mix_types.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], model: MixedModel) -> None:
        self._names, self._model = tuple(shapes), model
        parts = {name: part_of(name) for name in shapes if is_quantizable(name, shapes[name])}
        is_tied = "head" not in parts.values()
        self._num_values = sum(part == "values" for part in parts.values())
        self._places: dict[str, tuple[str, int, int]] = {}  # name -> part, index, number of columns
        counts: Counter[str] = Counter()
        for layer, name in sorted((_layer(name), name) for name in parts):
            part = "head" if is_tied and parts[name] == "embedding" else parts[name]
            index = layer if part == "down" and model.num_experts > 1 else counts[part]
            counts[part] += 1
            self._places[name] = part, index, shapes[name][-1]

    def types(self, mix: str) -> dict[str, str | None]:
        """Return the format of every tensor, as mix_types does. Raises ConfigError for an unknown mix."""
        if mix not in MIXES:
            raise ConfigError(f"{mix!r} is no mix of quantized formats; choose from: {', '.join(MIXES)}")
        found = {place: self._type(mix, *place) for place in set(self._places.values())}
        return {name: found[self._places[name]] if name in self._places else None for name in self._names}

    def _type(self, mix: str, part: str, index: int, num_columns: int) -> str:
        num_layers = self._num_values if part == "values" else self._model.num_layers
        return fitting_type(_type_of_part(mix, part, num_columns, index, num_layers, self._model), num_columns)


def is_quantizable(name: str, shape: Sequence[int]) -> bool:
    """Whether a mix quantizes the tensor: a weight of at least two dimensions that is no norm and no router."""
    return len(shape) >= 2 and name.endswith(("weight", _TABLE)) and not _UNQUANTIZED.search(name)


def fitting_type(name: str, num_columns: int) -> str:
    """Return the format, or one with smaller blocks if those do not fit; F16 if none does."""
    while num_columns % BLOCK_FORMATS[name][0] and name in _NARROW:
        name = _NARROW[name]
    return "F16" if num_columns % BLOCK_FORMATS[name][0] else name


def part_of(name: str) -> str:
    """Return the part of a model that the rules tell apart; other: none of these."""
    stem = f".{name.removesuffix('.weight')}"
    return next((part for part, endings in _DOTTED_ENDINGS.items() if stem.endswith(endings)), "other")


def _layer(name: str) -> int:
    found = _LAYER.search(name)
    return int(found[1]) if found else -1


def _type_of_part(mix: str, part: str, num_columns: int, index: int, num_layers: int, model: MixedModel) -> str:
    default = MIXES[mix]
    if part == "head":
        return "Q8_0" if default == "Q8_0" or num_columns % BLOCK_FORMATS[default][0] else "Q6_K"
    if model.num_experts == 8 and part in ("values", "keys"):
        return "Q8_0"
    if model.num_experts == 8 and part == "attention output":
        return "Q5_K" if mix in _EIGHT_EXPERTS else default
    rules = _RULES.get(part, {}).get(mix, ())
    name = next((name for layers, name in rules if _includes(layers, index, num_layers, model)), default)
    # A model of 70B parameters has few values: a better format costs little.
    is_large = model.num_layers == 80 and model.num_heads != model.num_kv_heads
    return "Q5_K" if part == "values" and is_large and name in ("Q3_K", "Q4_K") else name


def _includes(layers: str, index: int, num_layers: int, model: MixedModel) -> bool:
    """Whether a rule for these layers is one for layer `index`."""
    eighth = num_layers // 8
    return {
        "all": True,
        "first 2": index < 2,
        "first 4": index < 4,
        "first eighth": index < eighth,
        "first eighth with importance": model.has_importance and index < eighth,
        "first sixteenth": index < num_layers // 16,
        "outer and every third": index < eighth or index >= 7 * num_layers // 8 or (index - eighth) % 3 == 2,
        "with groups of 4 heads": model.num_heads >= 4 * model.num_kv_heads,
    }[layers]
