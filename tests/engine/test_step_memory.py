"""The memory of a step by arithmetic, against sums by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagewick.config import EngineConfig
from pagewick.engine.entry_memory import BLOCK_SCORES_BYTES
from pagewick.engine.image_settings import with_largest_picture
from pagewick.engine.step_memory import (
    INDEX_DIMS,
    INDEX_HEADS,
    MAX_SHORT_ROWS,
    MAX_SHORT_TOKENS,
    NUMBERS_OF_PART,
    PARTS_BYTES,
    QUERY_SLICE,
    SCORES_BYTES,
    SCORES_PART,
    SERVED_HEAD_DIMS,
    SPLIT,
    StepLimits,
    activation_bytes,
    gpu_cache_bytes,
    gpu_graph_bytes,
    gpu_step_bytes,
    image_bytes,
)
from pagewick.models.config import ModelConfig
from pagewick.models.registry import read_config
from pagewick.models.vision.config import PixtralConfig, VisionConfig
from tests.models.published import PUBLISHED
from tests.models.published_states import PUBLISHED_STATES

MIB = 2**20
LLAMA = read_config(PUBLISHED["Meta-Llama-3.1-8B"])
LIMITS = StepLimits(num_tokens=2048, num_logits=32, context=8192, element_bytes=2)
NODES = 16 * 1024 * 16 * 32 * 64


def of_tokens(num_tokens: int, num_ranks: int = 1) -> int:
    """Bytes of Llama 3.1 8B: four tensors of 4,096, three of 14,336, and 32 rows of 128,256 logits."""
    logits = 32 * 128256 * (4 + 4 + 24 + (0 if num_ranks == 1 else 8))
    return num_tokens * (4 * 4096 + 3 * 14336 // num_ranks) * 2 + logits


def test_an_8b_model_by_hand() -> None:
    # Four query heads share a KV head, and 16 rows of queries are four tokens.
    parts = 4 * 32 * (128 + 2) * 4 * (8192 // 256) * 32
    of_graphs = of_tokens(512) + parts + NODES
    expected = int((of_tokens(2048) + parts) * 9 / 8) + of_graphs + 64 * MIB
    assert gpu_step_bytes(LLAMA, LIMITS) == expected
    assert gpu_graph_bytes(LLAMA, LIMITS) == of_graphs
    assert 1290 * MIB < expected < 1310 * MIB
    # Products in float32, and activations of a byte, for the step and an eighth, and for graphs.
    each = 5 * 3 * 14336
    rounded = gpu_step_bytes(LLAMA, replace(LIMITS, rounds_activations=True))
    assert rounded - expected == int(2048 * each * 9 / 8) + 512 * each


def test_ranks_divide_layers_and_not_hidden_states() -> None:
    parts = 4 * 16 * (128 + 2) * 4 * (8192 // 256) * 32
    expected = int((of_tokens(2048, 2) + parts) * 9 / 8) + of_tokens(512, 2) + parts + NODES + (64 + 256) * MIB
    assert gpu_step_bytes(LLAMA, LIMITS, 2) == expected


def test_results_of_splits_are_bounded() -> None:
    long = replace(LIMITS, context=131072, num_logits=256)
    longer = replace(long, context=2 * 131072)
    assert gpu_step_bytes(LLAMA, long) == gpu_step_bytes(LLAMA, longer)
    # One sequence always gets the memory that it needs.
    longest = replace(long, context=10 * 131072)
    of_sequence = 4 * 32 * (128 + 2) * 4 * (10 * 131072 // 256)
    assert of_sequence > PARTS_BYTES
    assert gpu_graph_bytes(LLAMA, longest) - gpu_graph_bytes(LLAMA, long) == of_sequence - PARTS_BYTES
    assert gpu_step_bytes(LLAMA, LIMITS) < gpu_step_bytes(LLAMA, replace(LIMITS, context=131072))


def test_experts_count_once_for_each_that_a_token_has() -> None:
    model = read_config(PUBLISHED["Qwen3-30B-A3B"])
    width = 4 * 2048 + max(2 * (32 + 4) * 128, 8 * (3 * 768 + 2048))
    assert activation_bytes(model, 100, 0, 2, 0) == 100 * width * 2


def test_channels_that_decay_by_themselves_by_hand() -> None:
    """Kimi Linear: 32 heads of 128, whose gates and decays come from vectors of 128 numbers.

    Results of the convolution are in float32. Queries are copied once and keys twice, in chunks that may be half empty,
    and 64 tokens of a chunk have two matrices of each head, and a float32 factor for each number of a key. In float16,
    copies are in float32.
    """
    heads = 32 * 128
    from_gates = 3 * heads + 2 * 3 * heads + heads + heads + 2 * 128 + heads
    width = 4 * 2304 + from_gates + 2 * 3 * heads + 2 * 2 * 64 * 32 + heads // 4
    model = read_config(PUBLISHED_STATES["Kimi-Linear-48B-A3B-Instruct"])
    assert activation_bytes(model, 100, 0, 2, 0) == 200 * width
    assert activation_bytes(model, 100, 0, 2, 0, is_float16=True) == 200 * (width + 2 * 3 * heads)
    plans = [StepLimits.of(EngineConfig(dtype=dtype), model) for dtype in ("bfloat16", "float16")]
    assert gpu_step_bytes(model, plans[0]) < gpu_step_bytes(model, plans[1])


def test_experts_without_gates_and_with_latents() -> None:
    model = read_config(PUBLISHED["Qwen3-30B-A3B"])
    config = replace(model.mixtures[0], is_gated=False, shared_intermediate_size=1001)

    def width(**fields: Any) -> int:
        layers = tuple(replace(layer, mlp=replace(config, **fields)) for layer in model.layers)
        return activation_bytes(replace(model, layers=layers), 1, 0, 1, 0, 2) - 4 * 2048

    assert width() == 8 * (768 + 2048) + 1001
    assert width(is_gated=True) == (3 * (8 * 768 + 1001) + 1) // 2 + 8 * 2048
    assert width(latent_size=512) == 8 * 768 + 1001 + 10 * 512


def test_streams_inputs_of_layers_and_sparse_gates() -> None:
    """Gemma 3n E2B: four streams, inputs of 256 numbers in 30 layers, and MLPs of 8,192, the first of them sparse."""
    width = 4 * 2048 + 3 * 4 * 2048 + 3 * 30 * 256 + 4 * 8192
    assert activation_bytes(read_config(PUBLISHED["gemma-3n-E2B-it"]), 100, 0, 2, 0) == 100 * width * 2


def test_a_layer_that_predicts_further_tokens() -> None:
    model = read_config(PUBLISHED["GLM-4.5-Air"])
    assert model.mtp is not None
    before, after = (activation_bytes(each, 100, 7, 2, 28) for each in (model, replace(model, has_mtp=True)))
    assert after - before == 100 * 6 * 4096 * 2
    # Its graphs: a pool like that of the model's, both with these activations, what they read, and the kernels.
    both = (gpu_graph_bytes(each, LIMITS) for each in (model, replace(model, has_mtp=True)))
    kernels = 16 * 2**10 * 16 * 64
    own = next(both)
    pool = own - kernels * model.num_layers
    assert next(both) - own == pool + kernels + (2 * 6 + 1) * 512 * 4096 * 2


def test_an_indexer_that_no_kernel_serves() -> None:
    served, other = (read_config(PUBLISHED["DeepSeek-V3.2"] | {"index_n_heads": number}) for number in (64, 65))
    limits = replace(LIMITS, context=1000)
    added = gpu_graph_bytes(other, limits, 8) - gpu_graph_bytes(served, limits, 8)
    plain = 16 * 65 * 128 * 512 + 12 * 128 * 1000 + 64 * 65 * 1000 * 4
    assert added == plain - (2 * 65 * 128 * 2 + 64 * 4) * 512
    # 64 heads without kernels.
    fewer = gpu_graph_bytes(other, limits, 8) - gpu_graph_bytes(served, replace(limits, has_kernels=False), 8)
    assert fewer == 16 * 128 * 512 + 64 * 1000 * 4


def test_sparse_attention_by_hand() -> None:
    """DeepSeek-V3.2 on 8 ranks: each token sees 2,048 others, which an indexer of 64 heads with 128 numbers selects."""
    model = read_config(PUBLISHED["DeepSeek-V3.2"])
    layers = tuple(
        replace(layer, attention=replace(layer.latent, indexer=None)) for layer in model.layers if layer.latent
    )
    dense = replace(model, layers=layers)
    assert activation_bytes(model, 100, 0, 2, 0) - activation_bytes(dense, 100, 0, 2, 0) == 100 * 2048 * 4
    limits = replace(LIMITS, context=163840)
    # 40 parts of 4,096 scores have 515 counts each, and 256 MiB have room for 363 tokens.
    scores = 363 * 4 * (163840 + 40 * 515 + 4)
    assert scores <= 256 * MIB < scores * 364 // 363
    large, small = ((2 * 65 * 128 * 2 + 64 * 4 + 2048 * 4) * num_tokens + scores for num_tokens in (2048, 512))
    nodes = 16 * 1024 * 13 * 61 * 64
    # Dense attention has 32 sequences of 640 splits here, which are bounded as well.
    added = gpu_step_bytes(model, limits, 8) - gpu_step_bytes(dense, limits, 8)
    assert abs(added - (large * 9 / 8 + small + nodes)) <= 1
    short = replace(limits, context=300, num_logits=1)
    parts = 4 * 16 * (512 + 2) * 2 * 4
    added = gpu_graph_bytes(model, short, 8) - gpu_graph_bytes(dense, short, 8)
    # No token sees more than 300 others, which need no scores.
    assert added == (2 * 65 * 128 * 2 + 64 * 4 + 300 * 4) * 512 + nodes + PARTS_BYTES - parts
    longest = replace(limits, context=2**27, num_tokens=5, num_logits=5)
    # One token always gets the memory that it needs.
    added = gpu_graph_bytes(model, longest, 8) - gpu_graph_bytes(model, replace(longest, context=2**26), 8)
    assert added == 4 * (2**26 + 2**14 * 515)
    assert activation_bytes(model, 100, 0, 2, 0, context=300) == activation_bytes(dense, 100, 0, 2, 0) + 100 * 300 * 4


@pytest.mark.parametrize("name", ["num_tokens", "num_logits", "element_bytes"])
def test_every_limit_counts(name: str) -> None:
    more = replace(LIMITS, **{name: 2 * getattr(LIMITS, name)})
    assert gpu_step_bytes(LLAMA, more) > gpu_step_bytes(LLAMA, LIMITS)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, StepLimits(2048, 32, 131072, 2)),
        ({"max_num_batched_tokens": 512, "max_num_seqs": 7, "max_model_len": 99, "dtype": "float32"},
         StepLimits(512, 7, 99, 4)),
        ({"speculative_method": "ngram", "num_speculative_tokens": 3}, StepLimits(2048, 32 * 4, 131072, 2)),
    ],
)  # fmt: skip
def test_limits_are_the_configs(options: dict[str, object], expected: StepLimits) -> None:
    assert StepLimits.of(EngineConfig.from_options(**options), LLAMA) == expected


def test_the_largest_image_by_hand() -> None:
    """Qwen3-VL 8B, with features for three layers: patches of 3 * 2 * 16 * 16 numbers, and an MLP of 4,304."""
    vision = VisionConfig(
        image_token_id=0, hidden_size=1152, out_hidden_size=4096, num_blocks=27, num_heads=16, intermediate_size=4304,
        activation="gelu_tanh", patch_size=16, temporal_patch_size=2, merge_size=2, deepstack_blocks=(8, 16, 24),
    )  # fmt: skip
    model = replace(LLAMA, vision=vision)
    limits = replace(LIMITS, image_pixels=1024 * 768)
    num_patches, num_rows = 64 * 48, 32 * 24
    rows = (2 * num_rows + 2048) * 4 * 4096 * 2
    assert image_bytes(model, limits) == num_patches * (2 * 1152 + 2 * 4304) * 2 + rows
    gated = replace(model, vision=replace(vision, is_gated=True))
    assert image_bytes(gated, limits) == num_patches * (2 * 1152 + 3 * 4304) * 2 + rows
    narrow = replace(model, vision=replace(vision, hidden_size=64, intermediate_size=64))
    assert image_bytes(narrow, limits) == num_patches * 12 * 3 * 2 * 16 * 16 + rows
    assert image_bytes(LLAMA, limits) == 0
    assert gpu_step_bytes(model, limits) - gpu_step_bytes(LLAMA, LIMITS) == int(image_bytes(model, limits) * 9 / 8)
    # Without a flag, that of Qwen's models, unless it is longer than the context.
    assert StepLimits.of(EngineConfig(max_model_len=65536), model).image_pixels == 2**24
    assert StepLimits.of(EngineConfig(max_model_len=100), model).image_pixels == 100 * 32 * 32
    assert StepLimits.of(EngineConfig(max_image_pixels=5000), model).image_pixels == 5000


def test_a_token_may_have_a_row_and_a_column_of_patches_beside_it() -> None:
    """LightOnOCR's: 14 pixels more than a square of 28 x 28 in each direction."""
    vision = PixtralConfig(
        image_token_id=0, hidden_size=1024, out_hidden_size=1024, num_blocks=24, num_heads=16, intermediate_size=4096,
        activation="silu", patch_size=14, temporal_patch_size=1, merge_size=2, projector_eps=1e-6, takes_rest=True,
    )  # fmt: skip
    for takes_rest, side in ((True, 42), (False, 28)):
        model = replace(LLAMA, vision=replace(vision, takes_rest=takes_rest))
        assert StepLimits.of(EngineConfig(max_model_len=100), model).image_pixels == 100 * side**2


def test_a_projector_may_be_wider_than_blocks() -> None:
    """Command A Vision's: 2 x 2 patches of 1,152 numbers become 36,864, half of which multiply the others."""
    vision = {"hidden_size": 1152, "intermediate_size": 3072, "image_size": 512, "num_attention_heads": 12}
    text = {"hidden_size": 96, "intermediate_size": 72, "num_hidden_layers": 1, "num_attention_heads": 6}
    entries = {"text_config": {**text, "vocab_size": 256000}, "vision_config": vision}
    model = read_config({"architectures": ["Cohere2VisionForConditionalGeneration"], **entries})
    limits = StepLimits.of(EngineConfig(max_model_len=8192, dtype="bfloat16"), model)
    rows = (2 * 256 + limits.num_tokens) * 96 * 2
    assert image_bytes(model, limits) == 1024 * (4 * 1152 + 3 * 18432) // 4 * 2 + rows


def test_an_image_of_fixed_size() -> None:
    """Gemma 3 4B: 64 x 64 patches, of which 16 are a row, and every image has 896 x 896 pixels."""
    model = read_config(PUBLISHED["gemma-3-4b-it"])
    limits = StepLimits.of(EngineConfig(max_model_len=8192), model)
    assert limits.image_pixels == 896 * 896
    rows = (2 * 256 + limits.num_tokens) * 2560 * 2
    assert image_bytes(model, limits) == 4096 * (2 * 1152 + 2 * 4304) * 2 + rows


def test_the_largest_image_of_gemma_4_by_hand() -> None:
    """E2B: squares of 3 x 3 patches are a row; 280 rows by the published settings, and at most 1,120."""
    model = read_config(PUBLISHED["gemma-4-E2B"])
    assert StepLimits.of(EngineConfig(max_model_len=8192), model).image_pixels == 1120 * 48 * 48
    limits = StepLimits.of(EngineConfig(max_model_len=8192, max_image_pixels=280 * 48 * 48), model)
    rows = (2 * 280 + limits.num_tokens) * 1536 * 2
    assert image_bytes(model, limits) == 9 * 280 * (2 * 768 + 3 * 3072) * 2 + rows
    assert StepLimits.of(EngineConfig(max_model_len=100), model).image_pixels == 100 * 48 * 48


def test_the_cache_gets_the_rest() -> None:
    assert gpu_cache_bytes(free=800, total=1000, step_bytes=100) == 800 - 100 - 100
    assert gpu_cache_bytes(free=800, total=1000, step_bytes=100, utilization=0.5) == 200
    assert gpu_cache_bytes(free=800, total=1000, step_bytes=100, utilization=0.2) == 0


def test_numbers_are_those_of_the_kernels() -> None:
    pytest.importorskip("triton")
    from pagewick.kernels import reference_index
    from pagewick.kernels.triton import attention, head_blocks, index, mla, selection

    assert (attention.SPLIT, attention.PARTS_BYTES) == (SPLIT, PARTS_BYTES)
    assert attention.HEAD_DIMS == SERVED_HEAD_DIMS
    assert (index.DIMS, index.HEADS[-1], index.SCORES_BYTES) == (INDEX_DIMS, INDEX_HEADS, SCORES_BYTES)
    assert head_blocks.SCORES_BYTES == BLOCK_SCORES_BYTES
    assert selection.row_bytes(9000) == 4 * (9000 + -(-9000 // SCORES_PART) * NUMBERS_OF_PART + 4)
    assert reference_index.QUERY_SLICE == QUERY_SLICE
    assert (attention.MAX_SHORT_ROWS, mla.MAX_SHORT_TOKENS) == (MAX_SHORT_ROWS, MAX_SHORT_TOKENS)


def test_every_published_model_has_a_step() -> None:
    models: list[ModelConfig] = [read_config(config) for config in PUBLISHED.values()]
    assert all(64 * MIB < gpu_step_bytes(model, LIMITS) < 16 * 2**30 for model in models)


def test_a_tile_of_fixed_size() -> None:
    """SmolVLM2 500M: 32 x 32 patches, of which 16 are a row, and every tile has 512 x 512 pixels."""
    model = read_config(PUBLISHED["SmolVLM2-500M-Video-Instruct"])
    limits = StepLimits.of(EngineConfig(max_model_len=8192, max_image_pixels=2**22), model)
    assert limits.image_pixels == 512**2
    rows = (2 * 64 + limits.num_tokens) * 960 * 2
    assert image_bytes(model, limits) == 1024 * (2 * 768 + 2 * 3072) * 2 + rows


def test_the_largest_picture_of_minicpm_v_by_hand(tmp_path: Path) -> None:
    """A picture of 14 x 14 pixels a patch, of which 16 are a token, has at most 116 tokens, if it is narrow."""
    entries = {"scale_resolution": 448, "image_processor_type": "MiniCPMV4_6ImageProcessor"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(entries))
    text = {
        "model_type": "qwen3_5_text", "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24,
        "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 248094,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
    }  # fmt: skip
    vision = {
        "hidden_size": 1152, "image_size": 980, "intermediate_size": 4304, "num_attention_heads": 16,
        "num_hidden_layers": 27, "patch_size": 14,
    }  # fmt: skip
    architecture = "MiniCPMV4_6ForConditionalGeneration"
    config = {"architectures": [architecture], "text_config": text, "vision_config": vision, "image_token_id": 248056}
    model = read_config(config)
    # Without files that have settings, the upper limit of published processors counts.
    assert StepLimits.of(EngineConfig(max_model_len=8192), model).image_pixels == 120 * 56**2
    limits = StepLimits.of(with_largest_picture(EngineConfig(model=str(tmp_path), max_model_len=8192)), model)
    assert limits.image_pixels == 116 * 56**2
    rows = (2 * 116 + limits.num_tokens) * 1024 * 2
    assert image_bytes(model, limits) == 116 * 16 * (2 * 1152 + 2 * 4304) * 2 + rows


def test_the_largest_picture_of_lfm2_vl_by_hand(tmp_path: Path) -> None:
    """LFM2-VL 450M: pictures of 32 x 32 patches, of which 4 are a row, whatever the limit of an image's pixels."""
    model = read_config(PUBLISHED_STATES["LFM2-VL-450M"])
    assert StepLimits.of(EngineConfig(max_model_len=8192), model).image_pixels == 512**2
    settings = {"image_processor_type": "Lfm2VlImageProcessorFast", "tile_size": 512}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    config = EngineConfig(model=str(tmp_path), max_model_len=8192, max_image_pixels=2**22)
    limits = StepLimits.of(with_largest_picture(config), model)
    assert limits.image_pixels == 512**2
    rows = (2 * 256 + limits.num_tokens) * 1024 * 2
    assert image_bytes(model, limits) == 1024 * max(12 * 3 * 16**2, (2 * 768 + 2 * 3072) * 2) + rows
