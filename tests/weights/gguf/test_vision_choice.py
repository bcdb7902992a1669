"""Which vision part (mmproj) belongs to a GGUF model: on this disk, on a hub, and for `pagewick doctor`."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from pagewick.config import EngineConfig
from pagewick.doctor.checkpoint import open_checkpoint
from pagewick.engine.preflight import WeightBytes
from pagewick.errors import ConfigError, ModelLoadError
from pagewick.local_models import with_local_models
from pagewick.weights.gguf.vision_choice import vision_choices
from pagewick.weights.hub import resolve_model
from tests.models.checkpoints import write_checkpoint
from tests.weights.conftest import HubServer
from tests.weights.conftest import hub as hub_fixture
from tests.weights.gguf.mixes import rewrite
from tests.weights.gguf.models import write_file
from tests.weights.gguf.vision_models import VOCAB_SIZE, Pair, write_pair

__all__ = ["hub_fixture"]

MODEL = "owner/name"


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return write_pair("qwen3-vl", tmp_path)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="pagewick")
    return caplog


def found_for(model: Path | str, **options: Any) -> str | None:
    return with_local_models(EngineConfig(str(model), **options)).mmproj


def test_the_nearest_and_the_least_rounded_one_goes_first() -> None:
    names = ["mmproj-F32.gguf", "mmproj-BF16.gguf", "m-mmproj-f16.gguf", "mmproj-Q8_0.gguf", "mmproj.gguf", "m.gguf"]
    names += ["Q4/mmproj-Q8_0.gguf", "Q8/mmproj-BF16.gguf", "mmproj-BF16.txt"]
    above = ["mmproj-BF16.gguf", "m-mmproj-f16.gguf", "mmproj-F32.gguf", "mmproj-Q8_0.gguf", "mmproj.gguf"]
    assert vision_choices(names, "m.gguf") == above
    assert vision_choices(names, "Q4/m.gguf") == ["Q4/mmproj-Q8_0.gguf", *above]
    assert vision_choices([], "m.gguf") == []


class TestOnThisDisk:
    def test_one_beside_the_model_is_used(self, pair: Pair, log: pytest.LogCaptureFixture) -> None:
        assert found_for(pair.text) == str(pair.vision)
        assert found_for(pair.text.parent) == str(pair.vision)
        assert "images are read with mmproj-qwen3-vl-F32.gguf" in log.text
        assert found_for(pair.text, language_model_only=True) is None

    def test_one_that_does_not_fit_is_left_alone(
        self, pair: Pair, tmp_path: Path, log: pytest.LogCaptureFixture
    ) -> None:
        other = write_pair("qwen3.5-multimodal", tmp_path).vision
        other = other.rename(other.with_name("mmproj-BF16.gguf"))
        (tmp_path / "mmproj-F16.gguf").write_bytes(b"GGUF")
        assert found_for(pair.text) == str(pair.vision)
        assert f"mmproj-BF16.gguf is not used: {other} is not the vision part of {pair.text}" in log.text
        assert "mmproj-F16.gguf is not used: " in log.text

    def test_one_that_lacks_what_its_model_needs_is_left_alone(
        self, pair: Pair, tmp_path: Path, log: pytest.LogCaptureFixture
    ) -> None:
        lacking = {"clip.vision.attention.head_count": None}
        target = tmp_path / "mmproj-BF16.gguf"
        lame = rewrite(pair.vision, target, lambda name, numbers: [(name, numbers, "F32")], lacking)
        assert found_for(pair.text) == str(pair.vision)
        assert f"{lame.name} is not used: " in log.text and "attention.head_count is missing" in log.text
        with pytest.raises(ModelLoadError, match=r"attention\.head_count is missing"):
            WeightBytes.of(with_local_models(EngineConfig(str(pair.text), mmproj=str(lame))), 1)

    def test_a_name_stands_for_a_file_beside_the_model(self, pair: Pair, tmp_path: Path) -> None:
        second = tmp_path / "mmproj-other.gguf"
        second.write_bytes(pair.vision.read_bytes())
        assert found_for(pair.text, mmproj="mmproj-other.gguf") == str(second)
        elsewhere = second.rename(tmp_path / "eyes.gguf")
        assert found_for(pair.text, mmproj=str(elsewhere)) == str(elsewhere)
        with pytest.raises(ModelLoadError, match=r"--mmproj mmproj-other\.gguf is neither .*\n  there: mmproj-qwen3"):
            found_for(pair.text, mmproj="mmproj-other.gguf")

    def test_one_that_is_named_has_to_fit(self, pair: Pair, tmp_path: Path) -> None:
        other = write_pair("qwen3.5-multimodal", tmp_path)
        with pytest.raises(ModelLoadError, match="is not the vision part of") as error:
            found_for(pair.text, mmproj=str(other.vision))
        assert str(pair.text) in str(error.value) and str(other.vision) in str(error.value)
        with pytest.raises(ModelLoadError, match="does not hold the vision part"):
            found_for(pair.text, mmproj=str(pair.text))

    def test_there_may_be_none(self, pair: Pair, tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
        pair.vision.unlink()
        assert found_for(pair.text) is None
        assert "images are refused: there is no mmproj file for qwen3-vl-F32.gguf; give one with --mmproj" in log.text
        log.clear()
        (tmp_path / "text").mkdir()
        assert found_for(write_file("qwen3", tmp_path / "text")) is None
        assert "images" not in log.text

    def test_models_that_read_text_share_architectures_with_some_that_see(
        self, tmp_path: Path, log: pytest.LogCaptureFixture
    ) -> None:
        pair = write_pair("smolvlm", tmp_path)
        assert found_for(pair.text) == str(pair.vision)
        tokens = [f"t{token_id}" for token_id in range(VOCAB_SIZE)]
        values = {"tokenizer.ggml.tokens": tokens}
        plain = rewrite(pair.text, tmp_path / "plain.gguf", lambda name, numbers: [(name, numbers, "F32")], values)
        assert found_for(plain) is None
        assert f"{pair.vision.name} is not used: {plain} has no token <image>" in log.text
        log.clear()
        pair.vision.unlink()
        assert found_for(pair.text) is None
        assert not log.text, "nothing says that the model could read images"

    def test_safetensors_have_no_such_file(self, pair: Pair, tmp_path: Path) -> None:
        write_checkpoint("qwen3", tmp_path / "checkpoint")
        with pytest.raises(ConfigError, match=r"--mmproj .* is for GGUF files, and .* is a directory"):
            found_for(tmp_path / "checkpoint", mmproj=str(pair.vision))

    def test_memory_of_both_files_is_counted(self, pair: Pair) -> None:
        whole, text = (
            WeightBytes.of(EngineConfig(str(pair.text), dtype="float32", mmproj=mmproj), 1).all
            for mmproj in (str(pair.vision), None)
        )
        assert pair.vision.stat().st_size * 0.95 < whole - text < pair.vision.stat().st_size

    def test_doctor_counts_both_files(self, pair: Pair) -> None:
        whole = open_checkpoint(str(pair.text), {})
        assert whole.model_config is not None and whole.model_config.vision is not None
        num_bytes = pair.text.stat().st_size + pair.vision.stat().st_size
        assert whole.verdict.runs and num_bytes * 0.95 < whole.num_bytes < num_bytes
        pair.vision.unlink()
        assert open_checkpoint(str(pair.text), {}).num_bytes < pair.text.stat().st_size


class TestOnAHub:
    @pytest.fixture
    def files(self, pair: Pair, hub: HubServer) -> dict[str, bytes]:
        text, vision = pair.text.read_bytes(), pair.vision.read_bytes()
        names = ("mmproj-F32.gguf", "mmproj-BF16.gguf", "mmproj-Q8_0.gguf")
        files = {"README.md": b"x", "m-F32.gguf": text, "m-Q8_0.gguf": text + bytes(1)}
        files |= {name: vision + bytes(number) for number, name in enumerate(names)}
        hub.add(MODEL, files)
        return files

    def test_one_of_the_repository_is_downloaded(
        self, files: dict[str, bytes], hub: HubServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = with_local_models(EngineConfig(f"{MODEL}:F32"))
        assert config.mmproj is not None and Path(config.mmproj).name == "mmproj-BF16.gguf"
        assert Path(config.mmproj).read_bytes() == files["mmproj-BF16.gguf"]
        assert set(hub.fetched()) == {"m-F32.gguf", "mmproj-BF16.gguf"}
        hub.requests.clear()
        assert with_local_models(EngineConfig(f"{MODEL}:F32")) == config
        assert hub.fetched() == []
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert with_local_models(EngineConfig(f"{MODEL}:F32")) == config

    def test_another_one_by_its_name(self, files: dict[str, bytes], hub: HubServer) -> None:
        found = found_for(f"{MODEL}:F32", mmproj="mmproj-Q8_0.gguf")
        assert found is not None and found.endswith("/mmproj-Q8_0.gguf")
        assert set(hub.fetched()) == {"m-F32.gguf", "mmproj-Q8_0.gguf"}
        with pytest.raises(ModelLoadError, match=r"--mmproj eyes\.gguf is neither a file on this disk nor beside"):
            found_for(f"{MODEL}:Q8_0", mmproj="eyes.gguf")

    def test_one_on_this_disk_needs_none(self, files: dict[str, bytes], hub: HubServer, pair: Pair) -> None:
        assert found_for(f"{MODEL}:F32", mmproj=str(pair.vision)) == str(pair.vision)
        assert set(hub.fetched()) == {"m-F32.gguf"}

    def test_text_alone(self, files: dict[str, bytes], hub: HubServer) -> None:
        assert found_for(f"{MODEL}:F32", language_model_only=True) is None
        resolve_model(f"{MODEL}:Q8_0")
        assert set(hub.fetched()) == {"m-F32.gguf", "m-Q8_0.gguf"}

    def test_one_that_is_not_supported_is_not_downloaded(
        self, hub: HubServer, tmp_path: Path, log: pytest.LogCaptureFixture
    ) -> None:
        text = write_file("gemma-3-1b", tmp_path).read_bytes()
        hub.add(MODEL, {"m-F32.gguf": text, "mmproj-F16.gguf": write_pair("qwen2-vl", tmp_path).text.read_bytes()})
        assert found_for(f"{MODEL}:F32") is None
        assert "mmproj-F16.gguf is not used: owner/name/mmproj-F16.gguf does not hold the vision part" in log.text
        assert not list(Path(os.environ["HF_HOME"]).rglob("mmproj-F16.gguf"))

    def test_doctor_counts_both_files(self, files: dict[str, bytes], pair: Pair) -> None:
        remote, local = open_checkpoint(f"{MODEL}:F32", os.environ), open_checkpoint(str(pair.text), {})
        assert (remote.config, remote.tensors) == (local.config, local.tensors)
        assert remote.model_config is not None and remote.model_config.vision is not None
