"""Tensors of a checkpoint from headers alone, compared with the safetensors library and with malformed files."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from pagewick.errors import ModelLoadError
from pagewick.weights.tensor_headers import (
    TensorInfo,
    directory_tensors,
    file_tensors,
    parse_safetensors_header,
    remote_tensors,
    with_stored_dtype,
)


def header(entries: Any, data: int = 0) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + b"\0" * data


def parse(data: bytes) -> Any:
    return parse_safetensors_header(lambda offset, size: data[offset : offset + size], len(data), "w.safetensors")


def entry(dtype: Any = "F32", shape: Any = (2, 3), offsets: Any = (0, 24)) -> dict[str, Any]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def test_the_library_sees_the_same(tmp_path: Path) -> None:
    tensors = {"a": np.zeros((3, 5), np.float32), "b": np.zeros((), np.int64), "c": np.zeros((7, 0), np.float16)}
    save_file(tensors, tmp_path / "w.safetensors", metadata={"format": "pt"})
    found = {tensor.name: tensor for tensor in file_tensors(tmp_path / "w.safetensors")}
    with safe_open(tmp_path / "w.safetensors", framework="np") as theirs:
        assert set(found) == set(theirs.keys())
        for name in theirs.keys():  # noqa: SIM118  not a dict
            assert list(found[name].shape) == theirs.get_slice(name).get_shape()
            assert found[name].dtype == theirs.get_slice(name).get_dtype()
    assert {name: tensor.num_bytes for name, tensor in found.items()} == {"a": 60, "b": 8, "c": 0}
    assert found["b"].num_elements == 1


MALFORMED = {
    "empty": b"",
    "cut in its length": b"\x05\0\0",
    "no header": struct.pack("<Q", 0),
    "a header without end": struct.pack("<Q", 2**63) + b"{}",
    "a header longer than the file": struct.pack("<Q", 100) + b"{}",
    "not JSON": struct.pack("<Q", 2) + b"{]",
    "nested without end": struct.pack("<Q", 200_000) + b"[" * 200_000,
    "a list": header([]),
    "a tensor in words": header({"a": "x"}, 24),
    "an unknown type": header(entry(dtype="F7"), 24),
    "a type that is a list": header(entry(dtype=["F32"]), 24),
    "a negative size": header(entry(shape=[-2, -3]), 24),
    "a size in words": header(entry(shape=["2", 3]), 24),
    "a size that is a truth": header(entry(shape=[True, 6]), 24),
    "many dimensions": header(entry(shape=[1] * 17), 24),
    "too large": header(entry(shape=[2**60, 2**60]), 24),
    "beyond the file": header(entry(offsets=[0, 24]), 23),
    "backwards": header(entry(offsets=[24, 0]), 24),
    "three offsets": header(entry(offsets=[0, 12, 24]), 24),
    "another size than its shape": header(entry(offsets=[0, 20]), 24),
    "a hole": header(entry(offsets=[4, 28]), 28),
    "bytes of no tensor": header(entry(offsets=[0, 24]), 28),
    "an overlap": header(entry() | {"b": entry()["a"]}, 24),
    "a list of texts": header(entry() | {"__metadata__": ["pt"]}, 24),
    "a text that is a number": header(entry() | {"__metadata__": {"format": 1}}, 24),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_the_library_refuses_it_too(name: str, tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(MALFORMED[name])
    with pytest.raises((SafetensorError, OSError)):
        safe_open(tmp_path / "w.safetensors", framework="np")


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed(name: str) -> None:
    with pytest.raises(ModelLoadError, match=r"^w\.safetensors") as caught:
        parse(MALFORMED[name])
    assert 2 <= len(str(caught.value).splitlines()) <= 3
    assert len(str(caught.value)) < 500


def test_a_git_lfs_pointer() -> None:
    with pytest.raises(ModelLoadError, match="git lfs pull"):
        parse(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")


FREQUENCIES = TensorInfo("model.layers.0.self_attn.rotary_emb.inv_freq", "F32", (2,), 8)
HEAD = TensorInfo("lm_head.weight", "F16", (4, 4), 32)
NORM = TensorInfo("model.norm.weight", "BF16", (4,), 8)
IDS = TensorInfo("ids", "I64", (100,), 800)


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ((FREQUENCIES, IDS, HEAD), "float16"),
        ((HEAD, FREQUENCIES), "float16"),
        ((HEAD, NORM), "float16"),
        # Five small tensors have more bytes together than the large one.
        ((HEAD, *[NORM] * 5), "bfloat16"),
        ((TensorInfo("double", "F64", (9,), 72), HEAD), "float32"),
        ((IDS,), None),
        ((), None),
    ],
)
def test_a_dtype_that_config_json_lacks_is_that_of_most_bytes(
    tensors: tuple[TensorInfo, ...], expected: str | None
) -> None:
    """The safetensors library writes float32 before float16."""
    found = with_stored_dtype({"hidden_size": 4}, tensors)
    assert found == ({"hidden_size": 4} if expected is None else {"hidden_size": 4, "dtype": expected})
    for given in ({"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}, {"text_config": {"dtype": "bfloat16"}}):
        assert with_stored_dtype(given, tensors) == given


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    for number, name in ((1, "a"), (2, "b")):
        save_file({name: np.zeros((2, number), np.float32)}, tmp_path / f"model-0000{number}-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_shards(sharded: Path) -> None:
    assert {tensor.name: tensor.shape for tensor in directory_tensors(sharded)} == {"a": (2, 1), "b": (2, 2)}


def test_shards_on_a_hub(sharded: Path) -> None:
    files = {path.name: path.read_bytes() for path in sharded.iterdir()}
    index = json.loads(files["model.safetensors.index.json"])["weight_map"]

    def open_file(name: str) -> Callable[[int, int], bytes]:
        return lambda offset, size: files[name][offset : offset + size]

    found = remote_tensors(set(files), lambda name: len(files[name]), open_file, index, "someone/model")
    assert found == directory_tensors(sharded)


def test_an_index_of_another_version(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["c"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match="lists tensors that its files do not hold: c"):
        directory_tensors(sharded)


def test_a_tensor_in_two_files(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    save_file({"a": np.zeros(1, np.float32)}, sharded / "model-00002-of-00002.safetensors")
    with pytest.raises(ModelLoadError, match="a is in two files"):
        directory_tensors(sharded)
