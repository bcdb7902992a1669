"""Every layout of GPTQ, AWQ, AutoRound and Marlin: one weight, read to the last bit of what it means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pagewick.errors import ConfigError, ModelLoadError
from pagewick.quantization.ggml import dequantize
from pagewick.weights.description import describe
from pagewick.weights.opening import open_source
from pagewick.weights.packed.config import packed_rules
from tests.weights.packed.writers import awq, gptq, marlin

NAME = "model.layers.0.mlp.up_proj"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int"}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "symmetric": True}}},
}


def weight_of(rows: int = 64, columns: int = 256) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(5))


def write_one(directory: Path, quantization: dict[str, Any] | None, tensors: dict[str, Tensor]) -> None:
    """Write a checkpoint of one weight, a norm and a head."""
    plain = {"model.norm.weight": torch.ones(4), "lm_head.weight": torch.ones(3, 4)}
    save_file(
        {**plain, **{key: tensor.contiguous() for key, tensor in tensors.items()}}, directory / "model.safetensors"
    )
    config = {"torch_dtype": "bfloat16", "quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value}))


def numbers_in(directory: Path) -> tuple[Tensor, str | torch.dtype]:
    """Return the weight's numbers in the model's order of columns, and the type in which it is kept."""
    with open_source(directory) as source:
        kind, found = source.stored_type(f"{NAME}.weight"), source.get(f"{NAME}.weight")
        assert found.shape == source.shape(f"{NAME}.weight") and found.dtype == source.dtype(f"{NAME}.weight")
        numbers = dequantize(kind, found, weight_of().shape[1]) if isinstance(kind, str) else found
        if (order := f"{NAME}.column_order") in source.names():
            numbers = numbers[:, source.get(order).argsort()]
    return numbers, kind


@pytest.mark.parametrize(
    ("options", "entries", "kind"),
    [
        ({}, {}, "int4_g128"),
        ({"bits": 2, "group_size": 64, "sym": False}, {}, "int4_g64"),
        ({"bits": 3, "group_size": 32, "sym": False}, {}, "int4_g32"),
        ({"sym": False}, {}, "int4_g128"),
        ({"sym": False, "is_v2": True}, {"checkpoint_format": "gptq_v2"}, "int4_g128"),
        ({"group_size": -1}, {}, "int4_g128"),
        ({"group_size": 64, "desc_act": True, "sym": False}, {}, "int4_g64"),
        ({"bits": 8}, {}, "Q8_0"),
        ({"bits": 8, "desc_act": True}, {}, "Q8_0"),
        ({"bits": 8, "sym": False}, {}, torch.float32),
        ({"group_size": 16}, {}, torch.float32),
    ],
)
def test_gptq(options: dict[str, Any], entries: dict[str, Any], kind: str | torch.dtype, tmp_path: Path) -> None:
    parts, meant = gptq(**options)(NAME, weight_of())
    config = {key: value for key, value in options.items() if key != "is_v2"}
    write_one(tmp_path, {**GPTQ, **config, **entries}, parts)
    numbers, found = numbers_in(tmp_path)
    assert torch.equal(numbers, meant)
    assert found == kind
    with open_source(tmp_path, mix="q4_0") as source:
        assert source.stored_type(f"{NAME}.weight") == torch.float32
        assert torch.equal(source.get(f"{NAME}.weight"), meant)
        assert not any("column_order" in name for name in source.names())


@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("version", ["gemm", "gemv", "gemv_fast"])
def test_awq(group_size: int, version: str, tmp_path: Path) -> None:
    parts, meant = awq(group_size, version)(NAME, weight_of())
    write_one(tmp_path, {**AWQ, "group_size": group_size, "version": version.upper()}, parts)
    numbers, kind = numbers_in(tmp_path)
    assert torch.equal(numbers, meant)
    assert kind == f"int4_g{128 if group_size == -1 else group_size}"


def test_gptqmodel_names_the_layout_of_awq_otherwise(tmp_path: Path) -> None:
    parts, meant = awq(64, "gemv_fast")(NAME, weight_of())
    entries = {name: value for name, value in AWQ.items() if name != "version"}
    write_one(tmp_path, {**entries, "group_size": 64, "checkpoint_format": "gemv_fast"}, parts)
    assert torch.equal(numbers_in(tmp_path)[0], meant)


@pytest.mark.parametrize("group_size", [128, -1])
@pytest.mark.parametrize(
    ("entries", "names"),
    [
        ({**GPTQ, "checkpoint_format": "marlin"}, ("B", "s")),
        ({**GPTQ, "is_marlin_format": True}, ("B", "s")),
        ({"quant_method": "marlin"}, ("B", "s")),
        ({**AWQ, "version": "marlin"}, ("qweight", "scales")),
    ],
)
def test_marlin(entries: dict[str, Any], names: tuple[str, str], group_size: int, tmp_path: Path) -> None:
    parts, meant = marlin(group_size, names)(NAME, weight_of())
    write_one(tmp_path, {**entries, "group_size": group_size}, parts)
    numbers, kind = numbers_in(tmp_path)
    assert torch.equal(numbers, meant)
    assert kind == "int4_g128"


@pytest.mark.parametrize(
    ("packing", "write"), [("auto_round:auto_gptq", gptq(group_size=64)), ("auto_round:auto_awq", awq(64))]
)
def test_auto_round(packing: str, write: Any, tmp_path: Path) -> None:
    parts, meant = write(NAME, weight_of())
    write_one(tmp_path, {**ROUND, "packing_format": packing, "extra_config": {NAME: {"group_size": 64}}}, parts)
    assert torch.equal(numbers_in(tmp_path)[0], meant)


LONG: Final = "model." + "a" * 3000 + "c"


@pytest.mark.parametrize(
    ("entries", "is_packed"),
    [
        ({**GPTQ, "dynamic": {"-:(.*a)*$": {}}}, True),
        ({**GPTQ, "dynamic": {r"-:(?!.*mlp)(\w+\.?)*$": {}}}, False),
        ({**ROUND, "extra_config": {"(a|aa)+$": {"bits": 16}}}, True),
        ({**ROUND, "extra_config": {r"a(a*)*c": {"bits": 16}}}, False),
        ({**COMPRESSED, "ignore": ["re:model(.|a)*d"]}, True),
        ({**COMPRESSED, "ignore": [r"re:model\.(?=a)(a+)+"]}, False),
    ],
)
def test_no_expression_takes_for_ever(entries: dict[str, Any], is_packed: bool) -> None:
    """Most would take Python's `re` longer than anyone waits. AutoRound's own reader searches in names."""
    rules = packed_rules({"quantization_config": entries})
    assert rules is not None and (rules.format_of(LONG) is not None) is is_packed


def test_an_expression_that_is_too_complex_is_named() -> None:
    rules = packed_rules({"quantization_config": {**COMPRESSED, "ignore": ["re:(.{1,1000}){1,1000}b"]}})
    words = r"quantization_config.ignore in config.json: '\(.*b' is too complex a regular expression\n  write"
    with pytest.raises(ModelLoadError, match=words):
        assert rules is not None and rules.format_of(LONG)


@pytest.mark.parametrize(
    ("name", "content", "write"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 64, "desc_act": False}, gptq(group_size=64)),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 64, "version": "GEMM", "zero_point": True}, awq(64)),
    ],
)
def test_a_file_beside_config_json_has_the_rules(
    name: str, content: dict[str, Any], write: Any, tmp_path: Path
) -> None:
    parts, meant = write(NAME, weight_of())
    write_one(tmp_path, None, parts)
    (tmp_path / name).write_text(json.dumps(content))
    assert torch.equal(numbers_in(tmp_path)[0], meant)


class TestWhichWeights:
    """Rules of config.json for single weights."""

    def labels(self, directory: Path, entries: dict[str, Any], **options: Any) -> list[str]:
        parts, _ = gptq(**options)(NAME, weight_of())
        write_one(directory, {**GPTQ, **entries}, parts)
        return [tensor.label for tensor in describe(directory).tensors]

    @pytest.mark.parametrize("sign", ["", "+:"])
    def test_dynamic_changes_a_weight(self, sign: str, tmp_path: Path) -> None:
        rules = {r"-:.*down.*": {}, rf"{sign}.*\.0\.mlp.*": {"bits": 8, "group_size": 32}}
        assert "GPTQ int8 g32" in self.labels(tmp_path, {"dynamic": rules}, bits=8, group_size=32)

    @pytest.mark.parametrize(
        "entries",
        [
            {"dynamic": {r"-:.*up_proj": {}}},
            {"modules_to_not_convert": ["mlp.up_proj"]},
            {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.down_proj"]]},
        ],
    )
    def test_a_packed_weight_that_is_said_to_be_plain(self, entries: dict[str, Any], tmp_path: Path) -> None:
        with pytest.raises(ModelLoadError, match=rf"{NAME}.*packed, and .* in config.json says that {NAME} is not"):
            self.labels(tmp_path, entries)

    def test_a_name_is_compared_by_components(self, tmp_path: Path) -> None:
        assert "GPTQ int4 g128" in self.labels(tmp_path, {"modules_to_not_convert": ["mlp.up", "layers.00"]})


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"bits": 5}, "quantization_config.bits in config.json is 5, and must be one of 2, 3, 4, 8"),
        ({"bits": True}, "bits in config.json is True"),
        ({"group_size": 0}, "group_size in config.json is 0, and must be a whole number above 0"),
        ({"checkpoint_format": "bitblas"}, "checkpoint_format in config.json is 'bitblas'"),
        ({"dynamic": {"-:(": {}}}, r"dynamic in config.json: '\(' is no regular expression.*\n  write a simpler"),
        ({"dynamic": {"+:.*": {"bits": 7}}}, r"dynamic\.\+:\.\*\.bits in config.json is 7"),
        ({"rotation": "hadamard"}, "rotation in config.json is 'hadamard'"),
        ({"desc_act": "yes"}, "desc_act in config.json is 'yes', and must be true or false"),
        ({"modules_in_block_to_quantize": [[3]]}, "lists of names"),
        ({"quant_method": "aqlm"}, "quantized with aqlm"),
    ],
)
def test_entries_that_are_refused(entries: dict[str, Any], words: str, tmp_path: Path) -> None:
    write_one(tmp_path, {**GPTQ, **entries}, gptq()(NAME, weight_of())[0])
    with pytest.raises((ModelLoadError, ConfigError), match=words):
        describe(tmp_path)
    with pytest.raises((ModelLoadError, ConfigError), match=words):
        open_source(tmp_path)


class TestContradictions:
    def written(self, directory: Path, changes: dict[str, Any], entries: dict[str, Any], **options: Any) -> None:
        parts, _ = gptq(**options)(NAME, weight_of())
        for suffix, change in changes.items():
            tensor = change(parts.pop(f"{NAME}.{suffix}"))
            parts |= {} if tensor is None else {f"{NAME}.{suffix}": tensor}
        write_one(directory, {**GPTQ, **entries}, parts)

    @pytest.mark.parametrize(
        ("changes", "entries", "words"),
        [
            ({"qzeros": lambda it: None}, {}, f"lacks {NAME}.qzeros"),
            ({"scales": lambda it: it[:1]}, {}, rf"{NAME}.scales: its shape is \[1, 64\], and must be \[2, 64\]"),
            ({"scales": lambda it: it.int()}, {}, f"{NAME}.scales: it is stored as I32, and must be F16"),
            ({}, {"group_size": 64}, rf"{NAME}.qzeros: its shape is \[2, 8\], and must be \[4, 8\]"),
            ({}, {"bits": 8}, "its shape is"),
            ({"g_idx": lambda it: None}, {"desc_act": True}, f"lacks {NAME}.g_idx"),
            ({"qweight": lambda it: None, "qzeros": lambda it: None}, {}, "none of them is"),
        ],
    )
    def test_headers(self, changes: dict[str, Any], entries: dict[str, Any], words: str, tmp_path: Path) -> None:
        self.written(tmp_path, changes, entries)
        with pytest.raises(ModelLoadError, match=words):
            describe(tmp_path)

    @pytest.mark.parametrize(
        ("changes", "entries", "options", "words"),
        [
            ({"g_idx": lambda it: it.flip(0)}, {}, {}, "neighbours \\(act-order\\)"),
            ({"g_idx": lambda it: it * 0}, {"desc_act": True}, {}, "does not give every group 128 columns"),
            ({}, {"bits": 8}, {"bits": 8, "sym": False}, "it has zero points"),
        ],
    )
    def test_contents(
        self, changes: dict[str, Any], entries: dict[str, Any], options: dict[str, Any], words: str, tmp_path: Path
    ) -> None:
        self.written(tmp_path, changes, entries, **options)
        with (
            pytest.raises(ModelLoadError, match=f"cannot load {NAME}.weight: .*{words}"),
            open_source(tmp_path) as source,
        ):
            source.get(f"{NAME}.weight")

    def test_zero_points_of_gemv_fast_are_whole_numbers(self, tmp_path: Path) -> None:
        parts, _ = awq(64, "gemv_fast")(NAME, weight_of())
        parts[f"{NAME}.qzeros"] *= 1.1
        write_one(tmp_path, {**AWQ, "group_size": 64, "version": "gemv_fast"}, parts)
        with pytest.raises(ModelLoadError, match="qzeros are not its scales times"), open_source(tmp_path) as source:
            source.get(f"{NAME}.weight")

    def test_packed_tensors_without_rules(self, tmp_path: Path) -> None:
        write_one(tmp_path, None, gptq()(NAME, weight_of())[0])
        with pytest.raises(ConfigError, match=f"quantized \\({NAME}.qweight\\), and config.json does not say how"):
            describe(tmp_path)
