"""Safetensors checkpoints, written byte by byte from the format's definition."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pagewick.errors import ModelLoadError, ModelNotFoundError
from pagewick.weights.opening import open_source
from pagewick.weights.safetensors import SafetensorsSource

Build = Callable[..., bytes]
INDEX = "model.safetensors.index.json"


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def write(directory: Path, **contents: bytes | dict[str, object]) -> Path:
    """Write files; a keyword is a file's name with _ for the dot before the suffix."""
    for name, content in {"config_json": {}, **contents}.items():
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        stem, _, suffix = name.rpartition("_")
        (directory / f"{stem}.{suffix}").write_bytes(data)
    return directory


def fails(directory: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        open_source(directory)
    message = str(caught.value)
    assert len(message.splitlines()) <= 6
    return message


def test_single_file(tmp_path: Path, safetensors_bytes: Build) -> None:
    data = safetensors_bytes(
        {
            "b": ("F32", [2, 3], floats(1, 2, 3, 4, 5, 6)),
            "a": ("BF16", [2], b"\x80\x3f\x00\xc0"),  # 1.0 = 0x3f80, -2.0 = 0xc000
            "scalar": ("I64", [], struct.pack("<q", -7)),
            "none": ("F16", [0, 4], b""),
        }
    )
    with open_source(write(tmp_path, model_safetensors=data, config_json={"hidden_size": 8})) as source:
        assert source.names()[:2] == ("b", "a")
        assert set(source.names()) == {"b", "a", "scalar", "none"}
        assert (source.shape("b"), source.dtype("b")) == ((2, 3), torch.float32)
        assert (source.shape("scalar"), source.dtype("scalar")) == ((), torch.int64)
        assert source.stored_type("b") == torch.float32 and source.stored_type("scalar") == torch.int64
        assert source.get("b").tolist() == [[1, 2, 3], [4, 5, 6]]
        assert source.get("a").tolist() == [1.0, -2.0]
        assert source.get("a").dtype == source.dtype("a") == torch.bfloat16
        assert source.get("scalar").item() == -7
        assert source.get("none").shape == (0, 4)
        # The floating-point numbers of "b" take more bytes than those of "a".
        assert source.config() == {"hidden_size": 8, "dtype": "float32"}
        source.config()["hidden_size"] = 9
        assert source.config()["hidden_size"] == 8


@pytest.mark.parametrize(
    ("word", "dtype", "itemsize"),
    [
        ("F64", torch.float64, 8),
        ("F16", torch.float16, 2),
        ("F8_E4M3", torch.float8_e4m3fn, 1),
        ("F8_E5M2", torch.float8_e5m2, 1),
        ("F8_E8M0", torch.float8_e8m0fnu, 1),
        ("I32", torch.int32, 4),
        ("I16", torch.int16, 2),
        ("I8", torch.int8, 1),
        ("U8", torch.uint8, 1),
        ("BOOL", torch.bool, 1),
    ],
)
def test_dtypes(tmp_path: Path, safetensors_bytes: Build, word: str, dtype: torch.dtype, itemsize: int) -> None:
    data = safetensors_bytes({"x": (word, [3], bytes(3 * itemsize))})
    with open_source(write(tmp_path, model_safetensors=data)) as source:
        assert source.dtype("x") == source.get("x").dtype == dtype


def test_tensors_outlive_the_source(tmp_path: Path, safetensors_bytes: Build) -> None:
    data = safetensors_bytes({"x": ("F32", [2], floats(1, 2))})
    with open_source(write(tmp_path, model_safetensors=data)) as source:
        tensor = source.get("x")
    assert tensor.tolist() == [1, 2]


def rss_file_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile"))
    return 1024 * int(line.split()[1])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc/self/status, which only Linux has")
def test_tensors_are_mapped_and_released(tmp_path: Path, safetensors_bytes: Build) -> None:
    num_bytes = 32 * 2**20
    data = safetensors_bytes(
        {
            "before": ("U8", [5], b"abcde"),
            "large": ("U8", [num_bytes], b"\x01" * num_bytes),
            "after": ("U8", [5], b"fghij"),
        }
    )
    with open_source(write(tmp_path, model_safetensors=data)) as source:
        large, after = source.get("large"), source.get("after")
        untouched = rss_file_bytes()
        assert int(large[::4096].sum()) == num_bytes // 4096  # touches every page
        assert rss_file_bytes() - untouched > 0.9 * num_bytes
        source.release(large)
        assert rss_file_bytes() - untouched < 0.1 * num_bytes
        assert bytes(after.tolist()) == b"fghij"
        assert bytes(source.get("before").tolist()) == b"abcde"
        assert int(large[::4096].sum()) == num_bytes // 4096  # released pages come back from the file


def test_release_of_a_copy_touches_nothing_else(tmp_path: Path, safetensors_bytes: Build) -> None:
    data = safetensors_bytes({"x": ("U8", [5], b"abcde")})
    memory = torch.ones(3 * 2**16, dtype=torch.uint8)
    with open_source(write(tmp_path, model_safetensors=data)) as source:
        source.release(memory[2**16 + 1 : 2**17 - 1])
    assert int(memory[: 2**16 + 1].sum()) == 2**16 + 1
    assert int(memory[2**17 - 1 :].sum()) == 2**16 + 1


def test_shards(tmp_path: Path, safetensors_bytes: Build) -> None:
    one = safetensors_bytes({"b": ("F32", [1], floats(1)), "stale": ("F32", [1], floats(9))})
    two = safetensors_bytes({"a": ("F32", [1], floats(2)), "b": ("F32", [1], floats(8))})
    index = {"weight_map": {"a": "two.safetensors", "b": "one.safetensors"}}
    write(tmp_path, one_safetensors=one, two_safetensors=two)
    (tmp_path / INDEX).write_text(json.dumps(index))
    with open_source(tmp_path) as source:
        assert source.names() == ("b", "a")
        assert (source.get("a").item(), source.get("b").item()) == (2, 1)


def test_shards_may_be_links(tmp_path: Path, safetensors_bytes: Build) -> None:
    blob = tmp_path / "blob"
    blob.write_bytes(safetensors_bytes({"a": ("F32", [1], floats(2))}))
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (write(snapshot) / "model.safetensors").symlink_to("../blob")
    with open_source(snapshot) as source:
        assert source.get("a").item() == 2


def test_files_without_index(tmp_path: Path, safetensors_bytes: Build) -> None:
    one = safetensors_bytes({"a": ("F32", [1], floats(1))})
    two = safetensors_bytes({"b": ("F32", [1], floats(2))})
    (write(tmp_path) / "m-1-of-2.safetensors").write_bytes(one)
    assert "m-2-of-2.safetensors" in fails(tmp_path)
    (tmp_path / "m-2-of-2.safetensors").write_bytes(two)
    with open_source(tmp_path) as source:
        assert source.names() == ("a", "b")
    (tmp_path / "m-2-of-2.safetensors").write_bytes(one)
    assert "a is in two files" in fails(tmp_path)


def test_index_naming_an_absent_file(tmp_path: Path) -> None:
    (write(tmp_path) / INDEX).write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    assert "missing: gone.safetensors" in fails(tmp_path)


def test_index_naming_an_absent_tensor(tmp_path: Path, safetensors_bytes: Build) -> None:
    write(tmp_path, x_safetensors=safetensors_bytes({"a": ("F32", [1], floats(1))}))
    names = {f"t{i}": "x.safetensors" for i in range(7)}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "x.safetensors", **names}}))
    message = fails(tmp_path)
    assert "t0 (x.safetensors)" in message and "and 2 more" in message


def test_every_truncation_is_found(tmp_path: Path, safetensors_bytes: Build) -> None:
    data = safetensors_bytes({"a": ("F32", [4], floats(1, 2, 3, 4)), "b": ("F32", [1], floats(5))})
    for num_bytes in range(len(data)):
        assert "truncated or damaged" in fails(write(tmp_path, model_safetensors=data[:num_bytes]))


@pytest.mark.parametrize(
    "data",
    [
        b"garbage, not a header at all",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 60) + b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,4]}}      ' + floats(1),
        struct.pack("<Q", 60) + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}      ' + floats(1, 2),
        struct.pack("<Q", 60) + b'{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}      ' + floats(1),
    ],
)
def test_bad_headers(tmp_path: Path, data: bytes) -> None:
    message = fails(write(tmp_path, model_safetensors=data))
    assert str(tmp_path / "model.safetensors") in message and "download or copy it again" in message


def test_dtype_that_torch_lacks(tmp_path: Path, safetensors_bytes: Build) -> None:
    data = safetensors_bytes({"a": ("F6_E2M3", [4], bytes(3))})
    message = fails(write(tmp_path, model_safetensors=data))
    assert "a (F6_E2M3)" in message and "BF16" in message


def test_git_lfs_pointer(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
    assert "lfs pull" in fails(write(tmp_path, model_safetensors=pointer))


def test_dangling_link_and_directory(tmp_path: Path) -> None:
    (write(tmp_path) / "model.safetensors").symlink_to("nowhere")
    assert "cannot read" in fails(tmp_path)
    (tmp_path / "nowhere").mkdir()
    assert "cannot read" in fails(tmp_path)


def test_generation_config(tmp_path: Path, safetensors_bytes: Build) -> None:
    write(tmp_path, model_safetensors=safetensors_bytes({"a": ("F32", [1], floats(1))}))
    with open_source(tmp_path) as source:
        assert source.generation_config() == {}
    write(tmp_path, generation_config_json={"eos_token_id": [1, 2]})
    with open_source(tmp_path) as source:
        assert source.generation_config() == {"eos_token_id": [1, 2]}
    write(tmp_path, generation_config_json=b"{")
    assert "generation_config.json is not valid JSON" in fails(tmp_path)


def test_config_is_needed(tmp_path: Path, safetensors_bytes: Build) -> None:
    write(tmp_path, model_safetensors=safetensors_bytes({"a": ("F32", [1], floats(1))}))
    (tmp_path / "config.json").unlink()
    assert "it has no config.json" in fails(tmp_path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pytorch_model.bin", "refused, because reading a pickle runs code"),
        ("adapter_model.safetensors", "LoRA adapter"),
        ("notes.txt", "found: config.json, notes.txt"),
    ],
)
def test_other_formats(tmp_path: Path, name: str, words: str) -> None:
    (write(tmp_path) / name).touch()
    assert words in fails(tmp_path)


def test_not_a_directory(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelNotFoundError, match=f"give the directory it is in: {tmp_path}"):
        open_source(tmp_path / "model.safetensors")
    with pytest.raises(ModelNotFoundError, match="is not a directory"):
        open_source(tmp_path / "nothing")


def test_agrees_with_the_library_that_writes(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = {f"layer.{i}.w": torch.randn(i, 3).to(torch.bfloat16) for i in (1, 5, 70)}
    save_file(tensors, write(tmp_path) / "model.safetensors")
    with SafetensorsSource(tmp_path) as source:
        assert set(source.names()) == tensors.keys()
        assert all(torch.equal(source.get(name), tensor) for name, tensor in tensors.items())
