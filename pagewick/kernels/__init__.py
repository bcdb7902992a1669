"""The operations, one signature each: that of their definition in `reference`.

`TABLE` dispatches them by device and dtype to the first backend that supports them, else to their definition; `cpu` is
the native library, `triton` has kernels for GPUs, `fused` takes PyTorch's own. Structs that operations take are in
`options`, weights and caches in the layout of a backend in `matrix` and `kv_cache`.
"""

# Not for this module: torch would import numpy itself, and swallow a Ctrl-C meanwhile, with half of numpy left out.
import numpy as np  # noqa: F401
import torch
from torch import Tensor

from pagewick.errors import ConfigError
from pagewick.kernels import batch_invariance, cpu, fp8_activations, fused, reference, triton
from pagewick.kernels.dispatch import Table
from pagewick.kernels.kv_cache import LAYOUT_VERSION, can_pack

TABLE = Table([cpu.BACKEND, triton.BACKEND, fused.BACKEND])

activation = TABLE.operation(reference.activation)
add = TABLE.operation(reference.add)
add_layer_norm = TABLE.operation(reference.add_layer_norm)
add_low_rank = TABLE.operation(reference.add_low_rank)
add_rms_norm = TABLE.operation(reference.add_rms_norm)
argmax_allowed = TABLE.operation(reference.argmax_allowed)
argmax_rows = TABLE.operation(reference.argmax_rows)
block_attention = TABLE.operation(reference.block_attention)
channel_scan = TABLE.operation(reference.channel_scan)
collapse_streams = TABLE.operation(reference.collapse_streams)
combine = TABLE.operation(reference.combine)
compress_rows = TABLE.operation(reference.compress_rows)
correct_streams = TABLE.operation(reference.correct_streams)
dynamic_rotary_angles = TABLE.operation(reference.dynamic_rotary_angles)
edit_tokens = TABLE.operation(reference.edit_tokens)
expand_streams = TABLE.operation(reference.expand_streams)
full_attention = TABLE.operation(reference.full_attention)
fused_moe = TABLE.operation(reference.fused_moe)
gated_activation = TABLE.operation(reference.gated_activation)
gated_delta_net = TABLE.operation(reference.gated_delta_net)
gather_blocks = TABLE.operation(reference.gather_blocks)
gather_columns = TABLE.operation(reference.gather_columns)
gather_quantized_rows = TABLE.operation(reference.gather_quantized_rows)
gather_rows = TABLE.operation(reference.gather_rows)
gaussian_top_k = TABLE.operation(reference.gaussian_top_k)
grouped_linear = TABLE.operation(reference.grouped_linear)
latent_attention = TABLE.operation(reference.latent_attention)
layer_norm = TABLE.operation(reference.layer_norm)
limit = TABLE.operation(reference.limit)
linear = TABLE.operation(reference.linear)
log_softmax_stats = TABLE.operation(reference.log_softmax_stats)
mask_min_p = TABLE.operation(reference.mask_min_p)
mask_rows = TABLE.operation(reference.mask_rows)
mask_surprise = TABLE.operation(reference.mask_surprise)
mask_top_k_top_p = TABLE.operation(reference.mask_top_k_top_p)
mask_top_n_sigma = TABLE.operation(reference.mask_top_n_sigma)
mask_typical_p = TABLE.operation(reference.mask_typical_p)
mask_xtc = TABLE.operation(reference.mask_xtc)
match_magnitude = TABLE.operation(reference.match_magnitude)
mix_streams = TABLE.operation(reference.mix_streams)
multiply = TABLE.operation(reference.multiply)
ngram_rows = TABLE.operation(reference.ngram_rows)
paged_attention = TABLE.operation(reference.paged_attention)
philox_uniform = TABLE.operation(reference.philox_uniform)
quantize_weight = TABLE.operation(reference.quantize_weight)
quantized_linear = TABLE.operation(reference.quantized_linear)
rank_tokens = TABLE.operation(reference.rank_tokens)
rms_norm = TABLE.operation(reference.rms_norm)
root_logits = TABLE.operation(reference.root_logits)
rope_and_store = TABLE.operation(reference.rope_and_store)
rope_and_store_latent = TABLE.operation(reference.rope_and_store_latent)
rotary_angles = TABLE.operation(reference.rotary_angles)
rotate_heads = TABLE.operation(reference.rotate_heads)
route = TABLE.operation(reference.route)
sample_tokens = TABLE.operation(reference.sample_tokens)
scale = TABLE.operation(reference.scale)
scatter_blocks = TABLE.operation(reference.scatter_blocks)
select_blocks = TABLE.operation(reference.select_blocks)
select_keys = TABLE.operation(reference.select_keys)
selective_scan = TABLE.operation(reference.selective_scan)
short_convolution = TABLE.operation(reference.short_convolution)
sigmoid_gate = TABLE.operation(reference.sigmoid_gate)
soft_cap = TABLE.operation(reference.soft_cap)
store_index_keys = TABLE.operation(reference.store_index_keys)
store_kv = TABLE.operation(reference.store_kv)
stream_similarities = TABLE.operation(reference.stream_similarities)
stream_weights = TABLE.operation(reference.stream_weights)
surprise = TABLE.operation(reference.surprise)
widen = TABLE.operation(reference.widen)
window_attention = TABLE.operation(reference.window_attention)
xielu = TABLE.operation(reference.xielu)


def native_status() -> str:
    """Say in one sentence which native kernels run, or why none do and what to do about it."""
    return cpu.status()


def status(device: str) -> str:
    """Say in one sentence which kernels run on a device, such as "cuda:1", or why none do."""
    kind = device.partition(":")[0]
    if kind == "cpu":
        return native_status()
    reason = triton.why_off() if kind == "cuda" else "there are no kernels for this device"
    return f"plain PyTorch: {reason}" if reason else "Triton kernels"


def kv_layout_version(device: torch.device) -> str:
    """Return a name for the layout of keys and values in a device's blocks, for data that outlives this process."""
    return f"packed {LAYOUT_VERSION}" if device.type == "cpu" and cpu.library() else f"plain {device.type}"


def set_num_threads(num_threads: int) -> None:
    """Use `num_threads` threads, the calling one included, in native operations. No effect without them."""
    if native := cpu.library():
        native.set_num_threads(num_threads)


def require_batch_invariance(device: torch.device) -> None:
    """Demand that from now on, rows have the same bits in every batch. Raises ConfigError if a device cannot do it."""
    problem = {
        "cpu": "" if cpu.library() else f"it needs the native kernels on a CPU ({cpu.status()})",
        "cuda": triton.why_off() and f"it needs the kernels for GPUs, which are off: {triton.why_off()}",
    }.get(device.type, f"PyTorch may add in an order that depends on the batch on {device.type}; use --device cpu")
    if problem:
        raise ConfigError(f"--batch-invariant: {problem}")
    batch_invariance.require()
    TABLE.choose_again()


def require_fp8_activations(device: torch.device, dtype: torch.dtype) -> None:
    """Demand that from now on, products with FP8 weights round activations to FP8. Raises ConfigError if they cannot.

    dtype: that of activations.
    """
    if device.type != "cuda":
        problem = "it needs a GPU (--device cuda)"
    elif triton.why_off():
        problem = f"it needs the kernels for GPUs, which are off: {triton.why_off()}"
    elif dtype not in (torch.bfloat16, torch.float16):
        problem = "it needs activations in 16 bits; give --dtype bfloat16"
    else:
        problem = triton.why_no_fp8_products(device)
    if problem:
        raise ConfigError(f"--fp8-activations: {problem}")
    fp8_activations.require()


def empty_result(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory for a result that several operations write parts of; in a recorded step, that of the step."""
    return cpu.empty(shape, dtype) if device.type == "cpu" else torch.empty(shape, dtype=dtype, device=device)


def serves_attention(device_kind: str) -> bool:
    """Whether kernels compute attention on a kind of device; where none do, plain PyTorch needs more memory for it."""
    return TABLE.backend("paged_attention", device_kind, torch.bfloat16) is not None


def packs_kv(head_dim: int, block_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a cache on this device is to be packed (kv_cache.py): where native operations serve it."""
    # Whether queries are served is a question of the device: they may have another dtype than the cache.
    served_by = TABLE.backend("paged_attention", device.type, torch.float32)
    return served_by is cpu.BACKEND and can_pack(head_dim, block_size, dtype)
