"""Experts in host memory give the same bits as on the device, and the account of their places is right."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pagewick.errors import ConfigError
from pagewick.expert_routing import Routing
from pagewick.kernels import cpu
from pagewick.kernels.matrix import Experts
from pagewick.kernels.recorded_steps import StepMemory, can_record, record
from pagewick.layers.config import MoeConfig
from pagewick.layers.context import LayerContext
from pagewick.layers.expert_offload import OffloadedExperts, Residency
from pagewick.layers.moe import MoeLayer
from pagewick.quantization.expert_storage import host_tensors
from pagewick.quantization.grouped_experts import GroupedExperts
from pagewick.quantization.packing import PLAIN
from pagewick.quantization.share import whole_rows
from pagewick.quantization.weight import Pieces
from tests.kernels.conftest import library_off
from tests.late_stream import LateMark, LateStream
from tests.layers.ranks import on_ranks, single_context
from tests.layers.test_moe import PREFIX, H, loaded, made, tokens

# Numbers of tokens: steps that need few experts, all of them, or none; some repeat.
STEPS = (1, 3, 60, 1, 0, 7, 60, 3, 2)


def offloading(context: LayerContext, per_rank: int, dtype: torch.dtype = torch.float32) -> LayerContext:
    return replace(context, num_experts_offload_per_rank=per_rank, dtype=dtype)


def store_of(layer: MoeLayer) -> OffloadedExperts:
    assert isinstance(layer.experts.store, OffloadedExperts)
    return layer.experts.store


def weights_of(layer: MoeLayer, expert: int) -> list[Tensor]:
    """Return the two weights of an expert, from the place where it is now."""
    store = store_of(layer)
    memories, place = store.place_of(expert)
    found = []
    for memory, on_device in zip(memories, (store.gate_up, store.down), strict=True):
        assert isinstance(on_device, GroupedExperts) and isinstance(on_device.experts, Experts)
        (data,) = memory.tensors(place)
        found.append(on_device.experts.matrix_in(data).plain())
    return found


@pytest.fixture(params=["native", "plain"])
def kernels_in_use(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run with the native library, whose weights are packed, and without it, as on other devices."""
    if request.param == "native" and cpu.library() is None:
        pytest.skip("needs the native library: make install")
    with library_off() if request.param == "plain" else nullcontext():
        yield request.param


def test_a_gpu_computes_while_experts_arrive() -> None:
    """The stand-in copies as late as it may: an expert that is multiplied too early has the weights of another."""
    _, config, tensors = made("mixtral", torch.float32)
    expected = loaded(single_context(), config, tensors)
    for per_rank in (1, config.num_experts - config.routing.top_k):
        layer = loaded(offloading(single_context(), per_rank), config, tensors)
        store, stream = store_of(layer), LateStream()
        store._stream = stream
        for turn, count in enumerate(STEPS):
            x = tokens(count + turn, torch.float32)[turn:]
            torch.testing.assert_close(layer(x), expected(x), rtol=1e-5, atol=1e-6)
        assert stream.num_waits_for_current > 0 == stream.num_waits, "the host never waits"
        assert store.num_copies >= stream.num_waits_for_current and store.num_hits > 0


@pytest.mark.parametrize("per_rank", [0, 1])
def test_experts_of_the_device_are_uploaded_and_others_are_not(per_rank: int) -> None:
    _, config, tensors = made("mixtral", torch.float32)
    expected = loaded(single_context(), config, tensors)
    layer, taken, released = MoeLayer(offloading(single_context(), per_rank), PREFIX, H, config), [0], [0]

    def take(rows: Tensor) -> Tensor:
        taken[0] += 1
        return rows.clone()

    def release(rows: Tensor) -> None:
        released[0] += 1

    for path, module in layer.named_modules():
        for part, leaf in getattr(module, "expected_weights", list)():
            owner = path if part is None else ".".join([*path.split(".")[:-1], part])
            module.load_in_pieces(leaf, tensors[f"{owner}.{leaf}"], part, Pieces(take=take, release=release))
    # Three matrices of each expert, and the router.
    assert taken[0] == 3 * (config.num_experts - per_rank) + 1 and released[0] == 3 * config.num_experts + 1
    assert torch.equal(layer(tokens(7)), expected(tokens(7)))


def test_an_expert_that_is_not_waited_for_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """This proves that the stand-in finds a race."""
    monkeypatch.setattr(LateMark, "wait_on_device", lambda self: None)
    _, config, tensors = made("mixtral", torch.float32)
    layer, expected = (loaded(offloading(single_context(), 1), config, tensors) for _ in range(2))
    store_of(layer)._stream = LateStream()
    x = tokens(60, torch.float32)
    assert not torch.allclose(layer(x), expected(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("family", "dtype"), [
    ("mixtral", torch.float32), ("qwen2", torch.bfloat16), ("deepseek-v3", torch.float32),
    ("deepseek-v2-groups", torch.float16), ("nemotron", torch.float32), ("nemotron-latents", torch.bfloat16),
])  # fmt: skip
def test_the_same_bits_with_and_without(family: str, dtype: torch.dtype, kernels_in_use: str) -> None:
    _, config, tensors = made(family, dtype)
    expected = loaded(replace(single_context(), dtype=dtype), config, tensors)
    for per_rank in (1, config.num_experts - config.routing.top_k):
        layer = loaded(offloading(single_context(), per_rank, dtype), config, tensors)
        for turn, count in enumerate(STEPS):
            x = tokens(count + turn, dtype)[turn:]
            assert torch.equal(layer(x), expected(x))
        store = store_of(layer)
        assert store.num_copies >= 2 and store.num_hits > 0
        assert isinstance(store.gate_up, GroupedExperts)
        assert store.gate_up.experts.is_packed == (kernels_in_use == "native")


@pytest.mark.skipif(cpu.library() is None, reason="needs the native library: make install")
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_same_bits_on_several_ranks(world_size: int) -> None:
    """Each rank offloads 2 of 12 experts: 8 or 6 stay on the device, divided among ranks like the others."""
    _, config, tensors = made("qwen2")

    def act(context: LayerContext) -> tuple[list[Tensor], list[Tensor], int]:
        expected, layer = loaded(context, config, tensors), loaded(offloading(context, 2), config, tensors)
        steps = [tokens(count) for count in STEPS]
        answers = [layer(x) for x in steps]
        return answers, [expected(x) for x in steps], store_of(layer).num_copies

    found = on_ranks(world_size, act)
    for answers, expected, num_copies in found:
        assert all(map(torch.equal, answers, expected))
        assert num_copies == found[0][2] > 0


def test_experts_on_the_device_are_counted_and_stay() -> None:
    _, config, tensors = made("mixtral")
    layer = loaded(offloading(single_context(), 4), config, tensors)
    store, x = store_of(layer), tokens(1)
    assert (store.gate_up.num_experts, store.num_offloaded) == (3, 4)
    assert store.bytes_per_expert == sum(p[0].nbytes for p in store.parameters())
    assert store.host_bytes == 5 * store.bytes_per_expert
    layer(x)
    assert store.num_hits + store.num_copies == 2
    copies = store.num_copies
    for turn in range(3):
        layer(x)
        assert (store.num_copies, store.num_hits) == (copies, 2 - copies + 2 * (turn + 1))


def test_every_expert_is_complete_in_one_place() -> None:
    """After any exchange, host memory and the device together hold each expert's weights, unchanged."""
    _, config, tensors = made("deepseek-v3")
    layer = loaded(offloading(single_context(), 8), config, tensors)
    for count in STEPS:
        layer(tokens(count))
        for expert in range(config.num_experts):
            gate_up, down = weights_of(layer, expert)
            names = [f"experts.{expert}.{name}_proj.weight" for name in ("gate", "up", "down")]
            gate, up, expected_down = (tensors[name] for name in names)
            assert torch.equal(gate_up, torch.cat([gate, up]))
            assert torch.equal(down, expected_down)


@pytest.mark.skipif(not can_record(torch.device("cpu")), reason="needs the native library: make install")
def test_steps_are_not_recorded() -> None:
    """A replayed step would use the slots of the experts that were there when it was recorded."""
    _, config, tensors = made("mixtral")
    layer = loaded(offloading(single_context(), 1), config, tensors)
    with torch.inference_mode():
        _, recorded = record(lambda: [layer(tokens(2))], StepMemory())
    assert isinstance(recorded, str)


@pytest.mark.parametrize(("per_rank", "world_size", "most"), [(11, 1, 10), (6, 2, 5), (4, 3, 3), (5000, 1, 10)])
def test_too_many_offloaded_experts(per_rank: int, world_size: int, most: int) -> None:
    config = MoeConfig(num_experts=12, intermediate_size=9, routing=Routing(top_k=2))
    on_ranks(world_size, lambda context: MoeLayer(offloading(context, most), PREFIX, H, config))
    with pytest.raises(ConfigError, match=rf"of 12 experts.* and 2 must stay.*give at most {most}$"):
        on_ranks(world_size, lambda context: MoeLayer(offloading(context, per_rank), PREFIX, H, config))


def test_too_little_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*shape: object, **options: object) -> Tensor:
        raise RuntimeError("no memory")

    config = MoeConfig(num_experts=12, intermediate_size=9, routing=Routing(top_k=2))
    gate_up, down = (
        GroupedExperts(whole_rows(*size), Experts(torch.zeros(9, *size), 9, *size, False), PLAIN, lambda *_: None, "")
        for size in ((18, H), (H, 9))
    )
    monkeypatch.setattr(torch, "empty", refuse)
    num_bytes = 4 * (18 * H + 9 * H) * 4
    with pytest.raises(ConfigError, match=f"no {num_bytes} bytes of host memory for 3 experts of a layer; lower"):
        OffloadedExperts(config, gate_up, down)


def test_experts_without_weights_are_refused() -> None:
    config = MoeConfig(num_experts=6, intermediate_size=8, routing=Routing(top_k=2), num_identities=3)
    assert config.num_offloaded(0, 1) == 0
    with pytest.raises(ConfigError, match="some experts have no weights; leave it out"):
        config.num_offloaded(1, 1)


@pytest.mark.parametrize("num_offloaded", [1, 8, 9, 40])
@pytest.mark.parametrize("size", [1, 3, 37, 64])
def test_memory_beside_a_gpu_is_pinned(num_offloaded: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pieces are close to powers of two, in which such memory is allocated."""
    pieces: list[int] = []
    empty = torch.empty

    def pinned(shape: tuple[int, ...], *, dtype: torch.dtype, pin_memory: bool) -> Tensor:
        assert pin_memory
        pieces.append(math.prod(shape) * dtype.itemsize)
        return empty(shape, dtype=dtype)

    monkeypatch.setattr(torch, "empty", pinned)
    rows = host_tensors(num_offloaded + 1, torch.Size((size, 5)), torch.float32, is_pinned=True)
    assert len(rows) == num_offloaded + 1
    assert {row.shape for row in rows} == {(size, 5)}
    assert len({row.data_ptr() for row in rows}) == len(rows)
    for num_bytes in pieces[:-1]:
        assert num_bytes > 0.88 * (1 << (num_bytes - 1).bit_length())


@given(st.data(), st.integers(2, 12))
def test_residency(data: st.DataObject, num_experts: int) -> None:
    """Compare with memories that are really written to, and with a list of uses."""
    num_slots = data.draw(st.integers(1, num_experts - 1))
    residency = Residency(num_experts, num_slots)
    slots: list[int | None] = [*range(num_slots)]
    rows: list[int | None] = [*range(num_slots, num_experts), None]
    uses = [*range(num_slots)]  # the latest last
    for needed in data.draw(st.lists(st.sets(st.integers(0, num_experts - 1)), max_size=6)):
        missing = [expert for expert in sorted(needed) if expert not in slots]
        waves = list(residency.waves(needed))
        ordered = [*chain(*waves)]
        assert sorted(ordered) == sorted(needed)
        assert all(0 < len(wave) <= num_slots for wave in waves)
        assert ordered[len(needed) - len(missing) :] == missing
        for wave in waves:
            before = {expert for expert in slots if expert is not None}
            exchanges = residency.admit(wave)
            for exchange in exchanges:
                rows[exchange.saved_to], slots[exchange.slot] = slots[exchange.slot], rows[exchange.loaded_from]
                rows[exchange.loaded_from] = None
            assert len(exchanges) == len(set(wave) - before)
            assert [slots[residency.slot_of(expert) or 0] for expert in wave] == wave
            # Every evicted expert was used less recently than all that stayed, except those of the wave.
            gone = before - set(slots)
            stayed = before & set(slots) - set(wave)
            assert max(map(uses.index, gone), default=-1) < min(map(uses.index, stayed), default=10**6)
            uses = [expert for expert in uses if expert not in wave] + wave
        there = [expert for expert in [*slots, *rows] if expert is not None]
        assert sorted(there) == list(range(num_experts))
        for expert in range(num_experts):
            slot = residency.slot_of(expert)
            assert (slots[slot] if slot is not None else rows[residency.row_of(expert)]) == expert
