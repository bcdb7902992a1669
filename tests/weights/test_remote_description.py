"""A model on a hub is checked before its weights are downloaded."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagewick.config import EngineConfig
from pagewick.demo import MODEL_DIR
from pagewick.engine.preflight import check_description
from pagewick.errors import ConfigError, ModelLoadError
from pagewick.local_models import with_local_models
from pagewick.weights.hub import resolve_model
from tests.doctor.test_model import tiny_gguf
from tests.weights.conftest import HubServer
from tests.weights.test_hub import MODEL, small_model


def config_with(**changes: Any) -> bytes:
    """The built-in model's config.json with other entries."""
    return json.dumps({**json.loads((MODEL_DIR / "config.json").read_text(encoding="utf-8")), **changes}).encode()


@pytest.mark.parametrize(
    ("changes", "error", "complaint"),
    [
        ({"architectures": ["NobodyForCausalLM"], "model_type": "nobody"}, ModelLoadError, "NobodyForCausalLM"),
        ({"quantization_config": {"quant_method": "aqlm", "bits": 4}}, ConfigError, r"aqlm \(4 bits\)"),
        ({"num_hidden_layers": -1}, ModelLoadError, "num_hidden_layers is -1"),
    ],
)
def test_a_checkpoint_that_does_not_run(
    changes: dict[str, Any], error: type[Exception], complaint: str, hub: HubServer
) -> None:
    hub.add(MODEL, {**small_model(), "config.json": config_with(**changes)})
    with pytest.raises(error, match=complaint):
        resolve_model(MODEL, check=check_description)
    assert hub.fetched() == ["config.json"]


def test_a_gguf_file_that_does_not_run(hub: HubServer) -> None:
    weights = tiny_gguf(extra={"block_count": 5000})
    hub.add(MODEL, {"tiny-Q8_0.gguf": weights + bytes(2**22)})
    with pytest.raises(ModelLoadError, match=rf"the hub's {MODEL}: llama\.block_count is 5000"):
        resolve_model(f"{MODEL}:Q8_0", check=check_description)
    assert hub.ranges() == [f"bytes=0-{2**20 - 1}"]  # the header


@pytest.mark.parametrize("model", [MODEL, f"{MODEL}:Q8_0"])
def test_what_runs_is_downloaded(model: str, hub: HubServer) -> None:
    hub.add(MODEL, {**small_model(), "config.json": config_with(), "tiny-Q8_0.gguf": tiny_gguf()})
    path = resolve_model(model, check=check_description)
    assert (path.is_file() and path.read_bytes() == tiny_gguf()) or (path / "model.safetensors").exists()
    hub.requests.clear()
    assert resolve_model(model, check=check_description) == path
    assert hub.fetched() == []  # a model in the cache is checked there, when it is loaded


def test_safetensors_are_not_downloaded_where_a_gguf_file_is_wanted(hub: HubServer) -> None:
    hub.add(MODEL, {**small_model(), "config.json": config_with()})
    with pytest.raises(ConfigError, match=f"--quantization gguf: {MODEL} holds safetensors"):
        with_local_models(EngineConfig(model=MODEL, quantization="gguf"))
    assert hub.fetched() == ["config.json"]
