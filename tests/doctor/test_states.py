"""Doctor counts the states of layers as the layers themselves do."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from pagewick.doctor.plan import cache_groups
from pagewick.layers.state import StateLayer
from tests.models.checkpoints import VARIANTS
from tests.models.test_tensor_table import build, config_of


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("name", ["qwen3.5", "lfm2", "granite-4-h", "bamba-groups", "nemotron-3", "falcon-h1", "qwen4"])
def test_states_are_those_of_the_layers(name: str, num_ranks: int) -> None:
    model = config_of(VARIANTS[name])
    decoder = build(model, 0, num_ranks)
    kept = [part.cache_spec for part in decoder.modules() if isinstance(part, StateLayer)]
    groups = cache_groups(model, cache_dtype="float32", num_ranks=num_ranks)
    states = {replace(group.spec, layout=""): group.num_layers for group in groups if not group.bytes_per_token}
    assert Counter(states) == Counter(replace(spec, layout="") for spec in kept) != Counter()
    num_others = sum(layer.attention is not None and layer.state is None for layer in model.layers)
    # An index of blocks keeps something of tokens, and of blocks.
    num_others += 2 * sum(layer.block_index is not None for layer in model.layers)
    assert num_others == sum(group.num_layers for group in groups if group.bytes_per_token) > 0
