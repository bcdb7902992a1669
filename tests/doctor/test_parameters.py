"""Parameters and bytes, compared with the engine, with transformers and with the sizes of published files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagewick import LLM
from pagewick.config import BUILTIN_MODEL
from pagewick.doctor.checkpoint import open_checkpoint
from pagewick.doctor.parameters import Parameter, count, gguf_bytes, parameters_of, stored_formats
from pagewick.weights.tensor_headers import TensorInfo
from tests.models.checkpoints import CONFIGS, write_checkpoint


def counted(directory: str) -> int:
    checkpoint = open_checkpoint(directory, {})
    return count(parameters_of(checkpoint.tensors, checkpoint.config, is_tied=checkpoint.shape.is_tied))


def test_the_built_in_model() -> None:
    with LLM(BUILTIN_MODEL, kv_cache_memory="8MiB") as llm:
        assert counted(BUILTIN_MODEL) == llm.info.num_parameters


@pytest.mark.parametrize("name", CONFIGS)
def test_models_of_transformers(name: str, tmp_path: Path) -> None:
    model = write_checkpoint(name, tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert counted(str(tmp_path)) == sum(parameter.numel() for parameter in model.parameters())


def test_a_tied_head_that_was_written_all_the_same_counts_once() -> None:
    tensors = [
        TensorInfo("model.embed_tokens.weight", "BF16", (7, 4), 56),
        TensorInfo("lm_head.weight", "BF16", (7, 4), 56),
        TensorInfo("model.layers.0.self_attn.rotary_emb.inv_freq", "F32", (2,), 8),
    ]
    assert count(parameters_of(tensors, {}, is_tied=True)) == 28
    assert count(parameters_of(tensors, {}, is_tied=False)) == 56


def info(name: str, dtype: str, *shape: int) -> TensorInfo:
    return TensorInfo(name, dtype, shape, 0)


P = "model.layers.0.mlp.down_proj"
# One linear layer of 256 outputs and 512 inputs, as each way of packing writes it.
PACKED: dict[str, tuple[dict[str, Any], list[TensorInfo]]] = {
    "gptq": (
        {"bits": 4},
        [info(f"{P}.qweight", "I32", 64, 256), info(f"{P}.qzeros", "I32", 4, 32), info(f"{P}.scales", "F16", 4, 256),
         info(f"{P}.g_idx", "I32", 512)],
    ),
    "gptq, 8 bits": ({"bits": 8}, [info(f"{P}.qweight", "I32", 128, 256), info(f"{P}.scales", "F16", 4, 256)]),
    "awq": (
        {"bits": 4},
        [info(f"{P}.qweight", "I32", 512, 32), info(f"{P}.qzeros", "I32", 4, 32), info(f"{P}.scales", "F16", 4, 256)],
    ),
    "fp8": ({}, [info(f"{P}.weight", "F8_E4M3", 256, 512), info(f"{P}.weight_scale_inv", "F32", 2, 4)]),
    "compressed-tensors": (
        {},
        [info(f"{P}.weight_packed", "I32", 256, 64), info(f"{P}.weight_scale", "BF16", 256, 4),
         info(f"{P}.weight_shape", "I64", 2)],
    ),
    "bitsandbytes": (
        {},
        [info(f"{P}.weight", "U8", 65536, 1), info(f"{P}.weight.absmax", "U8", 2048),
         info(f"{P}.weight.quant_map", "F32", 16), info(f"{P}.weight.quant_state.bitsandbytes__nf4", "U8", 80)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PACKED)
def test_packed_weights_count_as_what_they_stand_for(name: str) -> None:
    quantization, tensors = PACKED[name]
    (found,) = parameters_of(tensors, {"quantization_config": quantization}, is_tied=False)
    assert (found.kind, found.num_elements) == ("linear", 256 * 512)


@pytest.mark.parametrize(
    ("tensors", "num_elements"),
    [
        ([info("layers.0.up_proj.weight", "F16", 0, 8)], 0),
        ([info("layers.0.up_proj.weight", "F16", 3, 0, 8)], 0),
        ([info("layers.0.up_proj.weight", "F16", 8, 0)], 0),
        ([info("layers.0.up_proj.weight", "F16")], 1),
        ([info("embed_tokens.weight", "F16")], 1),
        ([info("layers.0.up_proj", "F16", 5)], 5),
        ([info("x.qweight", "I32")], 8),
        ([info("x.qweight", "I32", 3)], 24),
        ([info("x.weight_packed", "I32")], 8),
        ([info("x.weight", "U8"), info("x.weight.absmax", "U8", 1)], 2),
        ([info("x.weight", "U8", 7, 0), info("x.weight.absmax", "U8", 1)], 0),
        ([info("x_blocks", "U8", 4)], 8),
        ([info("x_blocks", "U8")], 2),
    ],
)
def test_odd_shapes_are_counted_all_the_same(tensors: list[TensorInfo], num_elements: int) -> None:
    """A damaged or unusual file is no reason to say nothing."""
    found = parameters_of(tensors, {}, is_tied=False)
    assert count(found) == num_elements
    sizes = {one.name: one.num_bytes for one in stored_formats(found)}
    assert sizes["float32"] == 4 * num_elements
    assert sizes["gptq-int4"] >= num_elements // 2
    assert sizes["Q4_K_M"] >= num_elements // 2


def llama(layers: int, hidden: int, inner: int, kv: int, vocab: int) -> list[Parameter]:
    """The parameters of a Llama whose head is not tied; as many heads as make up the hidden size."""
    found = [
        Parameter("model.embed_tokens.weight", "embedding", (vocab, hidden)),
        Parameter("model.norm.weight", "other", (hidden,)),
        Parameter("lm_head.weight", "head", (vocab, hidden)),
    ]
    for layer in range(layers):
        shapes = {
            "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }  # fmt: skip
        found += [Parameter(f"model.layers.{layer}.{name}.weight", "linear", shape) for name, shape in shapes.items()]
        norms = ("input_layernorm", "post_attention_layernorm")
        found += [Parameter(f"model.layers.{layer}.{name}.weight", "other", (hidden,)) for name in norms]
    return found


LLAMA_3_8B = llama(32, 4096, 14336, 1024, 128256)


def test_llama_3_8b_has_its_published_parameters() -> None:
    assert count(LLAMA_3_8B) == 8_030_261_248


# Files of Meta-Llama-3.1-8B-Instruct as quantized by llama.cpp; all but 8 MB of them (the vocabulary) is tensors.
@pytest.mark.parametrize(
    ("name", "published"), [("Q8_0", 8_540_771_328), ("Q6_K", 6_596_006_912), ("Q4_K_M", 4_920_734_272)]
)
def test_gguf_files_have_their_published_sizes(name: str, published: int) -> None:
    vocabulary = published - gguf_bytes(LLAMA_3_8B, name)
    assert 7_800_000 < vocabulary < 7_900_000


def test_formats_by_hand() -> None:
    # 6 rows of 256, an embedding of 5 rows, a norm.
    found = [
        Parameter("model.embed_tokens.weight", "embedding", (5, 256)),
        Parameter("model.layers.0.mlp.up_proj.weight", "linear", (6, 256)),
        Parameter("model.norm.weight", "other", (256,)),
    ]
    sizes = {stored.name: stored.num_bytes for stored in stored_formats(found)}
    assert sizes["float32"] == 12 * 256 * 4
    assert sizes["bfloat16"] == sizes["float16"] == 12 * 256 * 2
    rest = 2 * 6 * 256
    assert sizes["fp8"] == sizes["int8"] == rest + 6 * 256 + 6 * 4
    awq = 6 * 128 + 2 * 6 * 2 + 2 * 6 // 2  # the weights, a scale and half a byte of zero for two groups of each row
    assert sizes["awq-int4"] == rest + awq
    assert sizes["gptq-int4"] == rest + awq + 4 * 256
    assert sizes["Q8_0"] == 11 * 8 * 34 + 256 * 4
    assert sizes["Q4_K_M"] == 5 * 210 + 6 * 144 + 256 * 4  # an embedding that is the head as well gets 6 bits


def test_rows_that_large_blocks_do_not_fill() -> None:
    found = [Parameter("model.layers.0.mlp.up_proj.weight", "linear", (6, 96))]
    assert gguf_bytes(found, "Q4_K_M") == 6 * 3 * 22  # llama.cpp falls back to Q5_0
    assert gguf_bytes(found, "Q6_K") == 6 * 3 * 34  # and to Q8_0
    assert gguf_bytes([Parameter("a.weight", "linear", (6, 50))], "Q8_0") == 600  # and to 16 bits
