"""quantize_layers on indexers, and on layers that see what an earlier layer's indexer has selected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pagewick.calibration import layer
from pagewick.calibration.inputs import InputSums
from pagewick.calibration.layer import TextRunner, batches_of
from pagewick.calibration.stages import stages_of
from pagewick.models.registry import read_config
from pagewick.quantization.calibrated.results import Recipe
from pagewick.weights.opening import open_source
from tests.calibration.test_quantizing import quantized, text, write


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_an_indexer_is_quantized_and_its_router_is_not(method: Any, tmp_path: Path) -> None:
    """The second layer of GLM-5.2 has no indexer."""
    write("glm-5.2", tmp_path)
    # AWQ has factors for columns whose inputs are much larger than others.
    tensors = load_file(tmp_path / "model.safetensors")
    for name in (name for name in tensors if "input_layernorm" in name):
        tensors[name][::7] *= 9
    save_file(tensors, tmp_path / "model.safetensors")
    results = quantized(tmp_path, text(90), Recipe(method=method, bits=4, group_size=-1, symmetric=False))
    for layer_idx, result in results.items():
        prefix = f"model.layers.{layer_idx}.self_attn.indexer"
        linears = {linear.name: linear for linear in result.linears if ".indexer." in linear.name}
        assert set(linears) == (set() if layer_idx == 1 else {f"{prefix}.wq_b", f"{prefix}.wk"})
        assert not any(".indexer." in name for name in [*result.remarks, *result.unquantized])
        changed = {name: tensor for name, tensor in result.tensors.items() if ".indexer." in name}
        if method == "gptq" or layer_idx == 1:
            assert not changed
            continue
        router = f"{prefix}.weights_proj.weight"
        assert set(changed) == {router}
        factors = linears[f"{prefix}.wk"].input_scale
        assert factors is not None
        assert torch.equal(changed[router], tensors[router] * factors)
        # Powers of two round nothing.
        assert (torch.frexp(factors).mantissa == 0.5).all() and len(set(factors.tolist())) > 1


@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-5.2"])
def test_weights_of_a_point_get_the_same_rows(name: str, tmp_path: Path) -> None:
    model, token_ids = write(name, tmp_path), text(70)
    rows: dict[str, Tensor] = {}

    def collect(path: str) -> Any:
        return lambda module, arguments: rows.update({path: arguments[0].flatten(0, -2)})

    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(collect(path))
    with torch.no_grad():
        model(torch.tensor(token_ids))
    with open_source(tmp_path) as source:
        config = read_config(source.config())
    indexed = 0
    for layer_idx, of_layer in enumerate(config.layers):
        for point in (point for stage in stages_of(config, of_layer) for fold in stage for point in fold.points):
            paths = [f"model.layers.{layer_idx}.{weight}" for weight in point.weights]
            if "self_attn" in paths[0]:
                indexed += sum(".indexer." in path for path in paths)
                assert all(torch.equal(rows[path], rows[paths[0]]) for path in paths)
    assert indexed == sum(".indexer.w" in path and "weights" not in path for path in rows) > 0


def test_shared_selections_are_those_of_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several batches, and runs that end before the indexer, states are those of transformers."""
    model, token_ids = write("glm-5.2", tmp_path), text(50, 40, 60)
    monkeypatch.setattr(layer, "_TOKENS_AT_ONCE", 60)
    with torch.no_grad():
        expected = [model(torch.tensor([ids]), output_hidden_states=True).hidden_states for ids in token_ids]
    with open_source(tmp_path) as source:
        config = read_config(source.config())
        batches = batches_of(token_ids, config)
        assert len(batches) == len(token_ids)
        runner = TextRunner(source, config, batches)
        states = runner.embed()
        # The last of transformers' states is normalised.
        for layer_idx in range(config.num_layers - 1):
            outputs = list(runner.run(layer_idx, source.get, states))
            early = InputSums([f"model.layers.{layer_idx}.self_attn.q_a_proj.weight"])
            cut = list(runner.run(layer_idx, source.get, states, early))
            assert all(torch.equal(*pair) for pair in zip(cut, states, strict=True))
            states = outputs
            for ours, of_sequence in zip(states, expected, strict=True):
                theirs = of_sequence[layer_idx + 1][0]
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))


@pytest.mark.parametrize("num_finished", [1, 2])
def test_a_resumed_run_gives_the_same_bits(num_finished: int, tmp_path: Path) -> None:
    """The finished layers are those that lend their selection, or they borrow it as well."""
    write("glm-5.2", tmp_path)
    recipe = Recipe(bits=8, group_size=-1, symmetric=False)
    whole = quantized(tmp_path, text(80, 40), recipe)
    rest = quantized(
        tmp_path,
        text(80, 40),
        recipe,
        finished=lambda layer_idx: whole[layer_idx] if layer_idx < num_finished else None,
    )
    assert rest.keys() == set(range(num_finished, 3))
    for layer_idx, found in rest.items():
        for ours, theirs in zip(found.linears, whole[layer_idx].linears, strict=True):
            assert ours.name == theirs.name and torch.equal(ours.levels, theirs.levels)
            assert torch.equal(ours.scales, theirs.scales)
