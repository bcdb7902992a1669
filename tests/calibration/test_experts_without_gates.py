"""quantize_layers on experts without gates, and on those that read latents."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagewick.calibration import quantizing
from pagewick.calibration.folding import LayerTensors
from pagewick.calibration.layer import TextRunner, batches_of
from pagewick.layers.config import MoeConfig
from pagewick.models.config import ModelConfig
from pagewick.models.registry import read_config
from pagewick.quantization.calibrated.results import Recipe
from pagewick.weights.opening import open_source
from tests.calibration.test_quantizing import check_factors, quantized, text, write

LATENTS = 24


def write_experts(directory: Path, latent_size: int | None) -> ModelConfig:
    """Write DeepSeek-V3 with other experts; return its config, which config.json cannot say."""
    write("deepseek-v3", directory)
    generator = torch.Generator().manual_seed(9)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        owner, found, _ = name.partition(".gate.weight")
        if found and latent_size is not None:
            hidden_size = tensor.shape[1]
            for leaf, shape in (("fc1", (latent_size, hidden_size)), ("fc2", (hidden_size, latent_size))):
                weight = torch.randn(shape, generator=generator) / shape[1] ** 0.5
                tensors[f"{owner}.{leaf}_latent_proj.weight"] = weight
        if ".experts." in name and latent_size is not None:
            rows, columns = tensor.shape
            shape = (latent_size, columns) if "down_proj" in name else (rows, latent_size)
            tensor = torch.randn(shape, generator=generator) / shape[1] ** 0.5
        if "expert" not in name or "gate_proj" not in name:
            tensors[name] = tensor
    save_file(tensors, directory / "model.safetensors")
    with open_source(directory) as source:
        config = read_config(source.config())
    fields: dict[str, Any] = {"is_gated": False, "activation": "relu2", "latent_size": latent_size}
    layers = [
        replace(layer, mlp=replace(layer.mlp, **fields)) if isinstance(layer.mlp, MoeConfig) else layer
        for layer in config.layers
    ]
    return replace(config, layers=tuple(layers))


@pytest.mark.parametrize("latent_size", [None, LATENTS])
def test_factors_change_no_state(latent_size: int | None, tmp_path: Path) -> None:
    config = write_experts(tmp_path, latent_size)
    with open_source(tmp_path) as source:
        check_factors(source, config)


@pytest.mark.parametrize(("method", "latent_size"), [("gptq", None), ("awq", LATENTS)])
def test_every_linear_layer_is_quantized(
    method: str, latent_size: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_experts(tmp_path, latent_size)
    monkeypatch.setattr(quantizing, "read_config", lambda entries: config)
    recipe = Recipe(method=method, bits=8, group_size=-1, symmetric=False)  # type: ignore[arg-type]
    results = quantized(tmp_path, text(90, 90), recipe)
    with open_source(tmp_path) as source:
        names = {name for name in source.names() if "_proj" in name}
        runner = TextRunner(source, config, batches_of(text(50, 9), config))
        states = runner.embed()
        for layer_idx, result in results.items():
            tensors = LayerTensors.of_result(source.get, result)
            (before,), (after,) = (list(runner.run(layer_idx, get, states)) for get in (source.get, tensors.get))
            assert (after - before).square().mean() / (before - states[0]).square().mean() < 2e-3
            states = [before]
    assert {f"{linear.name}.weight" for result in results.values() for linear in result.linears} == names
    reasons = {name.rsplit(".", 1)[1]: reason for name, reason in results[2].remarks.items() if "factors" in reason}
    expected = {"down_proj": "without AWQ's factors, because the inputs come from an activation without a gate"}
    if latent_size is not None:
        expected["fc2_latent_proj"] = "without AWQ's factors, because several experts make the inputs"
    assert reasons == (expected if method == "awq" else {})
