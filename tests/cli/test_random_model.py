"""Random models of real shapes: readable by transformers, repeatable, never incomplete."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagewick.cli import random_model
from pagewick.cli.random_model import SHAPES, DeltaSizes, cached_random_model, tensor_shapes, write_random_model
from pagewick.errors import ConfigError
from pagewick.text.chat_template import ChatTemplate
from pagewick.text.tokenizer import Tokenizer

SMALL = replace(
    SHAPES["qwen3-tiny"],
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=16,
    vocab_size=700,
)


SMALL_MOE = replace(
    SMALL,
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    num_experts=5,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
)

SMALL_LINEAR = replace(
    SMALL,
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    num_hidden_layers=4,
    delta=DeltaSizes(2, 4, 8, 16, 4, full_attention_interval=2),
)


@pytest.fixture(scope="module", autouse=True)
def short_training() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_model, "NUM_TRAINING_FILES", 3)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("random")
    write_random_model(SMALL, directory)
    return directory


def test_transformers_reads_the_model(model: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(model)
    assert loaded.dtype == torch.bfloat16
    assert loaded.config.num_key_value_heads == 1
    assert loaded.config.rope_parameters["rope_theta"] == 1e6
    weights = [parameter for parameter in loaded.parameters() if parameter.ndim == 2]
    assert sum(map(torch.numel, weights)) == SMALL.num_block_parameters + SMALL.num_head_parameters
    assert all(abs(weight.float().std().item() / random_model.WEIGHT_STD - 1) < 0.1 for weight in weights)


def test_transformers_reads_a_model_with_experts(tmp_path: Path) -> None:
    write_random_model(SMALL_MOE, tmp_path)
    loaded, loading = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    weights = [parameter for parameter in loaded.parameters() if parameter.ndim >= 2]
    assert sum(map(torch.numel, weights)) == SMALL_MOE.num_block_parameters + SMALL_MOE.num_head_parameters
    unused = 3 * 2 * (3 * 32 * 24)  # three of five experts in two layers
    assert SMALL_MOE.num_active_parameters == SMALL_MOE.num_block_parameters - unused


def test_transformers_reads_a_model_with_linear_attention(tmp_path: Path) -> None:
    write_random_model(SMALL_LINEAR, tmp_path)
    loaded, loading = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert loaded.config.layer_types == ["linear_attention", "full_attention"] * 2
    assert loaded.config.rope_parameters["rope_theta"] == 1e6
    weights = [parameter for parameter in loaded.parameters() if parameter.ndim == 2]
    assert sum(map(torch.numel, weights)) == SMALL_LINEAR.num_block_parameters + SMALL_LINEAR.num_head_parameters
    assert (SMALL_LINEAR.num_attention_layers, SMALL_LINEAR.num_linear_layers) == (2, 2)
    # The inputs of three tokens in 96 channels, and 8 x 16 numbers of each of four heads.
    assert SMALL_LINEAR.delta is not None
    assert SMALL_LINEAR.delta.num_state_floats == 3 * 96 + 4 * 8 * 16


def test_transformers_reads_the_tokenizer(model: Path) -> None:
    theirs, ours = AutoTokenizer.from_pretrained(model), Tokenizer.from_directory(model)
    text = "def quick(brown, fox=1):\n    return 'Grüße'"
    assert theirs(text)["input_ids"] == ours.encode(text, add_special_tokens=True)
    assert theirs.decode(theirs(text)["input_ids"]) == text
    assert len(theirs) == SMALL.vocab_size
    assert ours.eos_token_ids == (SMALL.vocab_size - 1,)
    template = ChatTemplate.from_directory(model, ours)
    assert template is not None
    assert template.render([{"role": "user", "content": "hi"}]).text == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_every_id_is_text(model: Path) -> None:
    tokenizer = Tokenizer.from_directory(model)
    assert all(tokenizer.token_bytes(token_id) for token_id in range(SMALL.vocab_size))


def test_a_seed_always_gives_the_same_bytes(model: Path, tmp_path: Path) -> None:
    write_random_model(SMALL, tmp_path)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / name).read_bytes() == (model / name).read_bytes()
    write_random_model(SMALL, tmp_path, seed=1)
    assert (tmp_path / "model.safetensors").read_bytes() != (model / "model.safetensors").read_bytes()


# Numbers of parameters of the published models.
@pytest.mark.parametrize(("name", "published"), [("qwen3-0.6b", 596_049_920), ("llama-3.2-1b", 1_235_814_400)])
def test_shapes_have_the_published_sizes(name: str, published: int) -> None:
    sizes = [torch.Size(size).numel() for size in tensor_shapes(SHAPES[name]).values()]
    assert sum(sizes) == published
    norms = sum(size[0] for size in tensor_shapes(SHAPES[name]).values() if len(size) == 1)
    assert SHAPES[name].num_block_parameters + SHAPES[name].num_head_parameters == published - norms


def test_a_model_is_written_once_and_never_left_incomplete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(SHAPES, "small", SMALL)
    written: list[Path] = []

    def write(shape: object, directory: Path) -> None:
        written.append(directory)
        (directory / "config.json").write_text(json.dumps({}))
        if len(written) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(random_model, "write_random_model", write)
    with pytest.raises(KeyboardInterrupt):
        cached_random_model("small")
    assert list((tmp_path / "pagewick" / "bench").iterdir()) == []
    directory = cached_random_model("small")
    assert directory.parent == tmp_path / "pagewick" / "bench"
    assert cached_random_model("small") == directory
    assert len(written) == 2
    with pytest.raises(ConfigError, match="one of qwen3-tiny, qwen3"):
        cached_random_model("gpt-7")
