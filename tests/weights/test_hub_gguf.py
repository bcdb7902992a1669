"""GGUF files on hubs: which one is chosen, what is downloaded, and what is found in a cache without a network."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from pagewick.errors import ConfigError, ModelLoadError, ModelNotFoundError
from pagewick.weights.gguf import choice
from pagewick.weights.gguf.choice import GgufModel, candidates, find_models, names_of
from pagewick.weights.hub import resolve_model, resolve_tokenizer
from tests.weights.conftest import Repository
from tests.weights.test_hub import COMMIT, MODEL, RecordedProgress, fails, files_in, noise, small_model
from tests.weights.test_modelscope import Hub as ModelScopeHub
from tests.weights.test_modelscope import hub as modelscope_hub

__all__ = ["modelscope_hub"]

PARTS = [f"UD-Q4_K_XL/m-UD-Q4_K_XL-0000{part}-of-00003.gguf" for part in (1, 2, 3)]


def quantized(*extra: str) -> dict[str, bytes]:
    """A repository as they usually are: a file for each quantization, a split one in a directory, and other things."""
    names = ("m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-BF16.gguf", *PARTS, "mmproj-F16.gguf", *extra)
    weights = {name: noise(1000 + 100 * seed, seed) for seed, name in enumerate(names)}
    return {"README.md": b"x", "config.json": b"{}", "imatrix_m.gguf": b"", **weights}


def runs(monkeypatch: pytest.MonkeyPatch, *formats: str) -> None:
    """Let exactly these block formats run."""
    monkeypatch.setattr(choice, "BLOCK_FORMATS", dict.fromkeys(formats, (32, 34)))


class TestLabels:
    @pytest.mark.parametrize(
        ("name", "label"),
        [
            ("Qwen3-8B-Q4_K_M.gguf", "Q4_K_M"),
            ("Qwen3-8B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
            ("qwen2.5-0.5b-instruct-q4_k_m.gguf", "Q4_K_M"),
            ("llama-2-7b.Q5_K_S.gguf", "Q5_K_S"),
            ("BF16/Qwen3-BF16-00001-of-00010.gguf", "BF16"),
            ("Q4_K_M/weights.gguf", "Q4_K_M"),
            ("model.fp16.gguf", "F16"),
            ("x.i1-IQ2_XXS.gguf", "IQ2_XXS"),
            ("Q4_0_4_4.gguf", "Q4_0_4_4"),
            ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
            ("x-TQ1_0.gguf", "TQ1_0"),
            ("x-f16-Q4_K_M-imat.gguf", "Q4_K_M"),
            ("gemma-3-270m.gguf", ""),
        ],
    )
    def test_of_a_name(self, name: str, label: str) -> None:
        (model,) = find_models([name])
        assert model.label == label

    def test_what_is_no_model(self) -> None:
        names = [
            "mmproj-F16.gguf",
            "a/m-mmproj-f16.gguf",
            "mtp-m.gguf",
            "imatrix.gguf",
            "Qwen_Qwen3-8B-imatrix.gguf",
            "Qwen3-8B.imatrix.gguf",
            "x.bin",
            "../m.gguf",
            "/m.gguf",
        ]
        assert find_models(names) == []

    def test_parts_are_one_model(self) -> None:
        assert find_models(reversed(PARTS)) == [GgufModel(PARTS[0], 3)]
        assert GgufModel(PARTS[0], 3).files == PARTS

    def test_a_name_that_says_too_little_is_the_file(self) -> None:
        models = find_models(["a-Q8_0.gguf", "b-Q8_0.gguf", "b-Q4_0.gguf", "c.gguf"])
        assert list(names_of(models).values()) == ["/a-Q8_0.gguf", ":Q4_0", "/b-Q8_0.gguf", "/c.gguf"]


class TestCandidates:
    NAMES = ("m-Q4_K_M.gguf", "m-Q4_0.gguf", "m-UD-Q4_K_M.gguf", "m-UD-Q2_K_XL.gguf", "Q8_0/m.gguf", *PARTS)

    @pytest.mark.parametrize(
        ("wanted", "found"),
        [
            ("Q4_K_M", ["m-Q4_K_M.gguf"]),
            ("q4_k_m", ["m-Q4_K_M.gguf"]),
            ("UD-Q4_K_M", ["m-UD-Q4_K_M.gguf"]),
            ("Q2_K_XL", ["m-UD-Q2_K_XL.gguf"]),  # only Unsloth's has this name
            ("m-Q4_0.gguf", ["m-Q4_0.gguf"]),
            ("Q8_0/m.gguf", ["Q8_0/m.gguf"]),
            ("m.gguf", ["Q8_0/m.gguf"]),
            (PARTS[1], [PARTS[0]]),
            ("Q6_K", []),
            ("Q4_K", []),
        ],
    )
    def test_by_name(self, wanted: str, found: list[str]) -> None:
        assert [model.first for model in candidates(find_models(self.NAMES), wanted)] == found

    @pytest.mark.parametrize(
        ("formats", "chosen"),
        [
            (("Q8_0",), "Q8_0/m.gguf"),
            (("Q8_0", "Q4_0"), "Q8_0/m.gguf"),  # a file in Q4_0 has tensors in Q6_K, too
            (("Q8_0", "Q4_0", "Q6_K"), "m-Q4_0.gguf"),
            (("Q8_0", "Q4_0", "Q6_K", "Q4_K"), "m-Q4_K_M.gguf"),
        ],
    )
    def test_the_best_that_runs(self, formats: tuple[str, ...], chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
        runs(monkeypatch, *formats)
        assert [model.first for model in candidates(find_models(self.NAMES), None)] == [chosen]

    def test_the_only_one_needs_no_choice(self) -> None:
        assert candidates(find_models(["m-IQ1_S.gguf"]), None) == [GgufModel("m-IQ1_S.gguf")]


class TestDownload:
    def test_by_quantization(self, hub: Any) -> None:
        files = quantized()
        hub.add(MODEL, files)
        progress = RecordedProgress()
        path = resolve_model(f"{MODEL}:q8_0", progress=progress)
        assert path.name == "m-Q8_0.gguf" and path.read_bytes() == files["m-Q8_0.gguf"]
        assert hub.fetched() == ["m-Q8_0.gguf"]
        assert progress.done_bytes == progress.total_bytes == len(files["m-Q8_0.gguf"])

    @pytest.mark.parametrize(
        ("model", "weight_file"),
        [
            (f"{MODEL}/m-BF16.gguf", None),
            (MODEL, "m-BF16.gguf"),
            (MODEL, "BF16"),
        ],
    )
    def test_by_file(self, hub: Any, model: str, weight_file: str | None) -> None:
        files = quantized()
        hub.add(MODEL, files)
        assert resolve_model(model, weight_file=weight_file).read_bytes() == files["m-BF16.gguf"]
        assert hub.fetched() == ["m-BF16.gguf"]

    @pytest.mark.parametrize("model", [f"{MODEL}:UD-Q4_K_XL", f"{MODEL}/{PARTS[0]}", f"{MODEL}/{PARTS[2]}"])
    def test_all_parts_of_one_model(self, hub: Any, model: str) -> None:
        files = quantized()
        hub.add(MODEL, files)
        path = resolve_model(model)
        assert path.as_posix().endswith(f"snapshots/{COMMIT}/{PARTS[0]}")
        assert sorted(hub.fetched()) == PARTS
        assert files_in(path.parent) == {name.rpartition("/")[2]: files[name] for name in PARTS}

    @pytest.mark.parametrize(("formats", "chosen"), [((), "m-Q8_0.gguf"), (("Q4_K", "Q6_K"), "m-Q4_K_M.gguf")])
    def test_without_a_choice(
        self,
        hub: Any,
        formats: tuple[str, ...],
        chosen: str,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        runs(monkeypatch, "Q8_0", *formats)
        caplog.set_level(logging.INFO, logger="pagewick")
        files = quantized()
        hub.add(MODEL, files)
        assert resolve_model(MODEL).name == chosen
        assert hub.fetched() == [chosen]
        label, size = chosen.removesuffix(".gguf").removeprefix("m-"), f"{len(files[chosen]) / 1000:.1f} kB"
        assert f"{MODEL} holds 4 GGUF models, and none is named: using {label} ({size})" in caplog.text

    def test_safetensors_go_first(self, hub: Any) -> None:
        hub.add(MODEL, {**small_model(), **quantized()})
        assert (resolve_model(MODEL) / "model.safetensors").exists()
        assert "m-Q8_0.gguf" not in hub.fetched()
        assert resolve_model(f"{MODEL}:Q8_0").name == "m-Q8_0.gguf"

    def test_a_broken_connection_is_resumed(self, hub: Any) -> None:
        data = noise(3_000_000)
        hub.add(MODEL, {"m-Q8_0.gguf": data})
        hub.cuts = [2_100_000] + [0] * 5
        assert "goes on where it stopped" in fails(ModelLoadError, f"{MODEL}:Q8_0")
        hub.requests.clear()
        assert resolve_model(f"{MODEL}:Q8_0").read_bytes() == data
        (asked,) = hub.ranges()
        assert asked is not None and int(asked.removeprefix("bytes=").removesuffix("-")) > 0

    def test_a_new_version_with_the_same_file_downloads_nothing(self, hub: Any) -> None:
        repository: Repository = hub.add(MODEL, quantized())
        resolve_model(f"{MODEL}:Q8_0")
        repository.commit = "b" * 40
        hub.requests.clear()
        assert "b" * 40 in str(resolve_model(f"{MODEL}:Q8_0"))
        assert hub.fetched() == []

    def test_modelscope(self, modelscope_hub: ModelScopeHub) -> None:
        files = quantized()
        modelscope_hub.models[MODEL, "master"] = files
        path = resolve_model(f"{MODEL}:Q8_0", hub="modelscope")
        assert path.read_bytes() == files["m-Q8_0.gguf"]
        split = resolve_model(f"{MODEL}:UD-Q4_K_XL", hub="modelscope")
        assert [(split.parent / Path(name).name).read_bytes() for name in PARTS] == [files[name] for name in PARTS]
        assert sorted(modelscope_hub.fetched()) == sorted(["m-Q8_0.gguf", *PARTS])
        assert resolve_model(f"{MODEL}:Q8_0", hub="modelscope") == path
        assert len(modelscope_hub.fetched()) == 4

    def test_a_gguf_file_leaves_the_checkpoint_beside_it_as_it_is(
        self, modelscope_hub: ModelScopeHub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        modelscope_hub.models[MODEL, "master"] = {**small_model(), **quantized()}
        directory = resolve_model(MODEL, hub="modelscope")
        modelscope_hub.cuts = [0] * 30
        with pytest.raises(ModelLoadError, match="goes on where it stopped"):
            resolve_model(f"{MODEL}:UD-Q4_K_XL", hub="modelscope")
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert resolve_model(MODEL, hub="modelscope") == directory
        with pytest.raises(ModelNotFoundError, match=f"{MODEL}:UD-Q4_K_XL is not in the cache, or not complete"):
            resolve_model(f"{MODEL}:UD-Q4_K_XL", hub="modelscope")
        monkeypatch.delenv("HF_HUB_OFFLINE")
        modelscope_hub.cuts = []
        resolve_model(f"{MODEL}:UD-Q4_K_XL", hub="modelscope")
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert resolve_model(f"{MODEL}:UD-Q4_K_XL", hub="modelscope").name == Path(PARTS[0]).name


class TestErrors:
    def test_a_missing_quantization_lists_what_is_there(self, hub: Any) -> None:
        hub.add(MODEL, quantized())
        assert fails(ModelLoadError, f"{MODEL}:Q6_K").splitlines() == [
            f"{MODEL} holds no GGUF model in Q6_K",
            "  it holds Q8_0 (1.0 kB), Q4_K_M (1.1 kB), BF16 (1.2 kB), UD-Q4_K_XL (4.2 kB)",
            f"  name one: {MODEL}:UD-Q4_K_XL",
        ]
        assert hub.fetched() == []

    def test_a_missing_file(self, hub: Any) -> None:
        hub.add(MODEL, quantized())
        assert "holds no GGUF model m-Q6_K.gguf\n" in fails(ModelLoadError, f"{MODEL}/m-Q6_K.gguf")

    def test_an_ambiguous_quantization(self, hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        runs(monkeypatch, "Q8_0")
        hub.add(MODEL, quantized("other-Q8_0.gguf"))
        message = fails(ModelLoadError, f"{MODEL}:Q8_0")
        assert "holds 2 GGUF models that are called Q8_0" in message
        assert "it holds m-Q8_0.gguf (1.0 kB), other-Q8_0.gguf (1.7 kB)" in message
        assert message.endswith(f"name one: {MODEL}/m-Q8_0.gguf")
        assert "not exactly one in Q8_0" in fails(ModelLoadError)

    def test_none_that_is_chosen_by_itself(self, hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        runs(monkeypatch, "Q8_0")
        hub.add(MODEL, {"m-Q4_0.gguf": b"x", "m-Q4_K_M.gguf": b"x"})
        assert f"{MODEL} holds 2 GGUF models, and not exactly one in Q8_0" in fails(ModelLoadError)

    def test_many_models_take_at_most_six_lines(self, hub: Any) -> None:
        hub.add(MODEL, {f"a-long-name-of-a-model-{'x' * 30}-{number}-Q2_K.gguf": b"x" for number in range(30)})
        assert "and 18 more" in fails(ModelLoadError) or "[...]" in fails(ModelLoadError)

    def test_a_part_that_the_repository_lacks(self, hub: Any) -> None:
        hub.add(MODEL, dict.fromkeys(PARTS[:2], b"x"))
        assert f"missing: {PARTS[2]}" in fails(ModelLoadError, f"{MODEL}:UD-Q4_K_XL")
        assert hub.fetched() == []

    def test_a_repository_without_gguf_files(self, hub: Any) -> None:
        hub.add(MODEL, small_model())
        assert "it holds no model in GGUF files" in fails(ModelLoadError, f"{MODEL}:Q8_0")

    def test_a_file_that_is_named_twice(self) -> None:
        with pytest.raises(ConfigError, match="leave out --weight-file"):
            resolve_model(f"{MODEL}:Q8_0", weight_file="m-Q4_0.gguf")

    @pytest.mark.parametrize("model", ["owner/../x.gguf", "models/typo/m.gguf", "./owner/x/m.gguf", "a--b/c:Q8_0"])
    def test_what_is_no_file_on_a_hub(
        self, hub: Any, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("models").mkdir()
        fails(ModelNotFoundError, model)
        assert hub.requests == []

    def test_a_file_outside_of_the_repository(self, hub: Any) -> None:
        hub.add(MODEL, {"../../m-Q8_0.gguf": b"x", "config.json": b"{}"})
        fails(ModelLoadError, f"{MODEL}:Q8_0")
        fails(ModelLoadError, f"{MODEL}/../../m-Q8_0.gguf")
        assert hub.fetched() == []


class TestOffline:
    @pytest.fixture
    def cached(self, hub: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Q8_0 in the cache, and no network."""
        hub.add(MODEL, quantized())
        path = resolve_model(f"{MODEL}:Q8_0")
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        return path

    @pytest.mark.parametrize("model", [MODEL, f"{MODEL}:Q8_0", f"{MODEL}/m-Q8_0.gguf"])
    def test_cached(self, cached: Path, model: str) -> None:
        assert resolve_model(model) == cached
        assert resolve_model(model, revision=COMMIT) == cached

    def test_another_one_is_cached(self, cached: Path) -> None:
        message = fails(ModelNotFoundError, f"{MODEL}:Q4_K_M")
        assert f"HF_HUB_OFFLINE is set, and {MODEL}:Q4_K_M is not in the cache" in message
        assert "it holds Q8_0 (1.0 kB)" in message

    def test_an_incomplete_model(self, hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        hub.add(MODEL, quantized())
        (resolve_model(f"{MODEL}:UD-Q4_K_XL").parent / Path(PARTS[1]).name).unlink()
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert "not complete" in fails(ModelNotFoundError, f"{MODEL}:UD-Q4_K_XL")

    def test_a_commit_that_is_cached_is_not_asked_for(self, hub: Any) -> None:
        hub.add(MODEL, quantized())
        path = resolve_model(f"{MODEL}:BF16", revision=COMMIT)
        hub.requests.clear()
        assert resolve_model(f"{MODEL}:BF16", revision=COMMIT) == path
        assert hub.requests == []
        assert resolve_model(MODEL, revision=COMMIT).name == "m-Q4_K_M.gguf"  # which had to be looked up

    def test_a_hub_in_trouble(self, hub: Any, caplog: pytest.LogCaptureFixture) -> None:
        hub.add(MODEL, quantized())
        path = resolve_model(f"{MODEL}:Q8_0")
        hub.status = 500
        assert resolve_model(f"{MODEL}:Q8_0") == path
        assert f"using the cached {MODEL}:Q8_0" in caplog.text


class TestTokenizers:
    def test_only_small_files_are_fetched(self, hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        hub.add(MODEL, small_model())
        directory = resolve_tokenizer(MODEL)
        assert sorted(files_in(directory)) == sorted(small_model().keys() - {"model.safetensors"})
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert resolve_tokenizer(MODEL) == directory
        assert "model.safetensors" in fails(ModelNotFoundError)

    def test_of_a_gguf_file(self, hub: Any) -> None:
        hub.add(MODEL, quantized())
        assert resolve_tokenizer(f"{MODEL}:Q8_0").name == "m-Q8_0.gguf"

    def test_paths(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").touch()
        assert resolve_tokenizer(str(tmp_path)) == tmp_path
        assert resolve_tokenizer(str(tmp_path / "tokenizer.json")) == tmp_path / "tokenizer.json"
        with pytest.raises(ModelNotFoundError):
            resolve_tokenizer(str(tmp_path / "other"))


def test_a_directory_and_a_file_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "m-Q8_0.gguf"
    file.touch()
    assert resolve_model(str(tmp_path), weight_file="m-Q8_0.gguf") == file
    assert resolve_model(str(tmp_path), weight_file=str(file)) == file
    assert resolve_model(MODEL, weight_file=str(file)) == file  # vllm.rs's --m ID --f PATH
    monkeypatch.chdir(tmp_path)
    assert resolve_model(MODEL, weight_file="./m-Q8_0.gguf").resolve() == file
    (tmp_path / "m-Q4_0.gguf").touch()
    assert "holds no m-Q6_K.gguf" in fails(ModelLoadError, str(tmp_path), weight_file="m-Q6_K.gguf")
