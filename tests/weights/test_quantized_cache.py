"""Weights that were quantized at load are kept: found again, rebuilt if they are damaged, and never in the way."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewick.errors import ModelLoadError
from pagewick.kernels import quantize_weight
from pagewick.quantization.plan import QuantizationPlan
from pagewick.weights import quantized_cache, quantized_file
from pagewick.weights.opening import open_source
from pagewick.weights.progress import Progress
from pagewick.weights.quantized_cache import QuantizedCache
from pagewick.weights.quantized_source import QuantizedSource, quantized_once

FORMATS = {"a.weight": "Q4_K", "b.weight": "Q8_0"}
PLAN = QuantizationPlan("q4_k_m", FORMATS, {})
NUM_BYTES = 70 * 2 * 144 + 33 * 34


class Counted(Progress):
    """Counts the bytes that were quantized."""

    def __init__(self) -> None:
        self.total = self.done = 0

    def start(self, description: str, total_bytes: int, done_bytes: int = 0) -> None:
        self.total = total_bytes

    def advance(self, num_bytes: int) -> None:
        self.done += num_bytes


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def write_model(directory: Path, seed: int = 0) -> Path:
    directory.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "a.weight": torch.randn(70, 512, generator=generator).bfloat16(),
        "b.weight": torch.randn(33, 32, generator=generator),
        "c.weight": torch.randn(7, generator=generator),
    }
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text("{}")
    return directory


@pytest.fixture
def cache(tmp_path: Path) -> QuantizedCache:
    return QuantizedCache(tmp_path / "cache" / "quantized")


def load(model: Path, cache: QuantizedCache, plan: QuantizationPlan = PLAN) -> tuple[QuantizedSource | None, int]:
    """Open a model; return how many bytes of it were quantized."""
    progress = Counted()
    found = quantized_once(model, open_source(model), plan, cache, progress)
    assert progress.done == progress.total
    return found, progress.done


def check(model: Path, source: QuantizedSource | None) -> None:
    assert source is not None
    stored = load_file(model / "model.safetensors")
    for name, kind in FORMATS.items():
        blocks = quantize_weight(stored[name], kind)
        assert torch.equal(source.get(name), blocks)
        assert source.shape(name) == tuple(blocks.shape)
        assert (source.dtype(name), source.stored_type(name)) == (torch.uint8, kind)
    assert torch.equal(source.get("c.weight"), stored["c.weight"])
    assert (source.dtype("c.weight"), source.stored_type("c.weight")) == (torch.float32, torch.float32)
    assert set(source.names()) == {"a.weight", "b.weight", "c.weight"}


SOURCE_BYTES = 70 * 512 * 2 + 33 * 32 * 4


def test_weights_are_quantized_once(model: Path, cache: QuantizedCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_file, "_CHUNK_SIZE", 3000)
    found, num_bytes = load(model, cache)
    assert num_bytes == SOURCE_BYTES
    check(model, found)
    found, num_bytes = load(model, cache)
    assert num_bytes == 0
    check(model, found)
    (entry,) = cache.entries()
    assert (entry.model, entry.mix) == (model, "q4_k_m")
    assert NUM_BYTES < entry.num_bytes < NUM_BYTES + 1000
    # Other programs can read the file, too.
    assert load_file(entry.path)["b.weight"].shape == (33, 34)


def test_a_file_is_for_one_state_of_a_checkpoint(model: Path, cache: QuantizedCache) -> None:
    load(model, cache)
    status = (model / "model.safetensors").stat()
    write_model(model, seed=1)
    os.utime(model / "model.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns))
    found, num_bytes = load(model, cache)
    assert num_bytes  # size and time are the same, and the first bytes are not
    check(model, found)
    os.utime(model / "model.safetensors")
    assert load(model, cache)[1]
    assert load(model, cache, QuantizationPlan("q4_k", FORMATS, {}))[1]
    assert load(model, cache, QuantizationPlan("q4_k", {**FORMATS, "a.weight": "Q5_K"}, {}))[1]
    assert len(cache.entries()) == 5


def truncated(content: bytes) -> bytes:
    return content[:-1]


def flipped(place: float) -> Callable[[bytes], bytes]:
    def flip(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[int(place * len(content))] ^= 1
        return bytes(changed)

    return flip


DAMAGE = [truncated, lambda content: b"", lambda content: b"{}" * 40, *map(flipped, (0.0, 0.004, 0.01, 0.5, 0.999))]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_rebuilt(
    damage: Callable[[bytes], bytes], model: Path, cache: QuantizedCache, caplog: pytest.LogCaptureFixture
) -> None:
    load(model, cache)
    (entry,) = cache.entries()
    entry.path.write_bytes(damage(entry.path.read_bytes()))
    found, num_bytes = load(model, cache)
    assert num_bytes == SOURCE_BYTES
    check(model, found)
    assert "is damaged" in caplog.text and "quantizing again" in caplog.text
    assert load(model, cache)[1] == 0


def test_checksums_are_computed_once_in_a_boot(
    model: Path, cache: QuantizedCache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checked: list[Path] = []
    check_sums = quantized_file._check_sums
    boot = tmp_path / "boot"
    boot.write_text("one")

    def counted(path: Path, *rest: Any) -> None:
        checked.append(path)
        check_sums(path, *rest)

    monkeypatch.setattr(quantized_file, "_check_sums", counted)
    monkeypatch.setattr(quantized_file, "_BOOT_ID", boot)
    for _ in range(3):
        check(model, load(model, cache)[0])
    (entry,) = cache.entries()
    try:
        os.getxattr(entry.path, "user.pagewick.checked")
    except (OSError, AttributeError):  # this system keeps no notes
        assert checked == [entry.path] * 3
        return
    assert checked == [entry.path]
    boot.write_text("two")
    for _ in range(2):
        assert load(model, cache)[1] == 0
    assert checked == [entry.path] * 2
    boot.unlink()
    for number in (3, 4):
        assert load(model, cache)[1] == 0
        assert len(checked) == number


def test_the_least_recently_used_file_goes_when_the_cache_is_full(tmp_path: Path) -> None:
    cache = QuantizedCache(tmp_path / "cache", max_bytes=2 * NUM_BYTES + 2000)
    models = [write_model(tmp_path / name, seed) for seed, name in enumerate("abc")]
    for age, model in ((30, models[0]), (20, models[1])):
        load(model, cache)
        (entry,) = (entry for entry in cache.entries() if entry.model == model)
        os.utime(entry.path, (age, entry.last_used - age))
    load(models[0], cache)  # now it is the one that was used last
    load(models[2], cache)
    assert {entry.model for entry in cache.entries()} == {models[0], models[2]}


def test_what_does_not_fit_is_not_kept(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = QuantizedCache(tmp_path / "cache", max_bytes=5000)
    assert load(model, cache) == (None, 0)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "they take 21.6 kB, and the limit, --quantized-cache-size, is 5.0 kB" in record.getMessage()
    assert list(cache.directory.iterdir()) == []


def test_a_full_disk_is_a_warning(
    model: Path, cache: QuantizedCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_room(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    assert quantized_once(model, open_source(model), PLAN, cache, Progress()) is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "No space left on device" in caplog.text
    assert list(cache.directory.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_a_warning(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert load(model, QuantizedCache(tmp_path / "file" / "quantized")) == (None, 0)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_weight_that_cannot_be_quantized_leaves_nothing_behind(model: Path, cache: QuantizedCache) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["b.weight"][3, 5] = torch.inf
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"cannot load b\.weight: it cannot be quantized: row 3"):
        load(model, cache)
    assert list(cache.directory.iterdir()) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from pagewick.quantization.plan import QuantizationPlan
from pagewick.weights import quantized_cache, quantized_file
from pagewick.weights.progress import Progress
from pagewick.weights.quantized_cache import QuantizedCache
from pagewick.weights.quantized_source import quantized_once
from pagewick.weights.opening import open_source

class Fatal(Progress):
    def advance(self, num_bytes):
        os.kill(os.getpid(), signal.SIGKILL)

plan = QuantizationPlan("q4_k_m", {"a.weight": "Q4_K", "b.weight": "Q8_0"}, {})
model = Path(sys.argv[1])
quantized_once(model, open_source(model), plan, QuantizedCache(Path(sys.argv[2])), Fatal())
"""


def test_a_process_that_is_killed_half_way_harms_no_one(model: Path, cache: QuantizedCache) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, model, cache.directory], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    (cache.directory / "another.partial").write_bytes(b"also left behind")
    assert {path.suffix for path in cache.directory.iterdir()} == {".partial"}
    found, num_bytes = load(model, cache)
    assert num_bytes == SOURCE_BYTES
    check(model, found)
    assert [path.suffix for path in cache.directory.iterdir()] == [".safetensors"]


def test_of_several_starts_at_once_one_quantizes(
    model: Path, cache: QuantizedCache, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    is_waiting = threading.Event()
    waiter: list[tuple[QuantizedSource | None, int]] = []

    class Slow(Counted):
        def advance(self, num_bytes: int) -> None:
            if not self.done:
                thread.start()
                is_waiting.wait(30)
            super().advance(num_bytes)

    class Noticed(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "another process is quantizing these weights" in record.getMessage():
                is_waiting.set()

    thread = threading.Thread(target=lambda: waiter.append(load(model, cache)))
    logger, handler = logging.getLogger("pagewick"), Noticed()
    logger.addHandler(handler)
    try:
        check(model, quantized_once(model, open_source(model), PLAN, cache, Slow()))
    finally:
        logger.removeHandler(handler)
    thread.join()
    assert is_waiting.is_set()
    ((found, num_bytes),) = waiter
    assert num_bytes == 0
    check(model, found)


def test_the_version_changes_with_the_quantizers() -> None:
    """If this fails, blocks have other bits than before: increase _VERSION, and put the new digest here."""
    numbers = ((torch.arange(6 * 512) * 7919) % 1009 - 504).float().view(6, 512) / 256
    digest = hashlib.blake2b(digest_size=8)
    for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"):
        digest.update(quantize_weight(numbers, kind).numpy().data)
    assert (quantized_cache._VERSION, digest.hexdigest()) == (1, "8bf70d672247148f")
