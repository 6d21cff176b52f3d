"""Calls that a rank gives up on the host, or that need memory on one rank only: no later call is
taken for them; every operator."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from tests.support.calls import SLACK, run_either
from tests.support.worlds import Member, Worlds

import tileweave as tw
from tileweave.kernels.all_gather.triton import Launcher
from tileweave.transport import rendezvous
from tileweave.transport.cpu import CpuTransport
from tileweave.transport.workspace import Instance

SECONDS = 2.0
DEPTH, COLS = 16, 8
VICTIM = 1
REFUSED = {"RankMismatchError", "PeerTimeout"}
IN_STEP = REFUSED | {"right"}  # where all ranks were refused in the same call, they may go on
Attempt = Callable[[float, bool], torch.Tensor]


def matmul(op: str, summed: bool = False, **options: int) -> Callable[[Member], Attempt]:
    """``summed``: the sum is over R * K products."""

    def prepare(me: Member) -> Attempt:
        products = DEPTH * me.world_size if summed else DEPTH
        w = torch.ones(me.world_size * COLS, products if op == "all_to_all_matmul" else DEPTH)

        def call(value: float, large: bool) -> torch.Tensor:
            rows = me.world_size * (24 if large else 4)
            return getattr(tw, op)(torch.full((rows, DEPTH), value), w, **options) / products

        return call

    return prepare


def ids_of(me: Member, tokens: int) -> torch.Tensor:
    return torch.arange(tokens * 2).view(tokens, 2) % (2 * me.world_size)


def dispatch(me: Member) -> Attempt:
    experts = torch.ones(2, COLS, DEPTH)

    def call(value: float, large: bool) -> torch.Tensor:
        tokens = 200 if large else 4  # the routes do not fit either
        y, plan = tw.dispatch_grouped_matmul(
            torch.full((tokens, DEPTH), value), experts, ids_of(me, tokens)
        )
        return y[: int(plan.offsets[-1])] / DEPTH

    return call


def combine(me: Member) -> Attempt:
    """After all ranks have made plans, of few and of many tokens."""
    experts = torch.ones(2, COLS, DEPTH)
    made = [
        tw.dispatch_grouped_matmul(torch.ones(n, DEPTH), torch.ones(2, DEPTH, DEPTH), ids_of(me, n))
        for n in (4, 40)
    ]

    def call(value: float, large: bool) -> torch.Tensor:
        y, plan = made[large]
        return tw.grouped_matmul_combine(torch.full_like(y, value), experts, plan) / (2 * DEPTH)

    return call


def embedding(me: Member) -> Attempt:
    layout = tw.EmbeddingLayout.in_rank_order([(COLS,)] * me.world_size)

    def call(value: float, large: bool) -> torch.Tensor:
        batch = me.world_size * (200 if large else 4)
        indices, offsets = torch.zeros(batch, dtype=torch.int64), torch.arange(batch + 1)
        return tw.embedding_bag_all_to_all(
            [torch.full((3, COLS), value)], indices, offsets, layout=layout
        )

    return call


OPS: dict[str, Callable[[Member], Attempt]] = {
    "all_gather_matmul": matmul("all_gather_matmul"),
    "matmul_reduce_scatter": matmul("matmul_reduce_scatter", summed=True),
    "matmul_all_reduce": matmul("matmul_all_reduce", summed=True),
    "matmul_all_to_all": matmul("matmul_all_to_all", scatter_dim=1, gather_dim=0),
    "all_to_all_matmul": matmul("all_to_all_matmul", summed=True, scatter_dim=0, gather_dim=1),
    "dispatch_grouped_matmul": dispatch,
    "grouped_matmul_combine": combine,
    "embedding_bag_all_to_all": embedding,
}


def step(call: Attempt, value: float, large: bool = False) -> tuple[str, float]:
    """One call on data of ``value`` on every rank: "right", "WRONG", or the name of the error; and
    its duration in seconds."""
    started = time.monotonic()
    try:
        y = call(value, large)
        said = (
            "right" if bool((y == value).all()) else f"WRONG: {y.flatten()[0].item()} for {value}"
        )
    except (tw.TileweaveError, torch.OutOfMemoryError) as error:
        said = type(error).__name__
    return said, time.monotonic() - started


def steps(
    me: Member, op: str, fault: Callable[[Member, Attempt], tuple[str, float]], warm: bool
) -> list[tuple[str, float]]:
    """A good call; the fault; two calls as if nothing had happened; and, after ``tw.close()``, a
    good one."""
    tw.close()
    step(OPS[op](me), 1.0)  # imports and compiles first, so that no rank is late
    tw.close()
    me.barrier()
    # a closed rank waits longer; a first call here is that of a new process
    rendezvous._CLOSED.clear()
    with mock.patch.dict(os.environ, TILEWEAVE_TIMEOUT=str(SECONDS)):
        call = OPS[op](me)
        found = [step(call, 1.0)] if warm else []
        me.barrier()
        found.append(fault(me, call))
        found += [step(call, value) for value in (3.0, 4.0)]
    tw.close()
    me.barrier()
    return [*found, step(OPS[op](me), 5.0)]


def check_refused(
    found: list[list[tuple[str, float]]], first: set[str], later: set[str] = REFUSED
) -> None:
    """``first``: what the fault may raise. ``later``: the same of later calls, until the workspace
    is closed."""
    for rank, each in enumerate(found):
        *_, (fault, taken), (next_one, _), (last, _), (closed, _) = each
        assert fault in first and taken < SECONDS * 9 / 8 + SLACK, (rank, found)
        assert {next_one, last} <= later and closed == "right", (rank, found)


def one_rank_grows(me: Member, call: Attempt, grows: bool = True) -> tuple[str, float]:
    return step(call, 2.0, (me.rank == VICTIM) == grows)


def all_but_one_grow(me: Member, call: Attempt) -> tuple[str, float]:
    return one_rank_grows(me, call, False)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("op", OPS)
def test_growth_needed_by_one_rank(worlds: Worlds, op: str, size: int) -> None:
    found = worlds("gloo", size).run(steps, op, one_rank_grows, True)
    assert all(each[0][0] == "right" for each in found), found
    check_refused(found, {"RankMismatchError"})


@pytest.mark.parametrize(
    "op", ["all_gather_matmul", "dispatch_grouped_matmul", "embedding_bag_all_to_all"]
)
def test_growth_not_needed_by_one_rank(worlds: Worlds, op: str) -> None:
    check_refused(worlds("gloo", 3).run(steps, op, all_but_one_grow, True), {"RankMismatchError"})


def comes_too_late(me: Member, call: Attempt) -> tuple[str, float]:
    """Its peers have given up, and are in their next call."""
    if me.rank == VICTIM:
        time.sleep(SECONDS + 0.5)
    return step(call, 2.0)


# Not a fused combine: its routing plan is made by an earlier call, so it is never the first one.
FIRST_CALLS = [
    pytest.param(op, interpreted, id=f"{op}-{'fused' if interpreted else 'unfused'}")
    for op in OPS
    for interpreted in (True, False)
    if not (op == "grouped_matmul_combine" and interpreted)
]


@pytest.mark.parametrize(("op", "interpreted"), FIRST_CALLS)
def test_first_call_given_up_by_peers(worlds: Worlds, op: str, interpreted: bool) -> None:
    check_refused(
        run_either(worlds("gloo", 2), interpreted, steps, op, comes_too_late, False),
        REFUSED,
        IN_STEP,
    )


@pytest.mark.parametrize("size", [2, 3])
def test_unfused_call_given_up_by_peers(worlds: Worlds, size: int) -> None:
    check_refused(
        run_either(worlds("gloo", size), False, steps, "matmul_all_reduce", comes_too_late, True),
        REFUSED,
        IN_STEP,
    )


def fails_in(me: Member, call: Attempt, where: str) -> tuple[str, float]:
    """All ranks need more memory or a new kernel. On one rank that fails, and no other rank
    knows."""
    with ExitStack() as patches:
        if me.rank == VICTIM:
            owner = {"barrier": CpuTransport, "allocate": CpuTransport, "_table": Instance}.get(
                where, Launcher
            )
            patches.enter_context(
                mock.patch.object(owner, where, side_effect=torch.OutOfMemoryError)
            )
        return step(call, 2.0, True)


def fails_in_barrier(me: Member, call: Attempt) -> tuple[str, float]:
    return fails_in(me, call, "barrier")


def fails_in_allocation(me: Member, call: Attempt) -> tuple[str, float]:
    return fails_in(me, call, "allocate")


def fails_after_mapping(me: Member, call: Attempt) -> tuple[str, float]:
    return fails_in(me, call, "_table")


def fails_to_compile(me: Member, call: Attempt) -> tuple[str, float]:
    return fails_in(me, call, "__init__")


def fails_to_launch(me: Member, call: Attempt) -> tuple[str, float]:
    return fails_in(me, call, "__call__")


FAILURES = (
    fails_in_barrier,
    fails_in_allocation,
    fails_after_mapping,
    fails_to_compile,
    fails_to_launch,
)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("fault", FAILURES, ids=lambda fault: fault.__name__)
def test_failure_on_one_rank(
    worlds: Worlds, fault: Callable[[Member, Attempt], tuple[str, float]], size: int
) -> None:
    check_refused(
        worlds("gloo", size).run(steps, "all_gather_matmul", fault, True),
        {"OutOfMemoryError", *REFUSED},
        IN_STEP,
    )
