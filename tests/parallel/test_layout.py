"""The layout of ranks, compared with all coordinates written down one by one."""

from __future__ import annotations

from itertools import product

import pytest

from pagewick.errors import ConfigError
from pagewick.parallel.collectives import Collectives, init_collectives
from pagewick.parallel.layout import Coordinates, RankLayout, layout_of
from pagewick.parallel.topology import Topology
from tests.layers.ranks import layer_context

SIZES = [(1, 1, 1), (1, 1, 5), (3, 1, 1), (1, 4, 1), (2, 1, 2), (1, 2, 2), (2, 3, 5), (3, 2, 4)]


@pytest.mark.parametrize("sizes", SIZES)
def test_every_rank_has_its_own_coordinates(sizes: tuple[int, int, int]) -> None:
    layout = RankLayout(*sizes)
    # The tensor axis is the innermost: it counts fastest.
    everyone = list(product(*map(range, sizes)))
    assert layout.world_size == len(everyone)
    for rank, expected in enumerate(everyone):
        assert layout.coordinates(rank) == expected


@pytest.mark.parametrize("sizes", SIZES)
def test_the_ranks_of_a_tensor_group_differ_along_the_tensor_axis_only(sizes: tuple[int, int, int]) -> None:
    layout = RankLayout(*sizes)
    everyone = list(product(*map(range, sizes)))
    expected = [
        [rank for rank, place in enumerate(everyone) if place[:2] == first]
        for first in dict.fromkeys(place[:2] for place in everyone)
    ]
    assert [list(group) for group in layout.tensor_groups] == expected


def test_a_layout_worked_out_by_hand() -> None:
    layout = RankLayout(data_size=2, pipeline_size=3, tensor_size=2)
    assert layout.coordinates(9) == Coordinates(data=1, pipeline=1, tensor=1)
    assert [list(group) for group in layout.tensor_groups] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]


def test_all_ranks_of_an_engine_share_every_layer() -> None:
    layout = layout_of(6)
    assert layout == RankLayout(1, 1, 6)
    assert [list(group) for group in layout.tensor_groups] == [[0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize(("sizes", "axis"), [((0, 1, 1), "data"), ((1, -2, 1), "pipeline"), ((1, 1, 0), "tensor")])
def test_a_size_below_one_is_refused(sizes: tuple[int, int, int], axis: str) -> None:
    with pytest.raises(ConfigError, match=rf"{axis} parallel size must be at least 1; got {min(sizes)}"):
        RankLayout(*sizes)


@pytest.mark.parametrize("rank", [-1, 12])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(ConfigError, match=rf"rank {rank} is not one of the 12 ranks of data 2 x pipeline 3 x tensor 2"):
        RankLayout(2, 3, 2).coordinates(rank)


def test_a_world_of_another_size_is_refused() -> None:
    topology = Topology(0, 6, 0, 6, 0, "127.0.0.1", 1, "openmpi")
    with pytest.raises(ConfigError, match=r"6 ranks were started, but .* 4 ranks of data 2 x pipeline 1 x tensor 2"):
        init_collectives(topology, "cpu", layout=RankLayout(2, 1, 2))


def test_only_ranks_of_one_tensor_group_share_a_layer() -> None:
    """Compare (tp_rank, tp_size) of each rank: ranks of other stages and replicas have shares of their own."""
    layouts = {sizes: RankLayout(*sizes) for sizes in [(2, 1, 2), (1, 2, 2), (4, 1, 1), (1, 1, 4)]}
    shares = {
        sizes: [
            (context.tp_rank, context.tp_size)
            for context in (layer_context(Collectives(rank, 4, layout=layout)) for rank in range(4))
        ]
        for sizes, layout in layouts.items()
    }
    assert shares == {
        (2, 1, 2): [(0, 2), (1, 2), (0, 2), (1, 2)],
        (1, 2, 2): [(0, 2), (1, 2), (0, 2), (1, 2)],
        (4, 1, 1): [(0, 1)] * 4,
        (1, 1, 4): [(0, 4), (1, 4), (2, 4), (3, 4)],
    }


def test_a_pipeline_has_a_rank_of_every_stage() -> None:
    layout = RankLayout(data_size=2, pipeline_size=3, tensor_size=2)
    assert [list(ranks) for ranks in layout.pipelines] == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]
    for ranks in layout.pipelines:
        places = [layout.coordinates(rank) for rank in ranks]
        assert [place.pipeline for place in places] == [0, 1, 2]
        assert len({(place.data, place.tensor) for place in places}) == 1


def test_every_stage_has_as_many_ranks() -> None:
    assert layout_of(6, 3) == RankLayout(pipeline_size=3, tensor_size=2)
    with pytest.raises(ConfigError, match="--pipeline-parallel-size 4 does not divide 6 ranks"):
        layout_of(6, 4)
