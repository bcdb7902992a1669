"""From names of adapters to directories and files, with a stand-in for the hub that speaks HTTP on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagewick.errors import ModelLoadError, ModelNotFoundError
from pagewick.weights.lora.finding import resolve_adapter
from pagewick.weights.lora.reading import read_adapter
from tests.weights.conftest import HubServer
from tests.weights.lora.convert import FILES

MODEL = "someone/adapter"


@pytest.fixture
def repository() -> dict[str, bytes]:
    names = ("adapter_config.json", "adapter_model.safetensors", "adapter.gguf")
    more = {"README.md": b"#", "tokenizer.json": b"{}", "training_args.bin": b"pickle", "optimizer.pt": b"pickle"}
    return {**{name: (FILES / name).read_bytes() for name in names}, **more}


def test_paths(tmp_path: Path) -> None:
    assert resolve_adapter(str(FILES)) == FILES
    assert resolve_adapter(str(FILES / "adapter.gguf")) == FILES / "adapter.gguf"
    with pytest.raises(ModelNotFoundError, match="there is no directory"):
        resolve_adapter(str(tmp_path / "nothing"))
    with pytest.raises(ModelLoadError, match="is a file"):
        resolve_adapter(str(FILES / "adapter_config.json"))


def test_only_the_adapter_is_downloaded_and_only_once(hub: HubServer, repository: dict[str, bytes]) -> None:
    hub.add(MODEL, repository)
    found = resolve_adapter(MODEL)
    assert {entry.name for entry in found.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert read_adapter(found, 6, 2).digest == read_adapter(FILES, 6, 2).digest
    hub.requests.clear()
    assert resolve_adapter(MODEL) == found
    assert not any("resolve" in path for method, path, _ in hub.requests if method == "GET")


def test_a_gguf_file_of_a_repository(hub: HubServer, repository: dict[str, bytes]) -> None:
    hub.add(MODEL, repository)
    found = resolve_adapter(f"{MODEL}/adapter.gguf")
    assert found.name == "adapter.gguf" and found.read_bytes() == repository["adapter.gguf"]
    with pytest.raises(ModelLoadError, match=r"it has no other.gguf\n  give the id of a repository"):
        resolve_adapter(f"{MODEL}/other.gguf")
    with pytest.raises(ModelNotFoundError, match=r"names no adapter; give owner/name, or owner/name/file\.gguf"):
        resolve_adapter(f"{MODEL}:Q8_0")


def test_a_repository_without_an_adapter(hub: HubServer, repository: dict[str, bytes]) -> None:
    del repository["adapter_model.safetensors"]
    hub.add(MODEL, {**repository, "adapter_model.bin": b"pickle"})
    with pytest.raises(ModelLoadError, match=r"is no LoRA adapter: it has no adapter_model.safetensors\n"):
        resolve_adapter(MODEL)


def test_offline(hub: HubServer, repository: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(MODEL, repository)
    found = resolve_adapter(MODEL)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.requests.clear()
    assert resolve_adapter(MODEL) == found and not hub.requests
    for name in (f"{MODEL}/adapter.gguf", "someone/other"):
        with pytest.raises(ModelNotFoundError, match=r"HF_HUB_OFFLINE is set, and the adapter .* is not in the cache"):
            resolve_adapter(name)
