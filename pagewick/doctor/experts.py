"""How a mixture of experts is made up, by its config.json. Imports no torch.

Read by the entries' names, not by the architecture: families that agree on an entry mean the same by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagewick.doctor.shape import read_size
from pagewick.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """num_experts: routed ones of each layer. num_experts_per_tok: how many of them a token goes to.

    intermediate_size: of one. shared_intermediate_size: of all that every token goes to together; 0 if there is none.
    is_sparse: for each layer, whether it has experts; the others have a plain MLP.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    shared_intermediate_size: int
    is_sparse: tuple[bool, ...]

    @property
    def num_layers(self) -> int:
        """Layers that have experts."""
        return sum(self.is_sparse)


def experts_of(config: Mapping[str, Any], num_layers: int) -> ExpertShape | None:
    """The experts of a model of so many layers; None if it has none. Raises ModelLoadError if a size is wrong."""
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    if not any(config.get(name) for name in names):
        return None
    num_experts = read_size(config, *names)
    per_token = read_size(config, "num_experts_per_tok")
    if per_token > num_experts:
        raise ModelLoadError(
            f"num_experts_per_tok is {per_token}, and there are {num_experts} experts\n  check config.json"
        )
    is_sparse = tuple(_is_sparse(config, layer) for layer in range(num_layers))
    if not any(is_sparse):
        return None
    intermediate = read_size(config, "moe_intermediate_size", "intermediate_size")
    return ExpertShape(num_experts, per_token, intermediate, _shared_size(config, intermediate), is_sparse)


def _shared_size(config: Mapping[str, Any], intermediate_size: int) -> int:
    if config.get("n_shared_experts"):
        return read_size(config, "n_shared_experts") * intermediate_size
    if config.get("shared_expert_intermediate_size"):
        return read_size(config, "shared_expert_intermediate_size")
    return 0


def _is_sparse(config: Mapping[str, Any], layer: int) -> bool:
    """DeepSeek's first layers are dense; Qwen's may be every so many, or named one by one."""
    first = config.get("first_k_dense_replace") or 0
    step = config.get("moe_layer_freq") or 1
    if "n_routed_experts" in config and isinstance(first, int) and isinstance(step, int):
        return layer >= first and layer % step == 0
    dense = config.get("mlp_only_layers")
    dense = dense if isinstance(dense, list) else []
    every = read_size(config, "decoder_sparse_step", default=1)
    return layer not in dense and (layer + 1) % every == 0
