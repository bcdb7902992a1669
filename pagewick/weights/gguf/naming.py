"""The names and shapes of the tensors in a GGUF file that holds a given Hugging Face checkpoint. Imports no torch.

The tables of architectures.py, read in the other direction. pieces.py says which rows belong to which tensor.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from pagewick.errors import ModelLoadError
from pagewick.weights.files import name_some
from pagewick.weights.gguf.architecture import CONVOLUTIONS, SEPARATE_CONVOLUTIONS, GgufArchitecture
from pagewick.weights.gguf.architectures import ARCHITECTURES, DEEPSEEK_V3, MIXTRAL, YOUTU
from pagewick.weights.gguf.architectures_2025 import OLMO3
from pagewick.weights.gguf.architectures_granite import GRANITE_MOE_SHARED
from pagewick.weights.gguf.architectures_hybrid import BAMBA, FALCON_MAMBA

# Architectures that share a kind with another one, and so are not values of ARCHITECTURES.
_MORE: Final = {
    MIXTRAL.name: ("llama", MIXTRAL),
    DEEPSEEK_V3.name: ("deepseek2", DEEPSEEK_V3),
    YOUTU.name: ("deepseek2", YOUTU),
    OLMO3.name: ("olmo2", OLMO3),
    GRANITE_MOE_SHARED.name: ("granitemoe", GRANITE_MOE_SHARED),
    BAMBA.name: ("granitehybrid", BAMBA),
    FALCON_MAMBA.name: ("mamba", FALCON_MAMBA),
}
_SAME: Final = {
    "BailingHybridForCausalLM": "BailingMoeV3ForCausalLM",
    "MistralForCausalLM": "LlamaForCausalLM",
    "Mistral3ForConditionalGeneration": "LlamaForCausalLM",
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Gemma3nForConditionalGeneration": "Gemma3nForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
    "Gemma4UnifiedForCausalLM": "Gemma4ForCausalLM",
    "Gemma4UnifiedForConditionalGeneration": "Gemma4ForCausalLM",
    "Glm4MoeLiteForCausalLM": "DeepseekV3ForCausalLM",
    "InternLM3ForCausalLM": "LlamaForCausalLM",
    "Cohere2VisionForConditionalGeneration": "Cohere2ForCausalLM",
    "Exaone4_5_ForConditionalGeneration": "Exaone4ForCausalLM",
    "LightOnOcrForConditionalGeneration": "Qwen3ForCausalLM",
    "MiniCPMV4_6ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")
_LATENTS: Final = "attn_kv_b"
_LAYER_INPUTS: Final = "per_layer_token_embd.weight"


def architecture_named(name: str) -> tuple[str, GgufArchitecture]:
    """Return general.architecture of a Hugging Face architecture, and its tables. Raises ModelLoadError."""
    name = _SAME.get(name, name)
    known: dict[str, tuple[str, GgufArchitecture]] = {}
    for kind, architecture in ARCHITECTURES.items():
        known.setdefault(architecture.name, (kind, architecture))
    known |= _MORE
    if name not in known:
        raise ModelLoadError(
            f"{name} has no form in GGUF files; docs/gguf.md lists the architectures that have one\n"
            "  use the checkpoint as it is, with --quantization"
        )
    kind, architecture = known[name]
    if not architecture.is_written:
        raise ModelLoadError(
            f"GGUF files of {name} ({kind}) can be read, and not be written yet\n"
            "  use the checkpoint as it is, with --quantization"
        )
    return kind, architecture


def gguf_name(
    name: str, architecture: GgufArchitecture, linear: Collection[int] = (), num_layers: int = 0
) -> tuple[str, int | None] | None:
    """Return the name in the file, and the place in it if it is stacked: the expert, or the head. None: unknown.

    linear: the layers with linear attention. num_layers: of the model, behind which the layer stands that predicts
    further tokens.
    """
    predicting = {theirs.format(num_layers): key for key, theirs in architecture.predicting.items()}
    stem, _, leaf = name.rpartition(".")
    if stem in predicting:
        return f"blk.{num_layers}.{predicting[stem]}.{leaf}", None
    if prefix := next((theirs for theirs, key in predicting.items() if not key and name.startswith(theirs)), ""):
        name = architecture.layer_prefix.format(num_layers) + name.removeprefix(prefix)
        stem = name.rpartition(".")[0]
    numbers, pattern = _NUMBER.findall(f"{stem}."), _NUMBER.sub("{}", f"{stem}.")[:-1]
    if pattern in architecture.whole.values():
        return f"{_key_of(architecture.whole, pattern)}.{leaf}", int(numbers[0]) if numbers else None
    if not numbers or not f"{pattern}.".startswith(architecture.layer_prefix):
        return None
    theirs, whole = (text.removeprefix(architecture.layer_prefix) for text in (pattern, f"{pattern}.{leaf}"))
    if whole in architecture.layer.values():
        theirs = whole
        leaf = architecture.ending_of(_key_of(architecture.layer, theirs)) or ""
    names = architecture.layer
    if theirs in architecture.linear.values() and int(numbers[0]) in linear:
        names = architecture.linear
    if theirs not in names.values() or leaf not in ("weight", "bias", ""):
        return None
    place = int(numbers[1]) if len(numbers) > 1 else None
    return f"blk.{numbers[0]}.{_key_of(names, theirs)}.{leaf}".rstrip("."), place


def gguf_shapes(
    shapes: Mapping[str, tuple[int, ...]],
    architecture: GgufArchitecture,
    config: Mapping[str, Any],
    linear: Collection[int] = (),
    num_layers: int = 0,
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the file's tensors, in the checkpoint's order.

    shapes: of the checkpoint's tensors. linear, num_layers: as in gguf_name. Raises ModelLoadError for tensors for
    which files have no name.
    """
    found: dict[str, tuple[int, ...]] = {}
    counts: dict[str, int] = {}
    unknown = []
    for name, shape in shapes.items():
        place = gguf_name(name, architecture, linear, num_layers)
        if place is None:
            unknown.append(name)
            continue
        stored, index = place
        if index is not None:
            counts[stored] = max(counts.get(stored, 0), index + 1)
        if stored.endswith(f".{_LATENTS}.weight"):
            found |= _latent_shapes(stored, shape, config)
        elif stored == _LAYER_INPUTS:
            # A row for each token: those that the checkpoint lacks have its first one.
            found[stored] = (max(shape[0], config["vocab_size"]), *shape[1:])
        elif _stem(stored) in SEPARATE_CONVOLUTIONS:
            found[stored] = (1, shape[0], 1, shape[-1])
        elif _stem(stored) in CONVOLUTIONS and len(shape) > 2:
            found[stored] = (shape[0], shape[-1])
        elif _stem(stored) == "ssm_a" and "ssm_f_a" in architecture.layer:
            found[stored] = (shape[0], 1) if len(shape) == 1 else shape
        elif _stem(stored) in architecture.vectors and "ssm_d" in architecture.layer:
            groups = config.get("mamba_n_groups", config.get("n_groups")) if _stem(stored) == "ssm_norm" else shape[0]
            found[stored] = (groups, shape[0] // groups)
        else:
            found[stored] = shape
    if unknown:
        raise ModelLoadError(
            f"GGUF files of {architecture.name} have no place for {name_some(unknown)}\n  use another checkpoint"
        )
    return {name: (counts[name], *shape) if name in counts else shape for name, shape in found.items()}


def _stem(stored: str) -> str:
    return stored.split(".", 2)[-1].removesuffix(".weight")


def _latent_shapes(stored: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """kv_b_proj is two tensors: the keys' part, transposed, and the values'."""
    num_heads, latent_size = config["num_attention_heads"], shape[-1]
    keys, values = (stored.replace(_LATENTS, name) for name in ("attn_k_b", "attn_v_b"))
    return {
        keys: (num_heads, latent_size, config["qk_nope_head_dim"]),
        values: (num_heads, config["v_head_dim"], latent_size),
    }


def _key_of(names: Mapping[str, str], theirs: str) -> str:
    return next(stem for stem, name in names.items() if name == theirs)
