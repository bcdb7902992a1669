"""ModelPool: at most as many models as there are places, every request is answered, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewick.errors import EngineDeadError, ModelLoadError, NotEnoughMemoryError
from pagewick.server.router.pool import LoadFailedError, ModelPool, PooledModel


@dataclass
class World:
    """The state that all models of a test share. events: loads (+) and unloads (-), in order."""

    memory: int = 100
    loaded: set[str] = field(default_factory=set)
    events: list[str] = field(default_factory=list)
    now: float = 0.0


@dataclass
class FakeModel:
    name: str
    world: World

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.world.loaded.remove(self.name)
        self.world.events.append(f"-{self.name}")


@dataclass
class FakeSource:
    """size: of its memory. gate: loading waits for it. failure: what loading raises."""

    name: str
    world: World
    size: int = 1
    gate: asyncio.Event | None = None
    failure: Exception | None = None
    num_loads: int = 0

    async def prepare(self) -> None:
        await asyncio.sleep(0)

    async def load(self) -> FakeModel:
        self.num_loads += 1
        await asyncio.sleep(0)
        if self.gate is not None:
            await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        if self.size + sum(map(SIZES.__getitem__, self.world.loaded)) > self.world.memory:
            raise NotEnoughMemoryError("not enough memory: it is small\n  close other programs")
        assert self.name not in self.world.loaded
        self.world.loaded.add(self.name)
        self.world.events.append(f"+{self.name}")
        return FakeModel(self.name, self.world)


SIZES = dict.fromkeys("abcdef", 1)
Pool = ModelPool[FakeModel]
Model = PooledModel[FakeModel]


def pool_of(
    world: World, names: str, max_loaded: int, idle_s: float | None = None, patience_s: float = 0.0
) -> tuple[Pool, dict[str, Model], dict[str, FakeSource]]:
    """Capital letters are pinned models."""
    pool: Pool = ModelPool(max_loaded=max_loaded, patience_s=patience_s, clock=lambda: world.now)
    sources = {name.lower(): FakeSource(name.lower(), world, SIZES[name.lower()]) for name in names}
    models = {
        name.lower(): pool.add(name.lower(), sources[name.lower()], idle_s=idle_s, is_pinned=name.isupper())
        for name in names
    }
    return pool, models, sources


async def use(pool: Pool, model: Model, world: World) -> None:
    await pool.acquire(model)
    assert model.name in world.loaded
    world.now += 1
    pool.release(model)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await scenario()

    asyncio.run(bounded())


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_the_model_that_was_used_longest_ago_makes_room() -> None:
    async def scenario() -> None:
        world = World()
        pool, models, _ = pool_of(world, "abc", 2)
        for name in "abac":
            await use(pool, models[name], world)
        assert world.events == ["+a", "+b", "-b", "+c"]
        await use(pool, models["a"], world)
        assert world.loaded == {"a", "c"}

    run(scenario)


def test_a_model_with_requests_is_unloaded_once_they_have_ended_and_takes_no_new_ones() -> None:
    async def scenario() -> None:
        world = World()
        pool, models, _ = pool_of(world, "ab", 1)
        await pool.acquire(models["a"])
        waiting = asyncio.create_task(use(pool, models["b"], world))
        await settle()
        late = asyncio.create_task(use(pool, models["a"], world))
        await settle()
        assert (world.events, models["a"].state, waiting.done(), late.done()) == (["+a"], "unloading", False, False)
        pool.release(models["a"])
        await asyncio.gather(waiting, late)
        # The late request comes after the one that had waited for the place.
        assert world.events == ["+a", "-a", "+b", "-b", "+a"]

    run(scenario)


def test_models_make_room_for_one_that_does_not_fit_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "c", 9)

    async def scenario() -> None:
        world = World(memory=10)
        pool, models, _ = pool_of(world, "abc", 3)
        for name in "abc":
            await use(pool, models[name], world)
        assert world.events == ["+a", "+b", "-a", "+c"]
        world.memory = 8
        await use(pool, models["a"], world)
        await pool.unload(models["c"], 0)
        with pytest.raises(LoadFailedError, match="not enough memory"):
            await pool.acquire(models["c"])
        # It has tried without any other model; the next time, others stay.
        assert world.loaded == set()
        await use(pool, models["a"], world)
        world.now += 11
        with pytest.raises(LoadFailedError, match="not enough memory"):
            await pool.acquire(models["c"])
        assert world.loaded == {"a"}
        world.memory = 10
        world.now += 11
        await use(pool, models["c"], world)
        assert world.loaded == {"a", "c"}

    run(scenario)


def test_all_who_wait_learn_of_a_failure_which_is_not_repeated_at_once() -> None:
    async def scenario() -> None:
        world = World()
        pool, models, sources = pool_of(world, "ab", 1)
        await use(pool, models["b"], world)
        sources["a"].failure = ModelLoadError("it is broken")
        found = await asyncio.gather(*(pool.acquire(models["a"]) for _ in range(3)), return_exceptions=True)
        assert [str(one) for one in found] == ["it is broken"] * 3 and models["a"].state == "unloaded"
        with pytest.raises(LoadFailedError):
            await pool.acquire(models["a"])
        assert sources["a"].num_loads == 1
        world.now += 11
        sources["a"].failure = None
        await use(pool, models["a"], world)
        assert models["a"].failure is None
        await use(pool, models["b"], world)

    run(scenario)


def test_a_client_that_leaves_while_a_model_loads_leaves_no_use_behind() -> None:
    async def scenario() -> None:
        world = World()
        pool, models, sources = pool_of(world, "ab", 1)
        sources["a"].gate = asyncio.Event()
        gone = asyncio.create_task(pool.acquire(models["a"]))
        await settle()
        gone.cancel()
        sources["a"].gate.set()
        await settle()
        assert models["a"].num_in_flight == 0 and world.loaded == {"a"}
        await use(pool, models["b"], world)

    run(scenario)


def test_a_client_that_leaves_in_the_turn_in_which_its_model_is_loaded() -> None:
    async def scenario() -> None:
        world = World()
        pool, models, _ = pool_of(world, "a", 1)
        for num_turns in range(1, 13):
            waiting = asyncio.create_task(pool.acquire(models["a"]))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await settle()
            if not waiting.cancelled():
                pool.release(models["a"])
            assert models["a"].num_in_flight == 0
            await pool.unload(models["a"], 0)

    run(scenario)


def test_a_model_nobody_wants_any_more_does_not_take_a_place() -> None:
    async def scenario() -> None:
        world = World()
        pool, models, sources = pool_of(world, "abc", 1)
        sources["a"].gate = asyncio.Event()
        first = asyncio.create_task(use(pool, models["a"], world))
        await settle()
        second = asyncio.create_task(use(pool, models["b"], world))
        await settle()
        second.cancel()
        await settle()
        sources["a"].gate.set()
        await first
        await settle()
        assert world.events == ["+a"] and models["b"].state == "unloaded"
        await use(pool, models["b"], world)

    run(scenario)


def test_a_place_that_gets_free_by_itself_is_taken_before_another_model_is_drained() -> None:
    async def scenario() -> None:
        world = World()
        pool, models, _ = pool_of(world, "abc", 2, patience_s=1000)
        for name in "ab":
            await pool.acquire(models[name])
        waiting = asyncio.create_task(use(pool, models["c"], world))
        await settle()
        assert (models["a"].state, models["b"].state) == ("loaded", "loaded")
        pool.release(models["b"])
        await waiting
        assert world.loaded == {"a", "c"}
        pool.release(models["a"])

    run(scenario)


def test_a_drained_model_goes_on_if_its_place_is_not_needed_any_more() -> None:
    async def scenario() -> None:
        world = World()
        pool, models, _ = pool_of(world, "abc", 2)
        for name in "ab":
            await pool.acquire(models[name])
        waiting = asyncio.create_task(pool.acquire(models["c"]))
        await settle()
        late = asyncio.create_task(pool.acquire(models["a"]))
        await settle()
        assert (models["a"].state, late.done()) == ("unloading", False)
        pool.release(models["b"])
        await waiting
        await late
        assert world.loaded == {"a", "c"} and models["a"].num_in_flight == 2
        # A drained model also goes on if the client that needed the place leaves.
        gone = asyncio.create_task(pool.acquire(models["b"]))
        await settle()
        assert "unloading" in {models["a"].state, models["c"].state}
        gone.cancel()
        await settle()
        assert {models["a"].state, models["c"].state} == {"loaded"} and models["b"].state == "unloaded"

    run(scenario)


def test_loading_is_given_up_by_request() -> None:
    async def scenario() -> None:
        world = World()
        pool, models, sources = pool_of(world, "a", 1)
        sources["a"].gate = asyncio.Event()
        waiting = asyncio.create_task(pool.acquire(models["a"]))
        await settle()
        await pool.unload(models["a"], 0)
        with pytest.raises(LoadFailedError, match="unloaded before"):
            await waiting
        sources["a"].gate.set()
        await use(pool, models["a"], world)

    run(scenario)


def test_a_model_without_requests_is_unloaded_after_a_while() -> None:
    async def scenario() -> None:
        world = World()
        pool, models, sources = pool_of(world, "ab", 2, idle_s=0.01)
        await pool.acquire(models["a"])
        await use(pool, models["b"], world)
        await asyncio.sleep(0.05)
        assert world.loaded == {"a"}
        pool.release(models["a"])
        await asyncio.sleep(0.05)
        assert world.loaded == set()
        # The client leaves while its model loads: nobody uses it.
        sources["b"].gate = asyncio.Event()
        gone = asyncio.create_task(pool.acquire(models["b"]))
        await settle()
        gone.cancel()
        sources["b"].gate.set()
        await settle()
        assert world.loaded == {"b"}
        await asyncio.sleep(0.05)
        assert world.loaded == set()

    run(scenario)


def test_pinned_models_make_no_room() -> None:
    async def scenario() -> None:
        world = World()
        pool, models, _ = pool_of(world, "ABcd", 2)
        for name in "acd":
            await use(pool, models[name], world)
        assert world.events == ["+a", "+c", "-c", "+d"]
        await use(pool, models["b"], world)
        assert world.loaded == {"a", "b"}
        with pytest.raises(LoadFailedError, match=r"pinned models leave no place for it: unload a, b \(POST"):
            await pool.acquire(models["c"])
        # One that is being unloaded is waited for.
        await pool.acquire(models["a"])
        unloading = asyncio.create_task(pool.unload(models["a"], 5))
        await settle()
        waiting = asyncio.create_task(use(pool, models["d"], world))
        await settle()
        pool.release(models["a"])
        await asyncio.gather(unloading, waiting)
        assert world.loaded == {"b", "d"}

    run(scenario)


def test_a_model_that_does_not_fit_beside_a_pinned_one_fails() -> None:
    async def scenario() -> None:
        world = World(memory=1)
        pool, models, _ = pool_of(world, "Abc", 3)
        await use(pool, models["a"], world)
        with pytest.raises(LoadFailedError, match="pinned"):
            await pool.acquire(models["b"])
        await pool.unload(models["a"], 0)
        await use(pool, models["c"], world)
        assert world.loaded == {"c"}

    run(scenario)


def test_unloading_without_a_deadline_cuts_no_request_short() -> None:
    async def check() -> None:
        world = World()
        pool, models, _ = pool_of(world, "a", max_loaded=1)
        await pool.acquire(models["a"])
        unloading = asyncio.create_task(pool.unload(models["a"]))
        await asyncio.sleep(0.05)
        assert (world.events, unloading.done()) == (["+a"], False)
        pool.release(models["a"])
        await unloading
        assert world.events == ["+a", "-a"]

    asyncio.run(check())


def test_unloading_waits_for_requests_only_for_a_while() -> None:
    async def scenario() -> None:
        world = World()
        pool, models, _ = pool_of(world, "a", 1)
        await pool.unload(models["a"], 5)
        await pool.acquire(models["a"])
        await pool.unload(models["a"], 0.01)
        assert world.loaded == set() and models["a"].state == "unloaded"
        pool.release(models["a"])
        await use(pool, models["a"], world)

    run(scenario)


def test_closing_ends_what_waits_and_what_loads() -> None:
    async def scenario() -> None:
        world = World()
        pool, models, sources = pool_of(world, "abc", 2)
        await pool.acquire(models["a"])
        sources["b"].gate = asyncio.Event()
        waiting = [asyncio.create_task(pool.acquire(models[name])) for name in "bc"]
        await settle()
        await pool.close()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(one) for one in found] == [EngineDeadError] * 2 and world.loaded == set()
        with pytest.raises(EngineDeadError):
            await pool.acquire(models["a"])

    run(scenario)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_history(data: st.DataObject) -> None:
    """Requests come, stay, leave early and end; models are unloaded, fail and recover, in any order."""

    async def scenario() -> None:
        world = World(memory=data.draw(st.integers(2, 6)))
        max_loaded = data.draw(st.integers(1, 3))
        pool, models, sources = pool_of(world, "abcd", max_loaded)
        running: list[tuple[str, asyncio.Task[FakeModel]]] = []
        unloading: list[asyncio.Task[None]] = []
        for _ in range(data.draw(st.integers(1, 40))):
            name = data.draw(st.sampled_from("abcd"))
            action = data.draw(st.sampled_from(["begin", "begin", "begin", "end", "end", "leave", "unload", "break"]))
            if action == "begin":
                running.append((name, asyncio.create_task(pool.acquire(models[name]))))
            elif action in ("end", "leave") and running:
                place = data.draw(st.integers(0, len(running) - 1))
                owner, task = running[place]
                if action == "leave" and not task.done():
                    task.cancel()
                if task.done() or action == "leave":
                    del running[place]
                    await finish(pool, models[owner], task)
            elif action == "unload":
                unloading.append(asyncio.create_task(pool.unload(models[name], 0.0 if not running else 5.0)))
            elif action == "break":
                broken = sources[name].failure
                sources[name].failure = ModelLoadError("broken") if broken is None else None
                world.now += 20
            for _ in range(data.draw(st.integers(0, 8))):
                await asyncio.sleep(0)
            world.now += 1
            assert len(world.loaded) <= max_loaded
            assert all(model.num_in_flight == 0 for model in models.values() if model.name not in world.loaded)
        for source in sources.values():
            source.failure = None
        # Whatever has happened, everybody is served in the end.
        while running:
            owner, task = next((one for one in running if one[1].done()), running[0])
            if task.done():
                running.remove((owner, task))
                await finish(pool, models[owner], task)
            await settle()
        await asyncio.gather(*unloading)
        world.now += 20
        for model in models.values():
            await use(pool, model, world)
            assert model.num_in_flight == 0
        await pool.close()
        assert world.loaded == set()

    run(scenario)


async def finish(pool: Pool, model: Model, task: asyncio.Task[FakeModel]) -> None:
    """End a request, whatever became of it."""
    found = (await asyncio.gather(task, return_exceptions=True))[0]
    if isinstance(found, FakeModel):
        pool.release(model)
    else:
        assert isinstance(found, LoadFailedError | asyncio.CancelledError)
