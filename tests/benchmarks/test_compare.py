"""The comparison with transformers: limits by hand, ratios, rounds, and a contestant that dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import compare_transformers
from benchmarks.compare_transformers import Rounds, open_peers, report, run_rounds
from benchmarks.limits import MachineLimits, limit
from benchmarks.peer import Peer, PeerError
from pagewick.cli.benchmarking.scenarios import Scenario, Timing, scenarios
from pagewick.cli.random_model import SHAPES

MACHINE = MachineLimits(bandwidth=34e9, matmul_rate=450e9)
SHAPE = SHAPES["qwen3-0.6b"]


def test_the_decode_limit_is_the_weights_over_the_bandwidth() -> None:
    # 595.98 M weights in bf16, and K/V of 28 layers x 8 heads x 128 for 192 positions on average.
    seconds = (2 * 595_984_384 + 192 * 2 * 28 * 8 * 128 * 2) / 34e9
    assert limit(Scenario("decode", 128, 128), SHAPE, MACHINE) == pytest.approx(1 / seconds)
    assert 1 / seconds == pytest.approx(28.0, abs=0.1)


def test_many_streams_are_limited_by_arithmetic() -> None:
    scenario = Scenario("decode", 64, 64, 64)
    assert limit(scenario, SHAPE, MACHINE) == pytest.approx(450e9 / (2 * 595_984_384))


def test_the_prefill_limit_counts_every_operation() -> None:
    blocks = 28 * (1024 * (2 * 2048 + 2 * 1024) + 3 * 1024 * 3072)
    attention = sum(4 * 2048 * 28 * position for position in range(1, 513))
    operations = 512 * 2 * blocks + attention + 2 * 151936 * 1024
    assert limit(Scenario("prefill 512", 512, 1), SHAPE, MACHINE) == pytest.approx(512 * 450e9 / operations)


class FakePeer:
    """A peer that needs `seconds` for every scenario, and a tenth of that in the round that is not counted."""

    def __init__(self, name: str, seconds: float, log: list[tuple[str, str, int]]) -> None:
        self.name, self.seconds, self.log = name, seconds, log

    def run(self, scenario: Scenario, seed: int) -> Timing:
        self.log.append((self.name, scenario.name, seed))
        return Timing(0.0, self.seconds, 12)


def test_rounds_interleave_the_contestants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_transformers, "measure_bandwidth", lambda device: 3.0)
    monkeypatch.setattr(compare_transformers, "measure_matmul_rate", lambda device: 4.0)
    log: list[tuple[str, str, int]] = []
    peers = {"pagewick": FakePeer("p", 2.0, log), "transformers": FakePeer("t", 3.0, log)}
    wanted = [Scenario("a", 5, 2), Scenario("b", 5, 2)]
    rounds = run_rounds(peers, wanted, 2, "cpu")  # type: ignore[arg-type]
    assert log[:4] == [("p", "a", 0), ("t", "a", 0), ("p", "b", 1), ("t", "b", 1)]
    assert len(log) == 3 * 4
    assert rounds.rates["pagewick", "a"] == [6.0, 6.0]
    assert rounds.ratio("a", "pagewick", "transformers") == 1.5
    assert rounds.median_machine() == MachineLimits(3.0, 4.0)


def test_a_ratio_is_taken_within_a_round() -> None:
    rounds = Rounds({("pagewick", "a"): [1.0, 10.0, 4.0], ("transformers", "a"): [1.0, 5.0, 1.0]}, [MACHINE])
    assert rounds.ratio("a", "pagewick", "transformers") == 2.0


def test_the_report_does_without_transformers() -> None:
    wanted = scenarios()
    rounds = Rounds({("pagewick", scenario.name): [10.0, 14.0, 12.0] for scenario in wanted}, [MACHINE])
    rows = report(rounds, wanted, "qwen3-0.6b")
    assert [row["scenario"] for row in rows] == [scenario.name for scenario in wanted]
    assert rows[2]["part_of_limit"] == pytest.approx(12.0 / limit(wanted[2], SHAPE, MACHINE))
    assert all("ratio" not in row for row in rows)


def test_a_contestant_that_is_not_installed_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_transformers, "CONTESTANTS", {"no_such_package_here": "benchmarks.none"})
    with open_peers(Path("model"), "cpu", 1) as peers:
        assert peers == {}


def test_a_contestant_that_ends_is_an_error() -> None:
    with pytest.raises(PeerError, match=r"benchmarks\.peer ended with status 0"):
        Peer("benchmarks.peer", Path("model"), "cpu", 1)
