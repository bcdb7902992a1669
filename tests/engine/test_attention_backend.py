"""--attention-backend in a whole engine: refused where it cannot run, and with stand-ins the same tokens as without."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewick.attention.packages import PACKAGES, Package
from pagewick.engine.engine import Engine
from pagewick.errors import ConfigError
from tests.attention.package_stand_ins import MODULES
from tests.engine.serving import Answers, request, running, serve, start
from tests.kernels.conftest import library_off
from tests.models.checkpoints import write_checkpoint

OPTIONS = {"max_model_len": 64, "dtype": "float32", "num_kv_blocks": 40}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("llama")
    write_checkpoint("llama", directory)
    with library_off():
        yield directory


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_that_cannot_run_here_is_an_error_at_the_start(name: str, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=f"--attention-backend {name}: it runs on GPUs, and the device is cpu"):
        start(checkpoint, attention_backend=name, **OPTIONS)


def tokens_of(engine: Engine) -> Answers:
    prompts = [[3, 5, 7, 11, 13, 17, 19, 23, 29] * 3, [2, 4, 6], [3, 5, 7, 11, 13, 17, 19, 23, 29] * 2]
    wanted = [request(prompt, f"r{number}", max_tokens=8, temperature=0.0) for number, prompt in enumerate(prompts)]
    return serve(engine, wanted)


@pytest.mark.parametrize("name", ["FLASH_ATTN", "TORCH_VARLEN"])
def test_a_package_changes_no_token(name: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in computes in float64 and rounds, and the model is small: its best tokens are far from the others."""
    monkeypatch.setitem(sys.modules, PACKAGES[name].module, MODULES[name])
    monkeypatch.setattr(Package, "check_device", lambda self, device: None)
    monkeypatch.setattr(Package, "check_cache", lambda self, dtype, cache_dtype, block_size: None)
    with running(checkpoint, attention_backend="CPU_ATTN", **OPTIONS) as engine:
        expected = tokens_of(engine)
    with running(checkpoint, attention_backend=name.lower(), **OPTIONS) as engine:
        found = tokens_of(engine)
    for ours, theirs in zip(found.values(), expected.values(), strict=True):
        assert ours.token_ids == theirs.token_ids
