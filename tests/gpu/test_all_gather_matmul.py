"""all_gather_matmul on one GPU: a group of one rank has nothing to gather, but everything else must
work."""

from __future__ import annotations

import pytest
import torch
from tests.support import backward, behaviour
from tests.support.matmul_cases import Case, prepare, verify
from tests.support.worlds import Member, World, Worlds

import tileweave as tw

pytestmark = pytest.mark.gpu

CASES = [
    Case(63, 130, 200, "bfloat16", bias=True),
    Case(128, 256, 512, "float16"),
    Case(7, 9, 33, "float32", bias=True),
]


@pytest.fixture
def world(worlds: Worlds) -> World:
    return worlds("nccl", 1)


def test_public_calls(world: World) -> None:
    world.run(behaviour.public_calls, CASES, "local")


def test_many_dimensions(world: World) -> None:
    world.run(behaviour.many_dimensions, Case(12, 16, 32, "bfloat16", bias=True))


def test_empty_dimensions(world: World) -> None:
    world.run(behaviour.empty_dimensions, "bfloat16")


@pytest.mark.parametrize("gathered", [False, True])
def test_gradients(world: World, gathered: bool) -> None:
    world.run(backward.gradients, [Case(64, 48, 96, "bfloat16", bias=True, gathered=gathered)])


def test_opcheck(world: World) -> None:
    world.run(behaviour.opcheck, Case(16, 24, 40, "bfloat16", bias=True), timeout=100)


def test_compiled(world: World) -> None:
    world.run(
        backward.gradients,
        [Case(64, 48, 96, "bfloat16", bias=True)],
        "xwb",
        "inductor",
        timeout=100,
    )


def test_column_parallel_linear(world: World) -> None:
    world.run(behaviour.column_parallel_linear, Case(64, 48, 96, "bfloat16", bias=True), False)


def capture_and_replay(me: Member) -> None:
    case = Case(64, 48, 96, "bfloat16", bias=True)
    first = prepare(case, me.rank, me.world_size, me.device, 0)
    tw.warmup("all_gather_matmul", case.rows, case.cols, case.depth, dtype=case.torch_dtype)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = tw.all_gather_matmul(first.x, first.w, first.bias)
    for n in range(5):
        call = prepare(case, me.rank, me.world_size, me.device, n)
        for held, fresh in ((first.x, call.x), (first.w, call.w), (first.bias, call.bias)):
            held.copy_(fresh)
        graph.replay()
        verify(y, call.want, case, f"replay {n}")


def test_capture_and_replay(world: World) -> None:
    world.run(capture_and_replay)


def devices_do_not_mix(me: Member) -> None:
    x, w = torch.zeros(4, 8, device=me.device), torch.zeros(6, 8, device=me.device)
    for args in ((x.cpu(), w), (x, w.cpu()), (x, w, torch.zeros(6))):
        with pytest.raises(tw.InputError, match=r"asked: .*cpu.*allowed: one device; remedy: "):
            tw.all_gather_matmul(*args)
    with pytest.raises(tw.InputError, match="one device"):
        tw.all_gather_matmul(x, w, out=torch.zeros(4, 6))


def test_devices_do_not_mix(world: World) -> None:
    world.run(devices_do_not_mix)
