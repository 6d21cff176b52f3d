"""The matmul operators over emulated nodes, where cuBLAS (here torch on the CPU) multiplies chunk
after chunk: worlds of 2 x 1, 2 x 2 and 3 x 2."""

from __future__ import annotations

import time
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.support import backward, behaviour, parity
from tests.support.matmul_cases import AG, AR, RS, Case, prepare
from tests.support.worlds import Member, World, Worlds, one_shot

import tileweave as tw
from tileweave.planning.problem import MatmulConfig
from tileweave.transport.rail import GlooRail

CHUNKS = MatmulConfig("library", "nodes", 16, 32, 64, 1, 4, num_slices=3)
ONE = replace(CHUNKS, num_slices=1)
CASES = [
    Case(35, 20, 24, bias=True, gathered=True),  # the last chunk is shorter
    Case(4, 33, 20, "float16", integers=True),
    Case(2, 9, 16),  # fewer rows than chunks
    Case(35, 20, 24, op=RS, bias=True),
    Case(8, 33, 20, "bfloat16", op=RS, integers=True),
    Case(1, 9, 16, op=RS),
    Case(36, 20, 24, op=AR, bias=True, residual=True, norm=True),
    Case(40, 33, 20, "float16", op=AR, integers=True, residual=True),
    Case(2, 9, 16, op=AR, bias=True),
    Case(35, 9, 16, op=AR, norm=True, residual=True),  # rows that two ranks do not share equally
]


@pytest.fixture(params=[2, 4], ids=["2x1", "2x2"])
def nodes(request: pytest.FixtureRequest, worlds: Worlds) -> World:
    return worlds("gloo", request.param, 2)


def right(me: Member, cases: list[Case], config: MatmulConfig) -> None:
    for number, case in enumerate(cases):
        call = prepare(case, me.rank, me.world_size, me.device, number)
        parity.run(call, dist.group.WORLD, config)
        call.verify(f"rank {me.rank}, {config!r}, call {number}")


@pytest.mark.parametrize("config", [CHUNKS, ONE], ids=["chunks", "one chunk"])
def test_parity(nodes: World, config: MatmulConfig) -> None:
    nodes.run(right, CASES, config)


def test_three_nodes(worlds: Worlds) -> None:
    worlds("gloo", 6, 3).run(right, CASES, CHUNKS)


def test_many_calls_with_late_ranks(nodes: World) -> None:
    nodes.run(parity.many_calls, [case for case in CASES if not case.norm], CHUNKS, 12, 0.004)


def late_network(me: Member) -> None:
    """The exchanges of one rank after the other are slow."""
    exchange = GlooRail.all_gather
    for number in range(2 * me.world_size):

        def slow(rail: GlooRail, *call: torch.Tensor, number: int = number) -> None:
            time.sleep(0.02 if number % me.world_size == me.rank else 0.0)
            exchange(rail, *call)

        with mock.patch.object(GlooRail, "all_gather", slow):
            right(me, [CASES[number % len(CASES)]], CHUNKS)


def test_a_late_network(nodes: World) -> None:
    nodes.run(late_network)


PUBLIC = [Case(36, 18, 40, op=RS, bias=True), Case(36, 18, 40, op=AR, bias=True, norm=True)]


def test_public_calls(nodes: World) -> None:
    nodes.run(behaviour.public_calls, PUBLIC, "fused")


def test_gradients(nodes: World) -> None:
    """Each is the other's backward."""
    nodes.run(backward.gradients, PUBLIC)
    nodes.run(backward.gradients, [Case(36, 18, 40)], "x")


def nothing_else_crosses(me: Member) -> list[int]:
    """Bytes that this rank sends to its rail, by operator."""
    found = []
    begin = GlooRail._begin
    for case in (Case(32, 24, 16), Case(32, 24, 16, op=RS), Case(32, 24, 16, op=AR)):
        sent: list[int] = []

        def counting(rail: GlooRail, mine: torch.Tensor, *rest: object, to=sent) -> dist.Work:
            to.append(mine.numel() * mine.element_size())
            return begin(rail, mine, *rest)  # type: ignore[arg-type]

        call = prepare(case, me.rank, me.world_size, me.device, 0)
        with mock.patch.object(GlooRail, "_begin", counting):
            parity.run(call, dist.group.WORLD, CHUNKS)
        found.append(sum(sent) - 8)  # the number of the call
    return found


def test_one_part_crosses_per_node(nodes: World) -> None:
    """x of a shard; of the sums of a node those for one other rank; a part of the sum of a
    node."""
    each = nodes.size // 2
    for sent in nodes.run(nothing_else_crosses):
        assert sent == [32 * 16 * 4, 32 * 24 * 4, 32 * 24 * 4 // each]


# --- Faults ---

SECONDS, SLACK = 3.0, 2.0
ALIVE = {"TILEWEAVE_TIMEOUT": str(SECONDS)}


def late_or_other(me: Member) -> list[tuple[str, float]]:
    """Rank 1 is late for a call of each operator; then a whole node makes another call."""
    found = []
    for op in (AG, RS, AR):
        for other in (False, True):
            case = Case(32, 18, 40, op=op)
            right(me, [case], CHUNKS)
            me.barrier()
            far = me.rank * 2 // me.world_size
            seen, started = "", time.monotonic()
            try:
                if other:
                    x, w = torch.zeros(16 * (2 + far), 40), torch.zeros(18, 40)
                    tw.matmul_all_reduce(x, w)
                else:
                    time.sleep(2.5 * SECONDS if me.rank == 1 else 0.0)
                    right(me, [case], CHUNKS)
            except tw.TileweaveError as error:
                seen = f"{type(error).__name__}: {error}"
            found.append((seen, time.monotonic() - started))
            tw.close()
            me.barrier()
            right(me, [case], CHUNKS)
            tw.close()
            me.barrier()
    return found


def test_late_and_other_calls() -> None:
    for rank, end in enumerate(one_shot("gloo", 4, late_or_other, extra=ALIVE, nodes=2)):
        for number, (seen, taken) in enumerate(end.value):  # type: ignore[arg-type]
            kind = "RankMismatchError" if number % 2 else "PeerTimeout"
            assert seen.startswith(kind), f"rank {rank}, {number}: {seen or 'no error'}"
            stuck = 0.0 if number % 2 or rank != 1 else 2.5 * SECONDS
            assert taken < SECONDS + SLACK + stuck, f"rank {rank}, {number}: {taken:.1f} s"
