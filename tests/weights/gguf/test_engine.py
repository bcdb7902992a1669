"""The engine with GGUF files: the same model as from safetensors, and the same bits however sequences are scheduled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import gguf
import pytest
import torch

from pagewick import LLM, SamplingParams
from pagewick.config import EngineConfig
from pagewick.engine.preflight import check_models
from pagewick.errors import ConfigError
from pagewick.kernels import cpu
from pagewick.kernels.block_formats import unpack_q8_0
from tests.models.answers import Answer, answers, make_prompts, running
from tests.models.kept_ranks import kept_ranks
from tests.weights.gguf.demo import write_demo
from tests.weights.gguf.mixes import quantize
from tests.weights.gguf.models import VOCAB_SIZE, write_file

PROMPTS = make_prompts((1, 33, 7, 40), vocab_size=VOCAB_SIZE)
NUM_TOKENS = 16
# Dense with grouped heads, dense and tied, experts, experts with a shared one, latents, states of three kinds.
MODELS = (
    *("llama3-rope", "gemma-2b", "qwen3-moe", "qwen2-moe", "deepseek-v2-lite", "qwen3.5-moe", "nemotron-3-latents"),
    "lfm2-moe",
)


@pytest.fixture(scope="module", params=MODELS)
def quantized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    return quantize(write_file(request.param, directory), directory / "q8_0.gguf")


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    with kept_ranks():
        yield


def check_equal(found: Sequence[Answer], expected: Sequence[Answer]) -> None:
    for answer, other in zip(found, expected, strict=True):
        assert answer.token_ids == other.token_ids
        assert torch.equal(answer.logits, other.logits)


@pytest.mark.skipif(cpu.library() is None, reason="torch's attention and norms do not promise equal bits")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_are_equal_however_sequences_are_scheduled(quantized: Path, dtype: str) -> None:
    with running(quantized, dtype=dtype) as engine:
        batch = answers(engine, PROMPTS, num_tokens=NUM_TOKENS)
        check_equal(answers(engine, PROMPTS, num_tokens=NUM_TOKENS), batch)
        alone = [answers(engine, [prompt], cache_salt="x", num_tokens=NUM_TOKENS)[0] for prompt in PROMPTS]
        check_equal(alone, batch)
    for options in ({"max_num_batched_tokens": 7}, {"num_kv_blocks": 5, "max_num_batched_tokens": 16}):
        with running(quantized, dtype=dtype, **options) as engine:
            check_equal(answers(engine, PROMPTS, num_tokens=NUM_TOKENS), batch)


def test_two_ranks_share_a_quantized_model(tmp_path: Path) -> None:
    """Sums of ranks are added in another order, and a last bit decides how an activation is rounded to 8 bits."""
    found = []
    for stored_type, size in (("Q8_0", 1), ("Q8_0", 2), ("BF16", 1)):
        path = write_demo(tmp_path / f"{stored_type}.gguf", stored_type)
        with running(path, tensor_parallel_size=size) as engine:
            found.append(answers(engine, PROMPTS, num_tokens=1))
    for alone, shared, exact in zip(*found, strict=True):
        assert alone.token_ids == shared.token_ids
        rounding = (alone.logits - exact.logits).abs().mean()
        assert (alone.logits - shared.logits).abs().mean() < rounding < 0.1


@pytest.mark.parametrize("stored_type", ["Q8_0", "Q4_0"])
def test_two_ranks_say_the_same(stored_type: str, tmp_path: Path) -> None:
    """Each token is the most likely one by far, so that the last bits of sums decide nothing."""
    path, said = write_demo(tmp_path / "demo.gguf", stored_type), []
    questions = ("How do I change the port?", "What is a prefix cache?", "Who are you?", "How do I install Pagewick?")
    for size in (1, 2):
        with LLM(str(path), tensor_parallel_size=size) as llm:
            params = SamplingParams(temperature=0, max_tokens=48)
            found = llm.chat([[{"role": "user", "content": question}] for question in questions], params)
            said.append([output.outputs[0].token_ids for output in found])
    assert said[0] == said[1] and all(len(token_ids) > 8 for token_ids in said[0])


def test_heads_in_the_order_of_llama_cpp_are_where_they_belong(tmp_path: Path) -> None:
    """Rounding weights costs as much as in a model whose heads are in the checkpoint's order."""
    errors = []
    for name in ("qwen3.5", "qwen3.5-tied"):
        path, found = write_file(name, tmp_path), []
        for kind in (path, quantize(path, tmp_path / f"{name}-q8_0.gguf")):
            with running(kind) as engine:
                found.append(answers(engine, PROMPTS, num_tokens=1))
        pairs = zip(*found, strict=True)
        errors.append(torch.stack([(exact.logits - other.logits).abs().mean() for exact, other in pairs]).mean())
    assert errors[1] < 2 * errors[0] < 1.0, errors


def test_ranks_cannot_share_heads_in_the_order_of_llama_cpp(tmp_path: Path) -> None:
    config = EngineConfig.from_options(model=str(write_file("qwen3.5-tied", tmp_path)), tensor_parallel_size=3)
    expected = (
        r"size 3 does not fit the model's layers of linear attention: .* llama.cpp's order\n  sizes that work: 1$"
    )
    with pytest.raises(ConfigError, match=expected):
        check_models(config)
    # Each key head has one value head.
    prompts, found = make_prompts((9,), vocab_size=VOCAB_SIZE), []
    path = write_file("qwen3.5", tmp_path)
    for size in (1, 2):
        with running(path, tensor_parallel_size=size) as engine:
            found.append(answers(engine, prompts, num_tokens=2))
    torch.testing.assert_close(found[1][0].logits, found[0][0].logits, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", ["lfm2", "granite-4-h-moe", "nemotron-h"])
def test_two_ranks_share_states(name: str, tmp_path: Path) -> None:
    path, prompts, found = write_file(name, tmp_path), make_prompts((9,), vocab_size=VOCAB_SIZE), []
    for size in (1, 2):
        with running(path, tensor_parallel_size=size) as engine:
            found.append(answers(engine, prompts, num_tokens=2))
    torch.testing.assert_close(found[1][0].logits, found[0][0].logits, atol=1e-3, rtol=0)


def test_ranks_cannot_share_a_block(tmp_path: Path) -> None:
    path = quantize(write_file("qwen3", tmp_path), tmp_path / "q8_0.gguf")
    with pytest.raises(ConfigError, match="cannot cut 96 input columns at 0:48"), running(path, tensor_parallel_size=2):
        pass


def test_rounding_is_that_of_the_gguf_package() -> None:
    numbers = torch.randn(9, 96) * torch.logspace(-4, 2, 9).unsqueeze(1)
    stored = gguf.quants.quantize(numbers.numpy(), gguf.GGMLQuantizationType.Q8_0)
    ours = unpack_q8_0(torch.from_numpy(stored)).numbers()
    theirs = torch.from_numpy(gguf.quants.dequantize(stored, gguf.GGMLQuantizationType.Q8_0))
    assert torch.equal(ours, theirs)


def test_the_built_in_model_says_the_same_from_a_file(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "How do I change the port?"}]
    params = SamplingParams(temperature=0, max_tokens=40)
    said = []
    for model in (None, write_demo(tmp_path / "demo.gguf", "BF16"), write_demo(tmp_path / "q8" / "demo.gguf", "Q8_0")):
        with LLM(None if model is None else str(model)) as llm:
            said.append(llm.chat(messages, params)[0].outputs[0].text)
    assert said[0] == said[1] == said[2] and "port" in said[0]


def test_a_gguf_file_drafts_for_another(tmp_path: Path) -> None:
    paths = [write_demo(tmp_path / name / "demo.gguf", kind) for name, kind in (("a", "BF16"), ("b", "Q8_0"))]
    params = SamplingParams(temperature=0, max_tokens=40)
    question = [{"role": "user", "content": "How do I change the port?"}]
    with LLM(str(paths[0])) as llm:
        alone = llm.chat(question, params)[0].outputs[0].token_ids
    with LLM(str(paths[0]), speculative_model=str(paths[1]), speculative_method="draft") as llm:
        assert llm.chat(question, params)[0].outputs[0].token_ids == alone
        assert llm.get_stats().num_accepted_tokens > 0
