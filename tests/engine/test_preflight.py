"""What is known of a model before torch is imported, and of memory before anything is made."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from pagewick.config import EngineConfig
from pagewick.demo import MODEL_DIR
from pagewick.engine import preflight
from pagewick.engine.preflight import check_memory, check_models, weight_bytes
from pagewick.errors import ConfigError, ModelLoadError, ModelNotFoundError
from pagewick.weights.tensor_headers import TensorInfo

# By hand: 5 layers of 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 768 + 2 * 256 + 2 * 64 parameters, a matrix of
# 4096 * 256 that is embedding and head, and a norm of 256.
NUM_PARAMETERS = 5 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 768 + 2 * 256 + 2 * 64) + 4096 * 256 + 256


def config_of(directory: Path = MODEL_DIR, **options: Any) -> EngineConfig:
    return EngineConfig(model=str(directory), **options)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The last number is how many bytes every device has free."""
    amounts = [2**60]
    monkeypatch.setattr(preflight, "available_memory", lambda device: amounts[-1])
    return amounts


def write_model(directory: Path, config: dict[str, Any], tensors: tuple[str, ...] = ("x",)) -> Path:
    entries = {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in tensors}
    header = json.dumps(entries).encode()
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    ours = json.loads((MODEL_DIR / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps({**ours, **config}), encoding="utf-8")
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


def test_a_draft_model_has_no_more_tokens(tmp_path: Path) -> None:
    draft = write_model(tmp_path / "draft", {"vocab_size": 4097})
    with pytest.raises(ConfigError, match="a vocabulary of 4097 tokens and the model one of 4096"):
        check_models(config_of(speculative_model=str(draft)))
    write_model(tmp_path / "smaller", {"vocab_size": 4095})
    check_models(config_of(speculative_model=str(tmp_path / "smaller")))


def test_a_draft_model_is_looked_at_like_the_other(tmp_path: Path) -> None:
    draft = write_model(tmp_path / "draft", {"architectures": ["MambaForCausalLM"]})
    with pytest.raises(ModelLoadError, match="MambaForCausalLM is not supported"):
        check_models(config_of(speculative_model=str(draft)))


def test_quantized_weights_are_known_by_their_names(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.gate_proj"
    directory = write_model(tmp_path / "m", {}, (f"{name}.qweight",))
    with pytest.raises(ConfigError, match=r"quantized \(model.layers.0.mlp.gate_proj\)"):
        check_models(config_of(directory))


def test_the_model_in_a_directory_below_is_proposed(tmp_path: Path) -> None:
    inner = write_model(tmp_path / "models--a--b" / "snapshots" / "abc", {})
    with pytest.raises(ModelNotFoundError, match=f"did you mean {inner}"):
        check_models(config_of(tmp_path / "models--a--b"))


@pytest.mark.parametrize(("dtype", "size"), [("auto", 2), ("float16", 2), ("float32", 4)])
def test_weights_must_fit_to_the_byte(free: list[int], dtype: str, size: int) -> None:
    needed = NUM_PARAMETERS * size
    free.append(needed)
    check_memory(config_of(dtype=dtype), "cpu", num_local_ranks=1)
    free.append(needed - 1)
    with pytest.raises(ConfigError, match=r"not enough memory.*\n.*pagewick doctor"):
        check_memory(config_of(dtype=dtype), "cpu", num_local_ranks=1)


def test_ranks_share_a_machine_and_have_gpus_of_their_own(free: list[int]) -> None:
    config = config_of(tensor_parallel_size=4)
    free.append(NUM_PARAMETERS * 2 // 4)
    check_memory(config, "cuda", num_local_ranks=2)
    with pytest.raises(ConfigError, match="not enough memory"):
        check_memory(config, "cpu", num_local_ranks=2)


def test_a_draft_model_takes_memory_too(free: list[int]) -> None:
    config = config_of(speculative_model=str(MODEL_DIR))
    free.append(NUM_PARAMETERS * 4)
    check_memory(config, "cpu", num_local_ranks=1)
    free.append(NUM_PARAMETERS * 4 - 1)
    with pytest.raises(ConfigError, match="not enough memory"):
        check_memory(config, "cpu", num_local_ranks=1)


def test_what_a_model_ignores_takes_no_memory(free: list[int], tmp_path: Path) -> None:
    names = ("vision_tower.a", "multi_modal_projector.b", "language_model.model.norm.weight")
    architecture = {"architectures": ["Gemma3ForConditionalGeneration"], "dtype": "float32"}
    directory = write_model(tmp_path / "m", architecture, names)
    free.append(4)
    check_memory(config_of(directory), "cpu", num_local_ranks=1)
    free.append(3)
    with pytest.raises(ConfigError, match="not enough memory"):
        check_memory(config_of(directory), "cpu", num_local_ranks=1)


def test_what_is_no_floating_point_number_stays_as_it_is() -> None:
    tensors = [TensorInfo("a", "F32", (3, 5), 60), TensorInfo("b", "I32", (7,), 28), TensorInfo("c", "F64", (), 8)]
    assert weight_bytes(tensors, "bfloat16") == 15 * 2 + 28 + 2


def test_experts_are_counted_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 layers of 6 experts of 3 tensors, and something shared by all tokens; each tensor is one number of 4 bytes."""
    names = [
        f"model.layers.{layer}.mlp.{owner}.{part}_proj.weight"
        for layer in range(2)
        for owner in ("shared_experts", *(f"experts.{expert}" for expert in range(6)))
        for part in ("gate", "up", "down")
    ]
    directory = write_model(tmp_path / "m", {}, tuple(names))
    config = config_of(directory, num_experts_offload_per_rank=2, tensor_parallel_size=2, dtype="float32")
    sizes = {"cuda": (2 * 3 * 3 * 4) // 2, "cpu": 5 * 6 * 4}
    monkeypatch.setattr(preflight, "available_memory", lambda device: sizes[device])
    check_memory(config, "cuda", num_local_ranks=2)
    sizes["cpu"] -= 1
    with pytest.raises(ConfigError, match=r"experts in host memory take .*\n.*lower --num-experts-offload-per-rank"):
        check_memory(config, "cuda", num_local_ranks=2)
    sizes |= {"cpu": 5 * 6 * 4 // 2, "cuda": sizes["cuda"] - 1}
    with pytest.raises(ConfigError, match=r"the weights take .* free on cuda"):
        check_memory(config, "cuda", num_local_ranks=1)
    # On a CPU it is all the same memory.
    sizes["cpu"] = len(names) * 4
    check_memory(config, "cpu", num_local_ranks=2)
    sizes["cpu"] -= 1
    with pytest.raises(ConfigError, match=r"the weights take .* free on cpu"):
        check_memory(config, "cpu", num_local_ranks=2)


def test_experts_that_are_not_there_cannot_be_elsewhere() -> None:
    with pytest.raises(ConfigError, match="has no experts; leave it out"):
        check_models(config_of(num_experts_offload_per_rank=1))
