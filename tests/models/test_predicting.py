"""transformers' own predicting layer computes what tests/models/predicting.py takes for the definition."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from pagewick.models.registry import read_config
from tests.models.checkpoints import write_checkpoint
from tests.models.predicting import MELLUM, Predicting

TOKEN_IDS = list(range(5, 42))
# Predicting layers of other kinds than those that Pagewick has.
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("k-exaone", {"mtp_layer_types": ["sliding_attention"]}),
    ("mellum-2", {"mtp_layer_types": ["full_attention"]}),
    ("nemotron-3-latents", {"mtp_layers_block_type": ["attention", "mlp"]}),
    ("nemotron-3-latents", {"mtp_hybrid_override_pattern": "WE"}),
    ("nemotron-3-latents", {"mtp_bottleneck_hidden_size": 64}),
    ("nemotron-3-latents", {"mtp_use_rope": True}),
    ("nemotron-3-latents", {"mtp_naive_parallel_enabled": True}),
    ("nemotron-3-latents", {"mtp_softmax_type": "off-by-one"}),
    ("nemotron-3-latents", {"num_nextn_predict_layers": 0}),
]


@pytest.mark.parametrize("name", ["deepseek-v3", "glm-4.5", "mellum-2"])
def test_names_and_formula(name: str, tmp_path: Path) -> None:
    made = Predicting(name, layout=MELLUM if name == "mellum-2" else None)
    made.write(tmp_path)
    options = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
    whole: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **options).eval()
    # It looks for the number of the published model's layer.
    whole._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{made.num_layers}\..*", r"^mtp\."]
    layer: Any = MtpModel.from_pretrained(whole).eval()
    hidden_states, following = made.hidden_states(TOKEN_IDS[:-1]), TOKEN_IDS[1:]
    with torch.no_grad():
        predicted = layer.forward_layer(
            0,
            hidden_states.unsqueeze(0),
            torch.arange(len(following)).unsqueeze(0),
            MtpCache(config=whole.config.get_mtp_config()),
            input_ids=torch.tensor([following]),
        )
        found = whole.lm_head(predicted)[0]
    torch.testing.assert_close(found, made.all_logits(hidden_states, following), rtol=0, atol=5e-5)


@pytest.mark.parametrize(("name", "entries"), OTHERS)
def test_layers_of_other_kinds_are_not_used(name: str, entries: dict[str, Any], tmp_path: Path) -> None:
    write_checkpoint(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_nextn_predict_layers": 1, "num_mtp_layers": 1}
    for entry in ("mtp_layers_block_type", "mtp_layer_types"):
        config.pop(entry, None)
    assert read_config(config).mtp is not None
    assert read_config({**config, **entries}).mtp is None
