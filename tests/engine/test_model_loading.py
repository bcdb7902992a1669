"""From a directory to a model: what its config.json does not say, and what it says that cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewick import LLM, SamplingParams, kernels
from pagewick.config import EngineConfig
from pagewick.demo import MODEL_DIR
from pagewick.engine import model_loading
from pagewick.engine.engine import Engine
from pagewick.engine.model_loading import read_model_config
from pagewick.engine.preflight import FreeMemory, check_memory
from pagewick.engine.speculation.draft_model import DraftModel
from pagewick.errors import ConfigError, ModelLoadError
from pagewick.parallel.collectives import Collectives


def copy_of(directory: Path, stored: torch.dtype, **changes: object) -> Path:
    """The built-in model stored in a dtype, with other entries in config.json; None leaves one out."""
    config = {**json.loads((MODEL_DIR / "config.json").read_text(encoding="utf-8")), **changes}
    kept = {name: value for name, value in config.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    tensors = {name: tensor.to(stored) for name, tensor in load_file(MODEL_DIR / "model.safetensors").items()}
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_dtype_that_the_file_does_not_say_is_that_of_its_tensors(dtype: torch.dtype, tmp_path: Path) -> None:
    config = EngineConfig(model=str(copy_of(tmp_path, dtype, dtype=None, torch_dtype=None)), num_kv_blocks=2)
    check_memory(config, "cpu", FreeMemory.of_rank("cpu", 1))
    engine = Engine(config)
    try:
        assert engine._ranks.runner.config.dtype == str(dtype).removeprefix("torch.")
    finally:
        engine.close()


@pytest.mark.parametrize("quantization", [None, "q8_0"])
def test_a_tied_head_is_compared_before_weights_are_quantized(quantization: str | None, tmp_path: Path) -> None:
    directory = copy_of(tmp_path, torch.bfloat16)
    tensors = load_file(directory / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    config = EngineConfig(str(directory), quantization=quantization, quantized_cache=False, num_kv_blocks=2)
    save_file({**tensors, "lm_head.weight": head}, directory / "model.safetensors")
    Engine(config).close()
    head[7, 7] = 3.0
    save_file({**tensors, "lm_head.weight": head}, directory / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        Engine(config)


def test_the_tokenizers_end_token_ends_sequences_too(tmp_path: Path) -> None:
    """Fine-tuned models often keep the generation_config.json of the model that they come from."""
    directory = copy_of(tmp_path, torch.bfloat16)
    vocab_size = json.loads((directory / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    (directory / "generation_config.json").write_text('{"eos_token_id": 5}', encoding="utf-8")

    def ends(token_id: int, tokenizer: Path | None = None) -> list[int]:
        listed = {"added_tokens_decoder": {str(token_id): {"content": "<|im_end|>"}}}
        place = directory if tokenizer is None else tokenizer
        place.mkdir(exist_ok=True)
        (place / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", **listed}))
        config = EngineConfig(str(directory), tokenizer=None if tokenizer is None else str(tokenizer))
        return model_loading.load_model(config, Collectives.single(), torch.device("cpu")).eos_token_ids

    assert ends(9) == [5, 9]
    assert ends(5) == [5]
    assert ends(vocab_size) == [5]
    assert ends(11, tmp_path / "other") == [5, 11]


@pytest.mark.parametrize(("local_world_size", "num_threads"), [(1, 12), (2, 6), (None, 3)])
def test_ranks_share_the_processors_of_their_machine(
    local_world_size: int | None, num_threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank of a machine quantizes with all of them, while the others wait."""
    used: list[int] = []
    monkeypatch.setattr(model_loading, "num_cores", lambda: 12)
    monkeypatch.setattr(kernels, "set_num_threads", used.append)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = EngineConfig(str(MODEL_DIR), quantization="q8_0", device="cpu", tensor_parallel_size=4)
    collectives = Collectives(0, 4, local_world_size=local_world_size)
    loaded = model_loading.load_model(config, collectives, torch.device("cpu"))
    assert loaded.config.num_threads == num_threads
    assert used == [num_threads, 12, num_threads]


def test_sizes_other_than_those_of_the_tensors_are_refused_before_memory_is_asked_for(tmp_path: Path) -> None:
    directory = copy_of(tmp_path, torch.bfloat16, hidden_size=2**24, intermediate_size=2**24)
    with pytest.raises(ModelLoadError, match=r"config\.json says \[4096, 16777216\]"):
        Engine(EngineConfig(model=str(directory), num_kv_blocks=2))


def test_nothing_that_lies_beside_the_weights_is_executed(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    classes = {name: f"modeling_own.{name}" for name in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")}
    directory = copy_of(tmp_path, torch.bfloat16, auto_map=classes)
    for name in ("modeling_own", "configuration_own", "tokenization_own", "__init__"):
        (directory / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()\n", encoding="utf-8")
    tokenizer = json.loads((MODEL_DIR / "tokenizer_config.json").read_text(encoding="utf-8"))
    (directory / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "auto_map": classes}), encoding="utf-8")
    (directory / "tokenizer.json").write_bytes((MODEL_DIR / "tokenizer.json").read_bytes())
    with LLM(str(directory), num_kv_blocks=4) as llm:
        assert llm.generate(["Pagewick is"], SamplingParams(max_tokens=2, temperature=0))[0].outputs[0].token_ids
    assert not mark.exists()


def test_fp8_activations_need_weights_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model=str(MODEL_DIR), device="cpu", fp8_activations=True, num_kv_blocks=2)
    with pytest.raises(ConfigError, match=r"--fp8-activations: it needs a GPU \(--device cuda\)"):
        Engine(config)
    monkeypatch.setattr(kernels, "require_fp8_activations", lambda device, dtype: None)
    with pytest.raises(ConfigError, match="--fp8-activations: no weight of this model is in FP8; leave the flag out"):
        Engine(config)
    # A draft model need not have any.
    target, given = read_model_config(MODEL_DIR), replace(config, num_kv_blocks=8)
    draft = DraftModel(given, Collectives(0, 1), torch.device("cpu"), target=target, target_directory=MODEL_DIR)
    assert not draft.config.fp8_activations


def test_options_that_change_nothing_are_named(caplog: pytest.LogCaptureFixture) -> None:
    plain = {"model": str(MODEL_DIR), "device": "cpu", "num_kv_blocks": 2}
    Engine(EngineConfig(**plain)).close()
    Engine(EngineConfig(**plain, enable_lora=True, max_loras=4, max_lora_rank=8)).close()
    assert "changes nothing" not in caplog.text
    Engine(EngineConfig(**plain, max_loras=4, max_lora_rank=8, max_image_pixels=10000)).close()
    notes = [record.getMessage() for record in caplog.records if "changes nothing" in record.getMessage()]
    without = "changes nothing without --lora, --lora-modules or --enable-lora: no adapter can be used"
    assert notes == [
        f"--max-loras {without}", f"--max-lora-rank {without}",
        "--max-image-pixels changes nothing: no images are read",
    ]  # fmt: skip
