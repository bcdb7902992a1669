"""`pagewick models`, on caches that huggingface_hub wrote or that are written here in its layout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub.constants  # noqa: F401  reads the environment once: before a test forbids connections
import pytest
from click.testing import CliRunner, Result

from pagewick.cli import cli
from pagewick.cli.models import ago
from pagewick.config import BUILTIN_MODEL
from pagewick.demo import MODEL_DIR
from pagewick.models.registry import ARCHITECTURES
from tests.weights.conftest import hub as hub  # a stand-in for a Hugging Face hub

MODEL = "someone/Model-1.5"
COMMIT = "a" * 40


def run(*arguments: str, text: str | None = None) -> Result:
    return CliRunner().invoke(cli, ["models", *arguments], input=text)


def listed() -> dict[str, dict[str, Any]]:
    result = run("list", "--json")
    assert result.exit_code == 0, result.output
    return {entry["model"]: entry for entry in json.loads(result.stdout)}


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the tests away from the caches of the user who runs them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches of both hubs, without a network."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "ms"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def write_hugging_face(cache: Path, model: str, files: dict[str, bytes], ref: str = "main") -> Path:
    """Write a model into Hugging Face's cache, in its documented layout."""
    storage = cache / "hf/hub" / f"models--{model.replace('/', '--')}"
    snapshot = storage / "snapshots" / COMMIT
    for directory in (snapshot, storage / "blobs", storage / "refs"):
        directory.mkdir(parents=True, exist_ok=True)
    for number, (name, content) in enumerate(files.items()):
        (storage / "blobs" / f"{number:040d}").write_bytes(content)
        (snapshot / name).parent.mkdir(exist_ok=True)
        (snapshot / name).symlink_to(os.path.relpath(storage / "blobs" / f"{number:040d}", (snapshot / name).parent))
    (storage / "refs" / ref).write_text(COMMIT)
    return snapshot


def write_modelscope(cache: Path, model: str, files: dict[str, bytes]) -> Path:
    directory = cache / "ms/models" / model.replace(".", "___")
    directory.mkdir(parents=True)
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)
    return directory


WHOLE = {"config.json": b"{}", "model.safetensors": b"x" * 1500}


class TestList:
    def test_empty_caches_have_only_the_built_in_model(self, caches: Path) -> None:
        lines = run("list").stdout.splitlines()
        assert lines[0].split() == ["MODEL", "SIZE", "STATE", "LAST", "USED"]
        assert lines[1].startswith(BUILTIN_MODEL) and "built in" in lines[1]
        assert len(lines) == 2
        assert listed() == {}

    def test_complete_and_incomplete(self, caches: Path) -> None:
        snapshot = write_hugging_face(caches, MODEL, WHOLE)
        write_hugging_face(caches, "other/half", {"config.json": b"{}", "model-00001-of-00002.safetensors": b"1"})
        directory = write_modelscope(caches, "third/Scope-0.5", WHOLE)
        models = listed()
        assert list(models) == ["other/half", MODEL, "third/Scope-0.5"]
        assert models[MODEL]["path"] == str(snapshot)
        assert models[MODEL]["num_bytes"] == 1502  # each blob once, however many names it has
        assert (models[MODEL]["is_complete"], models[MODEL]["missing"]) == (True, "")
        assert models[MODEL]["revisions"] == ["main"]
        assert models["other/half"]["missing"] == "model-00002-of-00002.safetensors"
        assert models["third/Scope-0.5"]["path"] == str(directory)
        text = run("list").stdout
        assert "third/Scope-0.5 (modelscope)" in text
        assert "incomplete: model-00002-of-00002.safetensors" in text

    def test_sizes_are_those_that_huggingface_hub_counts(self, caches: Path) -> None:
        from huggingface_hub import scan_cache_dir

        write_hugging_face(caches, MODEL, WHOLE)
        (theirs,) = scan_cache_dir(caches / "hf/hub").repos
        ours = listed()[MODEL]
        assert (ours["num_bytes"], ours["last_used"]) == (theirs.size_on_disk, theirs.last_accessed)

    def test_an_incomplete_update_of_modelscope(self, caches: Path) -> None:
        state = json.dumps({"is_complete": False, "files": {}}).encode()
        write_modelscope(caches, "third/scope", {**WHOLE, ".pagewick.json": state})
        assert listed()["third/scope"]["missing"] == "its newest version"

    def test_an_unnamed_commit_and_a_broken_index(self, caches: Path) -> None:
        write_hugging_face(caches, MODEL, {"config.json": b"{}", "model.safetensors.index.json": b"no"}, ref="v1")
        assert listed()[MODEL]["missing"] == "a readable index"
        (caches / "hf/hub/models--someone--Model-1.5/refs/v1").unlink()
        assert listed()[MODEL]["revisions"] == [COMMIT[:12]]

    @pytest.mark.parametrize("damage", ["no text", "a dangling link", "of no commit"])
    def test_one_damaged_model_hides_no_other(self, caches: Path, damage: str) -> None:
        write_hugging_face(caches, MODEL, WHOLE)
        write_hugging_face(caches, "other/damaged", WHOLE)
        ref = caches / "hf/hub/models--other--damaged/refs/main"
        if damage == "no text":
            ref.write_bytes(b"\xff\xfe")
        elif damage == "a dangling link":
            ref.unlink()
            ref.symlink_to("nowhere")
        else:
            ref.write_text("")
        models = listed()
        assert models[MODEL]["is_complete"]
        assert models["other/damaged"]["num_bytes"] == 1502
        if damage == "of no commit":
            assert models["other/damaged"]["revisions"] == ["main", COMMIT[:12]]
            return
        assert (models["other/damaged"]["path"], models["other/damaged"]["missing"]) == (None, "a readable refs/main")
        assert "incomplete: a readable refs/main" in run("list").stdout
        assert run("remove", "other/damaged", "--yes").exit_code == 0
        assert list(listed()) == [MODEL]

    @pytest.mark.parametrize(
        ("days", "words"), [(-1.0, "today"), (0.9, "today"), (1.5, "yesterday"), (40.0, "40 days ago")]
    )
    def test_times(self, days: float, words: str) -> None:
        assert ago(days * 86400) == words


class TestPath:
    def test_of_a_downloaded_model(self, caches: Path) -> None:
        snapshot = write_hugging_face(caches, MODEL, WHOLE)
        directory = write_modelscope(caches, MODEL, WHOLE)
        assert run("path", MODEL).stdout == f"{snapshot}\n"
        assert run("path", MODEL, "--revision", COMMIT).stdout == f"{snapshot}\n"
        assert run("path", MODEL, "--hub", "modelscope").stdout == f"{directory}\n"
        assert run("path", BUILTIN_MODEL).stdout == f"{MODEL_DIR}\n"
        assert run("path", str(directory)).stdout == f"{directory}\n"

    def test_of_a_missing_model(self, caches: Path) -> None:
        result = run("path", MODEL, "--revision", "v2", "--hub", "modelscope")
        assert (result.exit_code, result.stdout) == (1, "")
        assert f"pagewick models pull {MODEL} --hub modelscope --revision v2" in result.stderr


class TestRemove:
    def test_asks_for_confirmation(self, caches: Path) -> None:
        snapshot = write_hugging_face(caches, MODEL, WHOLE)
        result = run("remove", MODEL, text="n\n")
        assert result.exit_code == 1
        assert snapshot.exists()
        assert str(snapshot.parents[1]) in result.stdout
        result = run("remove", MODEL, text="y\n")
        assert "1.5 kB were freed" in result.stdout
        assert not snapshot.parents[1].exists()
        assert listed() == {}

    def test_removes_only_from_the_named_hub(self, caches: Path) -> None:
        snapshot = write_hugging_face(caches, MODEL, WHOLE)
        directory = write_modelscope(caches, MODEL, WHOLE)
        assert run("remove", MODEL, "--hub", "modelscope", "--yes").exit_code == 0
        assert (snapshot.exists(), directory.exists()) == (True, False)

    def test_a_link_to_another_disk_is_removed_as_a_link(self, caches: Path) -> None:
        snapshot = write_hugging_face(caches, MODEL, WHOLE)
        storage = snapshot.parents[1]
        elsewhere = storage.rename(caches / "elsewhere")
        storage.symlink_to(elsewhere)
        assert run("remove", MODEL, "--yes").exit_code == 0
        assert not storage.exists() and (elsewhere / "blobs").exists()

    @pytest.mark.parametrize("model", ["../../etc", "nobody/nothing", ".", BUILTIN_MODEL, "hf"])
    def test_refuses_to_remove_other_directories(self, caches: Path, model: str) -> None:
        snapshot = write_hugging_face(caches, MODEL, WHOLE)
        result = run("remove", model, "--yes")
        assert result.exit_code == 1 and "error:" in result.stderr
        assert snapshot.exists()


GGUF = {
    "m-Q8_0.gguf": b"8" * 800,
    "Q4/m-Q4_K_M-00001-of-00002.gguf": b"4" * 300,
    "Q4/m-Q4_K_M-00002-of-00002.gguf": b"4" * 100,
}


class TestGguf:
    def test_each_model_is_listed(self, caches: Path) -> None:
        snapshot = write_hugging_face(caches, MODEL, {"config.json": b"{}", **GGUF})
        directory = write_modelscope(caches, "third/Scope-0.5", {"a-Q8_0.gguf": b"x" * 10, "b-Q8_0.gguf": b"x"})
        models = listed()
        names = [f"{MODEL}:Q4_K_M", f"{MODEL}:Q8_0", "third/Scope-0.5/a-Q8_0.gguf", "third/Scope-0.5/b-Q8_0.gguf"]
        assert list(models) == names
        assert [models[name]["num_bytes"] for name in names] == [400, 800, 10, 1]
        assert all(models[name]["is_complete"] for name in names)
        assert models[names[1]]["path"] == str(snapshot / "m-Q8_0.gguf")
        for name, file in ((names[0], snapshot / "Q4/m-Q4_K_M-00001-of-00002.gguf"), (names[1].lower(), None)):
            assert file is None or run("path", name).stdout == f"{file}\n"
        assert run("path", names[2], "--hub", "modelscope").stdout == f"{directory / 'a-Q8_0.gguf'}\n"
        assert f"{MODEL}:Q8_0" in run("list").stdout

    def test_beside_a_checkpoint_and_without_a_part(self, caches: Path) -> None:
        parts = {name: data for name, data in GGUF.items() if "00002-of" not in name}
        write_hugging_face(caches, MODEL, {**WHOLE, **parts})
        models = listed()
        assert list(models) == [MODEL, f"{MODEL}:Q8_0"]
        assert models[MODEL]["num_bytes"] == 1502 + 300  # the part belongs to no model that can be used

    def test_an_interrupted_download(self, hub: Any) -> None:
        hub.add(MODEL, {"m-Q8_0.gguf": b"x" * 300_000, "m-BF16.gguf": b"y" * 10})
        hub.cuts = [200_000] + [0] * 5
        assert run("pull", f"{MODEL}:Q8_0").exit_code == 1
        assert (listed()[MODEL]["is_complete"], listed()[MODEL]["missing"]) == (False, "everything")
        assert run("pull", f"{MODEL}:bf16").exit_code == 0
        models = listed()
        assert models[f"{MODEL}:BF16"]["is_complete"]
        assert models[MODEL]["missing"] == "the rest of a download" and models[MODEL]["num_bytes"] >= 100_000
        result = run("pull", f"{MODEL}:Q8_0")
        assert Path(result.stdout.strip()).read_bytes() == b"x" * 300_000
        assert list(listed()) == [f"{MODEL}:BF16", f"{MODEL}:Q8_0"]

    @pytest.mark.parametrize("name", [f"{MODEL}:Q8_0", f"{MODEL}:q8_0", f"{MODEL}/m-Q8_0.gguf"])
    def test_one_is_removed(self, caches: Path, name: str) -> None:
        snapshot = write_hugging_face(caches, MODEL, {"config.json": b"{}", **GGUF})
        result = run("remove", name, "--yes")
        assert result.exit_code == 0 and "800 B were freed" in result.stdout
        assert list(listed()) == [f"{MODEL}:Q4_K_M"]
        assert sum(file.stat().st_size for file in (snapshot.parents[1] / "blobs").iterdir()) == 402
        assert run("remove", f"{MODEL}:Q4_K_M", "--yes").exit_code == 0
        assert not snapshot.parents[1].exists()  # with what belongs to no model

    def test_all_are_removed_by_the_name_of_the_repository(self, caches: Path) -> None:
        snapshot = write_hugging_face(caches, MODEL, {**WHOLE, **GGUF})
        write_hugging_face(caches, "other/one", WHOLE)
        result = run("remove", MODEL, "--yes")
        assert "2.7 kB were freed" in result.stdout
        assert not snapshot.parents[1].exists()
        assert list(listed()) == ["other/one"]


class TestPull:
    def test_downloads_and_prints_the_directory(self, hub: Any) -> None:
        hub.add(MODEL, WHOLE)
        result = run("pull", MODEL)
        assert result.exit_code == 0, result.output
        assert run("path", MODEL).stdout == result.stdout
        assert (Path(result.stdout.strip()) / "model.safetensors").read_bytes() == WHOLE["model.safetensors"]
        assert "1.5 kB" in result.stderr
        hub.requests.clear()
        assert run("pull", MODEL).stdout == result.stdout
        assert hub.fetched() == []

    def test_an_interrupted_download_is_listed_and_continued(self, hub: Any) -> None:
        hub.add(MODEL, {"config.json": b"{}", "model.safetensors": b"x" * 300_000})
        hub.cuts = [200_000] + [0] * 5
        assert run("pull", MODEL).exit_code == 1
        entry = listed()[MODEL]
        assert (entry["is_complete"], entry["missing"]) == (False, "model.safetensors")
        assert 0 < entry["num_bytes"] <= 200_010
        assert run("pull", MODEL).exit_code == 0
        assert hub.ranges()[-1] is not None
        assert listed()[MODEL]["is_complete"]

    def test_an_interrupt_says_how_to_continue(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*args: object, **options: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("pagewick.weights.hub.resolve_model", interrupt)
        result = run("pull", MODEL)
        assert (result.exit_code, result.stderr) == (130, "stopped; the same command continues the download\n")

    def test_the_hub_comes_from_the_environment_too(self, caches: Path) -> None:
        result = CliRunner().invoke(cli, ["models", "pull", MODEL], env={"PAGEWICK_HUB": "modelscope"})
        assert f"not in the cache ({caches / 'ms'})" in result.stderr


def test_supported_architectures() -> None:
    result = CliRunner().invoke(cli, ["models", "supported"])
    assert result.exit_code == 0 and set(result.stdout.split()) == set(ARCHITECTURES)
    assert json.loads(CliRunner().invoke(cli, ["models", "supported", "--json"]).stdout) == result.stdout.split()


def test_imports_no_torch(caches: Path) -> None:
    write_hugging_face(caches, MODEL, WHOLE)
    script = (
        "import sys\nfrom click.testing import CliRunner\nfrom pagewick.cli import cli\n"
        "result = CliRunner().invoke(cli, ['models', 'list'])\n"
        "print(result.exit_code, {'torch', 'numpy', 'huggingface_hub'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout == "0 set()\n"
