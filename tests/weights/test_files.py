"""Choosing files by name, and reading the small JSON ones."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pagewick.errors import ModelLoadError
from pagewick.weights import files
from pagewick.weights.hub import local_model
from pagewick.weights.lora.finding import resolve_adapter


@pytest.mark.parametrize("name", ["a", "a.safetensors", "..a", "a b", ".hidden"])
def test_plain_names(name: str) -> None:
    assert files.is_plain_name(name)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "../a", "a\\b", "a\0b"])
def test_names_that_lead_elsewhere(name: str) -> None:
    assert not files.is_plain_name(name)


def test_metadata_is_neither_weights_nor_code_nor_pickles() -> None:
    wanted = [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer.model",
        "tekken.json",
        "chat_template.jinja",
    ]
    unwanted = [
        "tokenizer.bin",
        "tokenizer.py",
        "x/config.json",
        "chat_template.pt",
        "a.safetensors",
        "README.md",
    ]
    assert files.select_metadata(wanted + unwanted) == sorted(wanted)


@pytest.mark.parametrize(
    ("names", "selected"),
    [
        (["model.safetensors", "model.safetensors.index.json", "other.safetensors"], ["model.safetensors"]),
        (["weights.safetensors", "consolidated.safetensors"], ["weights.safetensors"]),
        (["consolidated.safetensors"], ["consolidated.safetensors"]),
        (["weights.safetensors", "adapter_model.safetensors"], ["weights.safetensors"]),
        (["m-2-of-2.safetensors", "m-1-of-2.safetensors"], ["m-1-of-2.safetensors", "m-2-of-2.safetensors"]),
    ],
)
def test_weights_without_index(names: list[str], selected: list[str]) -> None:
    assert not files.needs_index(names)
    assert files.select_weights(names, None, "here") == selected


def test_weights_with_index() -> None:
    names = ["model.safetensors.index.json", "a.safetensors", "b.safetensors", "stray.safetensors"]
    assert files.needs_index(names)
    index = {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"}
    assert files.select_weights(names, index, "here") == ["a.safetensors", "b.safetensors"]


def test_missing_shards_are_named() -> None:
    with pytest.raises(ModelLoadError, match=r"m-0002-of-0003\.safetensors"):
        files.select_weights(["m-0001-of-0003.safetensors", "m-0003-of-0003.safetensors"], None, "here")
    with pytest.raises(ModelLoadError, match=r"missing: b\.safetensors"):
        files.select_weights(["a.safetensors"], {"x": "a.safetensors", "y": "b.safetensors"}, "here")
    with pytest.raises(ModelLoadError) as caught:  # a count that is not credible
        files.select_weights(["m-1-of-99999999999.safetensors"], None, "here")
    assert "and 9995 more" in str(caught.value)


@pytest.mark.parametrize(
    "present", [(), ("config.json",), ("model.safetensors",), ("config.json", "model.safetensors")]
)
def test_missing_files_of_a_plain_checkpoint(tmp_path: Path, present: tuple[str, ...]) -> None:
    for name in present:
        (tmp_path / name).write_text("{}")
    expected = [name for name in ("config.json", "model.safetensors") if name not in present]
    assert files.missing_files(tmp_path) == expected[:1]


def test_missing_files_of_a_sharded_checkpoint(tmp_path: Path) -> None:
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "b.safetensors").symlink_to("nowhere")
    assert files.missing_files(tmp_path) == ["a.safetensors", "b.safetensors"]
    (tmp_path / "nowhere").touch()
    (tmp_path / "a.safetensors").touch()
    assert files.missing_files(tmp_path) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not valid JSON"),
        (b"[1]", "JSON object"),
        (b'{"a": }', "not valid JSON"),
        (b'{"a": "\xff"}', "not valid JSON"),
        (b'{"a":' * 100_000, "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"a": "' + b"x" * 2**24 + b'"}', "larger than"),
        (None, "missing"),
    ],
)
def test_bad_json(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=words) as caught:
        files.read_json_object(path)
    assert str(path) in str(caught.value)


def test_json_object(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'\xef\xbb\xbf{"a": {"b": [1, null]}, "c": 1, "c": 2}')
    assert files.read_json_object(tmp_path / "config.json") == {"a": {"b": [1, None]}, "c": 2}
    with pytest.raises(ModelLoadError, match="cannot read"):
        files.read_json_object(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"metadata": {}}', "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": ["a"]}', "no weight_map"),
        ('{"weight_map": {"x": 1}}', "not a plain file name"),
        ('{"weight_map": {"x": "../a.safetensors"}}', "not a plain file name"),
        ('{"weight_map": {"x": "/etc/passwd"}}', "not a plain file name"),
        ('{"weight_map": {"x": "a", "y": "b", "x": "c"}}', "x is listed twice"),
    ],
)
def test_bad_index(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(ModelLoadError, match=words):
        files.read_index(tmp_path / "index.json")


def test_files_that_are_a_tokenizer() -> None:
    for names in (
        ["tokenizer.json"],
        ["tekken.json"],
        ["tiktoken.model"],
        ["tokenizer.model"],
        ["vocab.json", "merges.txt"],
        ["vocab.txt"],
    ):
        assert files.has_tokenizer(["config.json", *names])
    assert not files.has_tokenizer(["tokenizer_config.json", "vocab.json", "qwen.tiktoken"])


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "chat_template.jinja"])
@pytest.mark.parametrize("is_link", [False, True])
def test_pipes_and_devices_are_refused(name: str, is_link: bool, tmp_path: Path) -> None:
    (tmp_path / "original").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert local_model(str(tmp_path)) == resolve_adapter(str(tmp_path)) == tmp_path
    if is_link:
        (tmp_path / name).symlink_to("/dev/zero")
    else:
        os.mkfifo(tmp_path / name)
    for find in (local_model, resolve_adapter):
        with pytest.raises(ModelLoadError, match=rf"{name} is a pipe, a device or a socket.*\n  delete it"):
            find(str(tmp_path))


def test_names_in_errors_are_short_and_printable() -> None:
    assert files.name_some(["a", "\x1b[2J\nb", "é"]) == "a, ?[2J?b, é"
    assert files.name_some(["x" * 201, "y" * 200]) == f"{'x' * 200}..., {'y' * 200}"
