"""Adapters of PEFT and of llama.cpp: what is read of them, and what is refused, with the cause and the fix."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewick.errors import ModelLoadError
from pagewick.models.adapters import short_name
from pagewick.weights.lora.reading import adapter_rank, read_adapter
from tests.models.checkpoints import make_model
from tests.weights.lora.convert import BY_HEAD, FILES, MODEL, TARGETS

NUM_HEADS, NUM_KV_HEADS = 6, 2
NAMES = {f"model.layers.1.{target}" for target in TARGETS}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(FILES / name, tmp_path / name)
    return tmp_path


def change_config(directory: Path, **entries: Any) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = directory / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_an_adapter_of_peft(directory: Path) -> None:
    config = make_model(MODEL).config
    assert (config.num_attention_heads, config.num_key_value_heads) == (NUM_HEADS, NUM_KV_HEADS)
    tensors = load_file(directory / "adapter_model.safetensors")
    found = read_adapter(directory, NUM_HEADS, NUM_KV_HEADS)
    assert set(found.factors) == NAMES and not found.is_gguf
    for name, (a, b) in found.factors.items():
        # lora_alpha is 3, and 5 for one module; the rank is 2.
        scale = 2.5 if name.endswith("down_proj") else 1.5
        assert torch.equal(a, tensors[f"base_model.model.{name}.lora_A.weight"])
        assert torch.equal(b, scale * tensors[f"base_model.model.{name}.lora_B.weight"])
    assert found.max_rank == adapter_rank(directory) == 2


def test_a_gguf_file_of_llama_cpp_has_the_same_factors() -> None:
    peft, found = read_adapter(FILES, 0, 0), read_adapter(FILES / "adapter.gguf", NUM_HEADS, NUM_KV_HEADS)
    assert set(found.factors) == NAMES and found.is_gguf
    for name, (a, b) in peft.factors.items():
        # llama.cpp's converter knows one alpha for all modules.
        factor = 3 / 5 if name.endswith("down_proj") else 1
        assert torch.equal(found.factors[name].a, a)
        torch.testing.assert_close(found.factors[name].b, factor * b)
    assert adapter_rank(FILES / "adapter.gguf") == 2


@pytest.mark.parametrize("name", BY_HEAD)
def test_rows_of_queries_keys_and_values_lie_by_head(name: str) -> None:
    """llama.cpp's converter puts all queries before all keys, and these before all values."""
    config = make_model(name).config
    num_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_kv_heads", num_heads)
    peft = read_adapter(FILES / name, num_heads, num_kv_heads)
    found = read_adapter(FILES / name / "adapter.gguf", num_heads, num_kv_heads)
    assert peft.factors.keys() == set(BY_HEAD[name])
    expected = {short_name(weight): factors for weight, factors in peft.factors.items()}
    factors_of = {short_name(weight): factors for weight, factors in found.factors.items()}
    assert factors_of.keys() == expected.keys()
    for weight, (a, b) in expected.items():
        assert torch.equal(factors_of[weight].a, a)
        torch.testing.assert_close(factors_of[weight].b, b)


def test_the_digest_is_that_of_the_contents(directory: Path) -> None:
    first = read_adapter(directory, 0, 0).digest
    assert read_adapter(FILES, 0, 0).digest == first
    change_config(directory, lora_alpha=4)
    second = read_adapter(directory, 0, 0).digest
    change_tensors(directory, lambda tensors: next(iter(tensors.values())).mul_(1.5))
    assert len({first, second, read_adapter(directory, 0, 0).digest}) == 3


@pytest.mark.parametrize(("is_root", "scale"), [(False, 3 / 2), (True, 3 / 2**0.5)])
def test_the_scale(directory: Path, is_root: bool, scale: float) -> None:
    tensors = load_file(directory / "adapter_model.safetensors")
    change_config(directory, use_rslora=is_root, alpha_pattern={})
    for name, factors in read_adapter(directory, 0, 0).factors.items():
        torch.testing.assert_close(factors.b, scale * tensors[f"base_model.model.{name}.lora_B.weight"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_factors_of_16_bits(directory: Path, dtype: torch.dtype) -> None:
    expected = read_adapter(directory, 0, 0)
    change_tensors(directory, lambda tensors: tensors.update({name: one.to(dtype) for name, one in tensors.items()}))
    for name, factors in read_adapter(directory, 0, 0).factors.items():
        torch.testing.assert_close(factors.a, expected.factors[name].a, atol=0, rtol=2**-8)


def test_names_of_a_state_dict(directory: Path) -> None:
    """Trainers write them: the name of the adapter stands before the end."""

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace(".weight", ".default.weight").removeprefix("base_model.model.")] = tensors.pop(name)

    change_tensors(directory, rename)
    assert set(read_adapter(directory, 0, 0).factors) == NAMES


@pytest.mark.parametrize(
    ("entries", "complaint"),
    [
        ({"peft_type": "IA3"}, r"an adapter of the type IA3; only LORA is supported"),
        ({"use_dora": True}, r"an adapter with use_dora \(adapter_config.json\), which is not supported\n  merge it"),
        ({"modules_to_save": ["lm_head"]}, r"an adapter with modules_to_save "),
        ({"bias": "all", "fan_in_fan_out": True}, r"an adapter with fan_in_fan_out, bias "),
        ({"target_parameters": ["mlp.experts.down_proj"]}, r"an adapter with target_parameters "),
        ({"init_lora_weights": "pissa_niter_4"}, r"trained with init_lora_weights='pissa_niter_4', which changes the"),
        ({"lora_alpha": "3"}, r"lora_alpha in .*adapter_config.json is '3'; it must be a number"),
        ({"lora_alpha": True}, r"lora_alpha in .* is True"),
        ({"lora_alpha": float("nan")}, r"lora_alpha in .* is nan"),
        ({"lora_alpha": -(10**400)}, r"lora_alpha in .* is -10{78}; it must be a number of at most 16777216"),
        ({"lora_alpha": 1e308}, r"lora_alpha in .* is 1e\+308"),
        (
            {"alpha_pattern": {"q_proj": [3]}},
            r"alpha_pattern\['q_proj'\] in .*adapter_config.json is \[3\]; it must be",
        ),
        (
            {"alpha_pattern": ["o_proj"]},
            r"alpha_pattern in .*adapter_config.json is \['o_proj'\]; it must be an object",
        ),
        ({"alpha_pattern": {"(": 3}}, r"'\(' in alpha_pattern is no regular expression"),
    ],
)
def test_settings_that_are_refused(directory: Path, entries: dict[str, Any], complaint: str) -> None:
    change_config(directory, **entries)
    with pytest.raises(ModelLoadError, match=complaint) as error:
        read_adapter(directory, 0, 0)
    assert str(error.value).count("\n") < 6


def test_fan_in_fan_out_is_accepted_where_the_model_has_transposed_weights(directory: Path) -> None:
    """It is about the model's weight; the factors are the same with it."""
    expected = read_adapter(directory, 0, 0).factors
    change_config(directory, fan_in_fan_out=True)
    found = read_adapter(directory, 0, 0, is_transposed=True).factors
    assert found.keys() == expected.keys()
    for name, (a, b) in expected.items():
        assert torch.equal(found[name].a, a) and torch.equal(found[name].b, b)
    # Room for adapters is made before the model is known.
    assert adapter_rank(directory) == 2
    with pytest.raises(ModelLoadError, match=r"with fan_in_fan_out \(adapter_config.json\), which is not supported"):
        read_adapter(directory, 0, 0)
    change_config(directory, bias="all")
    with pytest.raises(ModelLoadError, match=r"an adapter with bias \("):
        read_adapter(directory, 0, 0, is_transposed=True)


def remove_one(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"]


def add_a_bias(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.lm_head.weight"] = torch.zeros(3, 3)


def flatten(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"] = torch.tensor(1.0)


def swap_shapes(tensors: dict[str, torch.Tensor]) -> None:
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
    tensors[name] = tensors[name].t().contiguous()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (remove_one, r"has only one of the two factors of model.layers.1.mlp.down_proj; copy it again"),
        (add_a_bias, r"has tensors beside the factors lora_A and lora_B: base_model.model.lm_head.weight\n"),
        (swap_shapes, r"have the shapes \[2, \d+\] and \[2, \d+\], and must have \[r, in\] and \[out, r\]"),
        (flatten, r"have the shapes \[\] and \[\d+, 2\], and must have"),
        (lambda tensors: tensors.clear(), r"holds no factors"),
    ],
)
def test_tensors_that_are_refused(
    directory: Path, change: Callable[[dict[str, torch.Tensor]], None], complaint: str
) -> None:
    change_tensors(directory, change)
    with pytest.raises(ModelLoadError, match=complaint):
        read_adapter(directory, 0, 0)


def test_files_that_are_missing_or_damaged(directory: Path, tmp_path: Path) -> None:
    weights = directory / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for read in (lambda: read_adapter(directory, 0, 0), lambda: adapter_rank(directory)):
        with pytest.raises(
            ModelLoadError, match=r"adapter_model.safetensors is damaged .*\n  download or copy it again"
        ):
            read()
    weights.unlink()
    with pytest.raises(ModelLoadError, match=r"has no adapter_model.safetensors\n"):
        read_adapter(directory, 0, 0)
    (directory / "adapter_model.bin").touch()
    with pytest.raises(ModelLoadError, match=r"has its factors in adapter_model.bin, a pickle; reading it would run"):
        read_adapter(directory, 0, 0)
    (directory / "adapter_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"adapter_config\.json"):
        read_adapter(directory, 0, 0)
    (directory / "adapter_config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"holds no LoRA adapter: it has no adapter_config.json\n  give the dir"):
        read_adapter(directory, 0, 0)


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    keys: dict[str, Any] | None = None,
    tensors: dict[str, Any] | None = None,
) -> Path:
    """Write an adapter of one weight, with other keys and tensors where some are given."""
    writer = gguf.GGUFWriter(path, architecture)
    found = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 4.0, **(keys or {})}
    for key, value in found.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            (writer.add_float32 if isinstance(value, float) else writer.add_string)(key, value)
    usual = {"blk.0.attn_v.weight.lora_a": np.ones((2, 48)), "blk.0.attn_v.weight.lora_b": np.ones((32, 2))}
    for name, numbers in (usual if tensors is None else tensors).items():
        writer.add_tensor(name, numbers.astype(np.float32) if numbers.dtype == np.float64 else numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("alpha", "scale"), [(4.0, 2.0), (0.0, 1.0), (None, 1.0)])
def test_the_scale_of_a_gguf_file(tmp_path: Path, alpha: float | None, scale: float) -> None:
    path = write_gguf(tmp_path / "a.gguf", keys={"adapter.lora.alpha": alpha})
    (factors,) = read_adapter(path, NUM_HEADS, NUM_KV_HEADS).factors.values()
    assert factors.b.unique().tolist() == [scale]


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"keys": {"general.type": "model"}}, r"holds a model, not a LoRA adapter"),
        ({"keys": {"general.type": "imatrix"}}, r"holds an importance matrix, not a LoRA adapter"),
        ({"keys": {"general.type": [5]}}, r"holds a \[5\], not a LoRA adapter"),
        ({"keys": {"adapter.type": "ia3"}}, r"holds an adapter of the type 'ia3', not a LoRA adapter"),
        ({"keys": {"adapter.alora.invocation_tokens": [5]}}, r"is an activated LoRA adapter"),
        ({"architecture": "gpt2"}, r"is an adapter of GPT-2, .*\n  load the directory from which"),
        ({"tensors": {"blk.0.attn_v.weight": np.ones((4, 4))}}, r"tensors beside the factors lora_a and lora_b: blk"),
        (
            {"tensors": {f"token_embd.weight.lora_{factor}": np.ones((4, 4)) for factor in "ab"}},
            r"changes token_embd.weight, which adapters cannot change\n",
        ),
        (
            {"tensors": {f"blk.0.ffn_up_exps.weight.lora_{factor}": np.ones((4, 4)) for factor in "ab"}},
            r"changes blk.0.ffn_up_exps.weight, which adapters cannot change\n",
        ),
        (
            {"tensors": {f"blk.0.ffn_up.weight.lora_{factor}": np.ones((2, 4, 4)) for factor in "ab"}},
            r"has blk.0.ffn_up.weight.lora_a in F32 with 3 dimensions; factors are matrices",
        ),
        (
            {"tensors": {f"blk.0.attn_q.weight.lora_{factor}": np.ones((2, 2)) for factor in "ab"}},
            r"blk.0.attn_q.weight.lora_b has 2 rows, which are not those of 6 heads\n  is it an adapter of this model",
        ),
        (
            {
                "architecture": "falcon",
                "tensors": {f"blk.0.attn_qkv.weight.lora_{factor}": np.ones((2, 2)) for factor in "ab"},
            },
            r"blk.0.attn_qkv.weight.lora_b has 2 rows, which are not those of 6 heads and 2 key heads\n  is it an ad",
        ),
    ],
)
def test_gguf_files_that_are_refused(tmp_path: Path, given: dict[str, Any], complaint: str) -> None:
    path = write_gguf(tmp_path / "a.gguf", **given)
    with pytest.raises(ModelLoadError, match=complaint):
        read_adapter(path, NUM_HEADS, NUM_KV_HEADS)
