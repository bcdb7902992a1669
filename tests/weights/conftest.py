"""Checkpoints written byte by byte, and a stand-in for a Hugging Face hub that speaks real HTTP."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from tests.log_lines import collected_lines


@pytest.fixture
def safetensors_bytes() -> Callable[..., bytes]:
    """Build a file from the format's definition: 8 bytes of header length, JSON header, data."""

    def build(tensors: dict[str, tuple[str, list[int], bytes]]) -> bytes:
        header: dict[str, Any] = {}
        data = b""
        for name, (dtype, shape, content) in tensors.items():
            offsets = [len(data), len(data) + len(content)]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
            data += content
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data

    return build


@dataclass
class Repository:
    """One model on the stand-in: its files by name, and how it misbehaves."""

    files: dict[str, bytes]
    commit: str = "a" * 40
    gated: bool = False
    lists_blobs: bool = True  # mirrors may list names only


@dataclass
class HubServer:
    """The stand-in: its models, the requests that it got, and how it fails."""

    endpoint: str = ""
    cdn: str = ""  # another origin: large files are redirected there
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, Range
    tokens_seen_by_cdn: list[str | None] = field(default_factory=list)
    valid_token: str = "hf_valid"
    cuts: list[int] = field(default_factory=list)  # each large response takes one: bytes until the connection breaks
    ignores_range: bool = False
    status: int | None = None  # status of every response

    def add(self, model: str, files: dict[str, bytes], **options: Any) -> Repository:
        """Publish a model."""
        self.repositories[model] = Repository(files, **options)
        return self.repositories[model]

    def fetched(self) -> list[str]:
        """Return the names of the files that were requested, in order; a redirect counts once."""
        return [
            re.split("/resolve/[^/]+/", path)[-1]
            for method, path, _ in self.requests
            if method == "GET" and "/cdn/" not in path and "/resolve/" in path
        ]

    def ranges(self) -> list[str | None]:
        """Return the Range headers of the requests for large files, in order."""
        return [asked for _, path, asked in self.requests if "/cdn/" in path]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, *args: object) -> None:
        """Log nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        if self.hub.status is not None:
            self.answer(self.hub.status, b"<html>sorry</html>", {"Content-Type": "text/html"})
        elif match := re.fullmatch(r"/api/models/(.+)/revision/([^/]+)", path):
            self.list_files(*match.groups())
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self.resolve(*match.groups())
        elif match := re.fullmatch(r"/cdn/([^/]+/[^/]+)/(.+)", path):
            self.hub.tokens_seen_by_cdn.append(self.headers.get("Authorization"))
            self.send_file(self.hub.repositories[match[1]].files[match[2]], self.hub.cuts)
        else:
            self.answer(404)

    def list_files(self, model: str, revision: str) -> None:
        repository = self.hub.repositories.get(model)
        if repository is None:
            self.answer(404, headers={"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", repository.commit):
            self.answer(404, headers={"X-Error-Code": "RevisionNotFound"})
        else:
            siblings = [describe(name, data, repository) for name, data in repository.files.items()]
            info = {"id": model, "sha": repository.commit, "siblings": siblings, "private": False}
            self.answer(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

    def resolve(self, model: str, revision: str, name: str) -> None:
        repository = self.hub.repositories[model]
        if repository.gated and self.headers.get("Authorization") != f"Bearer {self.hub.valid_token}":
            status = 401 if self.headers.get("Authorization") is None else 403
            self.answer(status, headers={"X-Error-Code": "GatedRepo"})
        elif name not in repository.files or revision not in ("main", repository.commit):
            self.answer(404, headers={"X-Error-Code": "EntryNotFound"})
        elif is_large(name):
            data = repository.files[name]
            headers = {
                "Location": f"{self.hub.cdn}/cdn/{model}/{name}",
                "X-Repo-Commit": repository.commit,
                "X-Linked-Etag": f'"{sha256(data)}"',
                "X-Linked-Size": str(len(data)),
            }
            self.answer(302, headers=headers)
        else:
            data = repository.files[name]
            self.send_file(data, [], {"X-Repo-Commit": repository.commit, "ETag": f'"{git_blob_id(data)}"'})

    def send_file(self, data: bytes, cuts: list[int], headers: dict[str, str] | None = None) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(asked[1]) if asked and not self.hub.ignores_range else 0
        body = data[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            cut = cuts.pop(0) if cuts else len(body)
            self.wfile.write(body[:cut])
            self.close_connection = cut < len(body)

    def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".gguf"))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def describe(name: str, data: bytes, repository: Repository) -> dict[str, Any]:
    """Return a file's entry in the list of the hub's API."""
    if not repository.lists_blobs:
        return {"rfilename": name}
    described = {"rfilename": name, "size": len(data), "blobId": git_blob_id(data)}
    if is_large(name):
        described["lfs"] = {"sha256": sha256(data), "size": len(data), "pointerSize": 130}
    return described


@contextlib.contextmanager
def running_hub(state: HubServer) -> Iterator[HubServer]:
    """Serve what `state` holds, at its endpoint."""
    handler = type("Handler", (_Handler,), {"hub": state})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    state.endpoint = f"http://127.0.0.1:{server.server_port}"
    state.cdn = f"http://localhost:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Run a stand-in; the environment points to it and to an empty cache below tmp_path."""
    for name in [n for n in os.environ if n.startswith(("HF_", "HUGGING", "TRANSFORMERS_")) or "proxy" in n.lower()]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("pagewick.weights.transfer.RETRY_DELAY_SECONDS", 0.0)
    with running_hub(HubServer()) as state:
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_ENDPOINT", state.endpoint)
        huggingface_hub.close_session()  # a client made earlier may have taken proxies from the environment
        yield state
        huggingface_hub.close_session()


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Collect the messages of pagewick's logger."""
    with collected_lines(logging.INFO) as found:
        yield found
