"""Models with Mamba or short convolutions in most layers, on their way into a GGUF file, and their relatives.

Files of Granite have its fused shared MLP as two projections. Granite 4 without Mamba is a file of Granite 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor

from pagewick.errors import ModelLoadError
from pagewick.layers.config import MoeConfig
from pagewick.layers.state_config import ChannelScanConfig, DeltaConfig, MambaConfig
from pagewick.models.config import ModelConfig
from pagewick.models.parts import AttentionConfig, MlpConfig
from pagewick.weights.gguf.architecture import GgufArchitecture
from pagewick.weights.gguf.architectures import ARCHITECTURES
from pagewick.weights.gguf.architectures_others import FALCON_WITH_TWO_NORMS
from pagewick.weights.gguf.naming import architecture_named

_GRANITE4, _NEMOTRON = "GraniteMoeHybridForCausalLM", "NemotronHForCausalLM"
_WITH_SHARED_MLPS: Final = frozenset({_GRANITE4, "GraniteMoeSharedForCausalLM"})
_LING: Final = frozenset({"BailingMoeV3ForCausalLM", "BailingHybridForCausalLM"})
_FUSED, _FUSED_DOWN = "shared_mlp.input_linear.weight", "shared_mlp.output_linear.weight"
_GATE, _UP, _DOWN = "gate_proj.weight", "up_proj.weight", "down_proj.weight"
_KINDS: Final = frozenset({"lfm2", "lfm2moe", "granitehybrid", "jamba", "nemotron_h", "nemotron_h_moe"})
# Files of models with nothing but Mamba.
_ALONE: Final = frozenset({"mamba", "mamba2"})
Shape = tuple[int, ...]


def file_architecture(model: ModelConfig) -> tuple[str, GgufArchitecture]:
    """Return general.architecture of a model's file, and its tables. Raises ModelLoadError if there is none."""
    name = model.architecture
    has_state = any(layer.state is not None for layer in model.layers)
    if name == _GRANITE4 and not has_state:
        if model.mixtures:
            raise ModelLoadError(
                f"{name} with experts, and without Mamba in any layer, has no form in GGUF files\n"
                "  use the checkpoint as it is, with --quantization"
            )
        return "granite", ARCHITECTURES["granite"]
    if name == _NEMOTRON and model.mixtures:
        if any(isinstance(layer.mlp, MlpConfig) for layer in model.layers):
            raise ModelLoadError(
                f"{name} with experts in some layers, and an MLP in others, has no form in GGUF files\n"
                "  use the checkpoint as it is, with --quantization"
            )
        return "nemotron_h_moe", ARCHITECTURES["nemotron_h_moe"]
    if name in _LING and any(state.decay_bound is None for state in model.deltas):
        raise ModelLoadError(
            f"{name} with decays that have no bound (kda_safe_gate false) has no form in GGUF files\n"
            "  use the checkpoint as it is, with --quantization"
        )
    if name == FALCON_WITH_TWO_NORMS.name and model.block == "parallel_norms":
        return "falcon", FALCON_WITH_TWO_NORMS
    return architecture_named(name)


def hybrid_values(kind: str, model: ModelConfig) -> dict[str, Any]:
    """Return the key-values that differ from those of other models: lists for all layers, and sizes of states.

    kind: general.architecture. model: with has_mtp if the file has the layer that predicts further tokens.
    """
    found: dict[str, Any] = {}
    mlps = [layer.mlp for layer in model.all_layers]
    if (model.architecture == _GRANITE4 and not model.mixtures) or kind == "lfm2":
        found["feed_forward_length"] = _size_of(mlps[0])
    if kind in _ALONE:
        return _of_mamba_alone(model)
    if kind not in _KINDS:
        return found
    attentions = [layer.attention for layer in model.all_layers]
    found["attention.head_count_kv"] = [
        attention.num_kv_heads if isinstance(attention, AttentionConfig) else 0 for attention in attentions
    ]
    if kind.startswith("nemotron"):
        found["feed_forward_length"] = [_size_of(mlp) for mlp in mlps]
    scan = next((attention for attention in attentions if isinstance(attention, ChannelScanConfig)), None)
    if scan is not None:
        found["ssm.inner_size"] = scan.num_channels
    mamba = next((attention for attention in attentions if isinstance(attention, MambaConfig)), None)
    if mamba is not None:
        is_rotated = any(layer.rope is not None for layer in model.layers)
        found |= {"ssm.inner_size": mamba.num_values, "rope.scaling.finetuned": is_rotated}
        if not is_rotated:
            found["rope.dimension_count"] = model.attention_width // model.num_heads
    return found


def _of_mamba_alone(model: ModelConfig) -> dict[str, Any]:
    """Return the sizes of the states. llama.cpp asks for the others, and does not use them."""
    found: dict[str, Any] = {"attention.head_count": 0, "feed_forward_length": 0}
    mixer = model.layers[0].attention
    if isinstance(mixer, ChannelScanConfig):
        return {**found, "ssm.inner_size": mixer.num_channels, "ssm.time_step_rank": mixer.step_rank}
    assert isinstance(mixer, MambaConfig), "these models have nothing else"
    return {**found, "ssm.inner_size": mixer.num_values, "ssm.group_count": mixer.num_groups}


def _size_of(mlp: MlpConfig | MoeConfig | None) -> int:
    return 0 if mlp is None else mlp.intermediate_size


def linear_layers(model: ModelConfig) -> frozenset[int]:
    """Return the layers with linear attention."""
    return frozenset(idx for idx, layer in enumerate(model.layers) if isinstance(layer.attention, DeltaConfig))


def names_in_files(name: str, model: ModelConfig) -> tuple[str, ...]:
    """Return the tensors that the tables of files know in place of a tensor of a checkpoint: itself, if it is known."""
    if model.architecture in _LING:
        # The published name of the output projection of linear attention, and the one that all layers share.
        return (name.replace(".attention.o_proj.", ".attention.dense."),)
    if model.architecture not in _WITH_SHARED_MLPS or not name.endswith((_FUSED, _FUSED_DOWN)):
        return (name,)
    parts = (_DOWN,) if name.endswith(_FUSED_DOWN) else (_GATE, _UP)
    owner = "shared_mlp" if model.mixtures else "mlp"
    layer = name.removesuffix(_FUSED).removesuffix(_FUSED_DOWN)
    return tuple(f"{layer}{owner}.{part}" for part in parts)


def separate_shared_mlps(
    shapes: Mapping[str, Shape], places: Mapping[str, str], model: ModelConfig
) -> tuple[dict[str, Shape], dict[str, str]]:
    """Return the tensors that files have in place of a checkpoint's: their shapes, and the tensors that hold them."""
    found, sources = {}, {}
    for name, shape in shapes.items():
        names = names_in_files(name, model)
        for part in names:
            found[part] = (shape[0] // len(names), *shape[1:])
            sources[part] = places[name]
    return found, sources


def part_of(name: str, place: str, weight: Tensor) -> Tensor:
    """Return the part of a checkpoint's tensor that is the tensor `name`: the tensor itself if it is whole."""
    if not place.endswith(_FUSED):
        return weight
    return weight.chunk(2)[0 if name.endswith(_GATE) else 1].clone()
