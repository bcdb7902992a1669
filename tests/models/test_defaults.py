"""What config.json leaves out has the default of the model's own class: it is read as if it stood there."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from pagewick.models.registry import ARCHITECTURES, read_config
from tests.models.checkpoints import COMMON, VARIANTS
from tests.models.test_tensors import VARIANT_OF

# Sizes: every published file has them, and a wrong one is a tensor that does not fit, or a shorter context.
SIZES = COMMON.keys() - {"head_dim"} | {
    "moe_intermediate_size", "num_experts_per_tok", "q_lora_rank", "num_nextn_predict_layers", "n_embd", "n_layer",
    "n_head",
}  # fmt: skip


def usual(architecture: str) -> dict[str, Any]:
    """The architecture's smallest file: its variant's sizes, and the default for everything else."""
    variant = VARIANTS[VARIANT_OF[architecture]]
    sizes = {name: value for name, value in variant.all_entries().items() if name in SIZES}
    config = getattr(transformers, f"{variant.config}Config")(**sizes)
    return {**config.to_dict(), "architectures": [architecture]}


# A multimodal file's text part is read as Gemma3ForCausalLM's is.
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES.keys() - {"Gemma3ForConditionalGeneration"}))
def test_what_is_left_out_is_the_default(architecture: str) -> None:
    config = usual(architecture)
    expected = read_config(config)
    for name in config.keys() - SIZES - {"architectures", "model_type"}:
        assert read_config({key: value for key, value in config.items() if key != name}) == expected, name
