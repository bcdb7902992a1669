"""What the doctor says of a model's memory, beside what the engine's own model takes, for every family and on ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from pagewick.attention.cache_spec import CacheSpec
from pagewick.attention.native import NativeBackend
from pagewick.doctor.checkpoint import Checkpoint
from pagewick.doctor.inventory import tensors_of
from pagewick.doctor.parts import weights_of_rank
from pagewick.doctor.plan import BLOCK_SIZE
from pagewick.doctor.shape import from_config
from pagewick.engine.cache.kv_cache import cache_groups
from pagewick.layers.context import LayerContext
from pagewick.models.registry import build_model, read_config
from pagewick.parallel.collectives import Collectives
from pagewick.quantization.unquantized import UnquantizedMethod
from tests.doctor.test_inventory import COMMON, VARIANTS, written


def engine_model(config: dict[str, Any], rank: int, size: int) -> torch.nn.Module:
    """One rank's, whose weights take no memory."""
    context = LayerContext(
        dtype=torch.float32,
        device=torch.device("meta"),
        collectives=Collectives(rank, size),
        backend=NativeBackend(BLOCK_SIZE, "bfloat16"),
        choose_method=lambda prefix: UnquantizedMethod(),
        max_model_len=512,
    )
    return build_model(context, read_config(config))


def _without_layout(spec: CacheSpec) -> CacheSpec:
    """The layout depends on the native library, which the doctor does not load; the bytes do not."""
    return replace(spec, layout="")


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_and_cache(variant: str) -> None:
    class_name, changes = VARIANTS[variant]
    # What two ranks share evenly: with other sizes one of them has a unit more.
    sizes = {**COMMON, "vocab_size": 192, **changes}
    config = {**written(getattr(transformers, f"{class_name}Config")(**sizes), class_name), "dtype": "float32"}
    shape = from_config(config)
    # Older files say it without this list.
    assert (
        from_config({name: value for name, value in config.items() if name != "layer_types"}).windows == shape.windows
    )
    checkpoint = Checkpoint("m", "m", config, shape, tuple(tensors_of(config)))
    for size in (1, 2):
        models = [engine_model(config, rank, size) for rank in range(size)]
        num_bytes = [sum(parameter.nbytes for parameter in model.parameters()) for model in models]
        assert num_bytes == [weights_of_rank(checkpoint, size).total] * size
        groups = shape.cache_groups(block_size=BLOCK_SIZE, cache_dtype="bfloat16", tensor_parallel_size=size)
        ours = Counter[CacheSpec]()
        for group in groups:
            ours[group.spec] += group.num_layers
        for model in models:
            assert {_without_layout(group.spec): len(group.layers) for group in cache_groups(model)} == ours


@pytest.mark.parametrize("changes", [{}, {"multi_query": True}, {"multi_query": False}])
def test_the_cache_of_shared_keys(changes: dict[str, Any]) -> None:
    sizes = {"n_embd": 48, "n_head": 6, "n_layer": 2, "n_positions": 64, "vocab_size": 193, "pad_token_id": 0}
    config = written(transformers.GPTBigCodeConfig(**sizes, **changes), "GPTBigCode")
    if not changes:
        del config["multi_query"]
    (ours,) = from_config(config).cache_groups(block_size=BLOCK_SIZE, cache_dtype="bfloat16")
    (theirs,) = cache_groups(engine_model(config, 0, 1))
    assert (ours.spec, ours.num_layers) == (_without_layout(theirs.spec), len(theirs.layers))
