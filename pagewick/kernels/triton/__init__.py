"""Kernels in Triton for GPUs of NVIDIA (from compute capability 8.0) and AMD. None has run on a GPU yet: docs/gpu.md.

Each operation has a module, which is imported when the operation first meets a tensor on a GPU. Nothing of Triton is
imported where PyTorch sees no GPU. PyTorch for CUDA and ROCm brings Triton along. PAGEWICK_TRITON=0 turns the kernels
off.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from pagewick.kernels import batch_invariance
from pagewick.kernels.dispatch import Backend, Function
from pagewick.kernels.switches import is_switched_on
from pagewick.kernels.triton import layouts

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_FLOAT32 = (torch.float32,)
_INT64 = (torch.int64,)

# The module of each operation, and the dtypes that its first tensor may have.
OPERATIONS: dict[str, tuple[str, tuple[torch.dtype, ...]]] = {
    "activation": ("elementwise", _FLOATS),
    "add_layer_norm": ("norm", _FLOATS),
    "add_low_rank": ("moe", _FLOATS),
    "add_rms_norm": ("norm", _FLOATS),
    "argmax_allowed": ("logits", _FLOAT32),
    "argmax_rows": ("logits", _FLOAT32),
    "block_attention": ("block_attention", _FLOATS),
    "channel_scan": ("channel_scan", _FLOATS),
    "collapse_streams": ("hyper", _FLOATS),
    "combine": ("routing", _FLOATS),
    "compress_rows": ("compress", _FLOATS),
    "edit_tokens": ("edits", _FLOAT32),
    "expand_streams": ("hyper", _FLOATS),
    "full_attention": ("full_attention", _FLOATS),
    "fused_moe": ("moe", _FLOATS),
    "gated_activation": ("elementwise", _FLOATS),
    "gated_delta_net": ("delta", _FLOATS),
    "gather_blocks": ("blocks", _INT64),
    "gather_quantized_rows": ("quantized", _INT64),
    "grouped_linear": ("moe", _FLOATS),
    "latent_attention": ("mla", _FLOATS),
    "layer_norm": ("norm", _FLOATS),
    # Only if results must not depend on the batch.
    "limit": ("elementwise", _FLOATS),
    "linear": ("linear", _FLOATS),
    "log_softmax_stats": ("logits", _FLOAT32),
    "mask_rows": ("logits", _FLOAT32),
    "paged_attention": ("attention", _FLOATS),
    "philox_uniform": ("logits", _INT64),
    "quantized_linear": ("quantized", _FLOATS),
    "rms_norm": ("norm", _FLOATS),
    "root_logits": ("routing", _FLOAT32),
    "rope_and_store": ("rope", _FLOATS),
    "rope_and_store_latent": ("latents", _FLOATS),
    "rotate_heads": ("rotate_heads", _FLOATS),
    "route": ("routing", _FLOAT32),
    "sample_tokens": ("sampling", _FLOAT32),
    "scale": ("elementwise", _FLOATS),
    "scatter_blocks": ("blocks", _INT64),
    "select_blocks": ("head_blocks", _FLOATS),
    "select_keys": ("index", _FLOATS),
    "selective_scan": ("scan", _FLOATS),
    "short_convolution": ("short_convolution", _FLOATS),
    "sigmoid_gate": ("elementwise", _FLOATS),
    "soft_cap": ("elementwise", _FLOATS),
    "store_index_keys": ("index", _FLOATS),
    "store_kv": ("rope", _FLOATS),
    "stream_weights": ("hyper", _FLOAT32),
    "window_attention": ("window_attention", _FLOATS),
}
MODULES = tuple(sorted({module for module, _ in OPERATIONS.values()}))


class _Functions(Mapping[str, Function]):
    """The functions by name, imported when they are taken."""

    def __getitem__(self, name: str) -> Function:
        module, _ = OPERATIONS[name]
        function: Any = getattr(importlib.import_module(f"{__name__}.{module}"), name)
        return function  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        return iter(OPERATIONS)

    def __len__(self) -> int:
        return len(OPERATIONS)

    def __contains__(self, name: object) -> bool:
        return name in OPERATIONS


def supports(operation: str, device_kind: str, dtype: torch.dtype) -> bool:
    """Whether there is a GPU that runs the kernels, and one for tensors of this dtype."""
    if operation == "linear" and not batch_invariance.is_required():
        return False
    return device_kind == "cuda" and dtype in OPERATIONS[operation][1] and not why_off()


@functools.cache
def why_off() -> str:
    """Say in one sentence why the kernels are off; nothing: they are on."""
    if not is_switched_on("PAGEWICK_TRITON"):
        return f"PAGEWICK_TRITON={os.environ['PAGEWICK_TRITON']}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; PyTorch for CUDA brings it along: pip install 'pagewick[gpu]'"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler; install gcc and Python's headers, or name a compiler in CC"
    if not torch.cuda.is_available():
        return "PyTorch sees no GPU"
    if not torch.version.hip and torch.cuda.get_device_capability() < (8, 0):
        return "the GPU is older than compute capability 8.0, which has no bfloat16"
    return _why_no_launcher()


def why_no_fp8_products(device: torch.device) -> str:
    """Say in one sentence why a GPU has no products of FP8 numbers; nothing: it has."""
    if torch.version.hip:
        return "it needs a GPU of NVIDIA: those of AMD have other numbers of 8 bits"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        return f"this GPU's compute capability is {major}.{minor}; tensor cores multiply FP8 from 8.9 on"
    if importlib.import_module(f"{__name__}.fp8_products").form_on(device) is None:
        return "PyTorch's product of FP8 numbers fails on this GPU; install a newer PyTorch, or leave the flag out"
    return ""


def _why_no_launcher() -> str:
    """Say why Triton cannot compile C, as it must to start a kernel; nothing: it can, and keeps what it has compiled.

    Otherwise the first step would fail: Triton raises exceptions of many kinds where Python's headers, the driver's
    library or a directory for its cache are missing.
    """
    try:
        from triton.runtime import driver

        driver.active.get_current_device()
    except Exception as error:
        # That of a compiler has the whole command; the compiler itself writes what it lacks to standard error.
        said = str(error).partition("\n")[0][:200]
        return (
            f"Triton cannot compile its launcher ({type(error).__name__}: {said}); install gcc and Python's headers "
            "(Debian: apt install gcc python3-dev), or see docs/gpu.md"
        )
    return ""


BACKEND = Backend("triton", _Functions(), supports, quantized_weights=layouts.LAYOUTS)
