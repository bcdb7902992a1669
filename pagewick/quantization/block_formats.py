"""The block formats that weights may have: ggml's types, the formats they become, and Pagewick's own formats.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pagewick.errors import ConfigError

# Formats that are not ggml's, with a float32 scale for each group: signed bytes, four bits with a zero point, E4M3, and
# codes of four bits. kernels/block_formats.py describes them.
OWN_FORMATS: Final[Mapping[str, tuple[int, int]]] = {
    "int8_g32": (32, 36),
    "int4_g32": (32, 21),
    "int4_g64": (64, 37),
    "int4_g128": (128, 69),
    "fp8_g32": (32, 36),
    "fp8_g128": (128, 132),
    **dict.fromkeys(("iq4_g32", "iq3_g32", "iq3s_g32", "iq2_g32", "iq1_g32"), (32, 20)),
    **dict.fromkeys(("iq2_g16", "iq1_g16", "fp4_g16"), (32, 24)),
}
# Block formats that can be multiplied (ggml.py): name -> numbers and bytes of a block.
BLOCK_FORMATS: Final[Mapping[str, tuple[int, int]]] = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "MXFP4": (32, 17),
    "IQ4_NL": (32, 18),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    **OWN_FORMATS,
}
# ggml's types that are kept in another of these formats, with the same numbers (expansion.py).
EXPANSIONS: Final[Mapping[str, str]] = {
    "IQ1_S": "iq1_g32",
    "IQ1_M": "iq1_g16",
    "IQ2_XXS": "iq2_g32",
    "IQ2_XS": "iq2_g16",
    "IQ2_S": "iq2_g16",
    "IQ3_XXS": "iq3_g32",
    "IQ3_S": "iq3s_g32",
    "IQ4_XS": "iq4_g32",
    "TQ1_0": "Q4_0",
    "TQ2_0": "Q4_0",
    "NVFP4": "fp4_g16",
}
# Numbers and bytes of the blocks that these types have in files.
EXPANDED_BLOCKS: Final[Mapping[str, tuple[int, int]]] = {
    "IQ1_S": (256, 50),
    "IQ1_M": (256, 56),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98),
    "IQ3_S": (256, 110),
    "IQ4_XS": (256, 136),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
    "NVFP4": (64, 36),
}

# The leaf of the tensor that says which column of the model each column of a weight is, if they are sorted.
ORDER_LEAF: Final = "column_order"


def kept_format(name: str) -> str:
    """Return the format that weights in a block format have in memory."""
    return EXPANSIONS.get(name, name)


def stored_block(name: str) -> tuple[int, int]:
    """Return the numbers and bytes of a block of a supported format, as files have it."""
    return EXPANDED_BLOCKS.get(name) or BLOCK_FORMATS[name]


def check_block_format(name: str, tensor_name: str) -> None:
    """Raise ConfigError unless weights in the block format `name` can be multiplied or expanded. Imports no torch."""
    if name not in BLOCK_FORMATS and name not in EXPANSIONS:
        known = [*(format for format in BLOCK_FORMATS if format not in OWN_FORMATS), *EXPANSIONS]
        raise ConfigError(
            f"{tensor_name} is stored as {name}, which is not supported\n"
            f"  supported: F32, F16, BF16, {', '.join(known)}\n"
            "  use another file of this model, such as one in Q4_K_M"
        )
