"""How layers are divided into stages, and what each stage holds, compared with the modules of its ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from pagewick.attention.native import NativeBackend
from pagewick.doctor import plan
from pagewick.doctor.checkpoint import Checkpoint
from pagewick.doctor.model import describe
from pagewick.doctor.plan import Device
from pagewick.doctor.rank_weights import weights_of_rank
from pagewick.doctor.report import model_text
from pagewick.doctor.support import Verdict
from pagewick.engine.cache.kv_cache import cache_groups
from pagewick.errors import ConfigError
from pagewick.layers.context import LayerContext
from pagewick.models.config import ModelConfig
from pagewick.models.decoder import Decoder
from pagewick.models.stages import stage_layers, stages_of
from pagewick.models.tensors import model_tensors
from pagewick.parallel.collectives import Collectives
from pagewick.parallel.layout import RankLayout
from pagewick.parallel.stages import Stages
from pagewick.quantization.unquantized import UnquantizedMethod
from tests.models.test_tensor_table import META, config_of
from tests.models.variants import VARIANTS


def with_layers(name: str, num_layers: int) -> ModelConfig:
    """A variant with its layers repeated, or cut."""
    config = config_of(VARIANTS[name])
    return replace(config, layers=tuple(config.layers[number % len(config.layers)] for number in range(num_layers)))


def build(config: ModelConfig, stage: int, num_stages: int) -> Decoder:
    """One stage's modules, whose weights take no memory."""
    context = LayerContext(
        dtype=torch.float32,
        device=META,
        collectives=Collectives(
            stage, num_stages, layout=RankLayout(1, num_stages, 1), stages=Stages(stage, range(num_stages))
        ),
        backend=NativeBackend(32, "float32"),
        choose_method=lambda prefix: UnquantizedMethod(),
        max_model_len=512,
    )
    return Decoder(context, config)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "sizes"),
    [(6, 1, [6]), (6, 2, [3, 3]), (7, 2, [3, 4]), (7, 3, [2, 2, 3]), (8, 3, [2, 3, 3]), (5, 5, [1] * 5)],
)
def test_stages_have_as_many_layers_as_possible(num_layers: int, num_stages: int, sizes: list[int]) -> None:
    found = stage_layers(with_layers("llama", num_layers), num_stages)
    assert [len(layers) for layers in found] == sizes
    assert found[0].start == 0 and found[-1].stop == num_layers
    assert all(one.stop == other.start for one, other in pairwise(found))


def test_a_layer_is_not_parted_from_what_it_reads() -> None:
    """Pairs of layers share the output of experts; later layers attend to what an earlier one keeps."""
    pairs = with_layers("longcat-flash", 12)
    for num_stages in (2, 3, 4, 6):
        assert all(layers.start % 2 == 0 for layers in stage_layers(pairs, num_stages))
    with pytest.raises(ConfigError, match="the model can be divided into 6 parts of layers that do not read from"):
        stage_layers(pairs, 7)
    config = with_layers("llama", 8)
    lent = replace(config, layers=(*config.layers[:5], replace(config.layers[5], lender=2), *config.layers[6:]))
    assert stage_layers(lent, 2) == [range(2), range(2, 8)]
    assert stage_layers(lent, 4) == [range(2), range(2, 6), range(6, 7), range(7, 8)]


@pytest.mark.parametrize(
    ("name", "message"),
    [("llama", "can be divided into 3 parts of layers; give at most"), ("gemma-3n", "makes an input of each layer")],
)
def test_what_cannot_be_divided_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^--pipeline-parallel-size 4: .*{message}"):
        stage_layers(with_layers(name, 3), 4)
    predicting = replace(with_layers("llama", 4), has_mtp=True)
    with pytest.raises(ConfigError, match="--speculative-method mtp needs all layers on one rank"):
        stage_layers(predicting, 2)


@pytest.mark.parametrize(
    "name",
    ["llama", "llama-bias-tied", "gpt2", "opt", "qwen3-moe", "gemma-3-1b", "deepseek-v3", "glm-5.2", "deepseek-v4",
     "qwen4", "jamba", "nemotron-h", "qwen3-vl", "moondream", "falcon-7b", "stablelm-3b"],
)  # fmt: skip
def test_each_stage_holds_what_the_table_says(name: str) -> None:
    config = replace(with_layers(name, 6), dtype="float32")
    checkpoint = Checkpoint("m", "m", {}, config, Verdict(True), ())
    sizes, held, blocks = [], [], []
    for stage, holding in enumerate(stages_of(config, 3)):
        model = build(config, stage, 3)
        absent = {parameter for module in model.absent for parameter in module.parameters()}
        sizes.append(sum(parameter.nbytes for parameter in model.parameters() if parameter not in absent))
        found = [tensor for tensor in model_tensors(config) if holding.holds(tensor.path)]
        assert sum(tensor.kept_bytes("float32") for tensor in found) == sizes[-1]
        held.append({tensor.path for tensor in found})
        groups = cache_groups(model, model.layers_of_stages(), stage)
        blocks.append([(replace(group.spec, layout=""), len(group.layers)) for group in groups])
        assert [group.num_per_stage[stage] for group in groups] == [number for _, number in blocks[-1]]
    assert max(sizes) == weights_of_rank(config, checkpoint, 1, num_stages=3).total
    assert set.union(*held) == {tensor.path for tensor in model_tensors(config)}
    # All stages have the same groups in the same order, and the doctor plans with the largest of each.
    most = {spec: max(of_stage[index][1] for of_stage in blocks) for index, (spec, _) in enumerate(blocks[0])}
    assert [[spec for spec, _ in of_stage] for of_stage in blocks] == [[spec for spec, _ in blocks[0]]] * 3
    planned = plan.cache_groups(config, cache_dtype="float32", num_stages=3)
    assert {group.spec: group.num_layers for group in planned} == most


def test_the_doctor_plans_with_the_largest_stage() -> None:
    config = with_layers("llama", 6)
    checkpoint = Checkpoint("m", "m", {}, config, Verdict(True), ())
    whole, staged = (
        describe(checkpoint, Device("cpu", 2**33, 2**33), plan.Wishes(pipeline_parallel_size=num_stages))
        for num_stages in (1, 3)
    )
    assert whole.plan is not None and staged.plan is not None
    assert staged.plan.weights == weights_of_rank(config, checkpoint, 1, num_stages=3).total < whole.plan.weights
    assert staged.plan.kv_bytes_per_token * 3 == whole.plan.kv_bytes_per_token
    assert staged.plan.flags == ("--pipeline-parallel-size", "3")
    assert "planned with 1 in each of 3 stages; the numbers are those of the largest" in model_text(staged)
