"""Writes a config.json as a GGUF file's metadata, and checks it by reading it as any file is read.

The keys of each architecture are in weights/gguf/architectures.py. Here are those that follow from several entries.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import torch

from pagewick.cli.quantizing.hybrid import file_architecture, hybrid_values
from pagewick.cli.quantizing.value_heads import state_of
from pagewick.cli.quantizing.values_2026 import Factors, padded_factors, values_2026
from pagewick.errors import ModelLoadError
from pagewick.layers.config import MlaConfig, RopeConfig
from pagewick.layers.rotary import inverse_frequencies
from pagewick.layers.sparse_activation import deviations_below
from pagewick.models.config import ModelConfig, architecture_of
from pagewick.models.parts import AttentionConfig, MlpConfig
from pagewick.models.registry import filled_config, read_config
from pagewick.weights.gguf.special_entries import INDEXERS

_GROUPS: Final = ("expert_group_count", "expert_group_used_count")
_SCALE: Final = "expert_weights_scale"
_WINDOW: Final = "attention.sliding_window"
_WINDOW_THETA: Final = "rope.freq_base_swa"
# Pairs of Qwen3.5's heads that turn with time, row and column, if config.json does not say so.
_AXES: Final = (11, 11, 10)
# The factor of a pair's frequency that lets it stand still.
_STILL: Final = 1e30
_SECTIONS: Final = "rope.dimension_sections"
# Architectures with a key for the size of the shared expert that config.json does not have.
_WITH_SHARED_SIZE: Final = frozenset({"ernie4_5-moe", "exaone-moe", "hunyuan-moe", "hy_v3"})
_GATING: Final = {"softmax": 1, "sigmoid": 2}
_POOLINGS: Final = {"mean": 1, "cls": 2, "last": 3}
# Fields of ModelConfig that may differ between a checkpoint and its file: their meaning is the same.
_SPELLINGS: Final = frozenset(
    {"architecture", "dtype", "names", "ignored", "longest_context", "rope", "window", "mtp"}
    | {"is_tiled", "is_fused", "is_shared_fused"}
)
_TOLERANCE: Final = 1e-6  # of float32, which the file has
# Architectures that also see images -> that of their text part.
_TEXT_PARTS: Final = {
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Mistral3ForConditionalGeneration": "MistralForCausalLM",
    "Gemma3nForConditionalGeneration": "Gemma3nForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
    "Gemma4UnifiedForConditionalGeneration": "Gemma4UnifiedForCausalLM",
    "Cohere2VisionForConditionalGeneration": "Cohere2ForCausalLM",
    # Its list of layer_types may be longer than that of EXAONE 4, which is otherwise the same.
    "Exaone4_5_ForConditionalGeneration": "Exaone4_5_ForConditionalGeneration",
    "LightOnOcrForConditionalGeneration": "Qwen3ForCausalLM",
    "MiniCPMV4_6ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Step3p7ForConditionalGeneration": "Step3p7ForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}

# The type of a text part -> its architecture, where that of the whole does not tell. The other ones than Mistral's are
# text parts of SmolVLM, Idefics3, InternVL and LFM2-VL.
_BY_TYPE: Final = {
    "ministral3": "Ministral3ForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
}


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json, or that of the text part of a model that also sees images.

    Raises ModelLoadError for a text part that has no form in GGUF files.
    """
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return {name: value for name, value in config.items() if name != "vision_config"}
    outer = {
        name: config[name]
        for name in ("architectures", "eos_token_id", "tie_word_embeddings", "embedding_pooling")
        if name in config
    }
    architecture = architecture_of(config)
    text_part = _BY_TYPE.get(str(inner.get("model_type")), _TEXT_PARTS.get(architecture))
    if text_part is None:
        raise ModelLoadError(
            f"the text part of {architecture} cannot be written as a GGUF file yet\n"
            "  use the checkpoint as it is, with --quantization"
        )
    # The families differ in what they read if the whole file does not say whether the head is tied.
    is_tied = read_config(config).tie_word_embeddings
    return {**inner, **outer, "architectures": [text_part], "tie_word_embeddings": is_tied}


def metadata_of(config: Mapping[str, Any], *, has_mtp: bool = False) -> tuple[dict[str, Any], Factors]:
    """Return the key-values that describe a model, and the rotary factors, which are tensors.

    config: from text_config. has_mtp: whether the file has a layer that predicts further tokens. Raises ModelLoadError
    for an architecture that has no form in GGUF files.
    """
    model, entries = read_config(config), filled_config(config)
    kind, architecture = file_architecture(model)
    found: dict[str, Any] = {"block_count": model.num_layers + has_mtp, "vocab_size": model.vocab_size}
    for key, entry in architecture.entries.items():
        if (value := entries.get(entry)) is not None:
            found[key] = value
    attention = model.attention
    if isinstance(attention, MlaConfig):
        found |= _latent_sizes(attention)
    elif isinstance(attention, AttentionConfig):
        found["attention.head_count_kv"] = attention.num_kv_heads
        found |= {f"attention.{part}_length": attention.head_dim for part in ("key", "value")}
    if _SCALE in architecture.entries:
        found = _router(model) | found
    if model.embedding:
        found["pooling_type"] = _POOLINGS[model.embedding]
    if config.get("n_group") is None:  # and so it is a default
        found = {key: value for key, value in found.items() if key not in _GROUPS}
    slides = [layer.window is not None for layer in model.layers]
    if kind == "phi3" or (kind == "llama4" and not any(slides)):
        found.setdefault(_WINDOW, 0)
    if kind == "stablelm":
        found["use_parallel_residual"] = model.block == "parallel"
    if kind in _WITH_SHARED_SIZE and model.mixtures and (shared := model.mixtures[0].shared_intermediate_size):
        found["expert_shared_feed_forward_length"] = shared
    if architecture.has_pattern and any(slides):
        found[f"{_WINDOW}_pattern"] = slides
    found |= _linear_attention(config, model, architecture.harmless, has_mtp=has_mtp)
    if kind == "gemma3n":
        found |= _gemma3n(model)
    if kind == "glm-dsa":
        indexers = (layer.latent.indexer for layer in model.layers if layer.latent is not None)
        found[INDEXERS] = [indexer is not None and not indexer.is_shared for indexer in indexers] + [True] * has_mtp
    rope, factors = _gemma4(model) if kind == "gemma4" else _rope(model)
    if _WINDOW_THETA in architecture.entries:
        thetas = [layer.rope.theta for layer in model.layers if layer.window is not None and layer.rope is not None]
        found |= dict(zip([_WINDOW_THETA], thetas, strict=False))
    all_layers = dataclasses.replace(model, has_mtp=has_mtp)
    found |= {**rope, **hybrid_values(kind, all_layers), **values_2026(kind, all_layers), **architecture.fixed}
    found |= {"nextn_predict_layers": 1} if has_mtp else {}
    if not model.mixtures:
        # A default of a family whose models may have none.
        found.pop("expert_used_count", None)
    values = {f"{kind}.{key}": value for key, value in found.items()}
    return {"general.architecture": kind, "general.type": "model", **values}, padded_factors(kind, model, factors)


def _linear_attention(
    config: Mapping[str, Any], model: ModelConfig, keys: Collection[str], *, has_mtp: bool
) -> dict[str, Any]:
    """Return the size of all value heads, the layers that have a state, and the axes of images if `keys` has them."""
    if (state := state_of(model)) is None or state.has_channel_decay:
        return {}
    found: dict[str, Any] = {
        "ssm.inner_size": state.num_value_heads * state.value_dim,
        "attention.recurrent_layers": [*(layer.state is not None for layer in model.layers), *[False] * has_mtp],
    }
    if _SECTIONS not in keys:
        return found
    axes = (config.get("rope_parameters") or config.get("rope_scaling") or {}).get("mrope_section", _AXES)
    return found | {_SECTIONS: [*axes, 0, 0, 0, 0][:4]}


def _gemma3n(model: ModelConfig) -> dict[str, Any]:
    """Sizes and sparsity of each layer's MLP, and the number of the stream that layers compute with."""
    mlps = [layer.mlp for layer in model.layers if isinstance(layer.mlp, MlpConfig)]
    return {
        "altup.active_idx": 0,
        "feed_forward_length": [mlp.intermediate_size for mlp in mlps],
        "activation_sparsity_scale": [deviations_below(mlp.sparsity) for mlp in mlps],
    }


def _gemma4(model: ModelConfig) -> tuple[dict[str, Any], Factors]:
    """Heads of two sizes with rotary embeddings of their own, and what differs from layer to layer."""
    slides = [layer.window is not None for layer in model.layers]
    within, everywhere = model.layers[slides.index(True)], model.layers[slides.index(False)]
    widths = [layer.mlp.intermediate_size for layer in model.layers if layer.mlp is not None]
    kv_heads = [layer.attention.num_kv_heads for layer in model.layers if isinstance(layer.attention, AttentionConfig)]
    found: dict[str, Any] = {
        "feed_forward_length": widths if len(set(widths)) > 1 else widths[0],
        "attention.head_count_kv": kv_heads if len(set(kv_heads)) > 1 else kv_heads[0],
        "attention.shared_kv_layers": sum(layer.lender is not None for layer in model.layers),
        "embedding_length_per_layer_input": 0 if model.layer_inputs is None else model.layer_inputs.size,
        f"{_WINDOW}_pattern": slides,
    }
    for layer, suffix in ((everywhere, ""), (within, "_swa")):
        assert isinstance(layer.attention, AttentionConfig) and layer.rope is not None
        found |= {f"attention.{part}_length{suffix}": layer.attention.head_dim for part in ("key", "value")}
        found |= {
            f"rope.dimension_count{suffix}": layer.attention.head_dim,
            f"rope.freq_base{suffix}": layer.rope.theta,
        }
    pairs, turned = found["rope.dimension_count"] // 2, everywhere.rope.rotary_dim // 2 if everywhere.rope else 0
    return found, {"rope_freqs.weight": (1.0,) * turned + (_STILL,) * (pairs - turned)}


def _latent_sizes(attention: MlaConfig) -> dict[str, int]:
    """The cache holds one head for all: the latent, and the part that is rotated."""
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": attention.kv_lora_rank + attention.qk_rope_head_dim,
        "attention.value_length": attention.kv_lora_rank,
        "attention.key_length_mla": attention.qk_nope_head_dim + attention.qk_rope_head_dim,
        "attention.value_length_mla": attention.v_head_dim,
    }


def _router(model: ModelConfig) -> dict[str, Any]:
    """How experts are chosen, for the architectures that have keys for it."""
    if not model.mixtures:
        return {}
    routing = model.mixtures[0].routing
    norm = {"expert_weights_norm": True} if routing.renormalize else {}
    return {"expert_gating_func": _GATING[routing.scoring], **norm}


def _rope(model: ModelConfig) -> tuple[dict[str, Any], Factors]:
    """The rotary embedding of the layers that see everything, or of the others if only these are rotated."""
    rotated = [layer for layer in model.layers if layer.rope is not None]
    rope = next((layer.rope for layer in rotated if layer.window is None), rotated[0].rope if rotated else None)
    if rope is None:
        return {}, {}
    found: dict[str, Any] = {"rope.freq_base": rope.theta, "rope.dimension_count": rope.rotary_dim}
    if rope.kind in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": rope.factor}
    if rope.kind in ("yarn", "longrope"):
        found["rope.scaling.original_context_length"] = rope.original_max_position_embeddings
    if rope.kind == "yarn":
        found |= _yarn(rope, is_mistral4=model.architecture == "Mistral4ForCausalLM")
    if rope.kind == "llama3":
        plain = inverse_frequencies(dataclasses.replace(rope, kind="default"))
        return found, {"rope_freqs.weight": tuple((plain / inverse_frequencies(rope)).tolist())}
    if rope.kind == "longrope":
        found["rope.scaling.attn_factor"] = rope.attention_factor
        names = {"long": rope.long_factor, "short": rope.short_factor}
        return found, {f"rope_factors_{name}.weight": factors for name, factors in names.items()}
    return found, {}


def _yarn(rope: RopeConfig, *, is_mistral4: bool) -> dict[str, Any]:
    found = {"rope.scaling.yarn_beta_fast": rope.beta_fast, "rope.scaling.yarn_beta_slow": rope.beta_slow}
    if rope.query_beta or is_mistral4:
        # Mistral 4's files have a tenth of the number, as those of DeepSeek, and readers take 0.1 for no key.
        part = 0.1 if is_mistral4 else 1.0
        scales = {"attention.temperature_scale": rope.query_beta}
        return found | scales | {"rope.scaling.yarn_log_multiplier": part * rope.mscale_all_dim}
    if rope.mscale_all_dim:
        return found | {"rope.scaling.yarn_log_multiplier": 0.1 * rope.mscale_all_dim}
    if not math.isclose(rope.attention_factor, 1 + 0.1 * math.log(max(1.0, rope.factor))):
        found["rope.scaling.yarn_attn_factor"] = rope.attention_factor
    return found


def check_same(config: Mapping[str, Any], stored: Mapping[str, Any]) -> list[str]:
    """Compare a model with what its GGUF file says about it; return what its readers should know.

    config: the checkpoint's; stored: the config.json that the file's metadata amount to. Raises ModelLoadError, which
    names what files of this architecture cannot say.
    """
    ours, theirs = (_with_all_rows(read_config(one)) for one in (config, stored))
    fields = list(_differences(ours, theirs))
    entries = list(_lost_entries(config, stored, len(fields))) if fields else []
    if lost := [*(entries or fields), *_rope_differences(ours, theirs)]:
        raise ModelLoadError(
            f"GGUF files of {ours.architecture} have no key for what config.json says: {', '.join(lost[:3])}\n"
            "  use the checkpoint as it is, with --quantization"
        )
    windows = [layer.window for layer in ours.layers]
    if windows == [layer.window for layer in theirs.layers]:
        return []
    size = min(window for window in windows if window is not None)
    return [f"GGUF files of {ours.architecture} have no key for its window: a response may differ after {size} tokens"]


def _with_all_rows(model: ModelConfig) -> ModelConfig:
    """Return the model with a row of the table of layers' inputs for each token, as files have them."""
    if (inputs := model.layer_inputs) is None:
        return model
    rows = inputs.num_ids(model.vocab_size)
    return dataclasses.replace(model, layer_inputs=dataclasses.replace(inputs, vocab_size=rows))


def _lost_entries(config: Mapping[str, Any], stored: Mapping[str, Any], num_lost: int) -> Iterator[str]:
    """Yield the entries of config.json that make the file's model more like the checkpoint's, were they in the file.

    num_lost: in how many fields the models differ.
    """
    ours = read_config(config)
    for name, value in filled_config(config).items():
        if value == stored.get(name):
            continue
        try:
            theirs = read_config({**stored, name: value})
        except ModelLoadError:
            continue  # this entry needs others
        if len(list(_differences(ours, theirs))) < num_lost:
            yield f"{name} {json.dumps(config.get(name, value))}"


def _differences(ours: Any, theirs: Any, name: str = "") -> Iterator[str]:
    """Yield the names of the fields in which two dataclasses differ."""
    if dataclasses.is_dataclass(ours) and type(ours) is type(theirs):
        for field in dataclasses.fields(ours):
            if field.name not in _SPELLINGS:
                yield from _differences(getattr(ours, field.name), getattr(theirs, field.name), field.name)
    elif isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs):
        pairs = (_differences(one, other, name) for one, other in zip(ours, theirs, strict=True))
        yield from dict.fromkeys(difference for pair in pairs for difference in pair)
    elif isinstance(ours, float) and isinstance(theirs, float):
        if not math.isclose(ours, theirs, rel_tol=_TOLERANCE):
            yield f"{name} {ours:g}"
    elif ours != theirs:
        yield name if isinstance(ours, tuple) or dataclasses.is_dataclass(ours) else f"{name} {ours}"


def _rope_differences(ours: ModelConfig, theirs: ModelConfig) -> list[str]:
    pairs = {(one.rope, other.rope) for one, other in zip(ours.layers, theirs.layers, strict=True)}
    return [] if all(_rotate_alike(one, other) for one, other in pairs) else ["its rotary embedding"]


def _rotate_alike(ours: RopeConfig | None, theirs: RopeConfig | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    if "dynamic" in (ours.kind, theirs.kind):
        return ours == theirs
    if (ours.rotary_dim, ours.interleaved) != (theirs.rotary_dim, theirs.interleaved):
        return False
    if not math.isclose(ours.query_beta, theirs.query_beta, rel_tol=_TOLERANCE):
        return False
    if ours.kind == theirs.kind == "longrope" and (
        ours.original_max_position_embeddings != theirs.original_max_position_embeddings
    ):
        return False
    numbers = (
        torch.cat([inverse_frequencies(rope, is_long=is_long), torch.tensor([rope.attention_factor])])
        for rope in (ours, theirs)
        for is_long in (False, True)
    )
    short, long, their_short, their_long = numbers
    return torch.allclose(short, their_short, rtol=1e-5, atol=0) and torch.allclose(long, their_long, rtol=1e-5, atol=0)
