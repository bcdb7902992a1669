"""The files of sentence-transformers are fetched with a model, and nothing else of its folders."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pagewick.demo import MODEL_DIR
from pagewick.doctor.checkpoint import Checkpoint, open_checkpoint
from pagewick.engine.preflight import check_description
from pagewick.errors import ModelLoadError, ModelNotFoundError
from pagewick.weights.cached_models import cached_models
from pagewick.weights.description import describe
from pagewick.weights.hub import resolve_model, resolve_tokenizer
from pagewick.weights.hub_settings import HuggingFaceSettings
from tests.weights.conftest import HubServer
from tests.weights.modules import MEAN, dense_weights, modules, with_two_layers, write_files
from tests.weights.test_modelscope import Hub as ModelScopeHub
from tests.weights.test_modelscope import hub as modelscope_hub  # a stand-in for ModelScope

MODEL = "someone/Model-1.5"

__all__ = ["modelscope_hub"]

# Repositories hold these files, too, which no module needs.
OTHERS = {
    "onnx/model.onnx": b"o",
    "onnx/config.json": b"{}",
    "openvino/model.safetensors": b"o",
    "4_Normalize/config.json": b"{}",
    "2_Dense/pytorch_model.bin": b"p",
    "2_Dense/README.md": b"r",
    "README.md": b"r",
    "9_Dense/config.json": b"{}",
    "sentence_bert_config.json": b"{}",
}


def model_files() -> dict[str, bytes]:
    """A model of the built-in one's kind, small, with two layers behind it."""
    config = json.loads((MODEL_DIR / "config.json").read_text(encoding="utf-8"))
    names = ("model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
    files = {name: (MODEL_DIR / name).read_bytes() for name in names}
    return {**files, "config.json": json.dumps(config).encode(), **with_two_layers()}


def files_below(directory: Path) -> dict[str, bytes]:
    """Return all files of a directory, without our own notes."""
    found = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if not name.startswith(".")}


class TestHuggingFace:
    def test_they_are_fetched(self, hub: HubServer) -> None:
        files = model_files()
        hub.add(MODEL, {**files, **OTHERS})
        directory = resolve_model(MODEL)
        assert files_below(directory) == files
        assert sorted(hub.fetched()) == sorted(files)
        hub.requests.clear()
        assert resolve_model(MODEL) == directory and hub.fetched() == []
        assert len(describe(directory).config["embedding_dense"]) == 2

    def test_they_are_checked_before_the_weights_are_fetched(self, hub: HubServer) -> None:
        changed = {"1_Pooling/config.json": b'{"pooling_mode": "max"}'}
        hub.add(MODEL, {**model_files(), **changed})
        with pytest.raises(ModelLoadError, match=rf'{MODEL}/1_Pooling/config.json: pooling_mode "max" is not support'):
            resolve_model(MODEL, check=check_description)
        assert hub.fetched() == ["config.json", "modules.json", "1_Pooling/config.json"]

    @pytest.mark.parametrize("name", ["1_Pooling/config.json", "2_Dense/config.json", "3_Dense/model.safetensors"])
    def test_an_interrupted_download_goes_on(self, name: str, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
        files = model_files()
        hub.add(MODEL, files)
        directory = resolve_model(MODEL)
        settings = HuggingFaceSettings.from_environment(os.environ)
        assert settings.find_cached(MODEL, "main") == directory
        (directory / name).unlink()
        assert settings.find_cached(MODEL, "main") is None
        assert [cached.missing for cached in cached_models(os.environ)] == [name]
        with monkeypatch.context() as offline:
            offline.setenv("HF_HUB_OFFLINE", "1")
            with pytest.raises(ModelNotFoundError, match=f"missing: {name}"):
                resolve_model(MODEL)
        assert files_below(resolve_model(MODEL)) == files

    def test_a_download_of_an_older_version_gets_them(self, hub: HubServer) -> None:
        files = model_files()
        hub.add(MODEL, {name: data for name, data in files.items() if "/" not in name and name != "modules.json"})
        directory = resolve_model(MODEL)
        hub.add(MODEL, files)
        assert resolve_model(MODEL) == directory and files_below(directory) == files

    @pytest.mark.parametrize(
        ("missing", "there", "complaint"),
        [
            ("1_Pooling/config.json", "1_Pooling/README.md", rf"{MODEL} is incomplete: .*asks for 1_Pooling/config"),
            ("3_Dense/model.safetensors", "README.md", rf"{MODEL} is incomplete: .*asks for 3_Dense/model.safetensors"),
            ("3_Dense/model.safetensors", "3_Dense/pytorch_model.bin", rf"{MODEL}/3_Dense holds .* only a pickle"),
        ],
    )
    def test_what_a_repository_lacks(self, missing: str, there: str, complaint: str, hub: HubServer) -> None:
        files = {**model_files(), there: b"x"}
        del files[missing]
        hub.add(MODEL, files)
        with pytest.raises(ModelLoadError, match=complaint):
            resolve_model(MODEL)
        assert "model.safetensors" not in hub.fetched()

    @pytest.mark.parametrize("path", ["../outside", "..", "a/b", "/tmp/outside"])
    def test_a_path_that_leads_elsewhere_fetches_nothing(self, path: str, hub: HubServer, tmp_path: Path) -> None:
        listed = modules(["Transformer", "Pooling"])
        listed[1]["path"] = path
        files = {**model_files(), "modules.json": json.dumps(listed).encode()}
        hub.add(MODEL, {**files, f"{path}/config.json": b"{}"})
        directory = resolve_model(MODEL)
        assert set(files_below(directory)) == {name for name in files if "/" not in name}
        assert not list(tmp_path.rglob("outside"))
        with pytest.raises(ModelLoadError, match="a folder in the model's directory"):
            describe(directory)

    def test_a_tokenizer_alone_needs_none(self, hub: HubServer) -> None:
        hub.add(MODEL, model_files())
        resolve_tokenizer(MODEL)
        assert not any("/" in name for name in hub.fetched())


class TestModelScope:
    def resolve(self) -> Path:
        return resolve_model(MODEL, hub="modelscope")

    def test_they_are_fetched(self, modelscope_hub: ModelScopeHub) -> None:
        files = model_files()
        modelscope_hub.models[MODEL, "master"] = {**files, **OTHERS, "../2_Dense/config.json": b"bad"}
        directory = self.resolve()
        assert files_below(directory) == files
        assert sorted(modelscope_hub.fetched()) == sorted(files)
        modelscope_hub.requests.clear()
        assert self.resolve() == directory and modelscope_hub.fetched() == []

    def test_a_changed_layer_is_fetched_again(self, modelscope_hub: ModelScopeHub) -> None:
        files = model_files()
        modelscope_hub.models[MODEL, "master"] = dict(files)
        self.resolve()
        changed = {"3_Dense/model.safetensors": dense_weights(24, 8, seed=9), "1_Pooling/config.json": b'{"a": 1}'}
        modelscope_hub.models[MODEL, "master"] |= changed
        modelscope_hub.requests.clear()
        assert files_below(self.resolve()) == {**files, **changed}
        assert sorted(modelscope_hub.fetched()) == sorted(changed)


class TestDoctor:
    def check(self, files: dict[str, bytes], directory: Path, remote: Checkpoint, fetched: list[str]) -> None:
        local = open_checkpoint(str(write_files(directory, files)), {})
        assert (remote.config, remote.tensors, remote.verdict) == (local.config, local.tensors, local.verdict)
        names = [f"{folder}.linear.weight" for folder in ("2_Dense", "3_Dense")]
        assert set(names) <= {tensor.name for tensor in remote.tensors}
        assert remote.config["embedding_pooling"] == "mean" and not remote.is_downloaded
        assert set(fetched) == {"config.json", "model.safetensors", *with_two_layers()}

    def test_hugging_face(self, hub: HubServer, tmp_path: Path) -> None:
        files = {**model_files(), **OTHERS}
        hub.add(MODEL, files)
        self.check(files, tmp_path / "model", open_checkpoint(MODEL, os.environ), hub.fetched())

    def test_modelscope(self, modelscope_hub: ModelScopeHub, tmp_path: Path) -> None:
        files = {**model_files(), **OTHERS}
        modelscope_hub.models[MODEL, "master"] = files
        remote = open_checkpoint(MODEL, os.environ, hub="modelscope")
        self.check(files, tmp_path / "model", remote, modelscope_hub.fetched())

    def test_a_pooling_that_is_not_supported(self, hub: HubServer) -> None:
        hub.add(
            MODEL, {**model_files(), "1_Pooling/config.json": json.dumps({**MEAN, "include_prompt": False}).encode()}
        )
        with pytest.raises(ModelLoadError, match=rf"{MODEL}/1_Pooling/config.json: include_prompt false") as caught:
            open_checkpoint(MODEL, os.environ)
        assert "/tmp" not in str(caught.value)
