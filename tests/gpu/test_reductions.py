"""matmul_reduce_scatter and matmul_all_reduce on one GPU: a group of one rank has nothing to add
up."""

from __future__ import annotations

import pytest
from tests.support import backward, behaviour
from tests.support.matmul_cases import AR, RS, Case
from tests.support.worlds import World, Worlds

pytestmark = pytest.mark.gpu

SCATTER = Case(64, 48, 96, "bfloat16", bias=True, op=RS)
REDUCE = Case(64, 48, 96, "bfloat16", bias=True, op=AR, residual=True, norm=True)
each = pytest.mark.parametrize("case", [SCATTER, REDUCE], ids=lambda case: case.op)


@pytest.fixture
def world(worlds: Worlds) -> World:
    return worlds("nccl", 1)


@each
def test_public_calls(world: World, case: Case) -> None:
    world.run(behaviour.public_calls, [case], "local")


@each
def test_gradients(world: World, case: Case) -> None:
    world.run(backward.gradients, [case])


@each
def test_opcheck(world: World, case: Case) -> None:
    world.run(behaviour.opcheck, case, timeout=100)


@each
def test_row_parallel_linear(world: World, case: Case) -> None:
    world.run(behaviour.row_parallel_linear, case)
