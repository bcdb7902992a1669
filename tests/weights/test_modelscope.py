"""ModelScope, with a stand-in that speaks its HTTP API on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import parse_qs, urlsplit

import huggingface_hub
import pytest

from pagewick.config import BUILTIN_MODEL
from pagewick.errors import ConfigError, ModelLoadError, ModelNotFoundError
from pagewick.weights.hub import resolve_model
from pagewick.weights.hub_settings import STATE_NAME, ModelScopeSettings
from tests.permissions import forbidden

MODEL = "someone/Model-1.5"
TOKEN = "ms-secret"


def noise(num_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


def small_model() -> dict[str, bytes]:
    return {
        "config.json": b'{"a": 1}',
        "tokenizer.json": b"{}",
        "model.safetensors": noise(3_000_000),
    }


@dataclass
class Hub:
    """The stand-in: its models, the requests that it got, and how it fails."""

    endpoint: str = ""
    cdn: str = ""
    models: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    private: bool = False
    requests: list[tuple[str, str | None]] = field(default_factory=list)  # name of the file, Range
    credentials_seen_by_cdn: list[str | None] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)  # bytes until the connection breaks, one for each large response
    status: int | None = None
    changes: Callable[[list[dict[str, Any]]], None] = lambda listed: None

    def fetched(self) -> list[str]:
        return [asked for asked, _ in self.requests if asked != "list"]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args: object) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if url.path.startswith("/cdn/"):
            self.hub.credentials_seen_by_cdn += [self.headers.get("Authorization"), self.headers.get("Cookie")]
            _, _, key, name = url.path.split("/", 3)
            self.send(self.hub.models[tuple(bytes.fromhex(key).decode().split("|"))][name])  # type: ignore[index]
            return
        match = re.fullmatch(r"/api/v1/models/([^/]+/[^/]+)/repo(/files)?", url.path)
        assert match is not None, self.path
        self.hub.requests.append((query.get("FilePath", "list"), self.headers.get("Range")))
        key = match[1], query["Revision"]
        authorised = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if self.hub.status is not None:
            self.answer(self.hub.status, b"<html>sorry</html>")
        elif self.hub.private and not (authorised and f"m_session_id={TOKEN}" in self.headers.get("Cookie", "")):
            self.refuse(403, "no permission")
        elif key not in self.hub.models:
            self.refuse(404, "model not exists")
        elif match[2]:
            listed = [describe(name, data) for name, data in self.hub.models[key].items()]
            self.hub.changes(listed)
            answer = {"Code": 200, "Success": True, "Message": "success", "Data": {"Files": listed}}
            self.answer(200, json.dumps(answer).encode())
        elif query["FilePath"].endswith(".safetensors"):
            location = f"{self.hub.cdn}/cdn/{'|'.join(key).encode().hex()}/{query['FilePath']}"
            self.answer(302, b"", {"Location": location})
        else:
            self.send(self.hub.models[key][query["FilePath"]])

    def refuse(self, status: int, message: str) -> None:
        self.answer(status, json.dumps({"Code": 10010205001, "Success": False, "Message": message}).encode())

    def send(self, data: bytes) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start = int(asked[1]) if asked else 0
        end = int(asked[2]) + 1 if asked and asked[2] else len(data)
        cut = self.hub.cuts.pop(0) if self.hub.cuts and len(data) > 1000 else end - start
        self.answer(206 if asked else 200, data[start:end], cut=cut)

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None, cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[:cut])
        self.close_connection = cut is not None and cut < len(body)


def describe(name: str, data: bytes) -> dict[str, Any]:
    """Return a file's entry in ModelScope's list."""
    digest = hashlib.sha256(data).hexdigest()
    return {"Name": name.split("/")[-1], "Path": name, "Type": "blob", "Size": len(data), "Sha256": digest}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Run a stand-in; the environment points to it and to an empty cache below tmp_path."""
    for name in [
        n for n in os.environ if n.startswith(("HF_", "MODELSCOPE_", "TRANSFORMERS_")) or "proxy" in n.lower()
    ]:
        monkeypatch.delenv(name)
    state = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": state}))
    server.daemon_threads = True
    state.endpoint = f"http://127.0.0.1:{server.server_port}"
    state.cdn = f"http://localhost:{server.server_port}"
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", state.endpoint)
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "ms"))
    monkeypatch.setattr("pagewick.weights.transfer.RETRY_DELAY_SECONDS", 0.0)
    huggingface_hub.close_session()  # a client made earlier may have taken proxies from the environment
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield state
    huggingface_hub.close_session()
    server.shutdown()
    thread.join()
    server.server_close()


def resolve(model: str = MODEL, **options: Any) -> Path:
    return resolve_model(model, hub="modelscope", **options)


def fails(kind: type[ModelLoadError], model: str = MODEL, **options: Any) -> str:
    with pytest.raises(ModelLoadError) as caught:
        resolve(model, **options)
    assert type(caught.value) is kind
    assert 2 <= len(str(caught.value).splitlines()) <= 6
    return str(caught.value)


def files_in(directory: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in directory.iterdir() if not entry.name.startswith(".pagewick")}


class TestDownload:
    def test_fetches_what_a_model_needs_into_modelscopes_layout(self, hub: Hub, tmp_path: Path) -> None:
        unneeded = {"pytorch_model.bin": b"pickle", "configuration.py": b"code", "sub/tokenizer.json": b"no"}
        hub.models[MODEL, "master"] = {**small_model(), **unneeded}
        directory = resolve()
        assert directory == tmp_path / "ms/models/someone/Model-1___5"
        assert files_in(directory) == small_model()
        assert sorted(hub.fetched()) == sorted(small_model())

    def test_second_time_asks_only_whether_something_changed(self, hub: Hub) -> None:
        hub.models[MODEL, "master"] = small_model()
        directory = resolve()
        hub.requests.clear()
        assert resolve() == directory
        assert hub.requests == [("list", None)]

    def test_only_what_changed_is_fetched_again(self, hub: Hub) -> None:
        hub.models[MODEL, "master"] = small_model()
        resolve()
        hub.requests.clear()
        hub.models[MODEL, "master"]["config.json"] = b'{"a": 2}'  # as long as before
        assert files_in(resolve())["config.json"] == b'{"a": 2}'
        assert hub.fetched() == ["config.json"]

    def test_each_revision_has_a_directory(self, hub: Hub) -> None:
        hub.models[MODEL, "master"] = small_model()
        hub.models[MODEL, "v1/a"] = {**small_model(), "config.json": b"{}"}
        assert files_in(resolve(revision="v1/a"))["config.json"] == b"{}"
        assert files_in(resolve()) == small_model()
        assert resolve(revision="v1/a").name == "Model-1___5@v1--a"

    def test_shards_are_those_of_the_index(self, hub: Hub) -> None:
        index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
        shards = {name: noise(2000, seed) for seed, name in enumerate(index["weight_map"].values())}
        wanted = {"config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode(), **shards}
        hub.models[MODEL, "master"] = {**wanted, "model-00003-of-00003.safetensors": b"left over"}
        assert files_in(resolve()) == wanted

    def test_files_of_another_program_are_checked_once(self, hub: Hub, tmp_path: Path) -> None:
        hub.models[MODEL, "master"] = small_model()
        directory = tmp_path / "ms/models/someone/Model-1___5"
        directory.mkdir(parents=True)
        (directory / "config.json").write_bytes(b'{"a": 1}')
        (directory / "model.safetensors").write_bytes(noise(3_000_000, 1))  # of the right size, and wrong
        assert files_in(resolve()) == small_model()
        assert sorted(hub.fetched()) == ["model.safetensors", "tokenizer.json"]

    def test_progress_counts_the_weights(self, hub: Hub) -> None:
        class Recorded:
            seen: list[tuple[str, int]] = []  # noqa: RUF012

            def start(self, description: str, total_bytes: int, done_bytes: int = 0) -> None:
                self.seen.append(("start", total_bytes))

            def advance(self, num_bytes: int) -> None:
                self.seen.append(("advance", num_bytes))

            def stop(self) -> None:
                self.seen.append(("stop", 0))

        hub.models[MODEL, "master"] = small_model()
        resolve(progress=Recorded())
        assert (Recorded.seen[0], Recorded.seen[-1]) == (("start", 3_000_000), ("stop", 0))
        assert sum(number for what, number in Recorded.seen if what == "advance") == 3_000_000

    def test_a_token_reads_private_models_and_is_not_sent_elsewhere(
        self, hub: Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.models[MODEL, "master"], hub.private = small_model(), True
        monkeypatch.setenv("MODELSCOPE_API_TOKEN", f"{TOKEN}\n")
        assert files_in(resolve()) == small_model()
        assert hub.credentials_seen_by_cdn == [None, None]


class TestInterrupted:
    def test_resumes_after_a_broken_connection(self, hub: Hub) -> None:
        hub.models[MODEL, "master"] = small_model()
        hub.cuts = [1_500_000, 700_000]
        assert files_in(resolve()) == small_model()
        asked = [asked for name, asked in hub.requests if name == "model.safetensors"]
        starts = [0 if value is None else int(value.removeprefix("bytes=").removesuffix("-")) for value in asked]
        assert len(starts) == 3
        assert 0 == starts[0] < starts[1] < starts[2]

    def test_a_second_call_resumes_and_nothing_incomplete_is_used(
        self, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.models[MODEL, "master"] = small_model()
        hub.cuts = [2_100_000] + [0] * 5
        assert "goes on where it stopped" in fails(ModelLoadError)
        (part,) = tmp_path.rglob("*incomplete*")
        arrived = part.stat().st_size
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert "model.safetensors" in fails(ModelNotFoundError)
        monkeypatch.delenv("HF_HUB_OFFLINE")
        hub.requests.clear()
        assert files_in(resolve()) == small_model()
        assert hub.requests[1:] == [("model.safetensors", f"bytes={arrived}-")]

    def test_half_an_update_is_not_used(self, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        hub.models[MODEL, "master"] = small_model()
        directory = resolve()
        hub.models[MODEL, "master"] |= {"config.json": b'{"a": 2}', "model.safetensors": noise(3_000_000, 5)}
        hub.cuts = [0] * 5
        fails(ModelLoadError)
        assert files_in(directory)["config.json"] == b'{"a": 2}'
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert "incomplete" in fails(ModelNotFoundError)
        monkeypatch.delenv("HF_HUB_OFFLINE")
        hub.cuts = []
        assert files_in(resolve()) == hub.models[MODEL, "master"]

    def test_wrong_bytes_are_refused(self, hub: Hub, tmp_path: Path) -> None:
        def lie(listed: list[dict[str, Any]]) -> None:
            listed[-1]["Sha256"] = "0" * 64

        hub.models[MODEL, "master"], hub.changes = small_model(), lie
        assert "damaged" in fails(ModelLoadError)
        assert not (tmp_path / "ms/models/someone/Model-1___5/model.safetensors").exists()

    def test_two_at_a_time_fetch_once(self, hub: Hub) -> None:
        hub.models[MODEL, "master"] = small_model()
        results: list[Path] = []
        threads = [threading.Thread(target=lambda: results.append(resolve())) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [results[0]] * 3
        assert hub.fetched().count("model.safetensors") == 1


class TestRefused:
    def test_unknown_model(self, hub: Hub) -> None:
        message = fails(ModelNotFoundError)
        assert hub.endpoint in message and MODEL in message and "MODELSCOPE_API_TOKEN" in message

    def test_unknown_revision(self, hub: Hub) -> None:
        hub.models[MODEL, "master"] = small_model()
        assert "no revision 'v9'" in fails(ModelNotFoundError, revision="v9")

    @pytest.mark.parametrize(("token", "fix"), [(None, "set MODELSCOPE_API_TOKEN"), ("other", "check MODELSCOPE_")])
    def test_private(self, hub: Hub, token: str | None, fix: str) -> None:
        hub.models[MODEL, "master"], hub.private = small_model(), True
        message = fails(ModelLoadError, token=token)
        assert fix in message and "no permission" in message and "other" not in message

    @pytest.mark.parametrize(("status", "words"), [(500, "HTTP 500"), (429, "wait"), (200, "MODELSCOPE_ENDPOINT")])
    def test_a_hub_in_trouble(self, hub: Hub, status: int, words: str) -> None:
        hub.status = status
        assert words in fails(ModelLoadError)

    def test_a_list_without_hashes(self, hub: Hub) -> None:
        hub.models[MODEL, "master"] = small_model()
        hub.changes = lambda listed: listed[0].pop("Sha256")
        assert "Sha256" in fails(ModelLoadError)

    def test_names_that_lead_elsewhere_are_ignored(self, hub: Hub, tmp_path: Path) -> None:
        hub.models[MODEL, "master"] = {**small_model(), "../tokenizer.json": b"bad", "..": b"bad"}
        assert files_in(resolve()) == small_model()
        assert sorted(hub.fetched()) == sorted(small_model())

    @pytest.mark.parametrize(
        ("files", "words"),
        [({"pytorch_model.bin": b""}, "pickle"), ({"model.safetensors": b""}, "config.json"), ({}, "no weights")],
    )
    def test_nothing_usable_fetches_nothing(self, hub: Hub, files: dict[str, bytes], words: str) -> None:
        hub.models[MODEL, "master"] = files
        assert words in fails(ModelLoadError)
        assert hub.fetched() == []

    def test_an_id_needs_an_owner(self, hub: Hub) -> None:
        assert "owner/name" in fails(ModelNotFoundError, "Model-1.5")
        assert hub.requests == []

    def test_an_unknown_hub(self) -> None:
        with pytest.raises(ConfigError, match="one of huggingface, modelscope; got 'elsewhere'"):
            resolve_model(MODEL, hub="elsewhere")

    def test_too_little_space_is_known_before_the_weights(self, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        hub.models[MODEL, "master"] = small_model()
        monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 2_999_999}))
        assert "MODELSCOPE_CACHE" in fails(ModelLoadError)
        assert "model.safetensors" not in hub.fetched()

    def test_a_cache_that_cannot_be_written(self, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        hub.models[MODEL, "master"] = small_model()
        (tmp_path / "file").touch()
        monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "file/ms"))
        assert "MODELSCOPE_CACHE" in fails(ModelLoadError)

    @pytest.mark.parametrize("gguf", [None, "Q8_0"])
    def test_a_complete_model_starts_in_a_cache_that_cannot_be_written(
        self, hub: Hub, tmp_path: Path, gguf: str | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        name = "config.json" if gguf is None else f"m-{gguf}.gguf"
        hub.models[MODEL, "master"] = small_model() if gguf is None else {name: noise(1000)}
        model = MODEL if gguf is None else f"{MODEL}:{gguf}"
        found = resolve(model)
        with forbidden(tmp_path / "ms", 0o500):
            assert resolve(model) == found
            assert caplog.text == ""
            hub.models[MODEL, "master"][name] = noise(1001)
            assert resolve(model) == found
        assert "using the cached" in caplog.text and "may be newer" in caplog.text

    def test_a_model_that_a_cache_without_permission_lacks(self, hub: Hub, tmp_path: Path) -> None:
        hub.models[MODEL, "master"] = small_model()
        (tmp_path / "ms").mkdir()
        with forbidden(tmp_path / "ms", 0o500):
            assert "a directory that you may write to" in fails(ModelLoadError)


class TestOffline:
    def test_uses_no_socket(self, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        hub.models[MODEL, "master"] = small_model()
        directory = resolve()

        def refuse(*args: object, **options: object) -> NoReturn:
            raise AssertionError("a socket was used")

        monkeypatch.setattr(socket.socket, "connect", refuse)
        monkeypatch.setattr(socket, "getaddrinfo", refuse)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert resolve() == directory
        message = fails(ModelNotFoundError, "someone/other")
        assert "HF_HUB_OFFLINE" in message and BUILTIN_MODEL in message

    def test_no_network(self, hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        hub.models[MODEL, "master"] = small_model()
        directory = resolve()
        with socket.create_server(("127.0.0.1", 0)) as closed:
            monkeypatch.setenv("MODELSCOPE_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        assert resolve() == directory
        assert "using the cached" in caplog.text
        assert "cannot reach" in fails(ModelLoadError, "someone/other")

    def test_a_damaged_state_is_not_believed(self, hub: Hub) -> None:
        hub.models[MODEL, "master"] = small_model()
        (resolve() / STATE_NAME).write_text('{"is_complete": true, "files": {"config.json": 5}}')
        hub.requests.clear()
        assert files_in(resolve()) == small_model()
        assert hub.fetched() == []


@pytest.mark.parametrize(
    ("environment", "endpoint", "cache_dir"),
    [
        ({}, "https://www.modelscope.cn", "/home/u/.cache/modelscope/hub"),
        ({"MODELSCOPE_DOMAIN": "www.modelscope.ai"}, "https://www.modelscope.ai", "/home/u/.cache/modelscope/hub"),
        ({"MODELSCOPE_ENDPOINT": "http://m/", "MODELSCOPE_DOMAIN": "x"}, "http://m", "/home/u/.cache/modelscope/hub"),
        ({"MODELSCOPE_CACHE": "~/c"}, "https://www.modelscope.cn", "/home/u/c"),
    ],
)
def test_settings(environment: dict[str, str], endpoint: str, cache_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/u")
    settings = ModelScopeSettings.from_environment({**environment, "MODELSCOPE_API_TOKEN": TOKEN})
    assert (settings.endpoint, settings.cache_dir, settings.token) == (endpoint, Path(cache_dir), TOKEN)
    assert TOKEN not in repr(settings)
