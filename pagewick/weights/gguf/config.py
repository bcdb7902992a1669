"""A GGUF file's metadata as a Hugging Face style config.json and generation_config.json. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Final

from pagewick.errors import ModelLoadError
from pagewick.weights.gguf.architecture import AXES, GgufArchitecture
from pagewick.weights.gguf.architectures import ARCHITECTURES, DEEPSEEK_V3, GLM4V, MIXTRAL, YOUTU
from pagewick.weights.gguf.architectures_2025 import OLMO3
from pagewick.weights.gguf.architectures_granite import GRANITE_MOE_SHARED
from pagewick.weights.gguf.architectures_hybrid import BAMBA, FALCON_MAMBA
from pagewick.weights.gguf.architectures_others import FALCON_WITH_TWO_NORMS
from pagewick.weights.gguf.encoders import DISTILBERT, encoder_entries
from pagewick.weights.gguf.hybrid_entries import is_bamba
from pagewick.weights.gguf.metadata import Metadata, ReadNumbers
from pagewick.weights.gguf.pooling import check_pooling, pooling_entries, sees_earlier_only
from pagewick.weights.gguf.special_entries import special_entries
from pagewick.weights.gguf.vocabulary import end_token_ids

_SIGMOID: Final = 2  # expert_gating_func
# The old name of rope.scaling.factor; a file with it scales linearly.
_SCALE_LINEAR: Final = "rope.scale_linear"
_YARN_ENTRIES: Final = {
    "rope.scaling.attn_factor": "attn_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
# Keys of models that compute something else than their architecture does elsewhere -> the values that change nothing.
# Mistral Large 3 (deepseek2) scales scores by position, Jina's BERT by distance.
_WITHOUT_EFFECT: Final[Mapping[str, tuple[Any, ...]]] = {
    "rope.dimension_sections": (0,),
    "attention.temperature_scale": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "rope.scaling.yarn_ext_factor": (1, -1),
}
# general.sampling.* -> entry of generation_config.json.
SAMPLING: Final = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def architecture_of(metadata: Metadata) -> GgufArchitecture:
    """Return the meaning of the file's architecture. Raises ModelLoadError if it is not supported."""
    kind = metadata.kind
    if kind not in ARCHITECTURES:
        raise ModelLoadError(
            f"{metadata.where} holds a model of the architecture {kind}, which is not supported\n"
            f"  supported: {', '.join(ARCHITECTURES)}"
        )
    if kind == "llama" and metadata.get("expert_count"):
        return MIXTRAL
    if kind == "deepseek2" and not metadata.get("expert_count"):
        return YOUTU
    if kind == "deepseek2":
        has_bias = any(name.endswith(".exp_probs_b.bias") for name in metadata.shapes)
        if metadata.get("expert_gating_func", _SIGMOID if has_bias else 0) == _SIGMOID:
            return DEEPSEEK_V3
    if kind == "granitemoe" and metadata.get("expert_shared_feed_forward_length"):
        return GRANITE_MOE_SHARED
    if kind == "glm4" and _has_axes(metadata):
        return GLM4V
    if kind == "olmo2" and metadata.get("attention.sliding_window"):
        return OLMO3
    if kind == "falcon" and "blk.0.attn_norm_2.weight" in metadata.shapes:
        return FALCON_WITH_TWO_NORMS
    if kind == "granitehybrid" and is_bamba(metadata):
        return BAMBA
    if kind == "mamba" and metadata.get("ssm.dt_b_c_rms"):
        return FALCON_MAMBA
    if kind == "bert" and "token_types.weight" not in metadata.shapes:
        return DISTILBERT
    if kind == "mistral3" and not metadata.get("attention.temperature_scale"):
        return ARCHITECTURES["llama"]
    return ARCHITECTURES[kind]


def _has_axes(metadata: Metadata) -> bool:
    sections = metadata.values.get(f"{metadata.kind}.{next(iter(AXES))}")
    return isinstance(sections, list) and any(sections)


def hugging_face_config(metadata: Metadata, read_numbers: ReadNumbers) -> dict[str, Any]:
    """Return the config.json that describes the file. read_numbers: reads a tensor of rope factors.

    Raises ModelLoadError if the file lacks something that its architecture needs, and names the key.
    """
    architecture, shapes = architecture_of(metadata), metadata.shapes
    if missing := [key for key in architecture.required if metadata.get(key) is None]:
        raise metadata.wrong(f"{metadata.kind}.{missing[0]}", "missing")
    check_pooling(metadata, architecture)
    _check_effects(metadata, architecture.harmless)
    if "token_embd.weight" not in shapes:
        raise ModelLoadError(f"{metadata.where} holds no token_embd.weight\n  use a file that holds a language model")
    found: dict[str, Any] = {
        "architectures": [architecture.name],
        "vocab_size": shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "dtype": "bfloat16",
        **architecture.constants,
    }
    for key, entry in architecture.entries.items():
        if (value := metadata.get(key)) is not None:
            found[entry] = value
    heads, key_heads = (architecture.entries.get(f"attention.head_count{suffix}") for suffix in ("", "_kv"))
    if key_heads is not None and heads in found:
        # As in llama.cpp, where no key says it.
        found.setdefault(key_heads, found[heads])
    num_blocks, num_later = metadata.num_layers()
    num_layers = num_blocks - num_later
    # GPT-2 and its successors have entries of other names.
    is_gpt2 = "n_embd" in architecture.entries.values()
    found["n_layer" if is_gpt2 else "num_hidden_layers"] = num_layers
    if num_later and architecture.predicting:
        # The model must know which layers of the file are not its own.
        found["num_nextn_predict_layers"] = num_later
    # Not every layer has all parts.
    parts = {name.partition(".")[2].partition(".")[2] for name in shapes if name.startswith("blk.")}
    found |= {entry: name in parts for entry, name in architecture.has.items()}
    found |= {entry: name not in parts for entry, name in architecture.lacks.items()}
    if architecture.entries.get("attention.kv_lora_rank"):
        found |= _latent_sizes(metadata, found)
    elif not is_gpt2 and "attention.head_count" in architecture.entries:
        found |= _head_sizes(metadata)
    found |= _expert_sizes(metadata, architecture, found)
    found |= _rope(metadata, read_numbers)
    found |= special_entries(metadata, found, read_numbers)
    if architecture.is_encoder:
        found |= encoder_entries(metadata, found)
    elif not sees_earlier_only(metadata, architecture):
        found["is_causal"] = False
    return found | pooling_entries(metadata, architecture)


def _check_effects(metadata: Metadata, harmless: Collection[str]) -> None:
    """Raise ModelLoadError for a key that changes what the model computes, and that is not supported."""
    for key, allowed in _WITHOUT_EFFECT.items():
        if key in harmless:
            continue
        value = metadata.values.get(f"{metadata.kind}.{key}", allowed[0])
        if any(one not in allowed for one in (value if isinstance(value, list) else [value])):
            raise metadata.wrong(f"{metadata.kind}.{key}", f"{value!r:.80}, which is not supported")


def generation_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the generation_config.json that a file's key-values amount to. Raises ModelLoadError."""
    found: dict[str, Any] = {}
    for key, entry in SAMPLING.items():
        value = values.get(f"general.sampling.{key}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[entry] = value
    ends = end_token_ids(values)
    return found | ({"eos_token_id": ends} if ends else {})


def _head_sizes(metadata: Metadata) -> dict[str, Any]:
    """head_dim, and the part of it that is rotated."""
    num_heads, hidden_size = metadata.get("attention.head_count"), metadata.get("embedding_length")
    head_dim = metadata.get("attention.key_length", hidden_size // max(1, num_heads))
    if metadata.get("attention.value_length", head_dim) != head_dim:
        raise metadata.wrong(
            f"{metadata.kind}.attention.value_length", "another than key_length, which is not supported"
        )
    rotary_dim = metadata.get("rope.dimension_count", head_dim)
    # The reader of config.json rounds the product with head_dim down, which must not become one less.
    factor = 1.0 if rotary_dim == head_dim else math.nextafter(rotary_dim / max(1, head_dim), 2.0)
    return {"head_dim": head_dim, "partial_rotary_factor": factor}


def _latent_sizes(metadata: Metadata, found: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of a head. Older files have them as key_length and value_length, newer ones the sizes of the latents."""
    suffix = "_mla" if metadata.get("attention.key_length_mla") is not None else ""
    key_length, value_length = (metadata.get(f"attention.{kind}_length{suffix}") for kind in ("key", "value"))
    if metadata.kind == "minicpm3" and value_length is None:
        # Values share out the hidden size.
        value_length = found["hidden_size"] // max(1, found["num_attention_heads"])
    for name, length in (("key", key_length), ("value", value_length)):
        if length is None:
            raise metadata.wrong(f"{metadata.kind}.attention.{name}_length", "missing")
    return {"qk_nope_head_dim": key_length - found["qk_rope_head_dim"], "v_head_dim": value_length}


def _expert_sizes(metadata: Metadata, architecture: GgufArchitecture, found: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of experts that older files show in their tensors only, and how the router's choices are scaled."""
    sizes: dict[str, Any] = {}
    shapes = metadata.shapes
    last = metadata.num_layers()[0] - 1
    for entry, name in (
        ("moe_intermediate_size", "ffn_up_exps"),
        ("shared_expert_intermediate_size", "ffn_up_shexp"),
    ):
        shape = shapes.get(f"blk.{last}.{name}.weight")
        if shape is not None and entry in architecture.entries.values() and entry not in found:
            sizes[entry] = shape[-2]
    if (renormalize := metadata.get("expert_weights_norm")) is not None:
        sizes["norm_topk_prob"] = renormalize
    if architecture.name == "DeepseekV2ForCausalLM" and found.get("n_group", 1) > 1:
        sizes["topk_method"] = "group_limited_greedy"
    return sizes


def _rope(metadata: Metadata, read_numbers: ReadNumbers) -> dict[str, Any]:
    """rope_theta and rope_scaling."""
    found: dict[str, Any] = {}
    if (theta := metadata.get("rope.freq_base")) is not None:
        found["rope_theta"] = theta
    names = {name: f"rope_factors_{name}.weight" for name in ("short", "long")}
    freqs = "rope_freqs.weight"
    if all(name in metadata.shapes for name in names.values()):
        factors = {f"{name}_factor": list(read_numbers(tensor)) for name, tensor in names.items()}
        found["rope_scaling"] = {"rope_type": "longrope", **factors}
        if (attention_factor := metadata.get("rope.scaling.attn_factor")) is not None:
            found["rope_scaling"]["attention_factor"] = attention_factor
    elif freqs in metadata.shapes:
        # The factors of Llama 3's scaling, already computed: each frequency is divided by its own.
        numbers = list(read_numbers(freqs))
        found["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": numbers,
            "long_factor": numbers,
            "attention_factor": 1.0,
            "original_max_position_embeddings": metadata.get("context_length"),
        }
    elif (scaling := _scaling(metadata)) is not None:
        found["rope_scaling"] = scaling
    return found


def _scaling(metadata: Metadata) -> dict[str, Any] | None:
    factor = metadata.get("rope.scaling.factor", metadata.get(_SCALE_LINEAR))
    kind = metadata.get("rope.scaling.type", "none" if factor is None else "linear")
    if kind in ("none", "longrope") or factor in (None, 0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise metadata.wrong(f"{metadata.kind}.rope.scaling.type", f"{kind!r}, which is not supported")
    found = {"rope_type": "yarn", "factor": factor}
    if (original := metadata.get("rope.scaling.original_context_length")) is not None:
        found["original_max_position_embeddings"] = original
    found |= {entry: value for key, entry in _YARN_ENTRIES.items() if (value := metadata.get(key)) is not None}
    if (written := metadata.get("rope.scaling.yarn_attn_factor")) is not None:
        # llama.cpp's converter writes attention_factor here, which is never below 1, or the multiplier attn_factor.
        is_multiplier = isinstance(written, float) and written < 1
        found["attn_factor" if is_multiplier else "attention_factor"] = written
    if (multiplier := metadata.get("rope.scaling.yarn_log_multiplier")) is not None:
        # Written as 0.1 * mscale_all_dim. DeepSeek's files have mscale equal to it.
        found |= dict.fromkeys(("mscale", "mscale_all_dim"), round(multiplier * 10, 6))
    return found
