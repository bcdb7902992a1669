"""The numbers that the products of a token take in the widest layer. Imports no torch."""

from __future__ import annotations

from pagewick.models.config import ModelConfig
from pagewick.models.parts import AttentionConfig, LayerConfig, MlpConfig


def widest_layer(model: ModelConfig, num_ranks: int, *, is_float16: bool) -> int:
    """Return the numbers of a token in the widest layer, by the formulas in engine/step_memory.py.

    is_float16: whether a GPU computes in float16.
    """
    return max(_layer_width(layer, model.hidden_size, num_ranks, is_float16=is_float16) for layer in model.layers)


def _layer_width(layer: LayerConfig, hidden_size: int, num_ranks: int, *, is_float16: bool) -> int:
    """Numbers of a token in the wider of attention and MLP, or experts beside it."""
    attention, width = layer.attention, 0
    if isinstance(attention, AttentionConfig):
        heads, kv_heads = (n * attention.head_dim for n in (attention.num_heads, attention.num_kv_heads))
        width = (4 if attention.has_gate else 3) * heads + 2 * kv_heads
        if attention.qkv_limit is not None:
            # Limited and unlimited queries, keys and values are there at once, before any output is.
            width = max(width, 2 * (heads + 2 * kv_heads))
    elif layer.latent is not None:
        width = layer.latent.num_heads * 2 * layer.latent.latent_size
        if layer.latent.has_gates:
            # Queries and gates as one projection makes them, and apart.
            width += layer.latent.num_heads * 2 * layer.latent.query_rows
        elif layer.latent.has_head_gates or layer.latent.has_number_gates:
            # A gate for each number of the heads' values, and these times the gates.
            width += layer.latent.num_heads * 2 * layer.latent.v_head_dim
        if layer.latent.has_log_scales:
            # Queries, their factors, and the products of both, before anything of attention.
            width = max(width, layer.latent.num_heads * 3 * layer.latent.qk_head_dim)
    elif layer.rows is not None:
        # Queries as they are made, normalised and rotated, and what is attended, before and behind its rotation.
        width = 3 * layer.rows.num_heads * layer.rows.head_dim
    width += sum(state.products_width(is_float16=is_float16) for state in layer.states)
    width = max(width, num_ranks * (layer.ngrams.products_width if layer.ngrams else 0))
    widest = -(-width // num_ranks)
    for mlp in (layer.mlp, layer.experts):
        if isinstance(mlp, MlpConfig):
            widest = max(widest, -(-(4 if mlp.sparsity else 3) * mlp.intermediate_size // num_ranks))
        elif mlp is not None:
            widest = max(widest, mlp.products_width(hidden_size, num_ranks))
    return widest
