"""Attention by other packages over Pagewick's blocks: flash-attn, FlashInfer, and PyTorch's varlen attention.

Only --attention-backend chooses one. A model, a GPU or a setting that a package does not serve is an error at the
start: nothing is replaced by other kernels. Keys and values are stored by Pagewick's own kernels, in the plain layout
(kernels/kv_cache.py), which all three packages read.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from pagewick import kernels
from pagewick.attention.backend import AttentionBackend, AttentionBatch, Scoring
from pagewick.attention.cache_spec import CacheSpec, Kept, KeptHeads
from pagewick.attention.native import NativeBackend, NativeHeads, choose_backend, default_block_size
from pagewick.errors import ConfigError
from pagewick.kernels.kv_cache import KVCache
from pagewick.kernels.options import HeadLayout, ScoreOptions

_WORKSPACE_BYTES: Final = 128 * 2**20
_CAPABILITY: Final = (8, 0)


class Attend(Protocol):
    """Attention of one layer. q: [T, H, D]. Returns [T, H, D]."""

    def __call__(self, q: Tensor, cache: KVCache, batch: AttentionBatch, group: int) -> Tensor: ...


MakeAttend = Callable[[HeadLayout, ScoreOptions], Attend]


@dataclass(frozen=True, slots=True)
class Package:
    """A package and what it serves.

    module, function: what is called; parameters: those without which the installed version is too old. get: how to
    install it. block_unit: a block's number of tokens must be a multiple of it. head_dims: the sizes of heads.
    fits_graphs: whether it only queues work, so that a CUDA graph can contain it.
    """

    name: str
    module: str
    function: str
    parameters: tuple[str, ...]
    get: str
    block_unit: int
    head_dims: tuple[int, ...]
    has_soft_cap: bool
    runs_on_amd: bool
    fits_graphs: bool
    make: Callable[[Any, torch.device], MakeAttend]

    def refuse(self, reason: str, fix: str = "") -> ConfigError:
        """Return the error about something that the package does not serve."""
        return ConfigError(
            f"--attention-backend {self.name}: {reason}\n"
            f"  {fix + ', or ' if fix else ''}leave the flag out, which uses Pagewick's own kernels"
        )

    def imported(self) -> Any:
        """Import the module. Raises ConfigError if it is not installed, does not work or is too old."""
        try:
            module = importlib.import_module(self.module)
            called = getattr(module, self.function)
        except ModuleNotFoundError as error:
            raise self.refuse(f"{error.name} is not installed", self.get) from None
        except (ImportError, OSError, AttributeError) as error:
            raise self.refuse(f"{self.module} cannot be used ({str(error)[:100]})", self.get) from error
        known = inspect.signature(getattr(called, "plan", called)).parameters
        if missing := [name for name in self.parameters if name not in known]:
            raise self.refuse(f"the installed {self.module} is too old: it lacks {', '.join(missing)}", self.get)
        return module

    def check_device(self, device: torch.device) -> None:
        """Raise ConfigError unless the package runs on this device."""
        if device.type != "cuda":
            raise self.refuse(f"it runs on GPUs, and the device is {device.type}", "give --device cuda")
        if torch.version.hip is not None:
            if not self.runs_on_amd:
                raise self.refuse("it does not run on GPUs of AMD")
        elif torch.cuda.get_device_capability(device) < _CAPABILITY:
            raise self.refuse(f"it needs a GPU of compute capability 8.0 or newer; {device} is older")

    def check_cache(self, dtype: torch.dtype, cache_dtype: str, block_size: int) -> None:
        """Raise ConfigError unless the package reads such blocks for queries of `dtype`."""
        name = str(dtype).removeprefix("torch.")
        if name not in ("bfloat16", "float16"):
            raise self.refuse(f"it computes in bfloat16 or float16, not in the model's {name}", "give --dtype bfloat16")
        if cache_dtype != name:
            raise self.refuse(f"it reads a KV cache in {name} only, not in {cache_dtype}", "leave --kv-cache-dtype out")
        if block_size % self.block_unit:
            raise self.refuse(
                f"its blocks have a multiple of {self.block_unit} tokens, not {block_size}",
                f"give --block-size {self.block_unit}",
            )


class PackageBackend(NativeBackend):
    """An AttentionBackend that stores keys and values as NativeBackend does, and lets a package attend."""

    def __init__(self, package: Package, device: torch.device, block_size: int, cache_dtype: str) -> None:
        super().__init__(block_size, cache_dtype, device)
        self._package = package
        self._make = package.make(package.imported(), device)

    def cache_spec(self, kept: Kept) -> CacheSpec:
        if not isinstance(kept, KeptHeads):
            raise self._package.refuse("it does not serve latent attention")
        if kept.head_dim not in self._package.head_dims:
            sizes = ", ".join(map(str, self._package.head_dims))
            raise self._package.refuse(f"it does not serve heads of {kept.head_dim} numbers, only of {sizes}")
        if kept.is_chunked:
            raise self._package.refuse("it does not serve attention that is cut into chunks")
        # Keys and values of other attention have other last bits, so blocks on disk are kept apart.
        spec = super().cache_spec(kept)
        return replace(spec, layout=f"{spec.layout} {self._package.name}")

    def bind_heads(
        self,
        kept: KeptHeads,
        scoring: Scoring,
        blocks: Tensor,
        group: int,
        kv_scales: tuple[float, float] = (0.0, 0.0),
    ) -> NativeHeads:
        if scoring.logit_soft_cap is not None and not self._package.has_soft_cap:
            raise self._package.refuse("it does not serve models that cap the scores of attention")
        if scoring.sinks is not None:
            raise self._package.refuse("it does not serve models with sinks in the softmax of attention")
        if scoring.sees_images_whole:
            reason = "it does not serve models in which the tokens of an image see each other"
            raise self._package.refuse(reason, "give --language-model-only, if no request has images")
        if scoring.chunk_size is not None:
            raise self._package.refuse("it does not serve models whose texts attend to an image of their own")
        if scoring.sees_all:
            raise self._package.refuse("it does not serve models in which tokens see those behind them")
        heads = super().bind_heads(kept, scoring, blocks, group, kv_scales)
        if heads.cache.is_packed:
            raise self._package.refuse("it reads no packed blocks")
        # Packages multiply rows after a sequence by 0, which leaves NaN if unused memory contains one.
        blocks.zero_()
        return PackageHeads(heads.cache, kept, scoring, group, self._make)


class PackageHeads(NativeHeads):
    """BoundHeads over a KVCache whose attention a package computes."""

    def __init__(self, cache: KVCache, kept: KeptHeads, scoring: Scoring, group: int, make: MakeAttend) -> None:
        super().__init__(cache, kept, scoring, group)
        self._package_attention = make(self._layout, self._scores)

    def _attend(self, q: Tensor, batch: AttentionBatch) -> Tensor:
        return self._package_attention(q, self.cache, batch, self._group)


def _longest(q: Tensor, batch: AttentionBatch) -> int:
    """Return the most queries that a sequence can have; each of a batch has one or more. Asks nothing of the GPU."""
    num_sequences = len(batch.context_lens)
    return len(q) - num_sequences + 1 if len(q) > num_sequences else 1


def _pages(cache: KVCache) -> tuple[Tensor, Tensor]:
    """Return keys and values as views [num_blocks, block_size, KVH, D]."""
    keys, values = cache.data.transpose(2, 3).unbind(1)
    return keys, values


def _sums(lengths: Tensor) -> Tensor:
    """Return 0 and the running sums of lengths [B]: [B + 1] int32."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _flash_attn(module: Any, device: torch.device) -> MakeAttend:
    def make(layout: HeadLayout, scores: ScoreOptions) -> Attend:
        window = (-1, -1) if scores.sliding_window is None else (scores.sliding_window - 1, 0)

        def attend(q: Tensor, cache: KVCache, batch: AttentionBatch, group: int) -> Tensor:
            keys, values = _pages(cache)
            tables = batch.groups[group].block_tables
            attended: Tensor = module.flash_attn_varlen_func(
                q,
                keys,
                values,
                cu_seqlens_q=batch.cu_seqlens_q,
                cu_seqlens_k=_sums(batch.context_lens),
                max_seqlen_q=_longest(q, batch),
                max_seqlen_k=tables.shape[1] * cache.block_size,
                softmax_scale=scores.softmax_scale,
                causal=True,
                window_size=window,
                softcap=scores.logit_soft_cap or 0.0,
                block_table=tables,
            )
            return attended

        return attend

    return make


def _torch_varlen(module: Any, device: torch.device) -> MakeAttend:
    def make(layout: HeadLayout, scores: ScoreOptions) -> Attend:
        window = (-1 if scores.sliding_window is None else scores.sliding_window - 1, 0)

        def attend(q: Tensor, cache: KVCache, batch: AttentionBatch, group: int) -> Tensor:
            keys, values = _pages(cache)
            tables = batch.groups[group].block_tables
            attended: Tensor = module.varlen_attn(
                q,
                keys,
                values,
                batch.cu_seqlens_q,
                None,
                _longest(q, batch),
                tables.shape[1] * cache.block_size,
                scale=scores.softmax_scale,
                window_size=window,
                enable_gqa=layout.num_heads != layout.num_kv_heads,
                seqused_k=batch.context_lens,
                block_table=tables,
            )
            return attended

        return attend

    return make


def _flashinfer(module: Any, device: torch.device) -> MakeAttend:
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    plans: dict[tuple[HeadLayout, float, int | None, float | None], _FlashInferPlan] = {}

    def make(layout: HeadLayout, scores: ScoreOptions) -> Attend:
        # Layers that attend alike share a plan, which is made once for each batch.
        key = layout, scores.softmax_scale, scores.sliding_window, scores.logit_soft_cap
        if key not in plans:
            plans[key] = _FlashInferPlan(module, workspace, layout, scores)
        return plans[key]

    return make


class _FlashInferPlan:
    """An Attend that plans a batch when the first layer attends; the other layers use that plan.

    Planning reads lengths on the host, so such a step cannot be captured in a graph.
    """

    def __init__(self, module: Any, workspace: Tensor, layout: HeadLayout, scores: ScoreOptions) -> None:
        self._prefill = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        self._decode = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        self._layout, self._scores = layout, scores
        self._planned: tuple[AttentionBatch, int] | None = None
        self._wrapper: Any = None

    def __call__(self, q: Tensor, cache: KVCache, batch: AttentionBatch, group: int) -> Tensor:
        if self._planned is None or self._planned[0] is not batch or self._planned[1] != group:
            self._wrapper, self._planned = self._plan(q, cache, batch, group), (batch, group)
        attended: Tensor = self._wrapper.run(q, cache.data)
        return attended

    def _plan(self, q: Tensor, cache: KVCache, batch: AttentionBatch, group: int) -> Any:
        tables, lengths = batch.groups[group].block_tables, batch.context_lens
        num_blocks = (lengths + cache.block_size - 1) // cache.block_size
        is_used = torch.arange(tables.shape[1], device=tables.device) < num_blocks.unsqueeze(1)
        pages = _sums(num_blocks), tables[is_used], lengths - (num_blocks - 1) * cache.block_size
        heads = self._layout.num_heads, self._layout.num_kv_heads, self._layout.head_dim, cache.block_size
        window, cap = self._scores.sliding_window, self._scores.logit_soft_cap
        options = {
            "sm_scale": self._scores.softmax_scale, "window_left": -1 if window is None else window - 1,
            "logits_soft_cap": cap, "q_data_type": q.dtype, "kv_data_type": cache.dtype,
        }  # fmt: skip
        if len(q) == len(lengths):
            self._decode.plan(*pages, *heads, **options)
            return self._decode
        self._prefill.plan(batch.cu_seqlens_q, *pages, *heads, causal=True, **options)
        return self._prefill


PACKAGES: Final = {
    package.name: package
    for package in (
        Package(
            "FLASH_ATTN", "flash_attn", "flash_attn_varlen_func", ("block_table", "softcap"),
            "pip install flash-attn --no-build-isolation", 256, tuple(range(8, 257, 8)), True, True, True, _flash_attn,
        ),
        Package(
            "FLASHINFER", "flashinfer", "BatchPrefillWithPagedKVCacheWrapper",
            ("window_left", "logits_soft_cap", "kv_data_type"), "pip install flashinfer-python", 1, (64, 128, 256),
            True, False, False, _flashinfer,
        ),
        Package(
            "TORCH_VARLEN", "torch.nn.attention.varlen", "varlen_attn", ("block_table", "seqused_k", "enable_gqa"),
            "pip install 'torch>=2.12'", 256, tuple(range(8, 257, 8)), False, False, True, _torch_varlen,
        ),
    )
}  # fmt: skip

# vLLM's names for kernels of its own, which are Pagewick's here -> the kind of device on which they run.
_OWN: Final = {"TRITON_ATTN": "cuda", "CPU_ATTN": "cpu"}


def usual_block_size(name: str, device: torch.device) -> int:
    """Return the tokens of a block for an --attention-backend, unless the user chooses another number."""
    usual = default_block_size(device)
    return max(usual, PACKAGES[name].block_unit) if name in PACKAGES else usual


def choose_named(
    name: str, device: torch.device, dtype: torch.dtype, cache_dtype: str, block_size: int
) -> AttentionBackend:
    """Return the backend that --attention-backend names, which is not "auto", for a model that runs in `dtype`.

    Raises ConfigError if it cannot serve the device, the dtypes or the block size. Its cache_spec and bind_heads raise
    ConfigError for layers that it cannot serve.
    """
    if name in _OWN:
        if device.type != _OWN[name]:
            raise ConfigError(f"--attention-backend {name} needs --device {_OWN[name]}; the device is {device.type}")
        if name == "TRITON_ATTN" and kernels.TABLE.backend("paged_attention", device.type, dtype) is None:
            raise ConfigError(
                "--attention-backend TRITON_ATTN: Triton is not installed, is turned off by PAGEWICK_TRITON=0, or does "
                "not support this GPU\n  pip install 'pagewick[gpu]', or leave the flag out"
            )
        return choose_backend(device, cache_dtype, block_size)
    package = PACKAGES[name]
    package.check_device(device)
    package.check_cache(dtype, cache_dtype, block_size)
    return PackageBackend(package, device, block_size, cache_dtype)
