"""Entries of config.json that follow from several keys of a GGUF file, by its architecture. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any, Final

from pagewick.errors import ModelLoadError
from pagewick.weights.gguf.entries_2026 import ENTRIES_2026
from pagewick.weights.gguf.hybrid_entries import HYBRID_ENTRIES
from pagewick.weights.gguf.metadata import Metadata, ReadNumbers

# Numbers of layers of the largest Gemma 2 and 3, which scale scores by hidden_size / num_heads, others by head_dim.
_WIDE_GEMMAS: Final = {"gemma2": 46, "gemma3": 62}
# Layers of EXAONE 4 32B.
_EXAONE_LAYERS: Final = 64
# Layers of Gemma 3n with keys of their own, in files that do not say how many borrow some.
_GEMMA3N_LAYERS_WITH_KEYS: Final = 20
# Experts of Llama 4 Maverick.
_MAVERICK_EXPERTS: Final = 128
_MISTRAL4_BETA: Final = 0.1
# short_mscale and long_mscale of Phi-3.5-MoE.
_PHIMOE_FACTOR: Final = 1.243163121016122
# expert_gating_func.
_SIGMOID: Final = 2
_SELECTIONS: Final = {1: "softmax", _SIGMOID: "sigmoid"}
_WINDOW: Final = "attention.sliding_window"
INDEXERS: Final = "attention.indexer.types"
"""The key, without its architecture, of a list of flags: whether each layer has an indexer."""
_SLIDING_PATTERN: Final = "attention.sliding_window_pattern"
_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"
# Factors of rotary frequencies from here on mean that a pair does not turn.
_STILL: Final = 1e20

Entries = Mapping[str, Any]


def special_entries(metadata: Metadata, found: Entries, read_numbers: ReadNumbers) -> dict[str, Any]:
    """Return the entries that the tables of architectures cannot say; null ones do not count.

    found: those that the tables say. read_numbers: reads a tensor of rope factors. Raises ModelLoadError for a key that
    is missing or malformed.
    """
    if metadata.kind == "gemma4":
        return _gemma4(metadata, found, read_numbers)
    special = _SPECIAL.get(metadata.kind)
    return {} if special is None else special(metadata, found)


def _gemma3n(metadata: Metadata, found: Entries) -> dict[str, Any]:
    num_layers, shapes = found["num_hidden_layers"], metadata.shapes
    widths = metadata.of_layers("feed_forward_length", num_layers)
    if widths is None:
        raise metadata.wrong("gemma3n.feed_forward_length", "missing")
    entries: dict[str, Any] = {"intermediate_size": widths, **_windows(metadata, found, interval=5)}
    # Gates become 0 below this number of deviations above their mean, minus infinity in layers that keep all.
    if (deviations := metadata.of_layers("activation_sparsity_scale", num_layers)) is not None:
        entries["activation_sparsity_pattern"] = [NormalDist().cdf(number) for number in deviations]
    for entry, name in (("vocab_size_per_layer_input", "per_layer_token_embd"), ("laurel_rank", "blk.0.laurel_l")):
        if f"{name}.weight" not in shapes:
            raise ModelLoadError(f"{metadata.where} holds no {name}.weight\n  use another file of this model")
        entries[entry] = shapes[f"{name}.weight"][0]
    shared = found.get("num_kv_shared_layers", max(0, num_layers - _GEMMA3N_LAYERS_WITH_KEYS))
    return {**entries, "num_kv_shared_layers": shared}


def _gemma4(metadata: Metadata, found: Entries, read_numbers: ReadNumbers) -> dict[str, Any]:
    kind, num_layers, shapes = metadata.kind, found["num_hidden_layers"], metadata.shapes
    layers: dict[str, list[Any]] = {}
    for key in (_SLIDING_PATTERN, "attention.head_count_kv", "feed_forward_length"):
        if (values := metadata.of_layers(key, num_layers)) is None:
            raise metadata.wrong(f"{kind}.{key}", "missing")
        layers[key] = values
    slides, kv_heads, widths = layers.values()
    head_dim, width = metadata.get("attention.key_length_swa"), widths[0]
    first_borrower = num_layers - found.get("num_kv_shared_layers", 0)
    wide = [2 * width if layer >= first_borrower else width for layer in range(num_layers)]
    if widths not in ([width] * num_layers, wide):
        raise metadata.wrong(f"{kind}.feed_forward_length", "different in some layers, which is not supported")
    for key, other in (("rope.dimension_count_swa", head_dim), ("rope.dimension_count", found["global_head_dim"])):
        if metadata.get(key, other) != other:
            raise metadata.wrong(f"{kind}.{key}", "another than the size of a head, which is not supported")
    own = [layer for layer in range(first_borrower) if not slides[layer]]
    tables = shapes.get("per_layer_token_embd.weight")
    return {
        "head_dim": head_dim,
        "num_key_value_heads": next((n for n, slide in zip(kv_heads, slides, strict=True) if slide), kv_heads[0]),
        "per_layer_config": {
            str(layer): {"head_dim": found["global_head_dim"], "num_key_value_heads": kv_heads[layer]}
            for layer in range(num_layers)
            if not slides[layer]
        },
        "intermediate_size": width,
        "use_double_wide_mlp": widths[-1] != width,
        "layer_types": [_SLIDING if slide else _FULL for slide in slides],
        "attention_k_eq_v": any(f"blk.{layer}.attn_v.weight" not in shapes for layer in own),
        "enable_moe_block": bool(found.get("num_experts")),
        "final_logit_softcapping": found.get("final_logit_softcapping"),
        "vocab_size_per_layer_input": found["vocab_size"] if tables is None else tables[0],
        "partial_rotary_factor": None,
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": _gemma4_ropes(metadata, found, read_numbers),
    }


def _gemma4_ropes(metadata: Metadata, found: Entries, read_numbers: ReadNumbers) -> dict[str, Any]:
    """Both rotary embeddings. The factors of the file say which pairs turn: 1 for these, 1e30 for the others."""
    full: dict[str, Any] = {"rope_type": "default"}
    if "rope_freqs.weight" in metadata.shapes:
        factors = list(read_numbers("rope_freqs.weight"))
        turned = [factor for factor in factors if factor < _STILL]
        if 2 * len(factors) != found["global_head_dim"] or factors[: len(turned)] != [1.0] * len(turned):
            raise ModelLoadError(
                f"{metadata.where}: rope_freqs.weight must hold a 1 for each pair that turns, and then 1e30\n"
                "  use another file of this model"
            )
        full = {"rope_type": "proportional", "partial_rotary_factor": len(turned) / len(factors)}
    return {
        _FULL: {**full, "rope_theta": metadata.get("rope.freq_base")},
        _SLIDING: {"rope_type": "default", "rope_theta": metadata.get("rope.freq_base_swa")},
    }


def _gemma(metadata: Metadata, found: Entries) -> dict[str, Any]:
    is_wide = found["num_hidden_layers"] == _WIDE_GEMMAS[metadata.kind]
    width = found["hidden_size"] // found["num_attention_heads"] if is_wide else found["head_dim"]
    cases: dict[str, Any] = {"query_pre_attn_scalar": width}
    pattern = metadata.values.get(f"{metadata.kind}.{_SLIDING_PATTERN}")
    if isinstance(pattern, list):
        cases["layer_types"] = [_SLIDING if slides else _FULL for slides in pattern]
    elif isinstance(pattern, int):
        cases["sliding_window_pattern"] = pattern
    return cases


def _gemma2(metadata: Metadata, found: Entries) -> dict[str, Any]:
    # The caps are null where a file has none.
    caps = {name: found.get(name) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    return _gemma(metadata, found) | caps


def _gpt_oss(metadata: Metadata, found: Entries) -> dict[str, Any]:
    return {"rope_scaling": {**found["rope_scaling"], "truncate": False}} if "rope_scaling" in found else {}


def _phi3(metadata: Metadata, found: Entries) -> dict[str, Any]:
    return {} if found.get("sliding_window") else {"sliding_window": None}


def _phimoe(metadata: Metadata, found: Entries) -> dict[str, Any]:
    """The factor of its longrope, which files have as that of Phi-3 would be."""
    cases = {**_phi3(metadata, found), "lm_head_bias": "output.bias" in metadata.shapes}
    if "rope_scaling" not in found:
        return cases
    return {**cases, "rope_scaling": {**found["rope_scaling"], "attention_factor": _PHIMOE_FACTOR}}


def _linear_attention(metadata: Metadata, found: Entries) -> dict[str, Any]:
    inner_size, num_heads = metadata.get("ssm.inner_size"), found["linear_num_value_heads"]
    cases: dict[str, Any] = {"linear_value_head_dim": inner_size // max(1, num_heads)}
    kinds = metadata.of_layers("attention.recurrent_layers", found["num_hidden_layers"])
    if kinds is not None:
        cases["layer_types"] = [_LINEAR if is_linear else _FULL for is_linear in kinds]
    return cases


def _windows(metadata: Metadata, found: Entries, *, interval: int = 4) -> dict[str, Any]:
    """layer_types: every fourth layer sees everything, unless the file says otherwise."""
    num_layers = found["num_hidden_layers"]
    slides = metadata.of_layers(_SLIDING_PATTERN, num_layers)
    if isinstance(metadata.values.get(f"{metadata.kind}.{_SLIDING_PATTERN}"), int):
        interval = slides[0] if slides else interval
        slides = None
    if slides is None:
        slides = [(layer + 1) % max(1, interval) != 0 for layer in range(num_layers)]
    return {"layer_types": [_SLIDING if slide else _FULL for slide in slides]}


def _two_ropes(metadata: Metadata, found: Entries) -> dict[str, Any]:
    """Layers with a window are rotated without the scaling of the others."""
    if not found.get("sliding_window"):
        return {}
    theta = found.get("rope_theta", 1e4)
    ropes = {
        _FULL: {"rope_type": "default", **found.get("rope_scaling", {}), "rope_theta": theta},
        _SLIDING: {"rope_type": "default", "rope_theta": found.get("rope_local_base_freq", theta)},
    }
    others = dict.fromkeys(("rope_theta", "rope_scaling", "rope_local_base_freq"))
    return {**others, "rope_parameters": ropes} | _windows(metadata, found)


def _cohere2moe(metadata: Metadata, found: Entries) -> dict[str, Any]:
    """Which layers have a window, and how experts are chosen: as in llama.cpp, by sigmoids if no key says it."""
    if not {"rms_norm_eps", "layer_norm_eps"} & found.keys():
        raise metadata.wrong("cohere2moe.attention.layer_norm_epsilon", "missing")
    if (scale := metadata.get("expert_weights_scale", 1.0)) not in (0.0, 1.0):
        raise metadata.wrong("cohere2moe.expert_weights_scale", f"{scale!r:.80}, which is not supported")
    gating = metadata.get("expert_gating_func", _SIGMOID)
    if gating not in _SELECTIONS:
        raise metadata.wrong("cohere2moe.expert_gating_func", f"{gating!r:.80}, which is not supported")
    return {"expert_selection_fn": _SELECTIONS[gating], **_windows(metadata, found)}


def _exaone4(metadata: Metadata, found: Entries) -> dict[str, Any]:
    # The first files of the 32B have no key for its window.
    window = found.get("sliding_window", 4096 if found["num_hidden_layers"] == _EXAONE_LAYERS else None)
    return {"sliding_window": window} | (_windows(metadata, found) if window else {})


def _mistral3(metadata: Metadata, found: Entries) -> dict[str, Any]:
    """Queries scaled by their position. The multiplier of YaRN's factor is mscale_all_dim itself; mscale is 1."""
    beta = metadata.get("attention.temperature_scale")
    if not beta:
        return {}
    scaling = found.get("rope_scaling", {})
    if scaling.get("rope_type") != "yarn":
        raise metadata.wrong("mistral3.rope.scaling.type", "not yarn, and scores are scaled by their position")
    mscales = {"mscale": 1.0, "mscale_all_dim": metadata.get("rope.scaling.yarn_log_multiplier", 0.0)}
    return {"rope_scaling": {**scaling, **mscales, "llama_4_scaling_beta": beta}}


def _mistral4(metadata: Metadata, found: Entries) -> dict[str, Any]:
    """Queries scaled by their position. Files of llama.cpp's converter may lack the number, which all models share."""
    scaling = found.get("rope_scaling", {})
    if scaling.get("rope_type") != "yarn":
        raise metadata.wrong("mistral4.rope.scaling.type", "not yarn, and queries are scaled by their position")
    beta = metadata.get("attention.temperature_scale", _MISTRAL4_BETA)
    return {"rope_scaling": {**scaling, "llama_4_scaling_beta": beta}}


def _glm_dsa(metadata: Metadata, found: Entries) -> dict[str, Any]:
    """Which layers have an indexer; files of models in which all have one may not say so."""
    flags = metadata.of_layers(INDEXERS, found["num_hidden_layers"])
    return {} if flags is None else {"indexer_types": ["full" if flag else "shared" for flag in flags]}


def _llama4(metadata: Metadata, found: Entries) -> dict[str, Any]:
    """The numbers that llama.cpp has in its code. It tells models whose heads are normalised by their experts."""
    num_layers, num_experts = found["num_hidden_layers"], found.get("num_local_experts", 0)
    entries: dict[str, Any] = {
        "use_qk_norm": num_experts != _MAVERICK_EXPERTS,
        "attention_chunk_size": 8192,
        "no_rope_layer_interval": 4,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    }
    if metadata.get(_WINDOW) == 0:
        entries |= {"no_rope_layers": [1] * num_layers, "layer_types": [_FULL] * num_layers}
    if not num_experts or found.get("interleave_moe_layer_step") == 0:
        entries |= {"moe_layers": [], "interleave_moe_layer_step": 1}
    return entries


def _falcon(metadata: Metadata, found: Entries) -> dict[str, Any]:
    """Models with several key heads are built as 40B and its successors are."""
    has_two_norms = "blk.0.attn_norm_2.weight" in metadata.shapes
    num_kv_heads = found["num_kv_heads"]
    if not isinstance(num_kv_heads, int) or isinstance(num_kv_heads, bool) or num_kv_heads < 1:
        key = "falcon.attention.head_count_kv"
        raise metadata.wrong(key, f"{num_kv_heads!r:.80}, and must be a whole number from 1")
    return {
        "new_decoder_architecture": has_two_norms or num_kv_heads > 1,
        "num_ln_in_parallel_attn": 1 + has_two_norms,
    }


_SPECIAL: Final[Mapping[str, Callable[[Metadata, Entries], dict[str, Any]]]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma,
    "gemma3n": _gemma3n,
    "gpt-oss": _gpt_oss,
    "phi3": _phi3,
    "phimoe": _phimoe,
    **dict.fromkeys(("olmo2", "mellum"), _two_ropes),
    "exaone4": _exaone4,
    "cohere2moe": _cohere2moe,
    "cohere2": _windows,
    "afmoe": _windows,
    "exaone-moe": _windows,
    "mistral3": _mistral3,
    "mistral4": _mistral4,
    "glm-dsa": _glm_dsa,
    "llama4": _llama4,
    "falcon": _falcon,
    **HYBRID_ENTRIES,
    **ENTRIES_2026,
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), _linear_attention),
}
