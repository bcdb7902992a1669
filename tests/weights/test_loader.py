"""Routing of checkpoint tensors to modules, with modules made by hand."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pagewick.errors import ModelLoadError
from pagewick.weights.loader import load_weights
from pagewick.weights.source import TensorSource


class MemorySource(TensorSource):
    """A source over a dict; it records the tensors that are read."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.events: list[str] = []

    def names(self) -> Sequence[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def get(self, name: str) -> Tensor:
        self.events.append(f"get {name}")
        return self.tensors[name]

    def release(self, tensor: Tensor) -> None:
        """Record the tensor whose memory this is, whole or in part. Fails if there is none."""
        address = tensor.data_ptr()
        (name,) = (n for n, t in self.tensors.items() if t.data_ptr() <= address < t.data_ptr() + t.nbytes)
        self.events.append(f"release {name}")

    def config(self) -> dict[str, Any]:
        return {}

    def generation_config(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self.events.append("close")


class Plain(nn.Module):
    """One weight, and a bias on request."""

    def __init__(self, *shape: int, has_bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, torch.nan), requires_grad=False)
        self.bias = nn.Parameter(torch.full(shape[:1], torch.nan), requires_grad=False) if has_bias else None
        self.num_finished = 0

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        yield None, "weight"
        if self.bias is not None:
            yield None, "bias"

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        assert part is None
        parameter = self.get_parameter(name)
        if tensor.shape != parameter.shape:
            raise ModelLoadError(f"shape {list(tensor.shape)} where {list(parameter.shape)} is expected")
        parameter.copy_(tensor)

    def finish_loading(self) -> None:
        assert not self.weight.isnan().any()
        self.num_finished += 1


class Fused(nn.Module):
    """The rows of several checkpoint tensors, one above the other."""

    def __init__(self, parts: dict[str, int], in_features: int) -> None:
        super().__init__()
        self.parts = parts
        self.weight = nn.Parameter(torch.full((sum(parts.values()), in_features), torch.nan), requires_grad=False)

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        return [(part, "weight") for part in self.parts]

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        assert name == "weight" and part is not None
        start = sum(self.parts[other] for other in list(self.parts)[: list(self.parts).index(part)])
        self.weight[start : start + self.parts[part]].copy_(tensor)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = Fused({"q_proj": 4, "k_proj": 2, "v_proj": 2}, 3)
        self.experts = Fused({"experts.0.up": 2, "experts.1.up": 2}, 3)
        self.norm = Plain(3)


class Model(nn.Module):
    ignored_weights: tuple[str, ...] = (r".*\.inv_freq",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = Plain(2, 3, has_bias=True)
        self.activation = nn.SiLU()


def checkpoint() -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {"head.bias": (2,), "head.weight": (2, 3)}
    for i in (1, 0):
        shapes |= {
            f"layers.{i}.v_proj.weight": (2, 3),
            f"layers.{i}.q_proj.weight": (4, 3),
            f"layers.{i}.k_proj.weight": (2, 3),
            f"layers.{i}.experts.1.up.weight": (2, 3),
            f"layers.{i}.experts.0.up.weight": (2, 3),
            f"layers.{i}.norm.weight": (3,),
        }
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def fails(model: nn.Module, tensors: dict[str, Tensor], **options: Any) -> str:
    source = MemorySource(tensors)
    with pytest.raises(ModelLoadError) as caught:
        load_weights(model, source, **options)
    assert len(str(caught.value).splitlines()) <= 6
    return str(caught.value)


def test_every_tensor_arrives() -> None:
    model, tensors = Model(), checkpoint()
    load_weights(model, MemorySource(tensors))
    state = model.state_dict()
    for i in (0, 1):
        fused = [tensors[f"layers.{i}.{part}.weight"] for part in ("q_proj", "k_proj", "v_proj")]
        assert torch.equal(state[f"layers.{i}.qkv_proj.weight"], torch.cat(fused))
        fused = [tensors[f"layers.{i}.experts.{expert}.up.weight"] for expert in (0, 1)]
        assert torch.equal(state[f"layers.{i}.experts.weight"], torch.cat(fused))
        assert torch.equal(state[f"layers.{i}.norm.weight"], tensors[f"layers.{i}.norm.weight"])
    assert torch.equal(state["head.weight"], tensors["head.weight"])
    assert torch.equal(state["head.bias"], tensors["head.bias"])


def test_streams_in_file_order_and_releases_each_tensor_at_once() -> None:
    source = MemorySource(checkpoint())
    load_weights(Model(), source)
    assert source.events == [f"{verb} {name}" for name in checkpoint() for verb in ("get", "release")]


def test_finishes_every_module_once_after_all_is_loaded() -> None:
    model = Model()
    load_weights(model, MemorySource(checkpoint()))
    assert [m.num_finished for m in model.modules() if isinstance(m, Plain)] == [1, 1, 1]


def test_modules_of_other_processes_are_not_read() -> None:
    """Their tensors must still be there."""
    model, source = Model(), MemorySource(checkpoint())
    model.absent = (model.layers[1],)  # type: ignore[assignment]
    load_weights(model, source)
    read = [event.removeprefix("get ") for event in source.events if event.startswith("get")]
    assert read == [name for name in checkpoint() if not name.startswith("layers.1.")]
    assert [m.num_finished for m in model.modules() if isinstance(m, Plain)] == [1, 0, 1]
    tensors = checkpoint()
    del tensors["layers.1.norm.weight"]
    assert "layers.1.norm.weight" in fails(model, tensors)


def test_a_module_on_its_own() -> None:
    model = Plain(2)
    load_weights(model, MemorySource({"weight": torch.ones(2)}))
    assert model.weight.tolist() == [1, 1]


def test_missing_tensors_are_found_before_reading() -> None:
    tensors = {name: tensor for name, tensor in checkpoint().items() if "layers.1" not in name}
    source = MemorySource(tensors)
    with pytest.raises(ModelLoadError, match="lacks 6 tensors") as caught:
        load_weights(Model(), source)
    assert "layers.1.q_proj.weight" in str(caught.value) and "and 1 more" in str(caught.value)
    assert source.events == []


def test_unexpected_tensors() -> None:
    extra = {f"layers.{i}.qkv_proj.weight": torch.zeros(1) for i in range(6)}
    message = fails(Model(), checkpoint() | extra)
    assert "no place for 6 tensors" in message and "layers.4.qkv_proj.weight and 1 more" in message
    assert "layers.5" not in message


def test_a_bias_that_the_model_does_not_have_must_be_zeros() -> None:
    bias = torch.zeros(4)
    load_weights(Model(), MemorySource(checkpoint() | {"layers.0.q_proj.bias": bias}))
    bias[3] = 1e-7
    assert "layers.0.q_proj.bias holds other numbers" in fails(Model(), checkpoint() | {"layers.0.q_proj.bias": bias})
    assert "no place for 1 tensor: q_proj.bias" in fails(Model(), checkpoint() | {"q_proj.bias": torch.zeros(4)})


def test_ignored_tensors_are_neither_read_nor_missed() -> None:
    extra = {"layers.0.rope.inv_freq": torch.zeros(1), "visual.weight": torch.zeros(1)}
    source = MemorySource(checkpoint() | extra)
    load_weights(Model(), source, ignore=[r"visual\..*"])
    assert not any("inv_freq" in event or "visual" in event for event in source.events)


def test_patterns_match_whole_names() -> None:
    extra = {"not_visual.weight": torch.zeros(1), "a.inv_freq.weight": torch.zeros(1)}
    message = fails(Model(), checkpoint() | extra, ignore=["visual.*"])
    assert "not_visual.weight, a.inv_freq.weight" in message


def test_an_expected_tensor_cannot_be_ignored() -> None:
    tensors = checkpoint()
    model = Model()
    load_weights(model, MemorySource(tensors), ignore=[".*"])
    assert torch.equal(model.head.weight, tensors["head.weight"])
    del tensors["head.weight"]
    assert "head.weight" in fails(Model(), tensors, ignore=[".*"])


def test_wrong_shape_names_the_tensor() -> None:
    message = fails(Model(), checkpoint() | {"layers.1.norm.weight": torch.zeros(4)})
    assert message == "cannot load layers.1.norm.weight: shape [4] where [3] is expected"


def test_progress_counts_bytes_and_stops_after_an_error() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.calls: list[tuple[str, int]] = []

        def start(self, description: str, total_bytes: int, done_bytes: int = 0) -> None:
            self.calls.append((description, total_bytes))

        def advance(self, num_bytes: int) -> None:
            self.calls.append(("advance", num_bytes))

        def stop(self) -> None:
            self.calls.append(("stop", 0))

    recorder = Recorder()
    tensors = {"weight": torch.ones(2, 3, dtype=torch.bfloat16), "bias": torch.ones(2)}
    load_weights(Plain(2, 3, has_bias=True), MemorySource(tensors), progress=recorder)
    assert recorder.calls == [("loading weights", 20), ("advance", 12), ("advance", 8), ("stop", 0)]
    recorder.calls.clear()
    tensors["weight"] = torch.ones(3, 2)
    fails(Plain(2, 3, has_bias=True), tensors, progress=recorder)
    assert recorder.calls[-1] == ("stop", 0)


def test_two_modules_must_not_expect_the_same_tensor() -> None:
    model = nn.Module()
    model.q_proj = Plain(4, 3)
    model.qkv_proj = Fused({"q_proj": 4}, 3)
    with pytest.raises(AssertionError, match=r"q_proj\.weight"):
        load_weights(model, MemorySource({}))


@pytest.mark.parametrize(("number", "is_refused"), [(math.nan, True), (math.inf, True), (-math.inf, False)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_small_tensor_that_is_not_finite_is_named(number: float, is_refused: bool, dtype: torch.dtype) -> None:
    model = nn.ModuleDict({"norm": Plain(5)})
    weight = torch.ones(5, dtype=dtype)
    weight[3] = number
    if not is_refused:
        load_weights(model, MemorySource({"norm.weight": weight}))
        return
    with pytest.raises(ModelLoadError, match=r"cannot load norm\.weight: it holds a NaN or infinity") as refused:
        load_weights(model, MemorySource({"norm.weight": weight}))
    assert "\n  download the model again" in str(refused.value)
    model["norm"].takes_infinity = True  # type: ignore[assignment]
    if number == math.inf:
        load_weights(model, MemorySource({"norm.weight": weight}))
    else:
        with pytest.raises(ModelLoadError, match=r"cannot load norm\.weight"):
            load_weights(model, MemorySource({"norm.weight": weight}))
