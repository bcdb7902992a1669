"""The built-in model over a KV cache of 8 or 4 bits predicts what it predicts over a bfloat16 one."""

from __future__ import annotations

from tests.attention.quality import NUM_SEQUENCES, joined, measure
from tests.deep import IS_DEEP
from tests.weights.gguf.quality import MAX_LENGTH, held_out_chats

# The largest divergence, and the least share of equal most likely tokens.
LIMITS = {"int8": (1e-4, 0.99), "fp8_e4m3": (5e-4, 0.99), "fp8_e5m2": (3e-3, 0.99), "int4": (1.5e-2, 0.98)}


def test_predictions_over_long_sequences() -> None:
    number = NUM_SEQUENCES if IS_DEEP else 1
    # Half of the tokens and more belong to questions.
    sequences = joined(held_out_chats(number * MAX_LENGTH // 2), number)
    for name, divergence, agreement in measure(list(LIMITS) if IS_DEEP else ["int8", "fp8_e4m3"], sequences):
        limit, least = LIMITS[name]
        assert 0 < divergence <= limit and agreement > least, name
