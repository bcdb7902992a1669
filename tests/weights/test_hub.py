"""From names to directories, with a stand-in for the hub that speaks HTTP on this machine."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest

from pagewick.config import BUILTIN_MODEL
from pagewick.errors import ConfigError, ModelLoadError, ModelNotFoundError
from pagewick.weights import huggingface_download, transfer
from pagewick.weights.hub import resolve_model
from pagewick.weights.hub_settings import HuggingFaceSettings
from tests.permissions import forbidden

MODEL = "someone/Model-1.5"
COMMIT = "a" * 40


def noise(num_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


def small_model() -> dict[str, bytes]:
    return {
        "config.json": b'{"a": 1}',
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b'{"b": 2}',
        "chat_template.jinja": b"{{ x }}",
        "model.safetensors": noise(3_000_000),
    }


def sharded_model(
    shards: tuple[str, ...] = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
) -> dict[str, bytes]:
    index = {"metadata": {}, "weight_map": {f"tensor{i}": name for i, name in enumerate(shards)}}
    weights = {name: noise(1000, seed) for seed, name in enumerate(shards)}
    return {"config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode(), **weights}


def files_in(directory: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in directory.iterdir()}


def fails(kind: type[ModelLoadError], model: str = MODEL, **options: Any) -> str:
    """Return the message with which resolve_model fails; it must be short, and the error of exactly that kind."""
    with pytest.raises(ModelLoadError) as caught:
        resolve_model(model, **options)
    assert type(caught.value) is kind
    message = str(caught.value)
    assert 2 <= len(message.splitlines()) <= 6
    return message


class RecordedProgress:
    def __init__(self) -> None:
        self.total_bytes = self.done_bytes = 0
        self.is_running = False

    def start(self, description: str, total_bytes: int, done_bytes: int = 0) -> None:
        self.total_bytes, self.done_bytes, self.is_running = total_bytes, done_bytes, True

    def advance(self, num_bytes: int) -> None:
        self.done_bytes += num_bytes

    def stop(self) -> None:
        self.is_running = False


class TestLocal:
    def test_built_in(self) -> None:
        from pagewick.demo import MODEL_DIR

        assert resolve_model(BUILTIN_MODEL) == MODEL_DIR

    def test_directory_goes_before_the_hub(self, hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        hub.add(MODEL, small_model())
        (tmp_path / MODEL).mkdir(parents=True)
        monkeypatch.chdir(tmp_path)
        assert resolve_model(MODEL) == Path(MODEL)
        assert hub.requests == []

    def test_home_directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / "m").mkdir()
        assert resolve_model("~/m") == tmp_path / "m"

    @pytest.mark.parametrize("model", ["./Qwen3-0.6", "/nowhere/else/at-all", "~/none", "a/b/c", "a\\b", "w.gguf"])
    def test_a_missing_path_is_not_asked_on_the_hub(self, hub: Any, model: str) -> None:
        assert model in fails(ModelNotFoundError, model)
        assert hub.requests == []

    def test_misspelt_path_suggests_the_right_one(self, tmp_path: Path) -> None:
        (tmp_path / "Qwen3-0.6B").mkdir()
        message = fails(ModelNotFoundError, f"{tmp_path}/Qwen3-06B")
        assert f"did you mean {tmp_path}/Qwen3-0.6B?" in message

    def test_file_names_its_directory(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").touch()
        assert str(tmp_path) in fails(ModelLoadError, f"{tmp_path}/model.safetensors").splitlines()[1]

    @pytest.mark.parametrize("model", ["", "two words", "a--b", "a/b..c", "ü/x", "x?y", "-m"])
    def test_neither_path_nor_id(self, hub: Any, model: str) -> None:
        fails(ModelNotFoundError, model)
        assert hub.requests == []

    @pytest.mark.parametrize(
        ("model", "advice"),
        [
            (
                "llama3",
                "copy the id from the model's page; one looks like Qwen/Qwen3-0.6B, and pagewick-demo is built in",
            ),
            ("Qwen3-0.6B", "did you mean Qwen/Qwen3-0.6B?"),
            ("Qwen2.5-7B-Instruct", "did you mean Qwen/Qwen2.5-7B-Instruct?"),
            ("Llama-3.2-1B", "did you mean meta-llama/Llama-3.2-1B?"),
            ("gemma-3-1b-it", "did you mean google/gemma-3-1b-it?"),
            ("Mistral-7B-Instruct-v0.3", "did you mean mistralai/Mistral-7B-Instruct-v0.3?"),
            ("Qwen3-0.6B-uncensored", "copy the id from the model's page"),
        ],
    )
    def test_an_id_without_its_owner(self, hub: Any, model: str, advice: str) -> None:
        message = fails(ModelNotFoundError, model)
        assert message.startswith(f"there is no directory {model}, and Hugging Face ids are owner/name\n  {advice}")
        assert hub.requests == []

    @pytest.mark.parametrize(
        ("model", "fix"),
        [
            ("https://huggingface.co/Qwen/Qwen3-0.6B", "give Qwen/Qwen3-0.6B"),
            ("https://huggingface.co/Qwen/Qwen3-0.6B/tree/main?x=1", "give Qwen/Qwen3-0.6B"),
            ("https://hf.co/a/b-GGUF/blob/main/sub/b-Q8_0.gguf?download=true", "give a/b-GGUF/sub/b-Q8_0.gguf"),
            ("hf.co/a/b-GGUF:Q4_K_M", "give a/b-GGUF:Q4_K_M"),
            ("https://modelscope.cn/models/a/b", "give a/b --hub modelscope"),
            ("https://example.com/a/b.gguf", "download it, and give its directory or GGUF file"),
            ("https://huggingface.co/", "download it"),
        ],
    )
    def test_an_address_in_place_of_an_id(self, hub: Any, model: str, fix: str) -> None:
        first, second = fails(ModelNotFoundError, model).splitlines()
        assert (first, second.startswith(f"  {fix}")) == (f"{model} is an address, not a model", True)
        assert hub.requests == []

    def test_the_owner_of_a_cached_model_is_certain(self, hub: Any) -> None:
        hub.add(MODEL, small_model())
        resolve_model(MODEL)
        owner, _, name = MODEL.partition("/")
        assert f"did you mean {owner}/{name}?" in fails(ModelNotFoundError, name)

    @pytest.mark.parametrize("revision", ["../../../etc", "a b", "/x", "refs/../../x", ""])
    def test_malformed_revision(self, hub: Any, revision: str) -> None:
        hub.add(MODEL, small_model())
        if revision:
            with pytest.raises(ConfigError, match="revision"):
                resolve_model(MODEL, revision=revision)
        else:
            assert resolve_model(MODEL, revision=revision).name == COMMIT

    def test_imports_no_torch(self, tmp_path: Path) -> None:
        script = (
            "import sys; from pagewick.weights.hub import resolve_model; import pagewick.weights.huggingface_download\n"
            f"resolve_model({str(tmp_path)!r}); print('torch' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        assert done.stdout == "False\n"


class TestDownload:
    def test_takes_what_a_model_needs_and_nothing_else(self, hub: Any, tmp_path: Path) -> None:
        unneeded = {
            "pytorch_model.bin": b"pickle",
            "modeling_custom.py": b"code",
            "consolidated.safetensors": b"again",
            "model.Q4_0.gguf": b"other format",
            "README.md": b"words",
            "tokenizer.bin": b"pickle",
        }
        hub.add(MODEL, {**small_model(), **unneeded})
        assert files_in(resolve_model(MODEL)) == small_model()
        assert sorted(hub.fetched()) == sorted(small_model())

    def test_cache_layout_is_the_usual_one(self, hub: Any, tmp_path: Path) -> None:
        hub.add(MODEL, small_model())
        snapshot = resolve_model(MODEL)
        storage = tmp_path / "hf/hub/models--someone--Model-1.5"
        assert snapshot == storage / "snapshots" / COMMIT
        assert (storage / "refs/main").read_text() == COMMIT
        blob = (snapshot / "model.safetensors").resolve()
        assert blob == storage / "blobs" / hashlib.sha256(small_model()["model.safetensors"]).hexdigest()
        assert not os.path.isabs(os.readlink(snapshot / "model.safetensors"))
        assert list(storage.rglob("*incomplete*")) == []

    def test_huggingface_hub_finds_what_was_downloaded(self, hub: Any, tmp_path: Path) -> None:
        from huggingface_hub import snapshot_download

        hub.add(MODEL, small_model())
        snapshot = resolve_model(MODEL)
        found = snapshot_download(MODEL, cache_dir=tmp_path / "hf/hub", local_files_only=True)
        assert Path(found) == snapshot

    def test_finds_what_huggingface_hub_has_downloaded(self, hub: Any, tmp_path: Path) -> None:
        from huggingface_hub import hf_hub_download

        hub.add(MODEL, small_model())
        for name in ("config.json", "model.safetensors"):  # as transformers does: without the tokenizer
            hf_hub_download(MODEL, name, cache_dir=tmp_path / "hf/hub", endpoint=hub.endpoint)
        hub.requests.clear()
        assert files_in(resolve_model(MODEL)) == small_model()
        assert "model.safetensors" not in hub.fetched()

    def test_shards_are_those_of_the_index(self, hub: Any) -> None:
        stray = {"model-00003-of-00003.safetensors": b"left over", "adapter_model.safetensors": b"adapter"}
        hub.add(MODEL, {**sharded_model(), **stray})
        assert files_in(resolve_model(MODEL)) == sharded_model()

    def test_second_time_asks_only_whether_something_changed(self, hub: Any) -> None:
        hub.add(MODEL, small_model())
        first = resolve_model(MODEL)
        hub.requests.clear()
        assert resolve_model(MODEL) == first
        assert [path for _, path, _ in hub.requests] == [f"/api/models/{MODEL}/revision/main"]

    def test_cached_commit_asks_nothing(self, hub: Any) -> None:
        hub.add(MODEL, small_model())
        first = resolve_model(MODEL, revision=COMMIT)
        hub.requests.clear()
        assert resolve_model(MODEL, revision=COMMIT) == first
        assert hub.requests == []

    def test_new_commit_fetches_only_what_changed(self, hub: Any) -> None:
        repository = hub.add(MODEL, small_model())
        old = resolve_model(MODEL)
        repository.commit = "b" * 40
        repository.files["config.json"] = b'{"a": 2}'
        hub.requests.clear()
        new = resolve_model(MODEL)
        assert hub.fetched() == ["config.json"]
        assert (new / "config.json").read_bytes() == b'{"a": 2}'
        assert files_in(old) == small_model()

    def test_mirror_that_lists_names_only(self, hub: Any) -> None:
        hub.add(MODEL, small_model(), lists_blobs=False)
        assert files_in(resolve_model(MODEL)) == small_model()

    def test_progress_counts_the_weights(self, hub: Any) -> None:
        hub.add(MODEL, sharded_model())
        progress = RecordedProgress()
        resolve_model(MODEL, progress=progress)
        assert (progress.total_bytes, progress.done_bytes, progress.is_running) == (2000, 2000, False)

    def test_two_at_a_time_fetch_once(self, hub: Any) -> None:
        hub.add(MODEL, small_model())
        results: list[Path] = []
        threads = [threading.Thread(target=lambda: results.append(resolve_model(MODEL))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [results[0]] * 3
        assert hub.fetched().count("model.safetensors") == 1


class TestInterrupted:
    def test_resumes_after_a_broken_connection(self, hub: Any) -> None:
        hub.add(MODEL, small_model())
        hub.cuts = [1_500_000, 700_000]
        progress = RecordedProgress()
        assert files_in(resolve_model(MODEL, progress=progress)) == small_model()
        starts = [0 if r is None else int(r.removeprefix("bytes=").removesuffix("-")) for r in hub.ranges()]
        assert len(starts) == 3
        assert 0 == starts[0] < starts[1] < starts[2]
        assert progress.done_bytes == progress.total_bytes == 3_000_000

    def test_a_second_call_resumes_the_first(self, hub: Any, tmp_path: Path) -> None:
        hub.add(MODEL, small_model())
        hub.cuts = [2_100_000] + [0] * 5
        assert "goes on where it stopped" in fails(ModelLoadError)
        (partial,) = (tmp_path / "hf/hub").rglob("*incomplete*")
        arrived = partial.stat().st_size
        assert 0 < arrived <= 2_100_000
        hub.requests.clear()
        progress = RecordedProgress()
        assert files_in(resolve_model(MODEL, progress=progress)) == small_model()
        assert hub.ranges() == [f"bytes={arrived}-"]
        assert progress.done_bytes == 3_000_000
        assert not partial.exists()

    @pytest.mark.usefixtures("ctrl_c_interrupts")
    def test_interrupt_keeps_the_bytes_that_arrived(self, hub: Any, tmp_path: Path) -> None:
        main_thread, main_has_reacted = threading.get_ident(), threading.Event()

        class Interrupt(RecordedProgress):
            def advance(self, num_bytes: int) -> None:
                super().advance(num_bytes)
                if self.done_bytes > 1_000_000 and not main_has_reacted.is_set():
                    signal.pthread_kill(main_thread, signal.SIGINT)  # Ctrl-C
                    main_has_reacted.wait(5)

        class Download(huggingface_download._Download):
            def _fetch_all(self, wanted: Any, advance: Any) -> None:
                set_stop = self._stop.set

                def stop() -> None:
                    set_stop()
                    main_has_reacted.set()

                self._stop.set = stop  # type: ignore[method-assign]
                super()._fetch_all(wanted, advance)

        hub.add(MODEL, small_model())
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(huggingface_download, "_Download", Download)
            resolve_model(MODEL, progress=Interrupt())
        (partial,) = (tmp_path / "hf/hub").rglob("*incomplete*")
        assert 1_000_000 < partial.stat().st_size < 3_000_000
        hub.requests.clear()
        assert files_in(resolve_model(MODEL)) == small_model()
        assert hub.ranges() != [None]

    def test_nothing_incomplete_is_visible(self, hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        hub.add(MODEL, small_model())
        hub.cuts = [1000] + [0] * 5
        fails(ModelLoadError)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        fails(ModelNotFoundError)

    def test_server_without_ranges(self, hub: Any) -> None:
        hub.add(MODEL, small_model())
        hub.cuts, hub.ignores_range = [1_100_000], True
        progress = RecordedProgress()
        assert files_in(resolve_model(MODEL, progress=progress)) == small_model()
        assert progress.done_bytes == 3_000_000

    @pytest.mark.parametrize("num_bytes", [5, 2_000_000, 3_000_000, 3_000_001])
    def test_wrong_bytes_are_detected_and_fetched_again(self, hub: Any, tmp_path: Path, num_bytes: int) -> None:
        hub.add(MODEL, small_model())
        blob = tmp_path / "hf/hub/models--someone--Model-1.5/blobs" / hashlib.sha256(noise(3_000_000)).hexdigest()
        blob.parent.mkdir(parents=True)
        transfer.partial_path(blob).write_bytes(b"x" * num_bytes)
        if num_bytes <= 3_000_000:  # a longer one cannot be the beginning of the file, and is dropped at once
            assert "damaged" in fails(ModelLoadError)
            assert not blob.exists()
        assert files_in(resolve_model(MODEL)) == small_model()

    def test_overloaded_server_is_asked_again(self, hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        hub.add(MODEL, small_model())
        original = transfer.Transfer._receive
        failures = iter([429, 503])

        def receive(self: Any, file: Any, partial: Any) -> None:
            hub.status = next(failures, None)
            original(self, file, partial)

        monkeypatch.setattr(transfer.Transfer, "_receive", receive)
        assert files_in(resolve_model(MODEL)) == small_model()
        assert next(failures, None) is None


class TestRefused:
    def test_unknown_model(self, hub: Any) -> None:
        message = fails(ModelNotFoundError)
        assert hub.endpoint in message and "HF_TOKEN" in message and str(Path(MODEL).absolute()) in message

    def test_unknown_revision(self, hub: Any) -> None:
        hub.add(MODEL, small_model())
        assert "no revision 'v2'" in fails(ModelNotFoundError, revision="v2")

    def test_gated_without_token(self, hub: Any) -> None:
        hub.add(MODEL, small_model(), gated=True)
        message = fails(ModelLoadError)
        assert f"{hub.endpoint}/{MODEL}" in message and "HF_TOKEN" in message

    def test_gated_with_a_token_without_access(self, hub: Any) -> None:
        hub.add(MODEL, small_model(), gated=True)
        message = fails(ModelLoadError, token="hf_other")
        assert "your token has no access" in message and "hf_other" not in message

    @pytest.mark.parametrize("place", ["argument", "HF_TOKEN", "file"])
    def test_gated_with_access(self, hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
        hub.add(MODEL, small_model(), gated=True)
        if place == "HF_TOKEN":
            monkeypatch.setenv("HF_TOKEN", f"{hub.valid_token}\n")
        if place == "file":
            (tmp_path / "hf").mkdir()
            (tmp_path / "hf/token").write_text(f"{hub.valid_token}\n")
        token = hub.valid_token if place == "argument" else None
        assert files_in(resolve_model(MODEL, token=token)) == small_model()
        assert hub.tokens_seen_by_cdn == [None]

    def test_server_error(self, hub: Any) -> None:
        hub.status = 503
        assert "HTTP 503" in fails(ModelLoadError)

    def test_not_a_hub(self, hub: Any) -> None:
        hub.status = 200
        assert "HF_ENDPOINT" in fails(ModelLoadError)

    @pytest.mark.parametrize(
        ("files", "words"),
        [
            ({"pytorch_model.bin": b""}, "pickle"),
            ({"mmproj-F16.gguf": b""}, "no weights"),
            ({"adapter_model.safetensors": b""}, "LoRA adapter"),
            ({"README.md": b""}, "no weights"),
            ({"model-00001-of-00002.safetensors": b""}, "model-00002-of-00002.safetensors"),
        ],
    )
    def test_nothing_usable_fetches_nothing(self, hub: Any, files: dict[str, bytes], words: str) -> None:
        hub.add(MODEL, {"config.json": b"{}", **files})
        assert words in fails(ModelLoadError)
        assert hub.fetched() == []

    def test_index_that_leads_elsewhere(self, hub: Any) -> None:
        hub.add(MODEL, sharded_model(("../../../outside.safetensors",)))
        assert "not a plain file name" in fails(ModelLoadError)

    def test_listed_names_that_lead_elsewhere_are_ignored(self, hub: Any) -> None:
        hub.add(MODEL, {**small_model(), "../tokenizer.json": b"bad", "sub/tokenizer.json": b"bad"})
        assert files_in(resolve_model(MODEL)) == small_model()


class TestDisk:
    def test_too_little_space_is_known_before_the_weights(self, hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        hub.add(MODEL, small_model())
        usage = type("Usage", (), {"free": 2_999_999})
        monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
        message = fails(ModelLoadError)
        assert "needs 3.0 MB" in message and "HF_HOME" in message
        assert "model.safetensors" not in hub.fetched()

    def test_space_for_the_rest_is_enough(self, hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        hub.add(MODEL, small_model())
        hub.cuts = [1_500_000] + [0] * 5
        fails(ModelLoadError)
        usage = type("Usage", (), {"free": 2_500_000})
        monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
        assert files_in(resolve_model(MODEL)) == small_model()

    def test_full_disk(self, hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        hub.add(MODEL, small_model())

        def append(self: Any, chunk: bytes) -> NoReturn:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(transfer._PartialFile, "append", append)
        message = fails(ModelLoadError)
        assert "is full" in message and "HF_HOME" in message

    def test_cache_that_cannot_be_written(self, hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        hub.add(MODEL, small_model())
        (tmp_path / "file").touch()
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "file/hub"))
        assert "HF_HOME" in fails(ModelLoadError)

    @pytest.mark.parametrize("gguf", [None, "Q8_0"])
    def test_a_complete_model_starts_in_a_cache_that_cannot_be_written(
        self, hub: Any, tmp_path: Path, gguf: str | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        hub.add(MODEL, small_model() if gguf is None else {f"m-{gguf}.gguf": noise(1000)})
        model = MODEL if gguf is None else f"{MODEL}:{gguf}"
        found = resolve_model(model)
        with forbidden(tmp_path / "hf", 0o500):
            assert resolve_model(model) == found
            assert caplog.text == ""
            hub.repositories[MODEL].commit = "b" * 40
            assert resolve_model(model) == found
        assert "using the cached" in caplog.text and "may be newer" in caplog.text

    def test_a_file_system_that_is_read_only_is_not_full(
        self, hub: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        repository = hub.add(MODEL, {"m-Q8_0.gguf": noise(1000)})
        found = resolve_model(MODEL)
        repository.commit = "b" * 40
        monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 0}))
        assert "needs 1.0 kB, but only 0 B are free" in fails(ModelLoadError)
        monkeypatch.setattr("os.access", lambda path, mode: False)
        assert resolve_model(MODEL) == found and "using the cached" in caplog.text

    def test_a_model_that_a_cache_without_permission_lacks(self, hub: Any, tmp_path: Path) -> None:
        hub.add(MODEL, small_model())
        (tmp_path / "hf").mkdir()
        with forbidden(tmp_path / "hf", 0o500):
            assert "a directory that you may write to" in fails(ModelLoadError)


class TestOffline:
    @pytest.fixture
    def no_network(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*args: object, **options: object) -> NoReturn:
            raise AssertionError("a socket was used")

        for name in ("connect", "connect_ex", "sendto"):
            monkeypatch.setattr(socket.socket, name, refuse)
        monkeypatch.setattr(socket, "getaddrinfo", refuse)
        monkeypatch.setattr(socket, "create_connection", refuse)

    def test_cached(self, hub: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
        hub.add(MODEL, sharded_model())
        snapshot = resolve_model(MODEL)
        request.getfixturevalue("no_network")
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert resolve_model(MODEL) == snapshot
        assert resolve_model(MODEL, revision=COMMIT) == snapshot

    @pytest.mark.usefixtures("no_network")
    def test_not_cached(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        message = fails(ModelNotFoundError)
        assert "HF_HUB_OFFLINE" in message and BUILTIN_MODEL in message

    def test_incomplete(self, hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        hub.add(MODEL, sharded_model())
        snapshot = resolve_model(MODEL)
        (snapshot / "model-00002-of-00002.safetensors").resolve().unlink()
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert "model-00002-of-00002.safetensors" in fails(ModelNotFoundError)

    def test_lost_blob_is_fetched_again_online(self, hub: Any) -> None:
        hub.add(MODEL, small_model())
        (resolve_model(MODEL) / "model.safetensors").resolve().unlink()
        assert files_in(resolve_model(MODEL)) == small_model()

    def test_no_network_and_not_cached(self, hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        assert BUILTIN_MODEL in fails(ModelLoadError)

    @pytest.mark.parametrize("trouble", ["no network", "server error", "gone"])
    def test_hub_in_trouble_but_cached(
        self, hub: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, trouble: str
    ) -> None:
        hub.add(MODEL, small_model())
        snapshot = resolve_model(MODEL)
        if trouble == "no network":
            with socket.create_server(("127.0.0.1", 0)) as closed:
                monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        elif trouble == "server error":
            hub.status = 500
        else:
            hub.repositories.clear()
        assert resolve_model(MODEL) == snapshot
        assert "using the cached" in caplog.text


@pytest.mark.parametrize(
    ("environment", "cache_dir", "token_path"),
    [
        ({}, "/home/u/.cache/huggingface/hub", "/home/u/.cache/huggingface/token"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub", "/x/huggingface/token"),
        ({"HF_HOME": "~/h", "XDG_CACHE_HOME": "/x"}, "/home/u/h/hub", "/home/u/h/token"),
        ({"HF_HOME": "/h", "HUGGINGFACE_HUB_CACHE": "/old"}, "/old", "/h/token"),
        ({"HF_HUB_CACHE": "/c", "HUGGINGFACE_HUB_CACHE": "/old", "HF_TOKEN_PATH": "/t"}, "/c", "/t"),
    ],
)
def test_directories_as_huggingface_hub_has_them(
    environment: dict[str, str], cache_dir: str, token_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/u")
    settings = HuggingFaceSettings.from_environment(environment)
    assert (settings.cache_dir, settings.token_path) == (Path(cache_dir), Path(token_path))

    # The independent reference: how huggingface_hub itself reads these variables.
    script = "from huggingface_hub import constants as c; print(c.HF_HUB_CACHE, c.HF_TOKEN_PATH)"
    clean = {"HOME": "/home/u", "PATH": os.environ["PATH"], **environment}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=clean)
    assert done.stdout.split() == [cache_dir, token_path]


@pytest.mark.parametrize(
    ("environment", "endpoint", "token", "offline"),
    [
        ({}, "https://huggingface.co", None, False),
        ({"HF_ENDPOINT": "http://m/", "HF_TOKEN": " t\n"}, "http://m", "t", False),
        ({"HF_HUB_OFFLINE": "yes", "HUGGING_FACE_HUB_TOKEN": "o"}, "https://huggingface.co", "o", True),
        ({"HF_HUB_OFFLINE": "0", "HF_TOKEN": ""}, "https://huggingface.co", None, False),
        ({"TRANSFORMERS_OFFLINE": "1"}, "https://huggingface.co", None, True),
    ],
)
def test_other_variables(environment: dict[str, str], endpoint: str, token: str | None, offline: bool) -> None:
    settings = HuggingFaceSettings.from_environment(environment)
    assert (settings.endpoint, settings.token, settings.offline) == (endpoint, token, offline)
    assert HuggingFaceSettings.from_environment(environment, "mine").token == "mine"
    assert "token='" not in repr(settings)


@pytest.mark.parametrize("model", ["~nosuchuser/model", "x" * 300, "a\0b"])
def test_impossible_paths_are_no_models(model: str) -> None:
    with pytest.raises(ModelLoadError, match=r"is no model|neither a directory"):
        resolve_model(model)
