"""Measure what small KV caches cost the built-in model: python -m tests.attention.quality [DTYPE ...] [--sequences N]

Prints the table of docs/quantization.md. The model continues sequences of 2,048 tokens, which are held-out chats one
after the other. Their tokens are given (teacher forcing), and every prediction of a token of an answer is compared with
that over a bfloat16 cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final

from pagewick.demo import MODEL_DIR
from tests.weights.gguf.quality import MAX_LENGTH, Example, held_out_chats, predictions, quality, row

DTYPES: Final = ("int8", "fp8_e4m3", "fp8_e5m2", "int4")
BASE: Final = "bfloat16"
NUM_SEQUENCES: Final = 8


def joined(chats: Sequence[Example], num_sequences: int) -> list[Example]:
    """Return sequences of MAX_LENGTH tokens that are chats one after the other; the last one of each is cut."""
    token_ids = [token_id for chat in chats for token_id in chat.token_ids]
    targets = [target for chat in chats for target in chat.targets]
    assert len(token_ids) >= num_sequences * MAX_LENGTH, "there are too few chats"
    bounds = range(0, num_sequences * MAX_LENGTH, MAX_LENGTH)
    # The prompt leaves room for the one token that is generated.
    return [
        Example(token_ids[begin : begin + MAX_LENGTH - 1], targets[begin : begin + MAX_LENGTH - 1]) for begin in bounds
    ]


def measure(
    dtypes: Sequence[str], sequences: Sequence[Example], dtype: str = "float32"
) -> list[tuple[str, float, float]]:
    """Return (dtype of the cache, mean divergence from a bfloat16 cache, share of equal most likely tokens)."""
    expected = list(predictions(MODEL_DIR, sequences, dtype, kv_cache_dtype=BASE))
    found = [
        (name, quality(expected, predictions(MODEL_DIR, sequences, dtype, kv_cache_dtype=name), sequences))
        for name in dtypes
    ]
    return [(name, one.divergence, one.agreement) for name, one in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dtypes", nargs="*", default=["float32", *DTYPES], metavar="DTYPE")
    parser.add_argument("--sequences", type=int, default=NUM_SEQUENCES)
    given = parser.parse_args()
    sequences = joined(held_out_chats(given.sequences * MAX_LENGTH), given.sequences)
    print(row("KV cache", "divergence", "same token"))
    print(row("---", "---", "---"))
    for name, divergence, agreement in measure(given.dtypes, sequences):
        print(row(name, f"{divergence:.1e}", f"{agreement:.2%}"), flush=True)


if __name__ == "__main__":
    main()
