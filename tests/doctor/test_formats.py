"""Parameters and bytes, compared with the engine, with transformers and with the sizes of published files."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagewick import LLM
from pagewick.config import BUILTIN_MODEL
from pagewick.doctor.checkpoint import open_checkpoint
from pagewick.doctor.formats import count, gguf_bytes, stored_formats
from pagewick.models.registry import read_config
from pagewick.models.tensor_sizes import ModelTensor, Role
from pagewick.models.tensors import model_tensors
from tests.models.checkpoints import CONFIGS, write_checkpoint


def counted(directory: str) -> int:
    model = open_checkpoint(directory, {}).model_config
    assert model is not None
    return count(list(model_tensors(model)))


def test_the_built_in_model() -> None:
    with LLM(BUILTIN_MODEL, kv_cache_memory="8MiB") as llm:
        assert counted(BUILTIN_MODEL) == llm.info.num_parameters


@pytest.mark.parametrize("name", CONFIGS)
def test_models_of_transformers(name: str, tmp_path: Path) -> None:
    model = write_checkpoint(name, tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert counted(str(tmp_path)) == sum(parameter.numel() for parameter in model.parameters())


def tensor_of(path: str, role: Role, shape: tuple[int, ...]) -> ModelTensor:
    return ModelTensor(path, path, shape, shape, role)


LLAMA = read_config({
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
})  # fmt: skip
LLAMA_3_8B = list(model_tensors(LLAMA))


def test_llama_3_8b_has_its_published_parameters() -> None:
    assert count(LLAMA_3_8B) == 8_030_261_248


# Files of Meta-Llama-3.1-8B-Instruct as quantized by llama.cpp; all but 8 MB of them (the vocabulary) is tensors.
@pytest.mark.parametrize(
    ("name", "published"), [("Q8_0", 8_540_771_328), ("Q6_K", 6_596_006_912), ("Q4_K_M", 4_920_734_272)]
)
def test_gguf_files_have_their_published_sizes(name: str, published: int) -> None:
    vocabulary = published - gguf_bytes(LLAMA_3_8B, LLAMA)[name]
    assert 7_800_000 < vocabulary < 7_900_000


def test_formats_by_hand() -> None:
    # 6 rows of 256, an embedding of 5 rows, a norm.
    found = [
        tensor_of("model.embed_tokens.weight", "embedding", (5, 256)),
        tensor_of("model.layers.0.mlp.up_proj.weight", "mlp", (6, 256)),
        tensor_of("model.norm.weight", "norm", (256,)),
    ]
    sizes = stored_formats(found, LLAMA)
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
    found = [tensor_of("model.layers.0.mlp.up_proj.weight", "mlp", (6, 96))]
    assert gguf_bytes(found, LLAMA)["Q4_K_M"] == 6 * 3 * 22  # llama.cpp falls back to Q5_0
    assert gguf_bytes(found, LLAMA)["Q6_K"] == 6 * 3 * 34  # and to Q8_0
    assert gguf_bytes([tensor_of("a.weight", "mlp", (6, 50))], LLAMA)["Q8_0"] == 600  # and to 16 bits


def test_eight_experts_and_fused_projections_have_rules_of_their_own() -> None:
    """As llama.cpp quantizes them: the attention of a model with eight experts is a small part of its weights."""
    mixtral = read_config({
        "architectures": ["MixtralForCausalLM"], "hidden_size": 256, "intermediate_size": 512, "vocab_size": 512,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 8,
    })  # fmt: skip
    square, expert = 256 * 256, 8 * 512 * 256
    q4_k, q5_k, q6_k, q8_0 = 144 / 256, 176 / 256, 210 / 256, 34 / 32
    attention = square * (q4_k + 2 * q8_0 + q5_k)  # q; k and v; o
    experts = 2 * 2 * expert * q4_k + expert * (q4_k + q6_k)  # gate and up of both layers; down of the first and last
    vocabulary = 512 * 256 * (q4_k + q6_k)
    in_float32 = 4 * (2 * 8 * 256 + 5 * 256)  # routers and norms
    found = gguf_bytes(list(model_tensors(mixtral)), mixtral)["Q4_K_M"]
    assert found == 2 * attention + experts + vocabulary + in_float32

    phi = read_config({
        "architectures": ["Phi3ForCausalLM"], "hidden_size": 256, "intermediate_size": 256, "vocab_size": 512,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0,
    })  # fmt: skip
    # The only layer is the last, so its fused q, k and v have 6 bits, as its down projection has.
    layer = 3 * square * q6_k + square * q4_k + 2 * square * q4_k + square * q6_k
    assert gguf_bytes(list(model_tensors(phi)), phi)["Q4_K_M"] == layer + vocabulary + 4 * 3 * 256
