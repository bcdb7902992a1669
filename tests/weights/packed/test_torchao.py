"""Checkpoints of torchao: what it wrote itself, others from its definition, and damaged ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagewick.config import EngineConfig
from pagewick.engine.preflight import check_models
from pagewick.errors import ConfigError, ModelLoadError
from pagewick.quantization.ggml import dequantize
from pagewick.weights.opening import open_source
from pagewick.weights.packed.config import packed_rules
from pagewick.weights.packed.headers import logical_tensors
from pagewick.weights.packed.layout import PackedWeight
from pagewick.weights.tensor_headers import file_tensors
from tests.deep import IS_DEEP
from tests.models.variants import VARIANTS
from tests.weights.gguf.test_mutations import mutated
from tests.weights.packed.harness import SIZES, check_logits, check_two_ranks, logits_on
from tests.weights.packed.test_byte_models import TINY
from tests.weights.packed.test_mutations import use
from tests.weights.packed.torchao_writers import (
    CASES,
    Stored,
    config,
    dtype,
    fp8,
    int4,
    int8,
    intx,
    nvfp4,
    quantization,
    rewrite,
    tiled_int4,
    word,
    write_stacks,
    write_torchao,
)

FIXTURES = Path(__file__).parent / "fixtures"
PREFIX = "model.layers.3.mlp.up_proj"
GIVEN = torch.randn(16, 64, generator=torch.Generator().manual_seed(6))


def described(
    whole: Mapping[str, Any], stored: Stored, directory: Path, *, description: str | None = None, prefix: str = PREFIX
) -> tuple[PackedWeight, Callable[[str], Tensor]]:
    """The weight of a file with one weight, and a reader of its tensors. description: instead of its own."""
    path = directory / "model.safetensors"
    save_file({f"{prefix}._weight_{name}": part.contiguous() for name, part in stored.parts.items()}, path)
    rewrite(path, {f"{prefix}.weight": stored.description if description is None else description})
    found = logical_tensors({"quantization_config": quantization(whole)}, file_tensors(path))
    return found.weights[f"{prefix}.weight"], load_file(path).__getitem__


def test_numbers_that_torchao_wrote() -> None:
    tensors, expected = (load_file(FIXTURES / f"{name}.safetensors") for name in ("torchao", "torchao_numbers"))
    whole = config("Int4WeightOnlyConfig")
    infos = file_tensors(FIXTURES / "torchao.safetensors")
    weights = logical_tensors({"quantization_config": quantization(whole)}, infos).weights
    assert {name.removesuffix(".weight") for name in weights} == set(expected)
    for name, numbers in expected.items():
        weight = weights[f"{name}.weight"]
        assert torch.equal(weight.format.numbers(weight, tensors.__getitem__), numbers), name


@pytest.mark.parametrize("shape", [(136, 192), (13, 64)])
@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str, shape: tuple[int, int], tmp_path: Path) -> None:
    whole, write, kind = CASES[name]
    if name == "fp8-blocks" and shape[0] % 8:
        shape = (16, shape[1])
    stored = write(torch.randn(shape, generator=torch.Generator().manual_seed(2)) / 8)
    weight, get = described(whole, stored, tmp_path)
    if shape[1] == 192:
        assert weight.stored_type == kind
    assert weight.shape == shape
    assert torch.equal(weight.format.numbers(weight, get), stored.numbers)
    rules = packed_rules({"quantization_config": quantization(whole)})
    form = rules and rules.format_of(PREFIX)
    assert form is not None
    planned = form.planned("name", *shape)
    assert planned.dtype == weight.stored_type
    # A group of all columns is a row.
    assert planned.label == weight.info.label or shape[1] == 64
    for part in stored.parts:
        if part not in ("zero_point", "act_pre_scale", "per_tensor_scale"):
            less = replace(stored, parts={key: tensor for key, tensor in stored.parts.items() if key != part})
            with pytest.raises(ModelLoadError, match=f"_weight_{part}"):
                described(whole, less, tmp_path)


def test_a_group_may_be_larger_than_what_is_left_of_a_row(tmp_path: Path) -> None:
    stored = int4(torch.randn(7, 56, generator=torch.Generator().manual_seed(3)), 32)
    weight, get = described(CASES["int4"][0], stored, tmp_path)
    assert torch.equal(weight.format.numbers(weight, get), stored.numbers)


def test_numbers_are_decoded_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewick.weights.packed.torchao_int4._CHUNK_SIZE", 1500)
    weights = torch.randn(37, 160, generator=torch.Generator().manual_seed(4))
    for name in ("int4", "int4-tiled"):
        whole, write, _ = CASES[name]
        stored = write(weights)
        weight, get = described(whole, stored, tmp_path)
        assert torch.equal(weight.format.numbers(weight, get), stored.numbers)


@pytest.mark.parametrize("name", CASES if IS_DEEP else ["fp8", "intx-4", "awq"])
def test_logits(name: str, tmp_path: Path) -> None:
    whole, write, _ = CASES[name]
    written = write_torchao(tmp_path, quantization(whole), write)
    alone = check_logits(written, tmp_path)
    if name in ("intx-4", "awq"):
        check_two_ranks(written, alone)


def test_layers_with_configurations_of_their_own(tmp_path: Path) -> None:
    """A quantized embedding with a tied head, and three classes in fused layers."""
    by_module = {
        "model.embed_tokens": config("IntxWeightOnlyConfig", granularity=config("PerAxis", axis=0)),
        r"re:.*\.mlp\..*": CASES["fp8"][0],
        "_default": CASES["intx-4"][0],
    }
    entries = quantization(config("FqnToConfig", fqn_to_config=by_module), include_input_output_embeddings=True)
    write = {
        "embed_tokens": partial(intx, bits=8),
        "up_proj": fp8,
        "k_proj": int8,
        "_proj": partial(intx, bits=4, group_size=64),
    }
    written = write_torchao(
        tmp_path,
        entries,
        write,
        entries={**SIZES, "tie_word_embeddings": True},
        is_packed=lambda prefix: prefix.endswith(tuple(write)),
    )
    assert "model.embed_tokens.weight" in written.packed
    check_two_ranks(written, check_logits(written, tmp_path))


@pytest.mark.parametrize("name", ["awq", "nvfp4-swizzled", "intx-4"])
def test_weights_that_are_quantized_again(name: str, tmp_path: Path) -> None:
    """Other formats are made from the exact numbers; int4 keeps levels of 4 bits."""
    whole, write, kind = CASES[name]
    written = write_torchao(tmp_path, quantization(whole), write, entries=TINY)
    for mix in ("q4_k_m", "int4"):
        check_models(EngineConfig(model=str(tmp_path), quantization=mix))
        with open_source(tmp_path, mix=mix) as source:
            for weight in written.packed:
                if mix == "int4" and kind.startswith("int4"):
                    assert source.stored_type(weight) == kind
                else:
                    assert torch.equal(source.get(weight), written.meant[weight])


MIXTURE = {name: size for name, size in SIZES.items() if name in VARIANTS["qwen3-moe"].all_entries()} | {
    "moe_intermediate_size": 64
}


def test_single_experts(tmp_path: Path) -> None:
    whole, write, _ = CASES["int8"]
    written = write_torchao(tmp_path, quantization(whole), write, name="qwen3-moe", entries=MIXTURE)
    assert any(".experts.3.down_proj" in name for name in written.packed)
    check_logits(written, tmp_path)


@pytest.mark.parametrize("name", ["int8", "fp8", "intx-4", "mxfp4"])
def test_experts_in_one_tensor(name: str, tmp_path: Path) -> None:
    whole, write, kind = CASES[name]
    by_name = config("FqnToConfig", fqn_to_config={r"re:.*experts\.(gate_up|down)_proj": whole})
    written = write_stacks(tmp_path, by_name, write, "qwen3-moe", **MIXTURE)
    check_models(EngineConfig(model=str(tmp_path)))
    with open_source(tmp_path) as source:
        for prefix in written.packed:
            numbers = written.meant[prefix]
            stored = "fp8_g128" if name == "fp8" and numbers.shape[1] == 128 else kind
            assert source.stored_type(prefix) == stored
            assert torch.equal(dequantize(stored, source.get(prefix), numbers.shape[1]), numbers)
    if name == "int8":
        check_two_ranks(written, check_logits(written, tmp_path))


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("int8", {"block_size": [8, 1, 128]}, "block_size"),
        ("int8", {"block_size": [1, 128]}, "block_size"),
        ("int4", {}, "_type in the header .*Int4Tensor"),
    ],
)
def test_what_experts_in_one_tensor_may_not_be(name: str, change: dict[str, Any], named: str, tmp_path: Path) -> None:
    whole, write, _ = CASES[name]
    write_stacks(tmp_path, whole, int8, "qwen3-moe", **MIXTURE)
    path = tmp_path / "model.safetensors"
    texts = dict(file_tensors(path)[0].metadata or {})
    key = next(key for key in texts if key.endswith("experts.gate_up_proj"))
    record = json.loads(texts[key])
    record = {**record, "_type": write(GIVEN).kind, "_data": {**record["_data"], **change}}
    rewrite(path, {**{key: text for key, text in texts.items() if "experts." in key}, key: json.dumps(record)})
    with pytest.raises(ModelLoadError, match=named):
        check_models(EngineConfig(model=str(tmp_path)))


def test_models_whose_experts_torchao_quantizes_in_another_direction(tmp_path: Path) -> None:
    """Those of gpt-oss have inputs in rows."""
    name = "model.layers.0.mlp.experts._down_proj_qdata"
    path = tmp_path / "model.safetensors"
    save_file({name: torch.zeros(4, 64, 64, dtype=torch.int8)}, path)
    entries = {"architectures": ["GptOssForCausalLM"], "quantization_config": quantization(CASES["int8"][0])}
    with pytest.raises(ModelLoadError, match=f"{name}, which is not supported for this model"):
        logical_tensors(entries, file_tensors(path))


def test_configurations_choose_modules() -> None:
    by_module = {
        "model.layers.0.mlp.up_proj": CASES["fp8"][0],
        "model.layers.0.mlp.down_proj.weight": CASES["mxfp4"][0],
        r"re:model\.layers\.\d+\.mlp\.(up|gate)_proj": CASES["int8"][0],
        r"re:.*\.o_proj": None,
        "_default": CASES["intx-4"][0],
    }
    for name in ("fqn_to_config", "module_fqn_to_config"):
        whole = config("ModuleFqnToConfig", **{name: by_module})
        rules = packed_rules({"quantization_config": quantization(whole, modules_to_not_convert=["visual"])})
        assert rules is not None
        found = [
            form and form.label
            for prefix in ("layers.0.mlp.up_proj", "layers.0.mlp.down_proj", "layers.1.mlp.up_proj",
                           "layers.1.mlp.up_proj_2", "layers.0.self_attn.o_proj", "visual.blocks.0.attn.qkv")
            for form in [rules.format_of(f"model.{prefix}")]
        ]  # fmt: skip
        assert found == ["FP8", "MXFP4", "int8 per row", "int4 g64", None, None]
        assert rules.label == "FP8, MXFP4, int8 per row, int4 g64 of torchao"


def test_a_head_may_be_quantized_although_configurations_leave_it_out(tmp_path: Path) -> None:
    rules = packed_rules({"quantization_config": quantization(CASES["int8"][0])})
    assert rules is not None and rules.format_of("lm_head") is None
    weight, get = described(CASES["int8"][0], int8(GIVEN), tmp_path, prefix="lm_head")
    assert weight.stored_type == "int8_g32"
    assert torch.equal(weight.format.numbers(weight, get), int8(GIVEN).numbers)


@pytest.mark.parametrize(
    "prefix",
    [
        "language_model.model.layers.3.mlp.up_proj", "model.language_model.layers.3.mlp.up_proj",
        "visual.blocks.0.mlp.up_proj",
    ],
)  # fmt: skip
def test_headers_with_other_names_than_their_files(prefix: str, tmp_path: Path) -> None:
    """transformers writes files with the names of older versions, and headers with its own."""
    stored = int8(torch.randn(8, 64, generator=torch.Generator().manual_seed(5)))
    for key in {
        "language_model.model.layers.3.mlp.up_proj": ["model.language_model.layers.3.mlp.up_proj"],
        "model.language_model.layers.3.mlp.up_proj": ["language_model.model.layers.3.mlp.up_proj"],
        "visual.blocks.0.mlp.up_proj": ["model.visual.blocks.0.mlp.up_proj"],
    }[prefix]:
        path = tmp_path / "model.safetensors"
        save_file({f"{prefix}._weight_{name}": part for name, part in stored.parts.items()}, path)
        rewrite(path, {f"{key}.weight": stored.description})
        weights = logical_tensors({"quantization_config": quantization(CASES["int8"][0])}, file_tensors(path)).weights
        weight = weights[f"{prefix}.weight"]
        assert torch.equal(weight.format.numbers(weight, load_file(path).__getitem__), stored.numbers)


@pytest.mark.parametrize(
    ("stored", "change", "named"),
    [
        (fp8(GIVEN), {"block_size": [1, 48]}, "block_size"),
        (fp8(GIVEN), {"block_size": [1, 1, 64]}, "other than two dimensions"),
        (fp8(GIVEN), {"block_size": [1, -64]}, "block_size"),
        (fp8(GIVEN), {"block_size": 64}, "block_size"),
        (int8(GIVEN), {"block_size": [4, 64]}, "block_size"),
        (intx(GIVEN, 4, 32), {"target_dtype": dtype("uint4")}, "target_dtype"),
        (intx(GIVEN, 4, 32), {"block_size": [1, 16]}, "_weight_scale"),
        (int4(GIVEN, 32), {"shape": [16, 128]}, "_weight_qdata"),
        (int4(GIVEN, 32), {"shape": [2, 16, 64]}, "shape"),
        (int4(GIVEN, 32), {"activation_dtype": dtype("int8")}, "activation_dtype"),
        (tiled_int4(GIVEN, 64), {"shape": [24, 64]}, "_weight_qdata"),
        (tiled_int4(GIVEN, 64), {"block_size": [1, 48]}, "groups of 48"),
        (nvfp4(GIVEN), {"is_swizzled_scales": True}, "_weight_scale"),
        (nvfp4(GIVEN), {"is_swizzled_scales": 1}, "is_swizzled_scales"),
        (nvfp4(GIVEN), {"block_size": 32}, "block_size"),
    ],
)
def test_wrong_descriptions_are_refused_by_name(
    stored: Stored, change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=named):
        described(CASES["int8"][0], replace(stored, data={**stored.data, **change}), tmp_path)


@pytest.mark.parametrize(
    ("description", "named"),
    [
        ("", "no JSON object"),
        ("[1]", "no JSON object"),
        ("[" * 50_000, "no JSON object"),
        ('{"_data": "' + "x" * 200_000 + '"}', "no JSON object"),
        ('{"_type": "Int4PreshuffledTensor", "_data": {}}', "_type in the header of .*Int4PreshuffledTensor"),
        ('{"_type": "Int4PlainInt32Tensor", "_data": {}}', "_type in the header of .*Int4PlainInt32Tensor"),
        ('{"_type": ["Int8Tensor"], "_data": {}}', "_type"),
        ('{"_type": "Int8Tensor", "_data": [1]}', "_data"),
        ('{"_type": "Int8Tensor"}', "_data"),
    ],
)
def test_what_is_no_description_is_refused(description: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=named) as caught:
        described(CASES["int8"][0], int8(GIVEN), tmp_path, description=description)
    assert len(str(caught.value)) < 1000


def test_a_header_without_descriptions(tmp_path: Path) -> None:
    path, name = tmp_path / "model.safetensors", f"{PREFIX}._weight_qdata"
    for texts in (None, {"format": "pt"}):
        save_file({name: torch.zeros(8, 64, dtype=torch.int8)}, path, texts)
        with pytest.raises(ModelLoadError, match=f"{PREFIX}.*says nothing about it"):
            logical_tensors({"quantization_config": quantization(CASES["int8"][0])}, file_tensors(path))
        with pytest.raises(ConfigError, match="no quantization_config"):
            logical_tensors({}, file_tensors(path))


def test_values_that_contradict_descriptions(tmp_path: Path) -> None:
    def read(stored: Stored, whole: str = "int8") -> None:
        weight, get = described(CASES[whole][0], stored, tmp_path)
        weight.format.numbers(weight, get)

    changed: list[tuple[Stored, dict[str, Tensor], str]] = [
        (int8(GIVEN), {"zero_point": torch.ones(16, 1, dtype=torch.int8)}, "zero points"),
        (intx(GIVEN, 4, 32), {"qdata": torch.full((16, 64), 8, dtype=torch.int8)}, "does not fit 4 bits"),
        (intx(GIVEN, 4, 32), {"zero_point": torch.full((16, 2), -9, dtype=torch.int8)}, "zero point"),
        (int4(GIVEN, 32), {"scale": torch.full((2, 16), float("nan")).bfloat16()}, "scale is infinite or NaN"),
        (int4(GIVEN, 32), {"zero_point": torch.full((2, 16), float("inf")).bfloat16()}, "zero point is infinite"),
        (int4(GIVEN, 32, has_zeros=False), {"zero_point": torch.ones(2, 16).bfloat16()}, "zero points"),
        (int8(GIVEN), {"act_pre_scale": torch.full((64,), float("inf"))}, "factor"),
    ]
    for stored, parts, named in changed:
        with pytest.raises(ModelLoadError, match=named):
            read(replace(stored, parts={**stored.parts, **parts}))
    for parts in ({"act_pre_scale": torch.ones(32)}, {"zero_point": torch.zeros(16, 1)}):
        with pytest.raises(ModelLoadError, match=next(iter(parts))):
            read(replace(int8(GIVEN), parts={**int8(GIVEN).parts, **parts}))
    with pytest.raises(ModelLoadError, match="both a weight and"):
        logical_tensors_with_plain_weight(tmp_path)


def logical_tensors_with_plain_weight(directory: Path) -> None:
    described(CASES["int8"][0], int8(GIVEN), directory)
    path = directory / "model.safetensors"
    save_file({**load_file(path), f"{PREFIX}.weight": GIVEN}, path)
    rewrite(path, {f"{PREFIX}.weight": int8(GIVEN).description})
    logical_tensors({"quantization_config": quantization(CASES["int8"][0])}, file_tensors(path))


def test_scales_of_activations_are_not_needed(tmp_path: Path) -> None:
    stored = int8(GIVEN)
    more = {"act_quant_scale": torch.tensor([0.02]), "act_quant_zero_point": torch.tensor([3], dtype=torch.int8)}
    weight, get = described(CASES["int8"][0], replace(stored, parts={**stored.parts, **more}), tmp_path)
    assert torch.equal(weight.format.numbers(weight, get), stored.numbers)


@pytest.mark.parametrize(
    "name",
    ["model.layers.0.mlp.experts._down_proj_qdata", "model.layers.0.q._bias_qdata", "model.layers.0.weight:qdata"],
)
def test_other_quantized_tensors_are_refused_by_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({name: torch.zeros(2, 8, 64, dtype=torch.int8)}, path)
    with pytest.raises(ModelLoadError, match=name):
        logical_tensors({"quantization_config": quantization(CASES["int8"][0])}, file_tensors(path))


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"quant_type": "int4_weight_only"}, "quant_type"),
        ({"quant_type": {"_type": "Int8WeightOnlyConfig"}}, "quant_type"),
        (quantization(config("UIntXWeightOnlyConfig")), "default._type .*UIntXWeightOnlyConfig"),
        (quantization(config("IntxWeightOnlyConfig", weight_dtype=dtype("uint4"))), "weight_dtype"),
        (quantization(config("IntxWeightOnlyConfig", granularity=config("PerToken"))), "granularity._type"),
        (quantization(config("IntxWeightOnlyConfig", granularity="row")), "granularity"),
        (quantization(config("IntxWeightOnlyConfig", intx_packing_format=word("_", "OPAQUE_TORCHAO_AUTO"))), "packing"),
        (quantization(config("Int4WeightOnlyConfig", int4_packing_format=word("_", "PRESHUFFLED"))), "preshuffled"),
        (quantization(config("Float8DynamicActivationInt4WeightConfig")), "int4_packing_format"),
        (
            quantization(
                config("Int4WeightOnlyConfig", int4_packing_format="tile_packed_to_4d", int4_tile_packed_ntile=16)
            ),
            "ntile",
        ),
        (quantization(config("MXDynamicActivationMXWeightConfig", weight_dtype=dtype("fp6_e2m3"))), "weight_dtype"),
        (quantization(config("AWQConfig", base_config=config("AWQConfig"))), "base_config._type"),
        (quantization(config("AWQConfig")), "base_config"),
        (quantization(config("FqnToConfig", fqn_to_config=[])), "fqn_to_config"),
        (quantization(config("FqnToConfig", fqn_to_config={"re:(": config("Int8WeightOnlyConfig")})), "fqn_to_config"),
        (quantization(config("FqnToConfig", fqn_to_config={"a": 3})), "fqn_to_config.a"),
        (quantization(config("Int8WeightOnlyConfig"), modules_to_not_convert="lm_head"), "modules_to_not_convert"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(entries: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelLoadError, match=f"(?i){named}"):
        packed_rules({"quantization_config": {"quant_method": "torchao", **entries}})


HOSTILE = (None, 0, -1, 3, 2**40, "x", "", [], {}, [1, 2], [7, 7], True, 0.5, [1, 64], [2**60, 2**60], dtype("int1"))


def altered(value: Any, random: Random) -> Any:
    """A value with one entry, somewhere in it, replaced or missing."""
    if isinstance(value, dict) and value and random.random() < 0.85:
        key = random.choice(list(value))
        if random.random() < 0.1:
            return {name: one for name, one in value.items() if name != key}
        return {**value, key: altered(value[key], random)}
    return random.choice(HOSTILE)


@pytest.mark.parametrize("name", CASES if IS_DEEP else ["intx-4", "int4-tiled", "nvfp4-swizzled"])
def test_changed_checkpoints_are_errors_or_models(name: str, tmp_path: Path) -> None:
    whole, write, _ = CASES[name]
    write_torchao(tmp_path, quantization(whole), write, entries=TINY)
    weights, described_by = tmp_path / "model.safetensors", tmp_path / "config.json"
    data, entries = weights.read_bytes(), json.loads(described_by.read_text())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    packed = [key for key in header["__metadata__"] if key.endswith("_proj.weight")]
    use(tmp_path)
    num_refused, count = 0, 1000 if IS_DEEP else 60
    for seed in range(count):
        random = Random(f"{name}-{seed}")
        match seed % 3:
            case 0:
                weights.write_bytes(mutated(data, random, length + 8))
            case 1:
                texts, key = header["__metadata__"], random.choice(packed)
                changed = json.dumps(altered(json.loads(texts[key]), random))
                text = json.dumps({**header, "__metadata__": {**texts, key: changed}}).encode()
                weights.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
            case _:
                found = {**entries, "quantization_config": altered(entries["quantization_config"], random)}
                described_by.write_text(json.dumps(found))
        try:
            use(tmp_path)
        except (ModelLoadError, ConfigError) as error:
            num_refused += 1
            assert len(str(error)) < 1500 and len(str(error).splitlines()) <= 6, seed
        weights.write_bytes(data)
        described_by.write_text(json.dumps(entries))
    assert count // 4 < num_refused < count


def test_files_in_parts(tmp_path: Path) -> None:
    """Every part of a checkpoint has the descriptions of all."""
    whole, write, _ = CASES["intx-4"]
    write_torchao(tmp_path, quantization(whole), write)
    expected = logits_on(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors, descriptions = load_file(path), dict(file_tensors(path)[0].metadata or {})
    names = list(tensors)
    index = {name: f"model-0000{1 + place % 2}-of-00002.safetensors" for place, name in enumerate(names)}
    for file in set(index.values()):
        save_file({name: tensors[name] for name in names if index[name] == file}, tmp_path / file, descriptions)
    path.unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    check_models(EngineConfig(model=str(tmp_path)))
    assert torch.equal(logits_on(tmp_path), expected)
    with open_source(tmp_path) as source:
        assert "int4 g64" in source.labels.values()
