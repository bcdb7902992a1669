"""The unquantized method, and the choice of a layer's method."""

from __future__ import annotations

import pytest
import torch

from pagewick.errors import ConfigError, ModelLoadError
from pagewick.kernels.matrix import Matrix
from pagewick.quantization import method_chooser
from pagewick.quantization.method import LinearMethod, Storage, StorageSpec
from pagewick.quantization.packing import PLAIN
from pagewick.quantization.unquantized import UnquantizedMethod


def make_layer(in_features: int = 5, out_features: int = 7, dtype: torch.dtype = torch.float32) -> Storage:
    storage = Storage(StorageSpec(((None, out_features),), in_features, dtype, torch.device("cpu")))
    assert UnquantizedMethod().create(storage) == {"weight": PLAIN}
    return storage


def matrix_of(layer: Storage) -> Matrix:
    matrix: Matrix = layer.__dict__["matrix"]
    return matrix


def test_create_registers_one_frozen_parameter() -> None:
    layer = make_layer(dtype=torch.bfloat16)
    ((name, weight),) = layer.named_parameters()
    assert (name, weight.dtype, weight.requires_grad) == ("weight", torch.bfloat16, False)
    assert matrix_of(layer).plain().shape == (7, 5)


def test_apply_is_a_matrix_product() -> None:
    method: LinearMethod = UnquantizedMethod()
    layer = make_layer()
    weight = torch.arange(35.0).reshape(7, 5)
    method.load(layer, "weight", weight, out_offset=0)
    method.finish(layer)
    x, bias = torch.tensor([[[1.0, 0, 0, 0, 0], [0, 0, 2, 0, 1]]]), torch.arange(7.0)
    expected = [
        [[float(sum(a * b for a, b in zip(row, w, strict=True))) for w in weight.tolist()] for row in x[0].tolist()]
    ]
    assert method.apply(layer, x, None).tolist() == expected
    with_bias = [[[value + i for i, value in enumerate(row)] for row in expected[0]]]
    assert method.apply(layer, x, bias).tolist() == with_bias


def test_parts_are_loaded_in_any_order() -> None:
    method, layer = UnquantizedMethod(), make_layer(2, 6, torch.bfloat16)
    parts = {0: torch.ones(3, 2), 5: torch.full((1, 2), 3.0), 3: torch.full((2, 2), 2.0)}
    for offset, part in parts.items():
        method.load(layer, "weight", part, out_offset=offset)
    assert matrix_of(layer).plain()[:, 1].tolist() == [1, 1, 1, 2, 2, 3]


def test_load_converts_and_copies() -> None:
    method, layer = UnquantizedMethod(), make_layer(2, 1, torch.bfloat16)
    source = torch.tensor([[1.0, 1.001]], dtype=torch.float32)
    method.load(layer, "weight", source, out_offset=0)
    source.zero_()
    assert matrix_of(layer).plain().tolist() == [[1.0, 1.0]]  # 1.001 is nearest to 1 in bfloat16


@pytest.mark.parametrize(
    ("shape", "out_offset"), [((7, 4), 0), ((8, 5), 0), ((7, 5), 1), ((5,), 0), ((1, 7, 5), 0), ((1, 1), 0)]
)
def test_wrong_shapes(shape: tuple[int, ...], out_offset: int) -> None:
    layer = make_layer()
    with torch.no_grad():
        matrix_of(layer).data.fill_(9)
    with pytest.raises(ModelLoadError) as caught:
        UnquantizedMethod().load(layer, "weight", torch.zeros(shape), out_offset=out_offset)
    assert str(list(shape)) in str(caught.value) and "[7, 5]" in str(caught.value)
    assert (matrix_of(layer).data == 9).all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.bool])
def test_quantized_numbers_without_scales(dtype: torch.dtype) -> None:
    with pytest.raises(ModelLoadError, match=f"stored as {dtype}"):
        UnquantizedMethod().load(make_layer(), "weight", torch.zeros(7, 5, dtype=dtype), out_offset=0)


def test_unquantized_checkpoint() -> None:
    assert isinstance(method_chooser({"a.q_proj.weight": torch.bfloat16})("a.q_proj"), UnquantizedMethod)


@pytest.mark.parametrize("stored_type", ["Q1_0", "Q2_0", "Q8_1", "Q8_K"])
def test_a_block_format_is_refused_by_its_name(stored_type: str) -> None:
    choose = method_chooser({"a.q_proj.weight": stored_type, "a.k_proj.weight": torch.bfloat16})
    with pytest.raises(ConfigError, match=rf"a\.q_proj\.weight is stored as {stored_type}, .* not supported"):
        choose("a.q_proj")
    assert choose("a.k_proj") == UnquantizedMethod()


@pytest.mark.parametrize("stored_type", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float16])
def test_an_odd_dtype_is_refused_only_while_loading(stored_type: torch.dtype) -> None:
    """Integers are refused only while loading, where the error can name the tensor."""
    assert method_chooser({"a.weight": stored_type})("a") == UnquantizedMethod()
