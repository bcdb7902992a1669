"""Products of FP8 weights with activations in FP8: interpreted, against the exact numbers of both sides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from pagewick import kernels
from pagewick.config import EngineConfig
from pagewick.errors import ConfigError
from pagewick.kernels import batch_invariance, fp8_activations
from pagewick.kernels import triton as backend
from pagewick.kernels.block_formats import unpack
from pagewick.kernels.options import StoredExperts, StoredQuantized
from pagewick.kernels.quantized import QuantizedMatrix
from pagewick.kernels.reference_quantized import quantize_activations
from pagewick.kernels.triton.layouts import pack_rows, packed_shape, row_scales
from pagewick.quantization.ggml import GgmlMethod
from pagewick.quantization.method import Storage, StorageSpec
from tests.kernels.block_rows import random_rows
from tests.kernels.triton.harness import assert_close
from tests.kernels.triton.test_models import only_kernels
from tests.kernels.triton.test_quantized import random_x

pytest.importorskip("triton")
from pagewick.kernels.triton import fp8_products, launches
from pagewick.kernels.triton.moe import grouped_linear
from pagewick.kernels.triton.quantized import quantized_linear

GROUP = fp8_products.GROUP


@pytest.fixture(autouse=True)
def _required(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fp8_activations, "is_required", lambda: True)
    forget = fp8_products.form_on.cache_clear
    yield
    forget()


def weight_of(num_rows: int, num_columns: int, *, name: str = "fp8_g128", is_uniform: bool) -> tuple[Tensor, Tensor]:
    """Return a packed weight and its numbers [N, K] float64. is_uniform: all groups of a row have the first's scale."""
    rows = random_rows(name, num_rows, num_columns)
    if is_uniform:
        blocks = rows.view(num_rows, -1, int(name[5:]) + 4)
        blocks[:, :, :4] = blocks[:, :1, :4]
    data = torch.full(packed_shape(name, num_rows, num_columns), 255, dtype=torch.uint8)
    pack_rows(name, rows, data, 0)
    return data, unpack(name, rows).numbers().double()


def rounded(x: Tensor, group_size: int) -> Tensor:
    """Return the numbers that x [T, K] becomes, in float64."""
    levels, scales = quantize_activations(x, group_size)
    return levels.double() * scales.double().repeat_interleave(group_size, dim=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_columns", "group_size"), [(384, 128), (128, 128), (48, 48), (1040, 1040)])
def test_activations_have_the_bits_of_their_definition(num_columns: int, group_size: int, dtype: torch.dtype) -> None:
    x = random_x(7, 2 * num_columns, dtype)[:, :num_columns]
    x[1] = 0
    x[2, 3], x[3, 5], x[4, num_columns - 1] = torch.nan, torch.inf, -torch.inf
    x[5] *= 2.0**-20
    x[6, ::3] *= 2.0**-9
    found, expected = fp8_products.quantize_activations(x, group_size), quantize_activations(x, group_size)
    assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(found[1].view(torch.int32), expected[1].view(torch.int32))


def test_the_largest_number_of_a_group_is_exact_and_others_have_four_bits() -> None:
    x = random_x(3, 256)
    numbers, groups = rounded(x, GROUP), x.double().unflatten(1, (2, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    errors = (numbers.unflatten(1, (2, GROUP)) - groups).abs()
    assert bool((errors[groups.abs() == largest] <= 1e-6).all())
    # Half a unit in the last place, or of the smallest numbers, which are multiples of 2^-9.
    assert bool((errors <= torch.maximum(groups.abs() / 16, largest / 448 * 2.0**-10) * 1.0001).all())


@pytest.mark.parametrize(
    ("kind", "num_tokens", "num_rows", "out_dtype"), [("some", 67, 65, torch.float16), ("many", 131, 7, torch.float32)]
)
def test_tiles(kind: str, num_tokens: int, num_rows: int, out_dtype: torch.dtype) -> None:
    """More than a tile in one direction or in both, with three groups of columns."""
    data, numbers = weight_of(num_rows, 384, is_uniform=False)
    x, bias = random_x(num_tokens, 384, torch.float16), random_x(1, num_rows, torch.float16)[0]
    out = torch.empty(num_tokens, num_rows, dtype=out_dtype)
    stored = launches.Stored(data, num_rows, 384, "fp8_g128")
    assert fp8_products.serves(kind, stored, x.dtype)
    fp8_products.multiply(kind, x, stored, bias, out)
    assert_close(out, rounded(x, GROUP) @ numbers.t() + bias.double(), absolute=1e-5 * float(numbers.abs().max()) * 384)


def test_tiles_of_experts() -> None:
    num_experts, num_rows, num_tokens = 3, 20, 41
    parts = [weight_of(num_rows, 256, is_uniform=False) for _ in range(num_experts)]
    data, numbers = torch.stack([part for part, _ in parts]), torch.stack([part for _, part in parts])
    weight = StoredExperts(data, num_experts, num_rows, 256, True, "fp8_g128")
    ids = torch.stack([torch.randperm(num_experts)[:2] for _ in range(num_tokens)]).to(torch.int32)
    ids[5, 1] = num_experts
    x = random_x(num_tokens, 256, torch.float16)
    found = grouped_linear(x, weight, ids)
    is_bad = torch.zeros(2 * num_tokens, dtype=torch.bool)
    is_bad[11] = True
    assert found[is_bad].isnan().all()
    of_choices = rounded(x, GROUP).repeat_interleave(2, 0)[~is_bad]
    expected = torch.einsum("ck,cnk->cn", of_choices, numbers[ids.flatten().long()[~is_bad]])
    assert_close(found[~is_bad], expected, absolute=1e-5 * float(numbers.abs().max()) * 256)


@pytest.mark.parametrize("form", [fp8_products.ROWS_INSIDE, fp8_products.BEHIND])
@pytest.mark.parametrize("name", ["fp8_g128", "fp8_g32"])
def test_rows_with_one_scale_go_through_pytorch(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_products, "form_on", lambda device: form)
    num_columns = 256 if name == "fp8_g128" else 160
    data, numbers = weight_of(32, num_columns, name=name, is_uniform=True)
    weight = StoredQuantized(data, 32, num_columns, name, True, row_scales=row_scales(name, data, num_columns))
    x, bias = random_x(21, num_columns, torch.bfloat16), random_x(1, 32, torch.bfloat16)[0]
    expected = rounded(x, num_columns) @ numbers.t()
    size = float(numbers.abs().max()) * num_columns
    assert_close(quantized_linear(x, weight, bias), expected + bias.double(), absolute=1e-4 * size)
    assert_close(quantized_linear(x, weight, None, torch.float32), expected, absolute=1e-5 * size)
    wide = torch.zeros(21, 40, dtype=torch.bfloat16)
    quantized_linear(x, weight, None, out=wide[:, 4:36])
    assert torch.equal(wide[:, 4:36], quantized_linear(x, weight)) and not wide[:, :4].any()


def test_the_faster_form_is_taken_if_its_result_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, product = torch.device("cpu"), fp8_products._product
    assert fp8_products.form_on(cpu) in (fp8_products.ROWS_INSIDE, fp8_products.BEHIND)
    for wrong, expected in (({"rows inside"}, "behind"), ({"rows inside", "behind"}, None)):
        fp8_products.form_on.cache_clear()
        for fault in ("refuses", "is wrong"):

            def other(form: str, *args: Any, fault: str = fault, wrong: set[str] = wrong) -> Tensor:
                if form in wrong and fault == "refuses":
                    raise RuntimeError("not on this GPU")
                return product(form, *args) * (2 if form in wrong else 1)

            monkeypatch.setattr(fp8_products, "_product", other)
            assert fp8_products.form_on(cpu) == expected
            fp8_products.form_on.cache_clear()


def test_a_form_that_takes_rows_for_adjacent_ones_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch's kernel for GPUs of capability 8.9 does. Behind the numbers of a packed row there are its scales."""
    product = fp8_products._product

    def of_adjacent_rows(form: str, left: Tensor, right: Tensor, *others: Any) -> Tensor:
        if form == fp8_products.ROWS_INSIDE:
            right = right.as_strided(right.shape, (1, len(right)))
        return product(form, left, right, *others)

    monkeypatch.setattr(fp8_products, "_product", of_adjacent_rows)
    assert fp8_products.form_on(torch.device("cpu")) == fp8_products.BEHIND


def test_scales_of_rows_are_found() -> None:
    data, _ = weight_of(16, 256, is_uniform=True)
    found = row_scales("fp8_g128", data, 256)
    assert found is not None and found.shape == (16,)
    assert row_scales("fp8_g128", weight_of(16, 256, is_uniform=False)[0], 256) is None
    assert row_scales("fp8_g128", weight_of(15, 256, is_uniform=True)[0], 256) is None
    assert row_scales("Q8_0", torch.zeros(packed_shape("Q8_0", 16, 256), dtype=torch.uint8), 256) is None
    layout = backend.layouts.LAYOUTS["fp8_g128"]
    matrix = QuantizedMatrix(data, 16, 256, "fp8_g128", True, torch.bfloat16, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pagewick.kernels.quantized.quantized_layout", lambda *args: layout)
        finished = matrix.finished()
        assert finished.row_scales is not None and torch.equal(finished.row_scales, found)
        patch.setattr(fp8_activations, "is_required", lambda: False)
        assert matrix.finished() is matrix


@pytest.mark.parametrize("is_uniform", [True, False])
def test_a_loaded_weight_is_multiplied_with_rounded_activations(is_uniform: bool) -> None:
    """From the file's rows to the product, with the kernels serving tensors on the CPU."""
    rows = random_rows("fp8_g128", 32, 256)
    if is_uniform:
        rows.view(32, 2, 132)[:, 1, :4] = rows.view(32, 2, 132)[:, 0, :4]
    x, numbers = random_x(18, 256, torch.bfloat16), unpack("fp8_g128", rows).numbers().double()
    method = GgmlMethod("fp8_g128")
    with only_kernels(), pytest.MonkeyPatch.context() as patch:
        # Both are never asked for together.
        patch.setattr(batch_invariance, "is_required", lambda: False)
        storage = Storage(StorageSpec(((None, 32),), 256, torch.bfloat16, torch.device("cpu")))
        method.create(storage)
        method.load(storage, "weight", rows[:20], out_offset=0)
        method.load(storage, "weight", rows[20:], out_offset=20)
        method.finish(storage)
        found = method.apply(storage, x, None, out_dtype=torch.float32)
    expected = rounded(x, 256 if is_uniform else GROUP) @ numbers.t()
    assert_close(found, expected, absolute=1e-5 * 256 * float(numbers.abs().max()))


def test_few_rows_keep_their_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    data, _ = weight_of(16, 256, is_uniform=True)
    scales = row_scales("fp8_g128", data, 256)
    for weight in (
        StoredQuantized(data, 16, 256, "fp8_g128", True),
        StoredQuantized(data, 16, 256, "fp8_g128", True, row_scales=scales),
    ):
        for num_tokens, is_same in ((1, True), (16, True), (17, False)):
            x = random_x(num_tokens, 256, torch.float16)
            found = quantized_linear(x, weight)
            with monkeypatch.context() as patch:
                patch.setattr(fp8_activations, "is_required", lambda: False)
                assert torch.equal(found, quantized_linear(x, weight)) == is_same


def test_other_weights_and_float32_keep_their_activations() -> None:
    data = torch.zeros(1, 1, dtype=torch.uint8)
    fp8, other = (launches.Stored(data, 1, 128, name) for name in ("fp8_g128", "Q8_0"))
    assert fp8_products.serves("many", fp8, torch.bfloat16)
    assert not fp8_products.serves("many", fp8, torch.float32)
    assert not fp8_products.serves("many", other, torch.bfloat16)
    assert not fp8_products.serves("few", fp8, torch.bfloat16)


@pytest.mark.parametrize(
    ("device", "facts", "expected"),
    [
        ("cpu", {}, "needs a GPU"),
        ("mps", {}, "needs a GPU"),
        ("cuda", {"why_off": "PAGEWICK_TRITON=0"}, "kernels for GPUs, which are off: PAGEWICK_TRITON=0"),
        ("cuda", {"hip": "6.4"}, "NVIDIA"),
        ("cuda", {"capability": (8, 6)}, "compute capability is 8.6; tensor cores multiply FP8 from 8.9 on"),
        ("cuda", {"form": None}, "install a newer PyTorch"),
        ("cuda", {"dtype": torch.float32}, "--dtype bfloat16"),
        ("cuda", {}, ""),
    ],
)
def test_what_the_flag_needs(
    device: str, facts: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    required: list[bool] = []
    monkeypatch.setattr(fp8_activations, "require", lambda: required.append(True))
    monkeypatch.setattr(backend, "why_off", lambda: facts.get("why_off", ""))
    monkeypatch.setattr(torch.version, "hip", facts.get("hip"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: facts.get("capability", (9, 0)))
    monkeypatch.setattr(fp8_products, "form_on", lambda device: facts.get("form", fp8_products.BEHIND))
    dtype = facts.get("dtype", torch.bfloat16)
    if not expected:
        kernels.require_fp8_activations(torch.device(device), dtype)
        assert required == [True]
        return
    with pytest.raises(ConfigError, match="--fp8-activations: ") as caught:
        kernels.require_fp8_activations(torch.device(device), dtype)
    assert expected in str(caught.value) and not required


def test_bits_cannot_be_independent_of_the_batch_at_the_same_time() -> None:
    with pytest.raises(ConfigError, match="--fp8-activations or --batch-invariant, not both"):
        EngineConfig(model="m", fp8_activations=True, batch_invariant=True)
