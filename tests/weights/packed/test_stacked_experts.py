"""gpt-oss with MXFP4 experts: all of a layer in one tensor of numbers and one of scales, gate and up interleaved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pagewick.config import EngineConfig
from pagewick.engine.preflight import check_models
from pagewick.errors import ModelLoadError
from pagewick.models.registry import read_config
from pagewick.models.tensors import model_tensors
from pagewick.quantization.ggml import dequantize
from pagewick.weights.description import describe
from pagewick.weights.opening import open_source
from tests.layers.ranks import on_ranks
from tests.models.by_hand import logits_of
from tests.models.checkpoints import make_model, save
from tests.models.variants import VARIANTS
from tests.weights.gguf.test_quantized_models import rounded
from tests.weights.packed import byte_writers
from tests.weights.packed.harness import PROMPTS, SIZES, load, logits_on

ENTRIES: dict[str, Any] = {
    **SIZES, "intermediate_size": 64, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 40,
}  # fmt: skip
LEFT_OUT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def write(directory: Path) -> dict[str, Tensor]:
    """Write gpt-oss as it is published; return the numbers of all weights by transformers' names."""
    save(make_model("gpt-oss", {**VARIANTS["gpt-oss"].all_entries(), **ENTRIES}), directory)
    stored, meant = {}, {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if tensor.ndim != 3:
            stored[name] = meant[name] = tensor
            continue
        num_experts, inputs, outputs = tensor.shape
        parts, numbers = byte_writers.mxfp4(tensor.transpose(1, 2).reshape(-1, inputs))
        meant[name] = numbers.view(num_experts, outputs, inputs).transpose(1, 2).contiguous()
        groups = (num_experts, outputs, inputs // 32)
        stored[f"{name}_blocks"] = parts[".weight_packed"].view(*groups, 16)
        stored[f"{name}_scales"] = parts[".weight_scale"].view(groups)
    save_file(stored, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": LEFT_OUT}
    (directory / "config.json").write_text(json.dumps(config))
    return meant


def reference(directory: Path, meant: dict[str, Tensor]) -> nn.Module:
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    plain = directory / "plain"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(config))
    save_file(meant, plain / "model.safetensors", {"format": "pt"})
    return transformers.AutoModelForCausalLM.from_pretrained(  # type: ignore[no-any-return]
        plain, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def round_activations(model: Any) -> None:
    """Have the inputs of the experts' products rounded to 8 bits, as ours are."""
    for layer in model.model.layers:
        experts = layer.mlp.experts
        experts.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0], 32), *inputs[1:]))
        experts._apply_gate = lambda gate_up, own=experts._apply_gate: rounded(own(gate_up), 32)


@torch.inference_mode()
def logits_of_reference(model: nn.Module) -> Tensor:
    return torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    directory = tmp_path_factory.mktemp("gpt-oss-mxfp4")
    return directory, write(directory)


def test_every_number_is_exact(written: tuple[Path, dict[str, Tensor]]) -> None:
    directory, meant = written
    stack = meant["model.layers.1.mlp.experts.gate_up_proj"]
    down = meant["model.layers.1.mlp.experts.down_proj"]
    with open_source(directory) as source:
        for expert in range(5):
            prefix = f"model.layers.1.mlp.experts.{expert}"
            for name, expected in (("gate_proj", stack[expert, :, 0::2]), ("up_proj", stack[expert, :, 1::2])):
                weight = f"{prefix}.{name}.weight"
                assert source.stored_type(weight) == "MXFP4"
                assert torch.equal(dequantize("MXFP4", source.get(weight), 128), expected.T)
            assert torch.equal(dequantize("MXFP4", source.get(f"{prefix}.down_proj.weight"), 64), down[expert].T)


def test_logits(written: tuple[Path, dict[str, Tensor]]) -> None:
    directory, meant = written
    check_models(EngineConfig(model=str(directory)))
    assert {tensor.label for tensor in describe(directory).tensors} == {"", "MXFP4"}
    (model,) = on_ranks(1, lambda context: load(context, directory))
    ours = logits_of(model, PROMPTS)
    assert torch.equal(ours, torch.cat([logits_of(model, [prompt]) for prompt in PROMPTS]))
    theirs = reference(directory, meant)
    expected = logits_of_reference(theirs)
    round_activations(theirs)
    allowed = (logits_of_reference(theirs) - expected).abs().mean()
    assert expected.std() > 0.3 and allowed < 0.03 * expected.std()
    assert (ours - expected).abs().mean() < 1.25 * allowed
    # Experts trade places with those in host memory, and take their biases along.
    torch.testing.assert_close(logits_on(directory, num_offloaded=2), ours, atol=1e-4, rtol=0)
    assert (logits_on(directory, 2) - ours).abs().mean() < allowed / 2


def test_unquantized_experts_in_host_memory_keep_their_biases(tmp_path: Path) -> None:
    save(make_model("gpt-oss"), tmp_path)
    torch.testing.assert_close(logits_on(tmp_path, num_offloaded=3), logits_on(tmp_path), atol=1e-4, rtol=0)


def test_a_stack_that_does_not_fit_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    blocks = "model.layers.0.mlp.experts.down_proj_blocks"

    def check(changed: dict[str, Tensor], words: str) -> None:
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(ModelLoadError, match=words):
            open_source(tmp_path)

    check({**tensors, blocks: tensors[blocks][:, :64].clone()}, f"{blocks}: its shape is .5, 64, 2, 16.")
    check({name: tensor for name, tensor in tensors.items() if name != blocks}, f"lacks 1 tensor .*{blocks}")
    check({**tensors, blocks[:-7]: torch.zeros(5, 64, 128)}, f"no place for {blocks[:-7]}")


def test_experts_that_are_stored_one_by_one_are_read_as_well(tmp_path: Path) -> None:
    """As programs write them that know no stacks."""
    save(make_model("gpt-oss"), tmp_path)
    expected = logits_on(tmp_path)
    with open_source(tmp_path) as source:
        config = read_config(source.config())
        tensors = {tensor.name: source.get(tensor.name).clone() for tensor in model_tensors(config, source.names())}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    assert torch.equal(logits_on(tmp_path), expected)
