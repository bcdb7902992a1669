"""StarCoder (GPT-BigCode: learned positions, one KV head) and StarCoder2."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.models.variants.variant import COMMON, NO_HEAD_DIM, Variant, rope

BIGCODE: dict[str, Any] = {
    **dict.fromkeys(COMMON), "vocab_size": 193, "n_embd": 96, "n_layer": 3, "n_head": 6, "n_positions": 160,
    "layer_norm_epsilon": 1e-3, "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip


def _halve(model: nn.Module, name: str) -> None:
    """Shrink weights: scores without scaling are large, and larger ones would enlarge errors of the last bits, too."""
    for key, weight in model.named_parameters():
        if key.endswith(name):
            weight.data.mul_(0.5)


STARCODER2 = {**NO_HEAD_DIM, "norm_epsilon": 1e-3, **rope(theta=1e5)}

VARIANTS = {
    "starcoder": Variant("GPTBigCode", BIGCODE),
    "gpt-bigcode-mha": Variant("GPTBigCode", {**BIGCODE, "multi_query": False, "n_inner": 80}),
    "gpt-bigcode-gelu-unscaled": Variant(
        "GPTBigCode",
        {**BIGCODE, "activation_function": "gelu", "scale_attn_weights": False},
        patch=lambda model: _halve(model, "c_attn.weight"),
    ),
    "starcoder2-3b": Variant("Starcoder2", {**STARCODER2, "sliding_window": 22}),
    "starcoder2-15b-untied": Variant(
        "Starcoder2", {**STARCODER2, "num_key_value_heads": 3, "tie_word_embeddings": False}
    ),
    "starcoder2-no-bias": Variant("Starcoder2", {**STARCODER2, "use_bias": False, "num_key_value_heads": 1}),
}
