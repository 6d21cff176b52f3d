"""dispatch_grouped_matmul in worlds of processes: the real kernels, interpreted, over shared host memory."""

from __future__ import annotations

import pytest
from tests import experts
from tests.experts import ROUTINGS, Case
from tests.worlds import World, Worlds

from tileweave.schedule_grouped import DispatchConfig

CONFIG = DispatchConfig("triton", 16, 32, 64, 1, 4, 2, 1, 4, 2)

CASES = [Case((7,), routing=routing) for routing in ROUTINGS]
UNEVEN = [Case((5, 0, 9)), Case((0, 3), spare=2), Case((4,), topk=3, experts=1), Case((6,), experts=5, topk=8)]


def test_references(world: World) -> None:
    world.run(experts.references, [*CASES, *UNEVEN])


def test_routing(world: World) -> None:
    world.run(experts.routing, [*CASES, *UNEVEN])


def test_parity(worlds: Worlds) -> None:
    worlds("gloo", 3).run(experts.parity, CASES, CONFIG)


@pytest.mark.parametrize("size", [2, 4])
def test_uneven(worlds: Worlds, size: int) -> None:
    worlds("gloo", size).run(experts.parity, UNEVEN, CONFIG)
