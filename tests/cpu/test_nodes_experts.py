"""Expert operators where ranks are on several nodes: 2 x 1, 2 x 2 and 3 x 2 emulated nodes."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from tests.support import combine, experts, scaled_experts
from tests.support.dead_nodes import SECONDS, SLACK, outlive, survive
from tests.support.experts import Case
from tests.support.worlds import Member, World, Worlds, one_shot

import tileweave as tw
from tileweave.ops.core.registry import name_of, workspace_of
from tileweave.transport.rail import GlooRail

WORLDS = {"2x1": (2, 2), "2x2": (4, 2), "3x2": (6, 3)}


@pytest.fixture(params=list(WORLDS.values()), ids=list(WORLDS))
def nodes(request: pytest.FixtureRequest, worlds: Worlds) -> World:
    return worlds("gloo", *request.param)


def cases_of(world: World) -> list[Case]:
    uneven = Case((3, 0, 5), experts=3, topk=3, depth=16, cols=24, nodes=world.nodes, spare=1)
    return [
        uneven,
        replace(uneven, tokens=(4,), topk=2, routing="one_rank", dtype="bfloat16"),
        replace(uneven, tokens=(3,), routing="holes"),
    ]


def test_public_calls(nodes: World) -> None:
    nodes.run(experts.public_calls, cases_of(nodes), "fused")
    nodes.run(combine.public_calls, cases_of(nodes)[:2], "fused")


def test_gradients(nodes: World) -> None:
    nodes.run(experts.gradients, cases_of(nodes)[:1])
    nodes.run(combine.gradients, cases_of(nodes)[:1])


def test_compiled(worlds: Worlds) -> None:
    world = worlds("gloo", 4, 2)
    world.run(experts.gradients, cases_of(world)[2:], "aot_eager")
    world.run(combine.gradients, cases_of(world)[2:], True, "aot_eager")


def test_fp8_tokens_are_right(worlds: Worlds) -> None:
    """They have no path between nodes."""
    case = Case((3, 0, 5), experts=3, topk=3, depth=144, cols=96, dtype="bfloat16", nodes=2)
    worlds("gloo", 4, 2).run(scaled_experts.dispatched, [case])


# --- Late ranks, a late network ---


def late(me: Member, cases: list[Case]) -> None:
    """One rank after the other is late, or its network is; results are compared at the end."""
    gather, found = GlooRail.all_gather, []
    for number in range(2 * me.world_size):
        case, mine = cases[number % len(cases)], number % me.world_size == me.rank

        def slow(rail: GlooRail, *tensors: torch.Tensor, mine: bool = mine) -> None:
            time.sleep(0.05 if mine else 0.0)
            gather(rail, *tensors)

        o = experts.draw(case, me.rank, me.world_size, me.device, number)
        time.sleep(0.05 if mine and number % 3 == 0 else 0.0)
        with mock.patch.object(GlooRail, "all_gather", slow):
            y, plan = tw.dispatch_grouped_matmul(o.x, o.experts, o.ids, max_tokens=case.max_tokens)
            rows = torch.where((torch.arange(plan.bound) < plan.offsets[-1])[:, None], y, 0.0)
            tw.grouped_matmul_combine(rows, o.experts.transpose(1, 2).contiguous(), plan)
        found.append((number, case, y))
    for number, case, y in found:
        experts.verify_y(y, case, me.rank, me.world_size, number, f"rank {me.rank}, call {number}")


def test_late_ranks_and_networks(worlds: Worlds) -> None:
    world = worlds("gloo", 4, 2)
    world.run(late, [replace(case, dtype="float32") for case in cases_of(world)])


# --- What crosses ---


def count(me: Member, tokens: int, depth: int, topk: int) -> dict[str, int]:
    """Bytes that this rank sends to other nodes in a call of each operator, and in an all-to-all of
    choices."""
    case = Case((tokens,), experts=8, topk=topk, depth=depth, cols=depth, nodes=2)
    o = experts.draw(case, me.rank, me.world_size, me.device, 0)
    sent = {"gather": 0, "exchange": 0}
    gather, exchange = GlooRail.all_gather, GlooRail.all_to_all

    def gathering(rail: GlooRail, out: torch.Tensor, x: torch.Tensor) -> None:
        if x.is_floating_point():  # not the number of the call
            sent["gather"] += x.nbytes * (len(rail.ranks) - 1)
        gather(rail, out, x)

    def exchanging(rail: GlooRail, out: torch.Tensor, x: torch.Tensor) -> None:
        before = sent["gather"]
        exchange(rail, out, x)
        sent["gather"] = before
        sent["exchange"] += x.nbytes // len(rail.ranks) * (len(rail.ranks) - 1)

    with (
        mock.patch.object(GlooRail, "all_gather", gathering),
        mock.patch.object(GlooRail, "all_to_all", exchanging),
    ):
        y, plan = tw.dispatch_grouped_matmul(o.x, o.experts, o.ids)
        dispatched = sent.copy()
        rows = torch.where((torch.arange(plan.bound) < plan.offsets[-1])[:, None], y, 0.0)
        tw.grouped_matmul_combine(rows, o.experts, plan)
    per_node = case.experts * me.world_size // 2
    node = me.rank * 2 // me.world_size
    choices = int((o.ids // per_node != node).sum())
    return {
        "dispatch": dispatched["gather"] + dispatched["exchange"],
        "combine": sent["exchange"],
        "other": sent["gather"] - dispatched["gather"],
        "choices": choices * depth * 4,
    }


def test_a_token_crosses_once_per_node(worlds: Worlds) -> None:
    for sent in worlds("gloo", 4, 2).run(count, 24, 16, 8):
        assert sent["dispatch"] == sent["combine"] == 24 * 16 * 4
        assert sent["other"] == 0
        assert sent["dispatch"] <= sent["choices"] / 2


# --- Faults ---

SMALL = Case((4,), experts=2, topk=2, depth=16, cols=16, nodes=2)


def call(me: Member, number: int, tokens: int = 4) -> None:
    case = replace(SMALL, tokens=(tokens,))
    o = experts.draw(case, me.rank, me.world_size, me.device, number)
    y, plan = tw.dispatch_grouped_matmul(o.x, o.experts, o.ids)
    experts.verify_y(y, case, me.rank, me.world_size, number, f"rank {me.rank}, call {number}")
    rows = torch.where((torch.arange(plan.bound) < plan.offsets[-1])[:, None], y, 0.0)
    tw.grouped_matmul_combine(rows, o.experts, plan)


def suffer(me: Member, fault: str) -> tuple[str, float]:
    call(me, 0)
    me.barrier()
    started = time.monotonic()
    try:
        for number in range(3):
            started = time.monotonic()
            if fault == "late" and me.rank == 1:
                time.sleep(1.5 * SECONDS)
            _dispatch_or_combine(me, number, fault)
    except tw.TileweaveError as error:
        taken = time.monotonic() - started
        if fault == "late" and me.rank == 1:
            taken -= 1.5 * SECONDS
        tw.close()
        return f"{type(error).__name__}: {error}", taken
    return "", 0.0


def _dispatch_or_combine(me: Member, number: int, fault: str) -> None:
    """Without routing, whose exchange is torch.distributed's: the plan is made before."""
    case = SMALL if fault != "differs" or me.rank < 2 else replace(SMALL, topk=1)
    c = combine.prepare(case, me.rank, me.world_size, me.device, number)
    c.y.nan_to_num_()
    if number % 2:
        tw.grouped_matmul_combine(c.y, c.experts, c.plan)
    else:
        plan = replace(c.plan, group_name=name_of(None))
        x = torch.zeros(case.tokens_of(me.rank), case.depth)
        tw.dispatch_grouped_matmul(x, c.experts, plan=plan)


def with_dead_node(me: Member) -> tuple[str, float]:
    call(me, 0)
    return outlive(me, [partial(_dispatch_or_combine, me, number, "dies") for number in range(3)])


@pytest.mark.parametrize("size", [2, 4], ids=["2x1", "2x2"])
def test_node_that_dies(size: int) -> None:
    survive(size, with_dead_node)


@pytest.mark.parametrize(("fault", "said"), [("late", "PeerTimeout"), ("differs", "RankMismatch")])
def test_faults_that_all_ranks_survive(fault: str, said: str) -> None:
    extra = {"TILEWEAVE_TIMEOUT": str(SECONDS)}
    ends = one_shot("gloo", 4, suffer, fault, extra=extra, timeout=60, nodes=2)
    for rank, end in enumerate(ends):
        seen, taken = end.value  # type: ignore[misc]
        assert seen.startswith(said), f"rank {rank}: {seen!r}"
        assert taken < SECONDS + SLACK, f"rank {rank} knew after {taken:.1f} s"


def first_call(me: Member) -> None:
    workspace_of(name_of(None), me.device)
    call(me, 5)
    tw.close()
    call(me, 6)
    tw.close()


def test_a_closed_group_is_opened_again(worlds: Worlds) -> None:
    worlds("gloo", 4, 2).run(first_call)
