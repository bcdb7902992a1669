"""Stand-ins for flash-attn, FlashInfer and torch.nn.attention.varlen: their signatures, computed densely on the CPU.

Signatures: flash-attn 2.8 (flash_attn/flash_attn_interface.py), FlashInfer 0.6 (flashinfer/prefill.py, decode.py) and
PyTorch 2.13 (torch/nn/attention/varlen.py). Arguments that Pagewick does not give must have their defaults.
"""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

num_plans: list[str] = []
"""The names of the wrappers of FlashInfer that have planned, in order."""


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, right: int, soft_cap: float) -> Tensor:
    """Attention of q [n, H, D] over k and v [m, KVH, D]; the last query is at the last key. left, right: -1: all."""
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("nhd,mhd->hnm", q.double(), k.double().repeat_interleave(group, 1)) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance > left
    if right >= 0:
        hidden |= -distance > right
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", weights, v.double().repeat_interleave(group, 1)).to(q.dtype)


def paged(
    q: Tensor, k: Tensor, v: Tensor, starts: list[int], lengths: list[int], tables: list[list[int]], **options: Any
) -> Tensor:
    """k, v: [num_pages, page_size, KVH, D]."""
    out = torch.full_like(q, math.nan)
    for (start, end), length, pages in zip(itertools.pairwise(starts), lengths, tables, strict=True):
        used = pages[: -(-length // k.shape[1])]
        out[start:end] = dense(q[start:end], *(x[used].flatten(0, 1)[:length] for x in (k, v)), **options)
    return out


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Tensor:  # fmt: skip
    assert block_table is not None and softmax_scale is not None and causal
    assert dropout_p == 0.0 and alibi_slopes is None and not (deterministic or return_attn_probs)
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == block_table.dtype == torch.int32
    assert k.stride(-1) == v.stride(-1) == block_table.stride(-1) == 1
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max()) and max_seqlen_k >= int(cu_seqlens_k.diff().max())
    return paged(
        q, k, v, cu_seqlens_q.tolist(), cu_seqlens_k.diff().tolist(), block_table.tolist(),
        scale=softmax_scale, left=window_size[0], right=0, soft_cap=softcap,
    )  # fmt: skip


def varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int, *,
    return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False, seqused_k: Tensor | None = None, block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:  # fmt: skip
    assert cu_seq_k is None and return_aux is None and num_splits is None
    assert scale is not None and seqused_k is not None and block_table is not None
    assert enable_gqa or query.shape[1] == key.shape[2]
    assert max_q >= int(cu_seq_q.diff().max()) and max_k >= int(seqused_k.max())
    return paged(
        query, key, value, cu_seq_q.tolist(), seqused_k.tolist(), block_table.tolist(),
        scale=scale, left=window_size[0], right=window_size[1], soft_cap=0.0,
    )  # fmt: skip


class _Wrapper:
    planned: dict[str, Any]

    def _keep(self, **planned: Any) -> None:
        for name in ("indptr", "indices", "last_page_len"):
            assert planned[name].dtype == torch.int32
        num_plans.append(type(self).__name__)
        self.planned = planned

    def _run(self, q: Tensor, cache: Tensor) -> Tensor:
        plan = SimpleNamespace(**self.planned)
        assert q.dtype == plan.q_data_type and cache.dtype == plan.kv_data_type
        assert q.shape[1:] == (plan.num_qo_heads, plan.head_dim)
        # kv_layout HND: [num_pages, 2, KVH, page_size, D].
        assert cache.shape[1:] == (2, plan.num_kv_heads, plan.page_size, plan.head_dim)
        k, v = cache.transpose(2, 3).unbind(1)
        bounds = itertools.pairwise(plan.indptr.tolist())
        tables = [plan.indices[first:end].tolist() for first, end in bounds]
        lengths = [
            (len(pages) - 1) * plan.page_size + last
            for pages, last in zip(tables, plan.last_page_len.tolist(), strict=True)
        ]
        return paged(
            q, k, v, plan.qo_indptr.tolist(), lengths, tables,
            scale=plan.sm_scale, left=plan.window_left, right=0, soft_cap=plan.logits_soft_cap or 0.0,
        )  # fmt: skip


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None, paged_kv_indptr_buf: Any = None, paged_kv_indices_buf: Any = None,
        paged_kv_last_page_len_buf: Any = None, custom_mask_buf: Any = None, mask_indptr_buf: Any = None,
        backend: str = "auto", jit_args: Any = None, jit_kwargs: Any = None,
    ) -> None:  # fmt: skip
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "HND" and not use_cuda_graph

    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, head_dim_vo: int | None = None,
        custom_mask: Any = None, packed_custom_mask: Any = None, causal: bool = False, pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False, sm_scale: float | None = None, window_left: int = -1,
        logits_soft_cap: float | None = None, rope_scale: Any = None, rope_theta: Any = None,
        q_data_type: Any = "float16", kv_data_type: Any = None, o_data_type: Any = None, non_blocking: bool = True,
        prefix_len_ptr: Any = None, token_pos_in_items_ptr: Any = None, token_pos_in_items_len: int = 0,
        max_item_len_ptr: Any = None, seq_lens: Any = None, seq_lens_q: Any = None, block_tables: Any = None,
        max_token_per_sequence: Any = None, max_sequence_kv: Any = None, fixed_split_size: Any = None,
        disable_split_kv: bool = False,
    ) -> None:  # fmt: skip
        assert causal and pos_encoding_mode == "NONE" and head_dim_vo is None
        self._keep(
            qo_indptr=qo_indptr, indptr=paged_kv_indptr, indices=paged_kv_indices,
            last_page_len=paged_kv_last_page_len, num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads,
            head_dim=head_dim_qk, page_size=page_size, sm_scale=sm_scale, window_left=window_left,
            logits_soft_cap=logits_soft_cap, q_data_type=q_data_type, kv_data_type=kv_data_type,
        )  # fmt: skip

    def run(self, q: Tensor, paged_kv_cache: Tensor, *args: Any, **options: Any) -> Tensor:
        assert not args and not options
        return self._run(q, paged_kv_cache)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        use_tensor_cores: bool = False, paged_kv_indptr_buffer: Any = None, paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None, backend: str = "auto", jit_args: Any = None,
    ) -> None:  # fmt: skip
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "HND" and use_tensor_cores

    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim: int, page_size: int, *, pos_encoding_mode: str = "NONE", window_left: int = -1,
        logits_soft_cap: float | None = None, q_data_type: Any = "float16", kv_data_type: Any = None,
        sm_scale: float | None = None,
    ) -> None:  # fmt: skip
        self._keep(
            qo_indptr=torch.arange(len(last_page_len) + 1), indptr=indptr, indices=indices,
            last_page_len=last_page_len, num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
            page_size=page_size, sm_scale=sm_scale, window_left=window_left, logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type, kv_data_type=kv_data_type,
        )  # fmt: skip

    def run(self, q: Tensor, paged_kv_cache: Tensor, *args: Any, **options: Any) -> Tensor:
        assert not args and not options
        return self._run(q, paged_kv_cache)


MODULES: dict[str, Any] = {
    "FLASH_ATTN": SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func),
    "TORCH_VARLEN": SimpleNamespace(varlen_attn=varlen_attn),
    "FLASHINFER": SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper,
        BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper,
    ),
}
