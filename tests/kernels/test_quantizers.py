"""Quantizers: their errors beside llama.cpp's own, what they write read by the `gguf` package, and what they refuse."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from torch import Tensor

from pagewick import kernels
from pagewick.kernels import reference
from pagewick.kernels.reference_quantizers import FORMATS, LARGEST
from pagewick.quantization.block_formats import OWN_FORMATS
from tests.kernels.conftest import NativeKernels, required_library
from tests.kernels.weights_to_quantize import (
    FIXTURES,
    dequantized,
    errors,
    gguf_quantized,
    importance,
    tensors,
)

TENSORS = tensors()
LLAMA_CPP = json.loads((FIXTURES / "quantizers.json").read_text())
GGML = [name for name in FORMATS if name not in OWN_FORMATS]
BLOCKS_OF_32 = [name for name in GGML if FORMATS[name].numbers == 32]


def test_tensors_are_those_that_llama_cpp_quantized() -> None:
    for title, x in TENSORS.items():
        assert x.double().square().mean().item() == pytest.approx(LLAMA_CPP[title]["mean square"][0], rel=1e-5)


@pytest.mark.parametrize("name", GGML)
@pytest.mark.parametrize("title", TENSORS)
def test_search_errs_no_more_than_llama_cpp(title: str, name: str) -> None:
    x, figures = TENSORS[title], LLAMA_CPP[title][name]
    # Constants have no error but that of rounding to float16, which may fall either way.
    rounding = 2.0**-11 * x.abs().max().item() if title == "constant blocks" else 0.0
    weighted, root = errors(x, dequantized(reference.quantize_weight(x, name), name), name, None)
    assert weighted <= max(1.02 * figures[0], rounding**2)
    assert root <= max(1.02 * figures[1], rounding)
    # With importance the other error may grow: it counts columns alike.
    weights = importance(x.shape[1])
    found = dequantized(reference.quantize_weight(x, name, weights), name)
    assert errors(x, found, name, weights)[0] <= max(1.02 * figures[2], 10 * rounding**2)


@pytest.mark.parametrize("name", BLOCKS_OF_32)
def test_without_search_blocks_of_32_are_those_of_the_gguf_package(name: str) -> None:
    for x in (*TENSORS.values(), TENSORS["gaussian"].bfloat16().float() * 1e4):
        assert torch.equal(reference.quantize_weight(x, name, search=False), gguf_quantized(x, name))


@pytest.mark.parametrize("name", FORMATS)
def test_search_finds_less_error_than_none(name: str) -> None:
    x = TENSORS["gaussian"]
    searched, plain = (
        errors(x, dequantized(reference.quantize_weight(x, name, search=search), name), name, None)[1]
        for search in (True, False)
    )
    assert searched == plain if name == "Q8_0" else 0.5 * plain < searched < 0.99 * plain


@pytest.mark.parametrize("search", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_numbers_that_a_format_has_stay_as_they_are(name: str, search: bool) -> None:
    kind = FORMATS[name]
    columns = torch.arange(256).view(-1, kind.group)
    # Every group has the lowest and the highest level.
    levels = (columns * 7 % (kind.top - kind.low + 1) + kind.low).float()
    levels[:, 0], levels[:, 1] = kind.low, kind.top
    for scale in (0.25, 2.0**-9, 8.0):
        x = scale * (levels - (8 if kind.has_zero else 0.5 * kind.top * kind.has_minimum)).view(1, 256)
        found = dequantized(reference.quantize_weight(x, name, search=search), name)
        # Where a block of 256 has minima, its scales are multiples of 1/15 or 1/63 of the largest one.
        tolerance = 2e-3 * kind.top * scale if kind.has_minimum and kind.scale_top else 0.0
        torch.testing.assert_close(found, x, rtol=0.0, atol=tolerance)


@pytest.mark.parametrize("title", ["gaussian", "shifted", "outlier columns", "embed_tokens"])
def test_int4_errs_less_than_q4_0_in_equal_groups_and_more_in_larger_ones(title: str) -> None:
    x = TENSORS[title]
    small, medium, large, q4_0 = (
        errors(x, dequantized(reference.quantize_weight(x, name), name), name, None)[1]
        for name in ("int4_g32", "int4_g64", "int4_g128", "Q4_0")
    )
    assert small < medium < large and small < q4_0


@pytest.mark.parametrize("value", [-10.0, 10.0])
def test_int4_stores_groups_of_one_number(value: float) -> None:
    x = torch.full((1, 128), value)
    for search in (True, False):
        found = dequantized(reference.quantize_weight(x, "int4_g128", search=search), "int4_g128")
        torch.testing.assert_close(found, x, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["Q4_0", "Q5_0", "Q8_0"])
def test_quantizing_twice_changes_nothing(name: str) -> None:
    for title in ("gaussian", "student", "outlier columns", "embed_tokens"):
        once = reference.quantize_weight(TENSORS[title], name, search=False)
        assert torch.equal(reference.quantize_weight(dequantized(once, name), name, search=False), once)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_and_dtypes_do_not_matter_to_a_row(name: str) -> None:
    x = TENSORS["student"].bfloat16()
    together = reference.quantize_weight(x, name)
    assert torch.equal(reference.quantize_weight(x[5:6].float(), name), together[5:6])
    halves = x.float().half()
    assert torch.equal(reference.quantize_weight(halves, name), reference.quantize_weight(halves.float(), name))
    # A block does not depend on the others of its row.
    half = reference.quantize_weight(x[:, 256:], name)
    assert torch.equal(half, together[:, together.shape[1] // 2 :])
    assert reference.quantize_weight(x[:0], name).shape == (0, together.shape[1])


def test_only_ratios_of_importance_matter_and_columns_without_any_are_kept() -> None:
    x, weights = TENSORS["gaussian"], importance(512)
    weights[64:128] = 0
    rows = reference.quantize_weight(x, "Q4_K", weights)
    assert torch.equal(rows, reference.quantize_weight(x, "Q4_K", weights * 2.0**-60))
    assert (dequantized(rows, "Q4_K") - x)[:, 64:128].abs().max() < 0.05
    assert torch.equal(
        reference.quantize_weight(x, "Q4_K", weights * 0), reference.quantize_weight(x, "Q4_K", torch.ones(512))
    )


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_that_cannot_be_stored_are_refused_with_their_row(name: str) -> None:
    for wrong in (torch.nan, -torch.inf, 2 * LARGEST):
        x = TENSORS["gaussian"].clone()
        x[3, 300] = x[9, 0] = wrong
        message = f"row 3 has a number that is not finite or above 2^28, which {name} cannot store"
        assert refused(x, name) == message
    x[3, 300] = x[9, 0] = LARGEST
    if name in GGML and name != "Q6_K":
        assert refused(x, name) == f"row 3 has numbers too large for {name}, whose scales are float16"


def refused(x: Tensor, name: str, weights: Tensor | None = None) -> str:
    with pytest.raises(ValueError) as caught:
        reference.quantize_weight(x, name, weights)
    return str(caught.value)


def test_what_does_not_fit_is_refused() -> None:
    assert refused(torch.ones(2, 384), "Q4_K") == "Q4_K has blocks of 256 columns, which a tensor [2, 384] does not fit"
    assert "[2, 48]" in refused(torch.ones(2, 48), "Q4_0") and "[64]" in refused(torch.ones(64), "Q4_0")
    assert "[2, 0]" in refused(torch.ones(2, 0), "Q4_0")
    assert "Q4_0, Q4_1" in refused(torch.ones(2, 32), "IQ4_XS")
    for weights in (torch.ones(31), -torch.ones(32), torch.full((32,), torch.nan), torch.ones(2, 32)):
        assert (
            refused(torch.ones(2, 32), "Q4_0", weights)
            == "importance must be 32 numbers of at least 0, one for each column"
        )


@functools.cache
def definition(title: str, name: str, dtype: torch.dtype, is_weighted: bool, search: bool) -> Tensor:
    weights = importance(TENSORS[title].shape[1]) if is_weighted else None
    return reference.quantize_weight(TENSORS[title].to(dtype), name, weights, search)


@pytest.mark.parametrize("name", FORMATS)
def test_native_quantizers_have_the_bits_of_the_definition(native: NativeKernels, name: str) -> None:
    dtypes = {"outlier columns": torch.float32, "student": torch.float16, "embed_tokens": torch.bfloat16}
    for title, dtype in (*dtypes.items(), ("subnormal scales", torch.float32), ("constant blocks", torch.float32)):
        x = TENSORS[title].to(dtype)
        for is_weighted, search in ((False, False), (False, True), (True, True)):
            expected = definition(title, name, dtype, is_weighted, search)
            weights = importance(x.shape[1]) if is_weighted else None
            assert torch.equal(native.quantize_weight(x, name, weights, search), expected), (title, is_weighted, search)


@pytest.mark.parametrize("name", ["Q4_0", "Q6_K"])
def test_native_quantizers_take_rows_that_lie_apart_and_few_of_them(native: NativeKernels, name: str) -> None:
    x = TENSORS["student"][:7, 256:]
    expected = reference.quantize_weight(x.contiguous(), name)
    assert torch.equal(native.quantize_weight(x, name), expected)
    assert torch.equal(native.quantize_weight(x.t().contiguous().t(), name), expected)
    assert native.quantize_weight(x[:0], name).shape == (0, expected.shape[1])


def test_native_quantizers_name_the_row_that_cannot_be_stored(native: NativeKernels) -> None:
    for wrong in (torch.nan, torch.inf, LARGEST):
        x = TENSORS["gaussian"].clone()
        x[5, 300] = x[9, 0] = wrong
        with pytest.raises(ValueError, match="row 5 has"):
            native.quantize_weight(x, "Q4_K")


def test_the_number_of_threads_changes_no_bit() -> None:
    library = required_library()
    x = TENSORS["student"].repeat(4, 3)
    found = []
    for num_threads in (1, 2, 3):
        library.set_num_threads(num_threads)
        found.append(kernels.quantize_weight(x, "Q4_K"))
    library.set_num_threads(torch.get_num_threads())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
