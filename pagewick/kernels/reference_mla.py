"""Multi-head latent attention in plain PyTorch; a part of `reference`.

DeepSeek-V2 (arXiv:2405.04434, section 2.1), in the absorbed form: the cache has one latent per token, from which every
head computes its own key and value with two matrices. As both products are linear, the queries are multiplied by the
one matrix, and the sums of latents by the other.

Dimensions: T tokens, B sequences, H query heads, N elements of a query head that are not rotated, L elements of a
latent, R elements of the rotated part of a query head, and of the one rotated key that all heads share.
"""

import torch
from torch import Tensor

from pagewick.kernels.options import AttentionMetadata, Rotation
from pagewick.kernels.reference_kv import store_latents, take_latents
from pagewick.kernels.reference_rope import rotate

# Queries of a long prefill are processed in slices of at most this size, which have at most this number of scores of
# all heads, unless one query has more.
QUERY_SLICE = 256
MAX_SCORES = 2**28


def rope_and_store_latent(
    q: Tensor,
    latents: Tensor | None,
    cache: Tensor,
    slot_mapping: Tensor,
    *,
    norm_weight: Tensor,
    norm_eps: float,
    rotation: Rotation,
    scales: Tensor | None = None,
) -> Tensor:
    """Store the normalised latent and the rotated key of latents [T, L + R]; return the rotated queries [T, H, R].

    latents may also be [T, L]: their keys are stored as 0; or None: nothing is stored.
    q: [T, H, N + R], of which the last R elements are rotated. cache: [num_blocks, block_size, L + R]. slot_mapping:
    [T] int64, slot = block_id * block_size + offset; slot -1 stores nothing. norm_weight: [L], of an RMS norm. Results
    are rounded once from float32 to q.dtype, and then to the cache's dtype. scales: those of a cache of 8-bit numbers,
    float32 [num_blocks, block_size, 2], as reference_kv.py defines them.
    """
    cos, sin, interleaved = rotation
    latent_dim, rope_dim = len(norm_weight), 2 * cos.shape[-1]
    dtype = torch.promote_types(q.dtype, torch.float32)
    if latents is not None:
        latent, key = latents[:, :latent_dim].to(dtype), latents[:, latent_dim:].to(dtype)
        normed = latent * torch.rsqrt(latent.square().mean(-1, keepdim=True) + norm_eps) * norm_weight
        turned = rotate(key, cos, sin, interleaved) if key.shape[1] else key.new_zeros(len(key), rope_dim)
        stored = slot_mapping >= 0
        rows = torch.cat((normed, turned), dim=-1).to(latents.dtype)
        store_latents(cache, scales, rows[stored], latent_dim, slot_mapping[stored])
    q_rope = q[..., -rope_dim:].to(dtype)
    return rotate(q_rope, cos.unsqueeze(1), sin.unsqueeze(1), interleaved).to(q.dtype)


def latent_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    metadata: AttentionMetadata,
    *,
    softmax_scale: float,
    scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute causal attention of a ragged batch over latents: sums of latents [T, H, L] in q_latent.dtype.

    A score is softmax_scale * (q_latent . latent + q_rope . key); a head's result is the mean of the latents, weighted
    by the softmax of its scores. q_latent: [T, H, L]; q_rope: [T, H, R]; cache: [num_blocks, block_size, L + R], and
    scales as in rope_and_store_latent. sinks: [H] float32, a further logit of each head's softmax, which has no latent.

    The queries of sequence b are its last q_len tokens and see the tokens up to their own. Other parts of the cache are
    never read. A sequence's result does not depend on the other sequences.
    """
    out = torch.empty_like(q_latent)
    latent_dim, dtype = q_latent.shape[-1], torch.promote_types(q_latent.dtype, torch.float32)
    starts, lengths = metadata.cu_seqlens_q.tolist(), metadata.context_lens.tolist()
    for b, context_len in enumerate(lengths):
        step = max(1, min(QUERY_SLICE, MAX_SCORES // max(1, q_latent.shape[1] * context_len)))
        for start in range(starts[b], starts[b + 1], step):
            end = min(start + step, starts[b + 1])
            num_keys = context_len - (starts[b + 1] - end)
            block_ids = metadata.block_tables[b][: -(-num_keys // cache.shape[1])].long()
            keys = take_latents(cache, scales, latent_dim, block_ids).flatten(0, 1)[:num_keys].to(dtype)
            q = torch.cat((q_latent[start:end], q_rope[start:end]), dim=-1).to(dtype)
            out[start:end] = _attend(q, keys, latent_dim, softmax_scale, sinks)
            # Else their memory would be taken while that of the next slice is.
            del keys, q
    return out


def _attend(q: Tensor, keys: Tensor, latent_dim: int, softmax_scale: float, sinks: Tensor | None) -> Tensor:
    """Compute attention of q [q_len, H, L + R], the last tokens of a sequence, over keys [num_keys, L + R]."""
    num_keys = len(keys)
    scores = torch.einsum("qhd,kd->hqk", q, keys) * softmax_scale
    hidden = torch.ones(len(q), num_keys, dtype=torch.bool, device=q.device).triu(num_keys - len(q) + 1)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is None:
        probs = scores.softmax(-1)
    else:
        column = sinks.to(scores.dtype).view(-1, 1, 1).expand(-1, len(q), 1)
        probs = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("hqk,kd->qhd", probs, keys[:, :latent_dim])
