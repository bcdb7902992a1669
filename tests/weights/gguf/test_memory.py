"""How much of a file is in memory while it is loaded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gguf_load import write_random_file
from pagewick.cli.quantizing.plan import planned_export
from pagewick.cli.random_model import Shape
from pagewick.config import EngineConfig
from pagewick.demo import MODEL_DIR
from pagewick.engine.model_loading import load_model
from pagewick.parallel.collectives import Collectives
from pagewick.weights.gguf import export
from pagewick.weights.gguf.source import GgufSource
from pagewick.weights.progress import Progress
from tests.weights.gguf.written import write

# Its embeddings are nearly all of the file.
SHAPE = Shape("Qwen3ForCausalLM", "qwen3", 256, 256, 1, 4, 2, 64, 65_536, 1e6, 1e-6)


def mapped_bytes(path: Path) -> int:
    """Return how many bytes of a mapped file have pages in this process."""
    is_of_file, found = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *rest = line.split()
        if "-" in key and not key.endswith(":"):
            is_of_file = line.endswith(str(path))
        elif is_of_file and key == "Rss:":
            found += int(rest[0]) * 1024
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_are_dropped_while_a_tensor_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, found, release = tmp_path / "m.gguf", [0], GgufSource.release
    write_random_file(SHAPE, path)

    def watched(source: GgufSource, tensor: torch.Tensor) -> None:
        found.append(mapped_bytes(path))
        release(source, tensor)

    monkeypatch.setattr(GgufSource, "release", watched)
    load_model(EngineConfig(model=str(path), device="cpu", num_threads=1), Collectives.single(), torch.device("cpu"))
    assert path.stat().st_size > 17_000_000
    assert 1_000_000 < max(found) < 8_000_000


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_part_of_a_tensor_is_in_memory_while_a_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, found = write(MODEL_DIR, tmp_path / "m.gguf", "f32"), [0]

    class Watch(Progress):
        def advance(self, num_bytes: int) -> None:
            found.append(mapped_bytes(path))

    monkeypatch.setattr(export, "_CHUNK", 2**16)  # 256 KiB; the embedding has 4 MiB
    with planned_export(path, "m", "q8_0") as (planned, _):
        planned.write(tmp_path / "q8.gguf", is_forced=False, progress=Watch())
    assert path.stat().st_size > 20_000_000
    assert 100_000 < max(found) < 1_500_000
