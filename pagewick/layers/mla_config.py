"""MlaConfig: the shape of multi-head latent attention. Imports no torch: config.json is checked without it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaConfig:
    """A latent attention. Names are Hugging Face's, except `num_heads`, which counts the heads of the whole model.

    q_lora_rank: rank of the query projection's two factors; None: it is one matrix. kv_lora_rank: size of a latent.
    qk_nope_head_dim, qk_rope_head_dim: elements of a query head that do not rotate, and that do.
    v_head_dim: elements of a value head.
    softmax_scale: factor of the scores; includes the square of YaRN's mscale if the model uses it.
    norm_eps: eps of the norms of both latents. attention_bias: q_a_proj, kv_a_proj_with_mqa and o_proj have biases.
    rope_interleaved: pairs that turn together are (2i, 2i + 1), else (i, i + qk_rope_head_dim / 2).
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    softmax_scale: float
    norm_eps: float = 1e-6
    attention_bias: bool = False
    rope_interleaved: bool = True

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_size(self) -> int:
        """Number of elements that are cached for a token."""
        return self.kv_lora_rank + self.qk_rope_head_dim
