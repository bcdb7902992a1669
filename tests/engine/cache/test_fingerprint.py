"""Two fingerprints are equal exactly if blocks of one may be taken for blocks of the other."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pagewick
from pagewick.config import EngineConfig
from pagewick.engine.cache import fingerprint
from pagewick.engine.cache.fingerprint import model_fingerprint
from pagewick.errors import ModelLoadError

CONFIG = EngineConfig(dtype="float32", kv_cache_dtype="bfloat16", block_size=16)
NUM_TENSORS = 5
TENSOR_BYTES = 300_000


def write_weights(path: Path, *, seed: int = 0, metadata: str = "pt", changed: dict[int, bytes] | None = None) -> None:
    """A safetensors file of random bytes, written from the format's description; `changed`: offset -> other bytes."""
    tensors: dict[str, Any] = {"__metadata__": {"format": metadata}}
    for number in range(NUM_TENSORS):
        offsets = [number * TENSOR_BYTES, (number + 1) * TENSOR_BYTES]
        tensors[f"layer.{number}"] = {"dtype": "U8", "shape": [TENSOR_BYTES], "data_offsets": offsets}
    header = json.dumps(tensors).encode()
    data = bytearray(random.Random(seed).randbytes(NUM_TENSORS * TENSOR_BYTES))
    for offset, content in (changed or {}).items():
        data[offset : offset + len(content)] = content
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def write_model(directory: Path, **options: Any) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text('{"num_hidden_layers": 5}')
    write_weights(directory / "model.safetensors", **options)
    return directory


def of(directory: Path, layout: str = "heads-first", rotations: Sequence[str] = ("theta=1e4",), **changes: Any) -> str:
    return model_fingerprint(directory, replace(CONFIG, **changes), layout, rotations)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def test_it_is_a_name_for_a_directory(model: Path) -> None:
    assert re.fullmatch(r"[0-9a-f]{32}", of(model))


def test_where_the_model_lies_does_not_count(model: Path, tmp_path: Path) -> None:
    expected = of(model)
    assert of(Path(shutil.copytree(model, tmp_path / "copy", copy_function=shutil.copyfile))) == expected
    linked = tmp_path / "linked"  # as in the Hugging Face cache
    linked.mkdir()
    for file in model.iterdir():
        (linked / file.name).symlink_to(file)
    assert of(linked, model="elsewhere/model", max_num_seqs=3, num_threads=7, device="cpu") == expected


def test_the_tokenizer_and_other_files_do_not_count(model: Path) -> None:
    expected = of(model)
    for name in ("tokenizer.json", "README.md", "generation_config.json", "adapter_model.safetensors"):
        (model / name).write_text("{}")
    assert of(model) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "float32"},
        {"block_size": 32},
        {"tensor_parallel_size": 2},
        {"quantization": "q4_k_m"},
        {"quantization": "q6_k"},
        {"batch_invariant": True, "device": "cuda:0"},
        {"fp8_activations": True},
        {"speculative_method": "mtp"},
        {"layout": "tokens-first"},
        {"layout": ""},
        {"rotations": ["theta=1e6"]},
        {"rotations": ["theta=1e4", "theta=1e6"]},
        {"rotations": []},
    ],
    ids=str,
)
def test_how_blocks_are_stored_counts(model: Path, changes: dict[str, Any]) -> None:
    assert of(model, **changes) != of(model)


def test_weights_of_two_formats_make_different_blocks(model: Path) -> None:
    assert of(model, quantization="q4_k_m") != of(model, quantization="q6_k")


def test_what_changes_nothing_on_a_cpu_does_not_count(model: Path) -> None:
    assert of(model, batch_invariant=True, device="cpu") == of(model)


def test_the_dtypes_are_not_mixed_up(model: Path) -> None:
    assert of(model, dtype="float16", kv_cache_dtype="bfloat16") != of(
        model, dtype="bfloat16", kv_cache_dtype="float16"
    )


def test_pagewicks_own_version_counts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pagewick, "__version__", "3.14.1")
    first = of(model)
    monkeypatch.setattr(pagewick, "__version__", "3.14.15")
    assert of(model) == first
    for other in ("3.15.1", "4.14.1", "31.4.1"):
        monkeypatch.setattr(pagewick, "__version__", other)
        assert of(model) != first
    monkeypatch.setattr(pagewick, "__version__", "3.14.1")
    monkeypatch.setattr(fingerprint, "LAYOUT_VERSION", fingerprint.LAYOUT_VERSION + 1)
    assert of(model) != first


def test_the_models_config_counts(model: Path) -> None:
    before = of(model)
    (model / "config.json").write_text('{"num_hidden_layers": 5, "rope_theta": 1e6}')
    assert of(model) != before


def test_other_weights_of_the_same_shape_count(model: Path, tmp_path: Path) -> None:
    assert of(write_model(tmp_path / "same")) == of(model)
    assert of(write_model(tmp_path / "other", seed=1)) != of(model)


@pytest.mark.parametrize("number", range(NUM_TENSORS))
def test_one_other_tensor_counts(model: Path, tmp_path: Path, number: int) -> None:
    """As when a part of a model was trained on. A page in its middle is looked at, whatever lies around."""
    middle = number * TENSOR_BYTES + TENSOR_BYTES // 2
    other = write_model(tmp_path / "other", changed={middle - 100: b"trained on"})
    assert of(other) != of(model)


@pytest.mark.parametrize("offset", [0, NUM_TENSORS * TENSOR_BYTES - 1])
def test_both_ends_count(tmp_path: Path, offset: int) -> None:
    models = [write_model(tmp_path / str(n), changed={offset: bytes([n])}) for n in range(2)]
    assert of(models[0]) != of(models[1])


def test_the_pages_are_spread_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 pages of 4 KiB: between two of them at most a 63rd of the file, less a page."""
    model = write_model(tmp_path / "model")
    num_bytes = (model / "model.safetensors").stat().st_size
    pages: set[int] = set()
    pread = os.pread

    def watched(file: int, count: int, offset: int) -> bytes:
        if count == 4096:
            pages.add(offset)
        return pread(file, count, offset)

    monkeypatch.setattr(os, "pread", watched)
    of(model)
    assert 64 <= len(pages) <= 64 + NUM_TENSORS
    ordered = sorted(pages)
    assert ordered[0] == 0 and ordered[-1] == num_bytes - 4096
    gaps = [after - before for before, after in itertools.pairwise(ordered)]
    assert max(gaps) <= num_bytes // 63 + 1


def test_the_header_counts_and_the_file_name(model: Path, tmp_path: Path) -> None:
    assert of(write_model(tmp_path / "header", metadata="np")) != of(model)
    before = of(model)
    (model / "model.safetensors").rename(model / "weights.safetensors")
    assert of(model) != before


def test_shards_count_each(tmp_path: Path) -> None:
    def sharded(name: str, seeds: tuple[int, int]) -> Path:
        directory = write_model(tmp_path / name)
        (directory / "model.safetensors").unlink()
        files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
        for file, seed in zip(files, seeds, strict=True):
            write_weights(directory / file, seed=seed)
        weight_map = {f"layer.{number}": files[number % 2] for number in range(NUM_TENSORS)}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return directory

    found = {of(sharded(f"{seeds}", seeds)) for seeds in ((1, 2), (2, 1), (1, 1), (2, 2), (1, 3))}
    assert len(found) == 5
    assert of(sharded("again", (1, 2))) in found


@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 4096, 4097, 64 * 4096])
def test_small_files_are_read_whole(tmp_path: Path, num_bytes: int) -> None:
    models = []
    for number in range(2):
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / "config.json").write_text("{}")
        content = bytearray(b"\2" + bytes(7) + b"{}" + bytes(num_bytes))
        if number and num_bytes:
            content[10 + num_bytes // 2] = 1
        (directory / "model.safetensors").write_bytes(content)
        models.append(directory)
    assert (of(models[0]) == of(models[1])) == (num_bytes == 0)


def test_a_model_of_many_gigabytes_costs_no_more(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model / "model.safetensors").unlink()
    huge = 40 * 2**30
    header = json.dumps({"a": {"dtype": "U8", "shape": [huge], "data_offsets": [0, huge]}}).encode()
    with (model / "model.safetensors").open("wb") as file:  # takes no place: what is not written is a hole
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + huge)
    num_read = 0
    pread = os.pread

    def counted(file: int, count: int, offset: int) -> bytes:
        nonlocal num_read
        content = pread(file, count, offset)
        num_read += len(content)
        return content

    monkeypatch.setattr(os, "pread", counted)
    before = of(model)
    assert 64 * 4096 <= num_read <= 65 * 4096 + 8 + len(header)
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(8 + len(header) + huge // 2)
        file.write(b"x")
    assert of(model) != before


def test_the_built_in_model(demo_model_dir: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(demo_model_dir, tmp_path / "copy"))
    assert of(copy) == of(demo_model_dir)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert of(copy) != of(demo_model_dir)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"short", (2**40).to_bytes(8, "little") + b"{}", (4).to_bytes(8, "little") + b"nope",
        (2).to_bytes(8, "little") + b"[]", (8).to_bytes(8, "little") + b'{"a":{}}',
        (28).to_bytes(8, "little") + b'{"a":{"data_offsets":[1]}}  ',
    ],
)  # fmt: skip
def test_damaged_weights(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is truncated or damaged\n.*download"):
        of(model)


@pytest.mark.parametrize("offsets", [[-(2**70), 2**70], [2**70, 2**70], [-10, -5], [5, 2]])
def test_impossible_offsets_lead_nowhere(model: Path, offsets: list[int]) -> None:
    """The loader refuses such a file; here it must not fail in another way before that."""
    header = json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": offsets}}).encode()
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"data")
    assert len(of(model)) == 32


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_files(model: Path, name: str) -> None:
    (model / name).unlink()
    with pytest.raises(ModelLoadError, match=str(model)):
        of(model)


def test_a_config_that_is_not_resolved_is_our_mistake(model: Path) -> None:
    for open_option in ("dtype", "quantization"):
        with pytest.raises(AssertionError):
            of(model, **{open_option: "auto"})
