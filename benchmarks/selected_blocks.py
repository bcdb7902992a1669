"""`python -m benchmarks.selected_blocks`: steps of a small MiniMax-M3 with native operations and by definition.

The sizes of heads, of blocks and of the index are MiniMax-M3's, but a token sees 4 blocks, so that short contexts have
more. Heads, experts and layers are fewer. The rest is as in benchmarks/compressed_entries.py.
"""

from __future__ import annotations

from typing import Any

import click

from benchmarks.compressed_entries import compare

_LAYERS = [0, 1, 1, 1]
_SPARSE = {
    "use_sparse_attention": True, "sparse_index_dim": 128, "sparse_num_index_heads": 2, "sparse_topk_blocks": 4,
    "sparse_block_size": 128, "sparse_score_type": "max", "sparse_init_block": 0, "sparse_local_block": 1,
    "sparse_attention_freq": _LAYERS, "sparse_disable_index_value": _LAYERS,
}  # fmt: skip
_TEXT = {
    "hidden_size": 2048, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 32,
    "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 8192, "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-06, "use_gemma_norm": True, "attention_output_gate": False, "rope_theta": 5000000,
    "rotary_dim": 64, "partial_rotary_factor": 0.5, "hidden_act": "swigluoai", "use_qk_norm": True,
    "qk_norm_type": "per_head", "tie_word_embeddings": False, "dense_intermediate_size": 2048,
    "shared_intermediate_size": 512, "num_local_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 1,
    "scoring_func": "sigmoid", "use_routing_bias": True, "routed_scaling_factor": 2.0, "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0, "moe_layer_freq": _LAYERS, "sparse_attention_config": _SPARSE,
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "architectures": ["MiniMaxM3SparseForConditionalGeneration"], "model_type": "minimax_m3_vl",
    "torch_dtype": "bfloat16", "text_config": _TEXT, "vision_config": {"hidden_size": 1280},
}  # fmt: skip


@click.command()
@click.option("--streams", default=1, show_default=True)
@click.option("--context", default=1024, show_default=True, help="tokens of each prompt")
@click.option("--rounds", default=5, show_default=True)
@click.option("--steps", default=8, show_default=True, help="steps of an engine in a round")
def main(streams: int, context: int, rounds: int, steps: int) -> None:
    """Print milliseconds of a prompt and of a step."""
    compare(CONFIG, ("select_blocks", "block_attention"), streams, context, rounds, steps)


if __name__ == "__main__":
    main()
