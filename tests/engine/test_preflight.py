"""Checks of a model before torch is imported, and of memory before anything is allocated."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import pytest

from pagewick.config import EngineConfig
from pagewick.demo import MODEL_DIR
from pagewick.engine import preflight
from pagewick.engine.preflight import FreeMemory, WeightBytes, check_memory, check_models, choose_quantization
from pagewick.engine.step_memory import StepLimits, gpu_step_bytes
from pagewick.errors import ConfigError, ModelLoadError, ModelNotFoundError
from pagewick.models.registry import read_config
from pagewick.models.tensors import model_tensors
from tests.doctor.test_model import NUM_IN_MATRICES, tiny_gguf
from tests.models.checkpoints import VARIANTS, make_model, save

# By hand: 5 layers of 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 768 + 2 * 256 + 2 * 64 parameters, a matrix of
# 4096 * 256 that is embedding and head, and a norm of 256.
NUM_IN_NORMS = 5 * (2 * 256 + 2 * 64) + 256
NUM_PARAMETERS = 5 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 768) + 4096 * 256 + NUM_IN_NORMS


def config_of(directory: Path = MODEL_DIR, **options: Any) -> EngineConfig:
    return EngineConfig(model=str(directory), **options)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The last number is how many bytes every device has free."""
    amounts = [2**60]
    monkeypatch.setattr(preflight, "available_memory", lambda device: amounts[-1])
    return amounts


def write_model(directory: Path, changes: dict[str, Any], more: tuple[str, ...] = (), *, is_whole: bool = True) -> Path:
    """The built-in model with changes of its config.json, and with `more` tensors; is_whole: with its own as well."""
    config = {**json.loads((MODEL_DIR / "config.json").read_text(encoding="utf-8")), **changes}
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(more, (1,))
    if is_whole:
        shapes |= {tensor.name: tensor.shape for tensor in model_tensors(read_config(config))}
    ends = list(accumulate((2 * prod(shape) for shape in shapes.values()), initial=0))
    header = json.dumps({
        name: {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
        for (name, shape), begin, end in zip(shapes.items(), ends[:-1], ends[1:], strict=True)
    }).encode()  # fmt: skip
    directory.mkdir(parents=True)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(file.tell() + ends[-1])
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def test_the_built_in_model_is_well() -> None:
    check_models(config_of(max_model_len=2048, tensor_parallel_size=2, speculative_model=str(MODEL_DIR)))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"tensor_parallel_size": 3}, "sizes that work: 1, 2, 4"),
        ({"max_model_len": 2049}, "--max-model-len 2049 is longer than the model's context of 2048"),
    ],
)
def test_what_does_not_go_with_the_model_is_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_models(config_of(**options))


def test_the_number_of_ranks_may_come_from_a_launcher() -> None:
    environ = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "localhost"}
    with pytest.raises(ConfigError, match="sizes that work: 1, 2, 4"):
        check_models(config_of(), environ)


def test_files_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    for name in ("describe", "model_tensors"):
        work = getattr(preflight, name)

        def counted(*given: Any, _name: str = name, _work: Any = work, **options: Any) -> Any:
            done.append(_name)
            return _work(*given, **options)

        monkeypatch.setattr(preflight, name, counted)
    config = config_of(device="cpu")
    models = check_models(config)
    assert done == ["describe", "model_tensors"]
    weights = WeightBytes.of(config, 1, models)
    check_memory(config, "cpu", FreeMemory.of_rank("cpu", 1), weights)
    assert done[2:] == ["model_tensors"]
    # Another process gets nothing from this one.
    assert WeightBytes.of(config, 1) == weights
    assert (weights.all, weights.expert) == (2 * NUM_PARAMETERS, 0)
    assert done[3:] == ["describe", "model_tensors"]


def test_a_draft_model_has_no_more_tokens(tmp_path: Path) -> None:
    draft = write_model(tmp_path / "draft", {"vocab_size": 4097})
    with pytest.raises(ConfigError, match="a vocabulary of 4097 tokens and the model one of 4096"):
        check_models(config_of(speculative_model=str(draft)))
    write_model(tmp_path / "smaller", {"vocab_size": 4095})
    check_models(config_of(speculative_model=str(tmp_path / "smaller")))


def test_a_draft_model_is_looked_at_like_the_other(tmp_path: Path) -> None:
    draft = write_model(tmp_path / "draft", {"architectures": ["BloomForCausalLM"]}, ("x",), is_whole=False)
    with pytest.raises(ModelLoadError, match="BloomForCausalLM is not supported"):
        check_models(config_of(speculative_model=str(draft)))


def test_quantized_weights_are_known_by_their_names(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.gate_proj"
    directory = write_model(tmp_path / "m", {}, (f"{name}.qweight",), is_whole=False)
    with pytest.raises(
        ConfigError, match=r"quantized \(model.layers.0.mlp.gate_proj.qweight\), and config.json does not say how"
    ):
        check_models(config_of(directory))


def test_tensors_are_compared_with_config_json(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m", {}, ("model.layers.5.mlp.up_proj.weight",))
    with pytest.raises(ModelLoadError, match=r"no place for 1 tensor: model\.layers\.5\.mlp\.up_proj\.weight"):
        check_models(config_of(directory))


def test_blocks_take_the_memory_that_they_have_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf())
    weights = WeightBytes.of(config_of(path), 1)
    assert (weights.all, weights.expert) == (NUM_IN_MATRICES // 32 * 34 + 2 * 3 * 64, 0)


@pytest.mark.parametrize(
    ("name", "size", "complaint"),
    [
        ("embedding_length", 0, r"tiny\.gguf: llama\.embedding_length is 0, and must be a whole number"),
        ("block_count", 5000, r"tiny\.gguf: llama\.block_count is 5000"),
        ("feed_forward_length", 95, r"and .*tiny\.gguf says \[95, 64\]\n  use another file of this model"),
    ],
)
def test_errors_name_the_key_of_a_gguf_file(name: str, size: int, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf(extra={name: size}))
    with pytest.raises(ModelLoadError, match=complaint) as caught:
        check_models(config_of(path))
    assert "config.json" not in str(caught.value)


def test_the_model_in_a_directory_below_is_proposed(tmp_path: Path) -> None:
    inner = write_model(tmp_path / "models--a--b" / "snapshots" / "abc", {})
    with pytest.raises(ModelNotFoundError, match=f"did you mean {inner}"):
        check_models(config_of(tmp_path / "models--a--b"))


@pytest.mark.parametrize(("dtype", "size"), [("auto", 2), ("float16", 2), ("float32", 4)])
def test_weights_must_fit_to_the_byte(free: list[int], dtype: str, size: int) -> None:
    needed = NUM_PARAMETERS * size
    free.append(needed)
    check_memory(config_of(dtype=dtype), "cpu", FreeMemory.of_rank("cpu", 1))
    free.append(needed - 1)
    with pytest.raises(ConfigError, match=r"not enough memory.*\n.*pagewick doctor"):
        check_memory(config_of(dtype=dtype), "cpu", FreeMemory.of_rank("cpu", 1))


def test_ranks_share_a_machine_and_have_gpus_of_their_own(free: list[int]) -> None:
    """A rank of two has a KV head of its own, and all norms."""
    config = config_of(tensor_parallel_size=2)
    weights = (NUM_PARAMETERS - NUM_IN_NORMS) * 2 // 2 + NUM_IN_NORMS * 2
    model = read_config(json.loads((MODEL_DIR / "config.json").read_text(encoding="utf-8")))
    free.append(weights + gpu_step_bytes(model, StepLimits.of(config, model), 2))
    check_memory(config, "cuda", FreeMemory.of_rank("cuda", 2))
    free.append(free[-1] - 1)
    with pytest.raises(ConfigError, match="and a step"):
        check_memory(config, "cuda", FreeMemory.of_rank("cuda", 2))
    free.append(weights)
    with pytest.raises(ConfigError, match="not enough memory"):
        check_memory(config, "cpu", FreeMemory.of_rank("cpu", 2))


def test_quantizing_at_load_needs_memory_on_a_gpu(free: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding of 4096 x 256 is quantized in one piece, and is in Q6_K, as vocabulary heads are."""
    monkeypatch.setattr(preflight, "gpu_step_bytes", lambda *given: 0)
    config = config_of(quantization="q4_k")
    weights = WeightBytes.of(config, 1)
    assert weights.quantizing == int(4096 * 256 * (2 + 37) * 9 / 8)
    assert WeightBytes.of(config_of(), 1).quantizing == 0
    assert WeightBytes.of(config, 2).quantizing == int(2048 * 256 * (2 + 37) * 9 / 8)
    free.append(weights.all + weights.quantizing)
    check_memory(config, "cuda", FreeMemory.of_rank("cuda", 1))
    free.append(free[-1] - 1)
    with pytest.raises(ConfigError, match=r"the weights take 0\.0 GiB and quantizing them 0\.0 GiB, and 0\.0 GiB are"):
        check_memory(config, "cuda", FreeMemory.of_rank("cuda", 1))
    # The native quantizers of a CPU work on some rows at a time.
    check_memory(config, "cpu", FreeMemory.of_rank("cpu", 1))
    # Afterwards the memory is free for steps.
    monkeypatch.setattr(preflight, "gpu_step_bytes", lambda *given: weights.quantizing)
    free.append(weights.all + weights.quantizing)
    check_memory(config, "cuda", FreeMemory.of_rank("cuda", 1))


def test_a_draft_model_takes_memory_too(free: list[int]) -> None:
    config = config_of(speculative_model=str(MODEL_DIR))
    free.append(NUM_PARAMETERS * 4)
    check_memory(config, "cpu", FreeMemory.of_rank("cpu", 1))
    free.append(NUM_PARAMETERS * 4 - 1)
    with pytest.raises(ConfigError, match="not enough memory"):
        check_memory(config, "cpu", FreeMemory.of_rank("cpu", 1))


def test_a_format_is_chosen_beside_a_draft_model(free: list[int]) -> None:
    config = config_of(quantization="auto", speculative_model=str(MODEL_DIR))
    free.append(2**40)
    assert choose_quantization(config, FreeMemory.of_rank("cpu", 1)) == config_of(speculative_model=str(MODEL_DIR))


def test_ignored_tensors_take_no_memory(free: list[int], tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m", {}, ("lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"))
    check_models(config_of(directory))
    free.append(NUM_PARAMETERS * 2)
    check_memory(config_of(directory), "cpu", FreeMemory.of_rank("cpu", 1))


def test_experts_are_counted_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each of 2 layers, 6 experts of three matrices of 8 x 256, of which a rank of two keeps half."""
    mixture = {
        "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 2, "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
    }  # fmt: skip
    directory = write_model(tmp_path / "m", mixture)
    config = config_of(directory, num_experts_offload_per_rank=2, tensor_parallel_size=2, dtype="float32")
    expert = 2 * 3 * 4 * 256 * 4
    norms, attention, routers = 2 * (2 * 256 + 2 * 64) + 256, 2 * (256 * 256 + 128 * 256), 2 * 6 * 256
    others = 4 * (norms + attention + routers + 4096 * 256 // 2)
    model = read_config(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    step = gpu_step_bytes(model, StepLimits.of(config, model), 2)
    sizes = {"cuda": others + 2 * expert + step, "cpu": 5 * expert * 2}
    monkeypatch.setattr(preflight, "available_memory", lambda device: sizes[device])
    check_memory(config, "cuda", FreeMemory.of_rank("cuda", 2))
    sizes["cpu"] -= 1
    with pytest.raises(ConfigError, match=r"experts in host memory take .*\n.*lower --num-experts-offload-per-rank"):
        check_memory(config, "cuda", FreeMemory.of_rank("cuda", 2))
    sizes |= {"cpu": 5 * expert, "cuda": sizes["cuda"] - 1}
    with pytest.raises(ConfigError, match=r"the weights take .* and a step 0\.\d GiB, and .* free on cuda"):
        check_memory(config, "cuda", FreeMemory.of_rank("cuda", 1))


def test_more_ranks_than_the_encoder_has_heads_are_refused_before_the_start(tmp_path: Path) -> None:
    """The decoder has 6 heads, the encoder 2."""
    entries = VARIANTS["qwen3-vl"].all_entries()
    vision = {**entries["vision_config"], "num_heads": 2}
    save(make_model("qwen3-vl", {**entries, "vision_config": vision}), tmp_path)
    config = EngineConfig(model=str(tmp_path), tensor_parallel_size=3)
    with pytest.raises(ConfigError, match=r"more than the vision encoder's 2 attention heads.*--language-model-only"):
        check_models(config, {})
    check_models(replace(config, language_model_only=True), {})
