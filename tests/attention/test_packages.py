"""Attention by other packages: what they are asked, against stand-ins, and everything that is refused."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from pagewick.attention.backend import AttentionBackend, Scoring
from pagewick.attention.cache_spec import KeptHeads, KeptLatents
from pagewick.attention.native import NativeBackend
from pagewick.attention.packages import PACKAGES, Package, PackageBackend, choose_named, usual_block_size
from pagewick.config import ATTENTION_BACKENDS, EngineConfig
from pagewick.errors import ConfigError
from tests.attention import package_stand_ins
from tests.attention.package_stand_ins import MODULES
from tests.attention.test_native import Sequences
from tests.kernels.conftest import library_off

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
NAMES = sorted(PACKAGES)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All packages are there, and blocks are plain, as on a GPU."""
    for name, module in MODULES.items():
        monkeypatch.setitem(sys.modules, PACKAGES[name].module, module)
    package_stand_ins.num_plans.clear()
    with library_off():
        yield


def backend(name: str, block_size: int, cache_dtype: str = "float32") -> PackageBackend:
    return PackageBackend(PACKAGES[name], CPU, block_size, cache_dtype)


def run(made: AttentionBackend, kept: KeptHeads, scoring: Scoring, sequences: Sequences, seed: int) -> list[Tensor]:
    """Attend to all sequences in random chunks and batches, and return the result of every step."""
    blocks = torch.full((sequences.num_blocks, made.cache_spec(kept).block_bytes), 255, dtype=torch.uint8)
    bound = made.bind_heads(kept, scoring, blocks, group=0)
    lengths = [len(keys) for keys in sequences.keys]
    random, done, found = Random(seed), [0] * len(lengths), []
    while done != lengths:
        unfinished = [seq for seq, length in enumerate(lengths) if done[seq] < length]
        chosen = random.sample(unfinished, random.randint(1, len(unfinished)))
        most = random.choice([1, 40])
        chunks = [(seq, done[seq], min(lengths[seq], done[seq] + random.randint(1, most))) for seq in chosen]
        step, k, v = sequences.step(chunks)
        q = torch.randn(len(k), scoring.num_heads, kept.head_dim, generator=torch.Generator().manual_seed(len(found)))
        found.append(bound.forward(q, k, v, step))
        for seq, _, end in chunks:
            done[seq] = end
    return found


@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (6, None), (None, 2.0), (1, 3.0)])
@pytest.mark.parametrize("num_kv_heads", [2, 6])
@pytest.mark.parametrize("name", NAMES)
def test_a_package_gives_what_pagewicks_kernels_give(
    name: str, num_kv_heads: int, window: int | None, soft_cap: float | None
) -> None:
    if soft_cap is not None and not PACKAGES[name].has_soft_cap:
        pytest.skip("it is refused")
    sequences = Sequences([1, 5, 33, 70], num_kv_heads, 64, 16, seed=3)
    kept, scoring = KeptHeads(num_kv_heads, 64, window), Scoring(6, 0.2, soft_cap)
    found = run(backend(name, 16), kept, scoring, sequences, 1)
    expected = run(NativeBackend(16, "float32"), kept, scoring, sequences, 1)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=3e-6, rtol=1e-5)


def test_flashinfer_plans_once_for_the_layers_of_a_step() -> None:
    sequences = Sequences([9, 20], 2, 64, 16, seed=4)
    made, kept = backend("FLASHINFER", 16), KeptHeads(2, 64)
    size = (sequences.num_blocks, made.cache_spec(kept).block_bytes)
    layers = [
        made.bind_heads(kept, Scoring(4, scale), torch.empty(size, dtype=torch.uint8), 0) for scale in (0.5, 0.5, 0.7)
    ]
    for chunks in ([(0, 0, 8), (1, 0, 19)], [(0, 8, 9), (1, 19, 20)]):
        step, k, v = sequences.step(chunks)
        for layer in layers:
            layer.forward(torch.randn(len(k), 4, 64), k, v, step)
    prefill, decode = "BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"
    assert package_stand_ins.num_plans == [prefill, prefill, decode, decode]


def test_blocks_are_cleared() -> None:
    """A package multiplies masked rows by 0, and 0 times NaN is NaN."""
    made, kept = backend("FLASH_ATTN", 256), KeptHeads(2, 64)
    blocks = torch.full((2, made.cache_spec(kept).block_bytes), 255, dtype=torch.uint8)
    made.bind_heads(kept, Scoring(4, 0.5), blocks, 0)
    assert not blocks.any()


def refusal(name: str, *, dtype: torch.dtype = torch.bfloat16, cache: str = "bfloat16", size: int = 256) -> str:
    with pytest.raises(ConfigError, match=f"^--attention-backend {name}: ") as error:
        choose_named(name, CUDA, dtype, cache, size)
    lines = str(error.value).splitlines()
    assert len(lines) == 2 and lines[1].endswith("leave the flag out, which uses Pagewick's own kernels")
    return str(error.value)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    zeros = torch.zeros
    # The workspace of FlashInfer.
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **given: zeros(*size, **given))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", NAMES)
class TestRefusals:
    def test_what_is_served_is_not_refused(self, name: str) -> None:
        assert isinstance(choose_named(name, CUDA, torch.bfloat16, "bfloat16", 256), PackageBackend)

    def test_not_installed(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, PACKAGES[name].module, None)

        def missing(module: str) -> Any:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)

        monkeypatch.setattr("importlib.import_module", missing)
        text = refusal(name)
        assert f"{PACKAGES[name].module} is not installed" in text and f"\n  {PACKAGES[name].get}, or " in text

    def test_broken(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(module: str) -> Any:
            raise ImportError("undefined symbol: _ZN3c10")

        monkeypatch.setattr("importlib.import_module", broken)
        assert "cannot be used (undefined symbol: _ZN3c10)" in refusal(name)

    def test_too_old(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        old = SimpleNamespace(**{PACKAGES[name].function: lambda q, k, v: None})
        monkeypatch.setitem(sys.modules, PACKAGES[name].module, old)
        assert f"is too old: it lacks {PACKAGES[name].parameters[0]}" in refusal(name)

    def test_an_old_gpu(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert "compute capability 8.0" in refusal(name)

    def test_amd(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.version, "hip", "6.2")
        if PACKAGES[name].runs_on_amd:
            choose_named(name, CUDA, torch.float16, "float16", 256)
        else:
            assert "GPUs of AMD" in refusal(name)

    def test_no_gpu(self, name: str) -> None:
        with pytest.raises(ConfigError, match=r"runs on GPUs, and the device is cpu\n  give --device cuda, or"):
            choose_named(name, CPU, torch.bfloat16, "bfloat16", 256)

    @pytest.mark.parametrize("cache", ["int8", "fp8_e4m3", "float32", "float16"])
    def test_another_dtype_of_the_cache(self, name: str, cache: str) -> None:
        assert f"in bfloat16 only, not in {cache}" in refusal(name, cache=cache)

    def test_float32(self, name: str) -> None:
        assert "not in the model's float32" in refusal(name, dtype=torch.float32, cache="float32")

    def test_sizes_of_blocks(self, name: str) -> None:
        unit = PACKAGES[name].block_unit
        if unit == 1:
            choose_named(name, CUDA, torch.bfloat16, "bfloat16", 33)
        else:
            assert f"multiple of {unit} tokens, not 32\n  give --block-size {unit}, or" in refusal(name, size=32)
        assert usual_block_size(name, CUDA) % unit == 0

    def test_latents_and_sizes_of_heads(self, name: str) -> None:
        with pytest.raises(ConfigError, match="does not serve latent attention"):
            backend(name, 256).cache_spec(KeptLatents(512, 64))
        with pytest.raises(ConfigError, match="does not serve heads of 260 numbers, only of "):
            backend(name, 256).cache_spec(KeptHeads(2, 260))


def test_soft_caps() -> None:
    made, kept = backend("TORCH_VARLEN", 256), KeptHeads(2, 64)
    blocks = torch.empty((2, made.cache_spec(kept).block_bytes), dtype=torch.uint8)
    with pytest.raises(ConfigError, match="models that cap the scores"):
        made.bind_heads(kept, Scoring(4, 0.5, 30.0), blocks, 0)


def test_sinks() -> None:
    made, kept = backend("TORCH_VARLEN", 256), KeptHeads(2, 64)
    blocks = torch.empty((2, made.cache_spec(kept).block_bytes), dtype=torch.uint8)
    with pytest.raises(ConfigError, match="models with sinks"):
        made.bind_heads(kept, Scoring(4, 0.5, sinks=torch.zeros(4)), blocks, 0)


def test_chunks() -> None:
    with pytest.raises(ConfigError, match="attention that is cut into chunks"):
        backend("TORCH_VARLEN", 256).cache_spec(KeptHeads(2, 64, 512, is_chunked=True))


def test_images_that_are_seen_whole() -> None:
    made, kept = backend("TORCH_VARLEN", 256), KeptHeads(2, 64)
    blocks = torch.empty((2, made.cache_spec(kept).block_bytes), dtype=torch.uint8)
    with pytest.raises(ConfigError, match=r"tokens of an image see each other\n  give --language-model-only, if no"):
        made.bind_heads(kept, Scoring(4, 0.5, sees_images_whole=True), blocks, 0)


def test_pagewicks_own_kernels_have_vllms_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(choose_named("CPU_ATTN", CPU, torch.float32, "float32", 32), NativeBackend)
    with pytest.raises(ConfigError, match="CPU_ATTN needs --device cpu; the device is cuda"):
        choose_named("CPU_ATTN", CUDA, torch.float32, "float32", 32)
    with pytest.raises(ConfigError, match="TRITON_ATTN needs --device cuda; the device is cpu"):
        choose_named("TRITON_ATTN", CPU, torch.float32, "float32", 32)
    monkeypatch.setattr("pagewick.kernels.TABLE.backend", lambda *given: None)
    with pytest.raises(ConfigError, match="TRITON_ATTN: Triton is not installed, is turned off"):
        choose_named("TRITON_ATTN", CUDA, torch.bfloat16, "bfloat16", 32)


def test_the_flag_names_what_there_is() -> None:
    assert set(ATTENTION_BACKENDS) == {"auto", "TRITON_ATTN", "CPU_ATTN", *PACKAGES}
    assert EngineConfig(attention_backend="flash_attn").attention_backend == "FLASH_ATTN"
    with pytest.raises(ConfigError, match=r"--attention-backend must be one of auto, .*; got 'FLEX"):
        EngineConfig(attention_backend="FLEX_ATTENTION")


@pytest.mark.parametrize("name", NAMES)
def test_a_package_does_not_promise_the_same_bits_in_a_batch(name: str) -> None:
    with pytest.raises(ConfigError, match=f"needs Pagewick's own attention: drop --attention-backend {name}"):
        EngineConfig(attention_backend=name, batch_invariant=True)


def test_the_stand_in_of_torch_has_torchs_signature() -> None:
    """The module itself, not the one that a test has put in its place."""
    theirs = inspect.signature(varlen.varlen_attn).parameters
    if "block_table" not in theirs:
        pytest.skip("PyTorch before 2.12 has no block tables there, which the registry of packages says")
    assert list(theirs) == list(inspect.signature(package_stand_ins.varlen_attn).parameters)
    package: Package = PACKAGES["TORCH_VARLEN"]
    assert set(package.parameters) <= set(theirs)
