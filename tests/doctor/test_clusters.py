"""GPUs by name and by numbers."""

from __future__ import annotations

import pytest

from pagewick.doctor.clusters import Cluster, GpuKind, kind_names, parse_cluster, parse_rate
from pagewick.errors import ConfigError

GIB, GB = 2**30, 10**9


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("8xH200", "H200", 8), ("H200", "H200", 1), ("2xa100-80gb", "A100-80G", 2), ("4090", "RTX4090", 1),
        ("3xgeforce rtx 3090", "RTX3090", 3), ("1xRTX6000-Ada", "RTX6000-Ada", 1),
    ],
)  # fmt: skip
def test_names(text: str, name: str, count: int) -> None:
    cluster = parse_cluster(text)
    assert (cluster.kind.name, cluster.num_gpus, cluster.num_nodes) == (name, count, 1)


@pytest.mark.parametrize("name", kind_names())
def test_every_kind_is_found_by_its_name(name: str) -> None:
    kind = parse_cluster(f"8x{name}").kind
    assert kind.name == name
    # No link is faster than the memory behind it.
    assert 0 < kind.host_link <= kind.gpu_link < kind.bandwidth


def test_numbers() -> None:
    assert parse_cluster("8xMine:48GiB:1008GB").kind == GpuKind("Mine", 48 * GIB, 1008 * GB, 32 * GB, 32 * GB)
    assert parse_cluster("2xM:64G:2TB:64GB:200GB/s").kind == GpuKind("M", 64 * GIB, 2000 * GB, 64 * GB, 200 * GB)
    # A known kind with more memory keeps its links.
    assert parse_cluster("H100:96GiB:4TB").kind == GpuKind("H100", 96 * GIB, 4000 * GB, 64 * GB, 450 * GB, 50 * GB)


def test_nodes() -> None:
    two = parse_cluster("8xH100", 2)
    assert (two.num_ranks, two.network) == (16, 50 * GB)
    assert parse_cluster("8xL4", 2, 12 * GB).network == 12 * GB
    assert parse_cluster("8xH100").network == 0
    assert Cluster(two.kind, 3, 5).num_ranks == 15


@pytest.mark.parametrize(("text", "rate"), [("4.8TB", 4800 * GB), ("50 gb/s", 50 * GB), ("7", 7), ("1.5k", 1500)])
def test_rates(text: str, rate: int) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    ("text", "nodes", "words"),
    [
        ("8xA100", 1, "no kind 'A100' here; near: .*A100-80G, A100-40G"),
        ("8xQ9", 1, "known: B200, H200"),
        ("xH200", 1, "no kind 'xH200'"),
        ("0xH200", 1, "from 1 to 4096"),
        ("4096xH200", 2, "from 1 to 4096"),
        ("8xH200:3GiB", 1, "memory and bandwidth are needed"),
        (":3GiB:1GB", 1, "memory and bandwidth are needed"),
        ("A:1GiB:1GB:1GB:1GB:1GB", 1, "are needed"),
        ("A:much:1GB", 1, "'much' is not a size"),
        ("A:0:1GB", 1, "without memory"),
        ("A:1GiB:0", 1, "'0' is not a bandwidth"),
        ("A:1GiB:fast", 1, "'fast' is not a bandwidth"),
        ("8xRTX4090", 2, "--network-bandwidth"),
    ],
)
def test_mistakes(text: str, nodes: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_cluster(text, nodes)
