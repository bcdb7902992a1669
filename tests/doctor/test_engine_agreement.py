"""The doctor's figures beside the engine's own modules, for every variant and on several ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from pagewick.attention.cache_spec import CacheSpec
from pagewick.doctor import plan
from pagewick.doctor.checkpoint import Checkpoint
from pagewick.doctor.rank_weights import weights_of_rank
from pagewick.doctor.support import Verdict
from pagewick.engine.cache.kv_cache import cache_groups
from pagewick.models.config import ModelConfig
from pagewick.models.mtp_offers import nextn, offer
from tests.models.test_tensor_table import build, config_of
from tests.models.variants import VARIANTS


def without_layout(spec: CacheSpec) -> CacheSpec:
    """The layout depends on the native library, which the doctor does not load; the bytes do not."""
    return replace(spec, layout="")


@pytest.mark.parametrize("name", VARIANTS)
def test_weights_and_cache(name: str) -> None:
    check(replace(config_of(VARIANTS[name]), dtype="float32"))


@pytest.mark.parametrize("name", ["deepseek-v3", "glm-5.2", "qwen3-next", "qwen3.5"])
def test_a_layer_that_predicts_further_tokens(name: str) -> None:
    """Its weights and what it keeps count, too."""
    config = replace(config_of(VARIANTS[name]), dtype="float32")
    if config.mtp is None:
        # transformers writes no number of them for some models.
        config = offer(config, nextn(config.num_layers))
    check(replace(config, has_mtp=True))


def check(config: ModelConfig) -> None:
    checkpoint = Checkpoint("m", "m", {}, config, Verdict(True), ())
    for num_ranks in (1, 2):
        models = [build(config, rank, num_ranks) for rank in range(num_ranks)]
        num_bytes = [sum(parameter.nbytes for parameter in model.parameters()) for model in models]
        assert max(num_bytes) == num_bytes[0] == weights_of_rank(config, checkpoint, num_ranks).total
        ours = Counter[CacheSpec]()
        for group in plan.cache_groups(config, cache_dtype="float32", num_ranks=num_ranks):
            ours[group.spec] += group.num_layers
        for model in models:
            found = Counter[CacheSpec]()
            # Groups may differ in their layout alone.
            for own in cache_groups(model):
                found[without_layout(own.spec)] += len(own.layers)
            assert found == ours
