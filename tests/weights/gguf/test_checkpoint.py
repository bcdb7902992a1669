"""Models in several GGUF files, and files that hold something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagewick.errors import ConfigError, ModelLoadError
from pagewick.sampling_params import default_sampling_params
from pagewick.weights.gguf.checkpoint import open_gguf, split_names
from pagewick.weights.gguf.config import generation_config
from pagewick.weights.hub import local_model
from tests.doctor.test_model import tiny_gguf
from tests.weights.gguf.test_header import gguf, string, value


def test_names_of_split_gguf_files() -> None:
    names = [f"m-Q8_0-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    assert split_names(names[1], 3) == names
    for name, count in ((names[0], 4), ("m.gguf", 3), ("m-1-of-00003.gguf", 3)):
        with pytest.raises(ModelLoadError, match=f"one of {count} files"):
            split_names(name, count)


def test_a_directory_with_one_model(tmp_path: Path) -> None:
    (tmp_path / "mmproj-model.gguf").touch()
    (tmp_path / "model-Q8_0.gguf").write_bytes(tiny_gguf())
    assert local_model(str(tmp_path)) == tmp_path / "model-Q8_0.gguf"
    (tmp_path / "config.json").write_text("{}")  # which many repositories of GGUF files have
    assert local_model(str(tmp_path)) == tmp_path / "model-Q8_0.gguf"
    (tmp_path / "model.safetensors").touch()
    assert local_model(str(tmp_path)) == tmp_path


def test_a_directory_with_the_parts_of_a_model(tmp_path: Path) -> None:
    names = split_names("m-00001-of-00002.gguf", 2)
    for index, name in enumerate(names):
        (tmp_path / name).write_bytes(tiny_gguf(part=(index, 2)))
    path = local_model(str(tmp_path))
    assert path == tmp_path / names[0]
    assert len(open_gguf(tmp_path / names[1]).tensors) == len(open_gguf(path).tensors) == 12


def test_a_directory_with_several_models(tmp_path: Path) -> None:
    for name in ("a-Q8_0.gguf", "a-Q4_K_M.gguf"):
        (tmp_path / name).write_bytes(b"x" * 2048)
    with pytest.raises(
        ModelLoadError, match=r"holds 2 models\n  it holds a-.*\.gguf \(2.0 kB\), a-.*\n  name one: /.*a-Q4"
    ):
        local_model(str(tmp_path))
    assert local_model(str(tmp_path), "a-Q8_0.gguf") == tmp_path / "a-Q8_0.gguf"
    with pytest.raises(ModelLoadError, match=r"holds no a-Q6_K\.gguf\n  it holds a-.*\n  name one"):
        local_model(str(tmp_path), "a-Q6_K.gguf")
    with pytest.raises(ConfigError, match="is a file already; leave out --weight-file b"):
        local_model(str(tmp_path / "a-Q8_0.gguf"), "b")


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ([("general.type", "adapter")], "holds a LoRA adapter"),
        ([("general.type", "imatrix")], "holds an importance matrix"),
        ([("general.type", "mmproj")], "holds the vision part"),
        ([("general.architecture", "controlvector")], "holds a control vector"),
        ([("general.architecture", "llama")], "holds a vocabulary only"),
    ],
)
def test_files_that_hold_no_model(keys: list[tuple[str, str]], complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf([(key, value(8, string(text))) for key, text in keys], []))
    with pytest.raises(ModelLoadError, match=complaint):
        open_gguf(path)


@pytest.mark.parametrize("magic", [b"lmgg", b"fmgg", b"tjgg"])
def test_the_formats_before_gguf(magic: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(magic + bytes(100))
    with pytest.raises(ModelLoadError, match=r"older than GGUF.*\n.*convert_llama_ggml_to_gguf"):
        open_gguf(path)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny_gguf().replace(b"llama.block_count", b"llama.block_cOunt"))
    with pytest.raises(ModelLoadError, match=r"m\.gguf: llama\.block_count is missing"):
        _ = open_gguf(path).config


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny_gguf().replace(b"blk.0.ffn_gate.weight", b"blk.0.ffn_gAte.weight"))
    with pytest.raises(ModelLoadError, match=r"tensors that LlamaForCausalLM does not have: blk\.0\.ffn_gAte\.weight"):
        _ = open_gguf(path).pieces


def test_sampling_defaults_of_a_file() -> None:
    values = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.penalty_repeat": 1.1}
    found = generation_config({**values, "general.sampling.top_p": "x", "tokenizer.ggml.eos_token_id": 7})
    assert found == {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1, "eos_token_id": [7]}
    params = default_sampling_params(found)
    assert (params.temperature, params.top_k, params.repetition_penalty) == (0.6, 20, 1.1)
