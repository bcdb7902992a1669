"""Checks of scheduler, block manager and sessions that must hold between any two steps."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from pagewick.engine.cache.group_tables import NULL_BLOCK
from pagewick.engine.sequence import Sequence as TokenSequence
from tests.engine.jobs import chain
from tests.engine.requests import Simulation


def check_books(simulation: Simulation) -> None:
    assert simulation.scheduler.check_integrity() == []
    _check_sequences(simulation)
    _check_blocks(simulation)
    _check_names(simulation)
    _check_pins(simulation)


def check_nothing_is_left(simulation: Simulation) -> None:
    """Check that nothing is held when all requests are finished."""
    scheduler, sequences = simulation.scheduler, simulation.scheduler._sequences
    assert not scheduler.has_work and not sequences.requests and not sequences.running and not len(sequences.waiting)
    assert sorted(sequences._free_slots) == [*range(simulation.max_num_seqs)]
    assert sequences.waiting.num_tokens == 0 and not sequences.waiting._by_key
    assert not scheduler._shares._served and not scheduler._shares._num_requests
    stats = scheduler.refresh_stats()
    assert stats.num_referenced_blocks == stats.num_requests_running == stats.num_requests_waiting == 0
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
    # After a crash, even blocks that no request can find are left on disk.
    if not simulation.enable_prefix_caching and not simulation.num_on_disk_at_start:
        assert stats.num_cached_blocks == stats.num_host_blocks == stats.num_disk_blocks == 0
    while scheduler._sessions.end_oldest():
        pass
    assert scheduler.refresh_stats().num_session_blocks == 0
    assert not any(pool._pins for pool in simulation.blocks.pools)


def _check_sequences(simulation: Simulation) -> None:
    manager, stats = simulation.scheduler._sequences, simulation.scheduler.refresh_stats()
    running, waiting = simulation.running, simulation.waiting
    assert stats.num_requests_running == len(running) <= simulation.max_num_seqs
    assert stats.num_requests_waiting == len(waiting)
    assert stats.num_waiting_tokens == sum(seq.num_tokens for seq in waiting)
    slots = [seq.slot for seq in running]
    assert sorted([*slots, *manager._free_slots]) == [*range(simulation.max_num_seqs)]
    assert running == sorted(running, key=lambda seq: seq.order)
    owners = manager.requests.values()
    paused = [beam.seq for owner in owners for beam in owner.beams if beam.candidates is not None]
    assert all(seq.num_missing_tokens == 0 or seq.slot is None for seq in paused)
    sequences = [seq for owner in owners for seq in owner.sequences]
    placed = {*running, *waiting, *paused}
    assert len(sequences) == len(set(sequences)) and set(sequences) == placed, "a sequence is nowhere"
    assert not set(running) & set(waiting) and not set(waiting) & set(paused)
    for seq in sequences:
        assert not seq.is_finished and (seq.slot is None) == (seq not in running)
        assert seq.slot is not None or not (seq.block_tables or seq.is_started or seq.has_sampled)
        if simulation.scheduler.num_in_flight == 0 or seq.slot is None:
            assert seq.num_tokens_in_flight == seq.num_unknown_tokens == 0
        assert 0 <= seq.num_unknown_tokens <= min(seq.num_tokens_in_flight, simulation.depth)


def _digests(simulation: Simulation, seq: TokenSequence) -> list[int]:
    job = simulation.live[seq.request_id].job
    if job.is_beam_search:
        return chain(seq.request, seq.token_ids)
    return job.choices[seq.choice_index].digests


def _check_blocks(simulation: Simulation) -> None:
    for group, (spec, pool) in enumerate(zip(simulation.specs, simulation.blocks.pools, strict=True)):
        if spec.has_snapshots:
            _check_states(simulation, group)
            continue
        places: dict[int, tuple[int, object]] = {}
        for seq in simulation.running:
            table, digests = seq.block_tables[group], _digests(simulation, seq)
            num_needed = spec.num_blocks(seq.num_computed_tokens)
            most = spec.num_blocks(seq.num_scheduled_tokens + simulation.max_draft_tokens)
            assert num_needed <= len(table), "tokens without blocks"
            assert len(table) <= most or simulation.has_lost_steps, "blocks without tokens"
            is_held = [block_id != NULL_BLOCK for block_id in table]
            assert all(before <= after for before, after in pairwise(is_held)), "a hole in a block table"
            for index, block_id in enumerate(table):
                if block_id == NULL_BLOCK:
                    continue
                end = (index + 1) * spec.block_size
                is_complete = end <= seq.num_computed_tokens
                place = (index, digests[end] if is_complete else (seq.arrival, seq.choice_index))
                assert places.setdefault(block_id, place) == place, "a block is shared by different prefixes"
        assert pool.num_free + pool.num_cached + len(places) == pool.num_open <= pool.num_blocks
        assert pool.num_referenced == len(places)
        # After a step nobody holds more than the next token may look back at.
        if spec.lookback is not None and not simulation.has_lost_steps:
            per_sequence = -(-spec.lookback // spec.block_size) + 1
            per_sequence += -(-simulation.max_draft_tokens // spec.block_size)
            num_in_flight = sum(spec.num_blocks(seq.num_tokens_in_flight) + 1 for seq in simulation.running)
            num_ahead = num_in_flight if simulation.scheduler.num_in_flight else 0
            assert len(places) <= per_sequence * len(simulation.running) + num_ahead


def _check_states(simulation: Simulation, group: int) -> None:
    """Every sequence holds the state that it goes on from and blocks for those after the steps in flight, no others."""
    pool, num_steps = simulation.blocks.pools[group], simulation.scheduler.num_in_flight
    states: dict[int, int] = {}
    num_spare = 0
    for seq in simulation.running:
        state, *spare = seq.block_tables[group]
        num_spare += len(spare)
        assert len(spare) <= (num_steps if seq.num_tokens_in_flight else simulation.has_lost_steps)
        assert (state == NULL_BLOCK) == (seq.num_computed_tokens == 0)
        if state != NULL_BLOCK:
            digest = _digests(simulation, seq)[seq.num_computed_tokens]
            assert states.setdefault(state, digest) == digest, "a state is shared by different prefixes"
    assert pool.num_referenced == len(states) + num_spare
    assert pool.num_free + pool.num_cached + pool.num_referenced == pool.num_open <= pool.num_blocks


def _check_names(simulation: Simulation) -> None:
    """Every block is where the books say, in one of pool and host memory, and the tree knows those of group 0."""
    blocks = simulation.blocks
    for group, (pool, tiers) in enumerate(zip(blocks.pools, blocks.tiers, strict=True)):
        assert not pool._block_of.keys() & {key for key, _ in tiers.host.entries()}
        on_disk = {key for other, key in simulation.disk.blocks if other == group}
        if not blocks._transfers and not any(step.plan.reads_disk for step in simulation.scheduler._in_flight):
            # A damaged block is deleted when it is read, and forgotten when the scheduler gets the result.
            if tiers.disk.is_closed:
                assert on_disk >= set(tiers.disk._keys)
            elif simulation.runner.can_write:  # else the scheduler gets to know of it with the next result
                assert on_disk == set(tiers.disk._keys)
        assert len(tiers.disk) <= max(tiers.disk.capacity, simulation.num_on_disk_at_start)
    if simulation.enable_prefix_caching:
        known = {*blocks.pools[0]._block_of, *(key for key, _ in blocks.tiers[0].host.entries())}
        assert blocks._tree._place_of.keys() == known


def _check_pins(simulation: Simulation) -> None:
    sessions = simulation.scheduler._sessions._sessions
    for group, pool in enumerate(simulation.blocks.pools):
        wanted = Counter(key for session in sessions.values() for key in session.pinned[group])
        assert pool._pins == wanted
