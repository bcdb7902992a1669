"""What of a model's weights lies in one rank's memory, by what reads it. Imports no torch.

A step of decoding reads some of it whole (attention, dense and shared MLPs, the vocabulary head), some in part (the
experts that its tokens go to), and of the embedding only a few rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pagewick.doctor.checkpoint import Checkpoint
from pagewick.doctor.parameters import layer_of
from pagewick.doctor.shape import DTYPE_BYTES, ModelShape
from pagewick.weights.tensor_headers import TensorInfo

# Of models for several media, the engine loads the language model alone.
_OTHER_MEDIA: Final = re.compile(r"(^|\.)(vision|visual|audio|multi_modal|multimodal|mm_projector|image)")
_SHARED: Final = re.compile(r"\.shared_experts?\.")
_EMBEDDING: Final = re.compile(r"(^|\.)(embed_tokens|wte|wpe)\.")
_HEAD: Final = re.compile(r"(^|\.)lm_head\.")
# Whole on every rank: norms, routers, the projections to low ranks, which have no heads to share out, and biases that
# are added after the ranks' sums.
_WHOLE: Final = re.compile(
    r"norm|\.ln_|\.(o_proj|dense|out_proj|down_proj|fc2|c_proj)\.bias|\.gate\.(weight|e_score_correction_bias)"
    r"|shared_expert_gate|\.(q_a_proj|kv_a_proj_with_mqa)\."
)
# The engine keeps them in float32: no rounding is to choose other experts.
_ROUTERS: Final = re.compile(r"\.gate\.(weight|e_score_correction_bias)$|\.shared_expert_gate\.weight$")
_KEYS_AND_VALUES: Final = re.compile(r"\.(k_proj|v_proj)\.")
_FUSED: Final = re.compile(r"\.(qkv_proj|query_key_value|c_attn)\.")


@dataclass(frozen=True, slots=True)
class RankWeights:
    """Bytes of one rank.

    dense: attention, MLPs without experts, norms and routers. is_tied: whether the head is the embedding.
    """

    dense: int = 0
    shared_experts: int = 0
    routed_experts: int = 0
    embedding: int = 0
    head: int = 0
    is_tied: bool = False

    @property
    def total(self) -> int:
        return self.dense + self.shared_experts + self.routed_experts + self.embedding + self.head

    @property
    def read_head(self) -> int:
        """What a step reads for its logits."""
        return self.embedding if self.is_tied else self.head


def weights_of_rank(checkpoint: Checkpoint, num_ranks: int, dtype: str | None = None) -> RankWeights:
    """The weights of one of so many ranks, as the engine shares them out; of the one with the most KV heads.

    dtype: pagewick's name of what weights are computed with, if they are not quantized; None for the model's own.
    """
    shape = checkpoint.shape
    element_bytes = None if is_quantized(checkpoint.config) else DTYPE_BYTES[dtype or shape.dtype]
    share = _shares(shape, num_ranks)
    sums = {"dense": 0.0, "shared_experts": 0.0, "routed_experts": 0.0, "embedding": 0.0, "head": 0.0}
    for tensor in checkpoint.tensors:
        num_bytes = tensor.num_bytes if element_bytes is None else tensor.num_elements * element_bytes
        if is_expert(tensor.name):  # by far the most
            sums["routed_experts"] += num_bytes / num_ranks
            continue
        if _OTHER_MEDIA.search(tensor.name):
            continue
        if _ROUTERS.search(tensor.name):
            num_bytes = tensor.num_elements * DTYPE_BYTES["float32"]
        sums[_part_of(tensor)] += num_bytes * share(tensor)
    if shape.is_tied:
        sums["head"] = 0
    return RankWeights(**{name: round(value) for name, value in sums.items()}, is_tied=shape.is_tied)


def is_expert(name: str) -> bool:
    """Whether a tensor belongs to experts of which a token goes to some."""
    return ".experts." in name


def is_quantized(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's linear layers are not stored as numbers of one dtype."""
    return bool(config.get("quantization_config") or config.get("compression_config"))


def _part_of(tensor: TensorInfo) -> str:
    name = tensor.name
    if layer_of(name) is None and _EMBEDDING.search(name):
        return "embedding"
    if _HEAD.search(name):
        return "head"
    return "shared_experts" if _SHARED.search(name) else "dense"


def _shares(shape: ModelShape, num_ranks: int) -> Callable[[TensorInfo], float]:
    """Which part of a tensor one rank holds."""
    # Latent attention has no KV heads; what is called so is shared out as heads are.
    kept = shape.num_kv_heads / num_ranks if shape.kv_lora_rank else shape.kv_heads_per_rank(num_ranks)
    fused = (shape.num_heads / num_ranks + 2 * kept) / (shape.num_heads + 2 * shape.num_kv_heads)

    def share(tensor: TensorInfo) -> float:
        if _WHOLE.search(tensor.name):
            return 1.0
        if _KEYS_AND_VALUES.search(tensor.name):
            return kept / shape.num_kv_heads
        return fused if _FUSED.search(tensor.name) else 1 / num_ranks

    return share
