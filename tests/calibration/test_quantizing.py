"""quantize_layers on tiny models of every kind, beside transformers."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from pagewick.calibration import quantizing
from pagewick.calibration.folding import LayerTensors, absorb
from pagewick.calibration.layer import TextRunner, batches_of
from pagewick.calibration.quantizing import quantize_layers
from pagewick.calibration.stages import stages_of
from pagewick.errors import ConfigError
from pagewick.models.config import ModelConfig
from pagewick.models.registry import read_config
from pagewick.quantization.calibrated.results import LayerResult, Recipe
from pagewick.quantization.calibrated.rounding import round_to_nearest
from pagewick.weights.opening import open_source
from pagewick.weights.source import TensorSource
from tests.models.checkpoints import make_model, save
from tests.models.variants import VARIANTS

VOCABULARY: Final = 193
# Sizes that groups of 32 divide.
WIDE: Final = {"hidden_size": 96, "intermediate_size": 96}
# A variant for each kind of block, attention, fused weight and norm.
KINDS: Final = (
    "llama-bias-tied", "llama-1", "qwen3", "phi-3-mini-4k", "phi-gqa-qk-layernorm", "starcoder", "gpt-bigcode-mha",
    "starcoder2-3b", "pythia", "gemma-2", "granite-untied-bias", "mixtral", "qwen2-moe-dense-layers",
    "deepseek-v2-lite", "deepseek-v3", "deepseek-v3.2", "glm-5.2", "a.x-k2", "olmo-2", "ministral-3", "command-r-plus",
    "qwen3.5", "lfm3", "granite-4-h-moe", "jamba", "nemotron-h", "nemotron-3-latents", "falcon-h1",
)  # fmt: skip

# Those whose tokens see a selection of the tokens before them.
SELECTIVE: Final = ("deepseek-v3.2", "glm-5.2", "a.x-k2")

# The deep run takes them all.
WHOLE: Final = (
    [(method, name) for method in ("gptq", "awq") for name in KINDS]
    if os.environ.get("PAGEWICK_DEEP") == "1"
    else [
        ("gptq", "starcoder"),
        ("awq", "deepseek-v3"),
        ("awq", "deepseek-v3.2"),
        ("gptq", "glm-5.2"),
        ("awq", "phi-gqa-qk-layernorm"),
        ("gptq", "qwen2-moe-dense-layers"),
        ("awq", "lfm3"),
        ("gptq", "nemotron-h"),
        ("awq", "falcon-h1"),
    ]
)


def text(*lens: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(2, VOCABULARY, (num_tokens,), generator=generator).tolist() for num_tokens in lens]


def write(name: str, directory: Path, entries: dict[str, Any] | None = None) -> nn.Module:
    """Write a variant's checkpoint, with these entries of config.json in place of its own; return the model."""
    model = make_model(name, {**VARIANTS[name].all_entries(), **(entries or {})})
    save(model, directory)
    return model


def quantized(directory: Path, token_ids: list[list[int]], recipe: Recipe, **options: Any) -> dict[int, LayerResult]:
    found: dict[int, LayerResult] = {}
    with open_source(directory) as source:
        quantize_layers(source, recipe, token_ids, on_layer=found.__setitem__, **options)
    return found


@pytest.mark.parametrize("name", KINDS)
def test_states_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model, token_ids = write(name, tmp_path), text(40, 1, 33)
    with torch.no_grad():
        expected = [model(torch.tensor([ids]), output_hidden_states=True).hidden_states for ids in token_ids]
    with open_source(tmp_path) as source:
        config = read_config(source.config())
        runner = TextRunner(source, config, batches_of(token_ids, config))
        states = runner.embed()
        # The last of transformers' states is normalised.
        for layer_idx in range(config.num_layers - 1):
            states = list(runner.run(layer_idx, source.get, states))
            assert len(states) == 1
            rows = torch.cat([of_sequence[layer_idx + 1][0] for of_sequence in expected])
            torch.testing.assert_close(states[0], rows, rtol=1e-3, atol=1e-3 * float(rows.abs().max()))


@pytest.mark.parametrize("name", KINDS)
def test_factors_change_no_state(name: str, tmp_path: Path) -> None:
    """Every fold of every layer is given random factors, and nothing is quantized."""
    write(name, tmp_path)
    with open_source(tmp_path) as source:
        check_factors(source, read_config(source.config()))


def check_factors(source: TensorSource, config: ModelConfig) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.inference_mode():
        runner = TextRunner(source, config, batches_of(text(50, 9), config))
        states = runner.embed()
        for layer_idx, layer in enumerate(config.layers):
            tensors = LayerTensors(source.get, partial(runner.name, layer_idx))
            for fold in (fold for stage in stages_of(config, layer) for fold in stage):
                if fold.absorber is None:
                    continue
                paths = [path for point in fold.points for path in point.weights]
                num_columns = tensors.weight(paths[0]).shape[1]
                factors = 0.5 + 2 * torch.rand(num_columns, generator=generator)
                factors = absorb(fold.absorber, factors, tensors)
                for path in paths:
                    tensors.change(f"{path}.weight", tensors.weight(path) * factors)
            (before,), (after,) = (list(runner.run(layer_idx, get, states)) for get in (source.get, tensors.get))
            torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-4 * float(before.abs().max()))
            # A layer of one part has one norm, and may have one projection that reads what it gives.
            assert len(tensors.changed) >= (2 if layer.attention is None or layer.mlp is None else 3)
            states = [before]


def test_a_norm_without_a_weight_takes_no_factors(tmp_path: Path) -> None:
    write("galactica-30b", tmp_path)
    with open_source(tmp_path) as source:
        config = read_config(source.config())
    inputs, values, up, down = (stage[0] for stage in stages_of(config, config.layers[0]))
    assert values.absorber is not None
    for fold in (inputs, up):
        assert fold.absorber is None and fold.reason == "no norm with a weight comes before it"
    assert down.absorber is None
    results = quantized(tmp_path, text(90), Recipe(method="awq", bits=8, group_size=-1, symmetric=False))
    assert [len(result.linears) for result in results.values()] == [6] * 3


@pytest.mark.parametrize(("method", "name"), WHOLE)
def test_every_linear_layer_is_quantized(name: str, method: Any, tmp_path: Path) -> None:
    write(name, tmp_path)
    recipe = Recipe(method=method, bits=8, group_size=-1, symmetric=False)
    results = quantized(tmp_path, text(90, 90), recipe)
    with open_source(tmp_path) as source:
        config, names = read_config(source.config()), set(source.names())
        runner = TextRunner(source, config, batches_of(text(50, 9), config))
        states = runner.embed()
        for layer_idx, result in results.items():
            tensors = LayerTensors.of_result(source.get, result)
            (before,), (after,) = (list(runner.run(layer_idx, get, states)) for get in (source.get, tensors.get))
            errors = (after - before).square().mean(dim=1) / (before - states[0]).square().mean()
            # With an indexer, a few tokens see another token than before, and differ by more than rounding.
            assert (errors.median() if name in SELECTIVE else errors.mean()) < 2e-3
            for linear in result.linears:
                shape = source.shape(f"{linear.name}.weight")
                assert linear.levels.shape == shape and linear.scales.shape == (shape[0], 1)
                assert linear.input_scale is None or linear.input_scale.shape == shape[1:]
            states = [before]
    assert results.keys() == set(range(config.num_layers))
    linears = {f"{linear.name}.weight" for result in results.values() for linear in result.linears}
    norms = {name for name in names if "norm" in name or "ln_" in name or name.endswith("bias")}
    ends = ("embed_tokens.weight", "embeddings.weight", "lm_head.weight", "A_log", ".D", "conv.weight", "conv1d.weight")
    ends += ("embed_in.weight", "embed_out.weight")
    others = {name for name in names - norms - linears if not name.endswith(ends)}
    assert all(
        "gate.weight" in name or "router" in name or "w" in name.rsplit(".", 2)[1] or "scale" in name for name in others
    ), others
    changed = set().union(*(result.tensors for result in results.values()))
    # OLMo 2 has no norm before a projection, so that nothing but weights that are quantized takes factors.
    assert bool(changed) == (method == "awq" and name != "olmo-2") and not changed & linears


def test_one_layer_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("llama", tmp_path, WIDE)
    blocks: list[weakref.ref[Any]] = []
    build = TextRunner._build

    def built(*arguments: Any) -> Any:
        assert all(reference() is None for reference in blocks)
        result = build(*arguments)
        blocks.append(weakref.ref(result[0]))
        return result

    monkeypatch.setattr(TextRunner, "_build", built)
    read: list[str] = []

    def on_layer(layer_idx: int, result: LayerResult) -> None:
        assert {name.split(".")[2] for name in read if "layers" in name} == {str(layer_idx)}
        read.clear()

    with open_source(tmp_path) as source:
        get = source.get
        monkeypatch.setattr(source, "get", lambda name: read.append(name) or get(name))  # type: ignore[func-returns-value]
        quantize_layers(source, Recipe(group_size=32), text(80), on_layer=on_layer)
    assert len(blocks) == 3 * 5 - 1


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_resumed_run_gives_the_same_bits(method: Any, tmp_path: Path) -> None:
    write("qwen3", tmp_path, WIDE)
    recipe = Recipe(method=method, group_size=32, symmetric=method == "gptq")
    whole = quantized(tmp_path, text(80, 40), recipe)
    rest = quantized(
        tmp_path, text(80, 40), recipe, finished=lambda layer_idx: whole.get(layer_idx if layer_idx < 2 else -1)
    )
    assert rest.keys() == {2} and whole.keys() == {0, 1, 2}
    for expected, found in zip(whole[2].linears, rest[2].linears, strict=True):
        assert expected.name == found.name and torch.equal(expected.levels, found.levels)
        assert torch.equal(expected.scales, found.scales)
        assert expected.zeros is found.zeros is None or torch.equal(*(one.zeros for one in (expected, found)))  # type: ignore[arg-type]
    assert all(torch.equal(tensor, rest[2].tensors[name]) for name, tensor in whole[2].tensors.items())


def test_later_layers_see_the_errors_of_earlier_ones(tmp_path: Path) -> None:
    write("llama", tmp_path, WIDE)
    recipe = Recipe(group_size=32, bits=2)
    whole = quantized(tmp_path, text(80), recipe)
    # The last layer alone, behind layers as they are in the checkpoint.
    alone = quantized(tmp_path, text(80), recipe, finished=lambda index: LayerResult(()) if index < 2 else None)
    assert not torch.equal(whole[2].linears[0].levels, alone[2].linears[0].levels)


def test_experts_with_few_tokens_are_rounded_to_nearest(tmp_path: Path) -> None:
    write("mixtral", tmp_path, WIDE)
    recipe = Recipe(group_size=32)
    results = quantized(tmp_path, text(220), recipe)
    remarks = {name: remark for result in results.values() for name, remark in result.remarks.items()}
    linears = {linear.name: linear for result in results.values() for linear in result.linears}
    experts = {name for name in linears if ".experts." in name}
    assert remarks and remarks.keys() < experts
    with open_source(tmp_path) as source:
        for name in experts:
            weight = source.get(f"{name}.weight").float()
            is_nearest = torch.equal(linears[name].levels, round_to_nearest(weight, recipe).levels)
            assert is_nearest == (name in remarks)
    assert all("tokens of the text use it; 64 must" in remark for remark in remarks.values())


def test_awq_rounds_to_nearest_without_compensation(tmp_path: Path) -> None:
    write("llama", tmp_path, WIDE)
    found = [
        quantized(tmp_path, text(200), Recipe(method="awq", group_size=32, compensation=is_compensated))[0].linears[0]
        for is_compensated in (True, False)
    ]
    with open_source(tmp_path) as source:
        weight = source.get(f"{found[0].name}.weight")
    assert all(one.input_scale is not None for one in found)
    distances = [float(((one.dequantize() / one.input_scale) - weight).square().mean()) for one in found]
    assert distances[1] < distances[0]


def test_awq_says_which_weights_cannot_be_scaled(tmp_path: Path) -> None:
    write("starcoder2-3b", tmp_path)
    results = quantized(tmp_path, text(100), Recipe(method="awq", group_size=-1, symmetric=False))
    assert results[0].remarks == {
        f"model.layers.0.{name}": f"without AWQ's factors, because {reason}"
        for name, reason in (
            ("self_attn.o_proj", "several heads share the values that the inputs come from"),
            ("mlp.c_proj", "the inputs come from an activation without a gate"),
        )
    }
    of_name = {linear.name: linear for linear in results[0].linears}
    assert of_name["model.layers.0.mlp.c_proj"].input_scale is None
    assert of_name["model.layers.0.mlp.c_fc"].input_scale is not None


@pytest.mark.parametrize("method", ["gptq", "awq", "rtn"])
def test_weights_may_be_left_out(method: Any, tmp_path: Path) -> None:
    """A weight that stays as it is keeps its part in what AWQ does around it."""
    write("llama", tmp_path, {"hidden_size": 96, "intermediate_size": 72})

    def left_out(name: str, shape: tuple[int, int]) -> str | None:
        return "its head is small" if name.endswith("k_proj") and shape == (32, 96) else None

    results = quantized(tmp_path, text(90), Recipe(method=method, group_size=32), left_out=left_out)
    assert results[1].unquantized == {
        "model.layers.1.self_attn.k_proj": "its head is small",
        "model.layers.1.mlp.down_proj": "its 72 columns are not a multiple of the group of 32",
    }
    assert {linear.name.rsplit(".", 1)[1] for linear in results[1].linears} == {
        "q_proj", "v_proj", "o_proj", "gate_proj", "up_proj",
    }  # fmt: skip
    assert ("model.layers.1.self_attn.k_proj.weight" in results[1].tensors) == (method == "awq")


def test_rounding_to_nearest_needs_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("mixtral", tmp_path, WIDE)
    monkeypatch.delattr(TextRunner, "run")
    recipe = Recipe(method="rtn", group_size=32, symmetric=False)
    results = quantized(tmp_path, [], recipe)
    with open_source(tmp_path) as source:
        for linear in results[2].linears:
            weight = source.get(f"{linear.name}.weight")
            assert (linear.dequantize() - weight).abs().max() <= 0.51 * linear.scales.float().max() + 1e-6
    assert not any(result.remarks or result.tensors for result in results.values())


class CountedProgress(quantizing.Progress):
    def __init__(self) -> None:
        self.total = self.done = 0
        self.is_over = False

    def start(self, description: str, total_bytes: int, done_bytes: int = 0) -> None:
        self.total = total_bytes

    def advance(self, num_bytes: int) -> None:
        self.done += num_bytes

    def stop(self) -> None:
        self.is_over = True


@pytest.mark.parametrize("name", ["mixtral", "phi-gqa-qk-layernorm", "deepseek-v3", "glm-5.2"])
def test_progress_counts_every_weight_once(name: str, tmp_path: Path) -> None:
    write(name, tmp_path)
    progress = CountedProgress()
    results = quantized(tmp_path, [], Recipe(method="rtn", group_size=32), progress=progress)
    assert progress.done == progress.total > 0 and progress.is_over
    kept = CountedProgress()
    quantized(tmp_path, [], Recipe(method="rtn", group_size=32), progress=kept, finished=results.get)
    assert kept.done == kept.total == progress.total


@pytest.mark.parametrize(
    ("token_ids", "words"),
    [
        ([[5] * 63], "the text has 63 tokens, and at least 64 are needed"),
        ([[5] * 513], "a sequence of 513 tokens, and the model reads 512"),
        ([[5] * 99, [193]], "outside of the vocabulary of 193"),
    ],
)
def test_texts_that_the_model_cannot_read_are_errors(token_ids: list[list[int]], words: str, tmp_path: Path) -> None:
    write("llama", tmp_path)
    with pytest.raises(ConfigError, match=words):
        quantized(tmp_path, token_ids, Recipe(group_size=-1))


def test_layers_that_read_more_than_hidden_states_are_refused(tmp_path: Path) -> None:
    write("gemma-4-31b", tmp_path)
    with pytest.raises(ConfigError, match="Gemma4ForCausalLM cannot be run layer by layer"):
        quantized(tmp_path, text(70), Recipe(group_size=-1))


def test_factors_do_not_pass_a_clamped_activation(tmp_path: Path) -> None:
    write("gpt-oss", tmp_path)
    with open_source(tmp_path) as source:
        config = read_config(source.config())
    downs = stages_of(config, config.layers[0])[-1]
    assert len(downs) == 7 and all(fold.absorber is None and "activation" in fold.reason for fold in downs)
    results = quantized(tmp_path, text(70), Recipe(method="awq", group_size=32))
    assert len(results) == config.num_layers


def test_factors_do_not_pass_bounded_products(tmp_path: Path) -> None:
    """Those of an MLP, of a shared expert or of the others; the second layer has none."""
    write("step-3.7", tmp_path)
    with open_source(tmp_path) as source:
        config = read_config(source.config())
    for layer_idx, layer in enumerate(config.layers):
        downs = stages_of(config, layer)[-1]
        assert len(downs) == (1 if layer_idx == 0 else 9)
        assert all((fold.absorber is not None) == (layer_idx == 1) for fold in downs)


@pytest.mark.parametrize("name", ["deepseek-v2-lite", *SELECTIVE])
def test_inputs_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """kv_b_proj has no product of its own in Pagewick, and experts get some of the tokens each."""
    model, token_ids = write(name, tmp_path), text(70)
    seen: dict[str, list[Tensor]] = {}

    def collect(name: str) -> Callable[..., None]:
        return lambda module, arguments: seen.setdefault(name, []).append(arguments[0].flatten(0, -2))

    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(collect(path))
    with torch.no_grad():
        model(torch.tensor(token_ids))
    sums: dict[str, Tensor] = {}
    with open_source(tmp_path) as source, pytest.MonkeyPatch.context() as patch:

        def pop(self: Any, name: str) -> Any:
            found = self._sums.pop(name)
            if found.num_rows:
                sums[name.removesuffix(".weight")] = found.gram().clone()
            return found

        patch.setattr(quantizing.InputSums, "pop", pop)
        # With finished layers that nothing has changed, each layer gets the inputs of the original.
        for layer_idx in range(3):
            quantize_layers(
                source,
                Recipe(bits=8, group_size=-1, symmetric=False),
                token_ids,
                on_layer=lambda index, result: None,
                finished=lambda index, this=layer_idx: None if index == this else LayerResult(()),  # type: ignore[misc]
            )
    compared = [path for path in sums if path in seen]
    assert any("kv_b_proj" in path for path in compared) and any("o_proj" in path for path in compared)
    for path in compared:
        rows = torch.cat(seen[path])
        expected = rows.t() @ rows
        # Later weights of a layer get the inputs that the quantized weights before them make.
        torch.testing.assert_close(sums[path], expected, rtol=0.1, atol=0.05 * float(expected.abs().max()))
