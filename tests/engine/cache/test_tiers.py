"""Where evicted blocks go, against a model that moves contents as the transfers say."""

from __future__ import annotations

from random import Random

import pytest

from pagewick.engine.batch import Tier, Transfer
from pagewick.engine.cache.tiers import DiskTier, GroupTiers, HostTier
from tests.engine.requests import Simulation, full_spec, token_ids_of


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def tiers(num_host: int, capacity: int, *keys: int) -> tuple[GroupTiers, list[Transfer]]:
    transfers: list[Transfer] = []
    disk = DiskTier([key_of(number) for number in keys], capacity)
    return GroupTiers(0, HostTier(num_host), disk, transfers), transfers


def kinds(transfers: list[Transfer]) -> list[tuple[str, str, int]]:
    """Where from, where to, and which key if one of them is the disk; emptied."""
    found = [
        (Tier(one.source_tier).name, Tier(one.destination_tier).name, int.from_bytes(one.key, "little"))
        for one in transfers
    ]
    transfers.clear()
    return found


def test_without_tiers_nothing_is_kept() -> None:
    group, transfers = tiers(0, 0)
    assert group.save(3, key_of(1)) == [key_of(1)]
    assert (transfers, key_of(1) in group) == ([], False)


def test_host_memory_is_filled_first_and_its_oldest_goes_to_disk() -> None:
    group, transfers = tiers(2, 10)
    assert group.save(5, key_of(1)) == group.save(6, key_of(2)) == []
    assert transfers == [
        Transfer(0, Tier.DEVICE, 5, Tier.HOST, 0),
        Transfer(0, Tier.DEVICE, 6, Tier.HOST, 1),
    ]
    transfers.clear()
    assert group.save(7, key_of(3)) == [key_of(1)]
    assert transfers == [
        Transfer(0, Tier.HOST, 0, Tier.DISK, -1, key_of(1)),
        Transfer(0, Tier.DEVICE, 7, Tier.HOST, 0),
    ]
    assert all(key_of(number) in group for number in (1, 2, 3))
    assert [*group.host.problems()] == []


def test_a_full_disk_loses_what_was_used_least_recently() -> None:
    group, transfers = tiers(0, 2)
    for number in (1, 2):
        assert group.save(0, key_of(number)) == [key_of(number)]
    assert kinds(transfers) == [("DEVICE", "DISK", 1), ("DEVICE", "DISK", 2)]
    assert group.take(key_of(1)) is None
    group.load(key_of(1), None, 4)
    assert transfers == [Transfer(0, Tier.DISK, -1, Tier.DEVICE, 4, key_of(1))]
    transfers.clear()
    group.save(0, key_of(3))
    assert kinds(transfers) == [("DISK", "DISK", 2), ("DEVICE", "DISK", 3)]
    # Saved again, it is not written again, and counts as used.
    group.save(4, key_of(1))
    assert kinds(transfers) == []
    group.save(0, key_of(4))
    assert kinds(transfers) == [("DISK", "DISK", 3), ("DEVICE", "DISK", 4)]
    assert [key_of(number) in group for number in (1, 2, 3, 4)] == [True, False, False, True]


def test_what_is_about_to_be_loaded_is_not_pushed_out() -> None:
    """Neither from host memory nor from disk: loading two blocks evicts two others, and both tiers are full."""
    group, transfers = tiers(1, 1, 2)
    group.save(0, key_of(1))
    transfers.clear()
    taken = [(key_of(1), group.take(key_of(1))), (key_of(2), group.take(key_of(2)))]
    for (key, place), number in zip(taken, (3, 4), strict=True):
        group.save(9, key_of(number))
        group.load(key, place, 9)
    assert kinds(transfers) == [
        ("DEVICE", "DISK", 3),  # the only place in host memory is taken
        ("HOST", "DEVICE", 0),
        ("DEVICE", "HOST", 0),
        ("DISK", "DEVICE", 2),
        ("DISK", "DISK", 3),  # only now must something go for it
    ]
    assert [key_of(number) in group for number in (1, 2, 3, 4)] == [False, True, False, True]


def test_what_is_wrong_is_deleted_everywhere() -> None:
    group, transfers = tiers(1, 2, 1)
    group.save(0, key_of(2))
    transfers.clear()
    group.forget(key_of(1))
    group.forget(key_of(2))
    group.forget(key_of(3))
    assert kinds(transfers) == [("DISK", "DISK", 1)]
    assert (len(group.host), len(group.disk)) == (0, 0)
    assert [*group.host.problems()] == []


def test_at_the_end_the_most_useful_blocks_are_written() -> None:
    group, transfers = tiers(2, 4, 9, 2)
    group.save(0, key_of(1))
    transfers.clear()
    group.write_all([(5, key_of(2)), (6, key_of(3)), (7, key_of(4))])
    # 1 is in host memory and older than what the pool has; 2 is on disk already; 9 is the one that goes.
    assert kinds(transfers) == [("HOST", "DISK", 1), ("DEVICE", "DISK", 3), ("DISK", "DISK", 9), ("DEVICE", "DISK", 4)]
    assert sorted(int.from_bytes(key, "little") for key in group.disk._keys) == [1, 2, 3, 4]
    group, transfers = tiers(0, 2)
    group.write_all([(number, key_of(number)) for number in range(5)])
    assert kinds(transfers) == [("DEVICE", "DISK", 3), ("DEVICE", "DISK", 4)]


def test_after_a_refused_write_the_blocks_found_at_the_start_are_read_and_stay() -> None:
    group, transfers = tiers(0, 10, 1, 2, 3)
    # The disk may have refused a block that this process wrote, though not one that it has found and read.
    group.save(0, key_of(4))
    for number in (1, 4):
        group.load(key_of(number), group.take(key_of(number)), 6)
    transfers.clear()
    group.disk.close()
    group.load(key_of(2), group.take(key_of(2)), 7)
    assert kinds(transfers) == [("DISK", "DEVICE", 2)]
    assert [key_of(number) in group for number in (1, 2, 3, 4)] == [True, True, True, False]
    group.save(0, key_of(5))
    group.write_all([(3, key_of(6))])
    assert kinds(transfers) == []


@pytest.mark.parametrize("seed", range(60))
def test_a_block_that_is_found_holds_what_was_saved(seed: int) -> None:
    random = Random(seed)
    num_host, capacity = random.randrange(4), random.randrange(5)
    group, transfers = tiers(num_host, capacity)
    host: dict[int, int] = {}
    disk: dict[bytes, int] = {}
    device = dict.fromkeys(range(4), 0)
    for _ in range(120):
        number = random.randrange(8)
        match random.choice(["save", "save", "load", "forget"]):
            case "save" if key_of(number) not in group.host:
                block_id = random.randrange(4)
                device[block_id] = number
                group.save(block_id, key_of(number))
            case "load":
                wanted = [key_of(other) for other in random.sample(range(8), 3) if key_of(other) in group]
                taken = [(key, group.take(key)) for key in wanted]
                for block_id, (key, place) in enumerate(taken):
                    evicted = 8 + random.randrange(8)
                    if key_of(evicted) not in group.host:
                        transfers.append(Transfer(0, -1, evicted, Tier.DEVICE, block_id))  # what was there
                        group.save(block_id, key_of(evicted))
                    group.load(key, place, block_id)
                run(transfers, device, host, disk)
                for block_id, (key, _) in enumerate(taken):
                    assert key_of(device[block_id]) == key
                    group.drop(key)
            case "forget":
                group.forget(key_of(number))
        run(transfers, device, host, disk)
        assert disk.keys() == group.disk._keys.keys() and len(disk) <= capacity
        assert all(key_of(content) == key for key, content in disk.items())
        assert all(key_of(host[slot]) == key for key, slot in group.host.entries())
        assert [*group.host.problems()] == []


def run(transfers: list[Transfer], device: dict[int, int], host: dict[int, int], disk: dict[bytes, int]) -> None:
    for one in transfers:
        match one.source_tier, one.destination_tier:
            case Tier.DISK, Tier.DISK:
                del disk[one.key]
                continue
            case -1, _:
                content = one.source
            case Tier.DISK, _:
                content = disk[one.key]
            case source, _:
                content = (device if source == Tier.DEVICE else host)[one.source]
        if one.destination_tier == Tier.DISK:
            assert one.key not in disk
            disk[one.key] = content
        else:
            (device if one.destination_tier == Tier.DEVICE else host)[one.destination] = content
    transfers.clear()


def test_a_preempted_sequence_comes_back_from_host_memory() -> None:
    """Also without prefix caching, and then nothing of it is left when it is over."""
    simulation = Simulation(num_blocks=[6], host=[8], enable_prefix_caching=False, max_num_seqs=2)
    jobs = [simulation.add(range(start, start + 9), max_tokens=12) for start in (0, 20)]
    deltas = simulation.run()
    assert [token_ids_of(deltas[job.request.request_id]) for job in jobs] == [job.output_token_ids for job in jobs]
    assert simulation.num_preemptions > 0 and simulation.tally["HOST to DEVICE"] > 0
    stats = simulation.scheduler.refresh_stats()
    assert (stats.num_host_blocks, stats.num_cached_blocks) == (0, 0)
    # Nobody else finds it.
    simulation.add(range(9), max_tokens=1)
    assert simulation.run()["r3"][0].num_cached_tokens == 0


def test_who_is_aborted_while_it_waits_leaves_nothing_in_the_tiers() -> None:
    simulation = Simulation(num_blocks=[6], host=[8], enable_prefix_caching=False, max_num_seqs=2)
    for start in (0, 20):
        simulation.add(range(start, start + 9), max_tokens=12)
    while not simulation.scheduler.refresh_stats().num_host_blocks:
        simulation.step()
    simulation.abort([seq.request_id for seq in simulation.waiting])
    simulation.abort([seq.request_id for seq in simulation.running])
    assert simulation.scheduler.refresh_stats().num_host_blocks == 0


def test_a_restart_finds_what_was_written_at_the_end() -> None:
    simulation = Simulation(disk_capacity=[10])
    simulation.add(range(17), max_tokens=2)
    simulation.run()
    simulation.runner.transfer(simulation.scheduler.save_cache().transfers)
    simulation.restart()
    simulation.add(range(17), max_tokens=2)
    assert simulation.run()["r2"][0].num_cached_tokens == 16
    assert simulation.tally["DISK to DEVICE"] == 4


@pytest.mark.parametrize("damaged", [0, 2])
def test_unreadable_blocks_are_computed_again_and_nobody_else_is_disturbed(damaged: int) -> None:
    """Two requests share the blocks that cannot be read, in one plan; a stream and a long prompt go on."""
    simulation = Simulation([full_spec()], [40], disk_capacity=[10], budget=30)
    simulation.add(range(17), max_tokens=2)
    simulation.run()
    simulation.runner.transfer(simulation.scheduler.save_cache().transfers)
    simulation.restart()
    simulation.add([30, 31], max_tokens=20)
    simulation.step()
    long = simulation.add([*range(20, 38), *range(20)], max_tokens=2)
    simulation.step()
    (prompt,) = [seq for seq in simulation.running if seq.request_id == long.request.request_id]
    num_computed = prompt.num_computed_tokens
    simulation.disk.damaged |= {[*simulation.disk.blocks][damaged]}
    for _ in range(2):
        simulation.add(range(18), max_tokens=2)
    num_preemptions = simulation.num_preemptions
    while not simulation.has_lost_steps:
        assert simulation.live
        simulation.step()
    assert prompt.num_computed_tokens >= num_computed > 0
    assert simulation.num_preemptions - num_preemptions <= 2
    simulation.run()
    assert simulation.tally["unreadable"] == 1
