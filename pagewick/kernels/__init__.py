"""The operations, one signature each, dispatched by device and dtype: the table of contents of this package.

`reference` defines every operation; backends (`cpu`, the native library; `triton`) have faster ones of some.
`dispatch` chooses among them. `native_status()` says in a sentence whether the native library serves a CPU.
`truncation` is plain PyTorch everywhere.
"""

import torch
from torch import Tensor

from pagewick.expert_routing import Routing
from pagewick.kernels import cpu
from pagewick.kernels.huge_pages import huge_zeros
from pagewick.kernels.kv_cache import LAYOUT_VERSION, KVCache, can_pack, plain_cache
from pagewick.kernels.mla import HeadMatrices
from pagewick.kernels.moe import Experts
from pagewick.kernels.operations import (
    TABLE,
    activation,
    add,
    add_layer_norm,
    add_rms_norm,
    argmax_rows,
    combine,
    dynamic_rotary_angles,
    fused_moe,
    gated_activation,
    latent_attention,
    layer_norm,
    log_softmax_stats,
    paged_attention,
    philox_uniform,
    rms_norm,
    rope_and_store,
    rope_and_store_latent,
    rotary_angles,
    rotary_embedding,
    route,
    sample_tokens,
    scale,
    soft_cap,
    store_kv,
)
from pagewick.kernels.options import (
    AttentionMetadata,
    DrawOptions,
    HeadLayout,
    HeadNorm,
    HeadOptions,
    MoeBiases,
    Rotation,
    ScoreOptions,
    SharedOutput,
)
from pagewick.kernels.reference_sampling import Purpose
from pagewick.kernels.truncation import (
    mask_min_p,
    mask_surprise,
    mask_top_k_top_p,
    mask_top_n_sigma,
    mask_typical_p,
    mask_xtc,
    mirostat_top_k,
    surprise,
)

__all__ = [
    "TABLE",
    "AttentionMetadata",
    "DrawOptions",
    "Experts",
    "HeadLayout",
    "HeadMatrices",
    "HeadNorm",
    "HeadOptions",
    "KVCache",
    "MoeBiases",
    "Purpose",
    "Rotation",
    "Routing",
    "ScoreOptions",
    "SharedOutput",
    "activation",
    "add",
    "add_layer_norm",
    "add_rms_norm",
    "argmax_rows",
    "combine",
    "dynamic_rotary_angles",
    "empty_result",
    "fused_moe",
    "gated_activation",
    "huge_zeros",
    "kv_layout_version",
    "latent_attention",
    "layer_norm",
    "log_softmax_stats",
    "mask_min_p",
    "mask_surprise",
    "mask_top_k_top_p",
    "mask_top_n_sigma",
    "mask_typical_p",
    "mask_xtc",
    "mirostat_top_k",
    "native_status",
    "packs_kv",
    "paged_attention",
    "philox_uniform",
    "plain_cache",
    "rms_norm",
    "rope_and_store",
    "rope_and_store_latent",
    "rotary_angles",
    "rotary_embedding",
    "route",
    "sample_tokens",
    "scale",
    "set_num_threads",
    "soft_cap",
    "store_kv",
    "surprise",
]


def native_status() -> str:
    """One sentence: which native kernels run, or why none do and what to do about it."""
    return cpu.status()


def kv_layout_version() -> str:
    """What changes whenever keys and values come to lie otherwise in a block: for what outlives a process."""
    return f"packed {LAYOUT_VERSION}" if cpu.library() else "plain"


def set_num_threads(num_threads: int) -> None:
    """Use `num_threads` threads, the calling one included, in native operations. No effect without them."""
    if native := cpu.library():
        native.set_num_threads(num_threads)


def empty_result(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for what several operations write a part of each; in a recorded step, that of the recording."""
    return cpu.empty(shape, dtype) if device.type == "cpu" else torch.empty(shape, dtype=dtype, device=device)


def packs_kv(head_dim: int, block_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a cache on this device is to be packed (kv_cache.py): where native operations serve it."""
    return TABLE.backend("paged_attention", device.type, dtype) is cpu.BACKEND and can_pack(head_dim, block_size, dtype)
