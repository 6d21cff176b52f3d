"""Shared by GPU tests of all operators: CUDA graphs, and a peer that never calls."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from tests.support import parity
from tests.support.behaviour import invoke
from tests.support.matmul_cases import Call, Case, prepare
from tests.support.worlds import Member

import tileweave as tw
from tileweave.planning.problem import MatmulConfig

SECONDS = 3.0  # TILEWEAVE_TIMEOUT where a peer never calls, or calls too late
QUEUED = 4  # calls that the others queue in the meantime: more than there are slots


def warm_up(case: Case, size: int) -> None:
    options = {"norm": True} if case.norm else {}
    cols = case.w_shape(size)[0]
    tw.warmup(
        case.op,
        case.x_rows(size),
        cols,
        case.x_cols(size),
        dtype=case.torch_dtype,
        **options,
        **case.options(),
    )


def replay_and_call(me: Member, case: Case, replays: int) -> None:
    """Replay a graph of two calls with fresh inputs, with eager calls in between and some ranks
    late."""
    first, second = (prepare(case, me.rank, me.world_size, me.device, n) for n in range(2))
    warm_up(case, me.world_size)
    first.verify("before the capture", *invoke(case, first.operands))
    graph = torch.cuda.CUDAGraph()
    me.barrier()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = [invoke(case, call.operands) for call in (first, second)]
    kept: list[tuple[str, Call, list[torch.Tensor | None]]] = []

    def look() -> None:
        tw.synchronize()
        for what, call, found in kept:
            call.verify(f"rank {me.rank}, {what}", *found)
        kept.clear()

    for n in range(replays):
        if n % me.world_size == me.rank:
            parity.pause(me.device, 0.0005)
        fresh = [
            prepare(case, me.rank, me.world_size, me.device, 100 + 2 * n + i) for i in range(2)
        ]
        for held, call in zip((first, second), fresh, strict=True):
            for name in held.operands.names():
                getattr(held.operands, name).copy_(getattr(call.operands, name))
        graph.replay()
        for call, pair in zip(fresh, results, strict=True):
            kept.append((f"replay {n}", call, [None if t is None else t.clone() for t in pair]))
        if n % 3 == 0:
            eager = prepare(case, me.rank, me.world_size, me.device, 1000 + n)
            kept.append((f"eager after replay {n}", eager, list(invoke(case, eager.operands))))
        if len(kept) > 50:
            look()
    look()
    me.barrier()
    del graph
    tw.close()  # later tests in this world start without a captured call before them


def capture_without_warmup(me: Member, case: Case) -> None:
    """Capture without warmup is refused with a remedy, for the first call and for a larger one.
    Calls work afterwards."""
    tw.close()
    small = prepare(case, me.rank, me.world_size, me.device, 9)
    large = prepare(replace(case, rows=16 * case.rows), me.rank, me.world_size, me.device, 9)
    for call in (small, large):
        torch.cuda.synchronize()
        me.barrier()
        with (
            pytest.raises(tw.CaptureError, match=r"tw\.warmup"),
            torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"),
        ):
            invoke(call.case, call.operands)
        me.barrier()
        small.verify("after a refused capture", *invoke(case, small.operands))
        torch.cuda.synchronize()


def calls_without_peer(
    me: Member, case: Case, config: MatmulConfig, absent: int
) -> dict[str, object]:
    """Make some calls on all ranks, then some that ``absent`` skips. Return what the other rank
    sees, and after how long.

    And what ``absent`` gets, which makes these calls after the others have given up.
    """
    case, group = case.fit(config), dist.group.WORLD
    for seconds in (60.0, SECONDS):  # the first round compiles, and may take its time
        me.barrier()
        tw.close()
        os.environ["TILEWEAVE_TIMEOUT"] = str(seconds)
        for n in range(3):
            call = prepare(case, me.rank, me.world_size, me.device, n)
            parity.run(call, group, config)
        tw.synchronize()
        call.verify(f"rank {me.rank}, while all call")
    me.barrier()
    calls = [prepare(case, me.rank, me.world_size, me.device, 99 + n) for n in range(QUEUED)]
    for call in calls:
        call.out.zero_()
    torch.cuda.synchronize()
    if me.rank == absent:
        time.sleep(SECONDS + 4.0)
        found = make_late_calls(calls, group, config)
        me.barrier()  # keep the memory of the others alive until now
        return {"late": found}
    started = time.monotonic()
    for call in calls:
        parity.run(call, group, config)
    with pytest.raises(tw.PeerTimeout) as caught:
        tw.synchronize()
    taken = time.monotonic() - started
    with pytest.raises(tw.PeerTimeout):
        parity.run(calls[0], group, config)
    poisoned = all(bool(call.out.isnan().any()) for call in calls)
    me.barrier()
    tw.close()
    error = caught.value
    return {
        "op": error.op,
        "taken": taken,
        "rank": error.rank,
        "peer": error.peer,
        "lag": error.expected - error.seen,
        "poisoned": poisoned,
    }


def make_late_calls(calls: list[Call], group: dist.ProcessGroup, config: MatmulConfig) -> list[str]:
    """Make calls that the others have given up, and further ones, until one raises. Each is
    "right", "NaN", or a description of what is wrong."""
    made = []
    try:
        for call in calls:
            parity.run(call, group, config)
            made.append(call)
        tw.synchronize()
    except tw.PeerTimeout:
        pass
    torch.cuda.synchronize()
    return [_state(call) for call in made]


def _state(call: Call) -> str:
    if call.out.isnan().any():
        return "NaN"
    try:
        call.verify("late")
    except AssertionError as error:
        return f"wrong: {error}"
    return "right"


def check_timed_out(ends: list, op: str, absent: int = 1) -> None:
    """Every other rank has waited for ``absent`` for the whole timeout. Its result is poisoned, and
    nothing hung."""
    assert len(ends) > absent and [end.exit_code for end in ends] == [0] * len(ends), ends
    for rank, seen in ((rank, end.value) for rank, end in enumerate(ends) if rank != absent):
        assert SECONDS <= seen["taken"] < SECONDS + 2.0, seen
        found = tuple(seen[name] for name in ("op", "rank", "peer", "lag", "poisoned"))
        assert found == (op, rank, absent, 1, True), seen
    late = ends[absent].value["late"]
    assert late and late[-1] == "NaN" and set(late) <= {"right", "NaN"}, late


def call_without_peer(
    me: Member,
    absent: int,
    call: Callable[[int], torch.Tensor],
    poisoned: Callable[[torch.Tensor], bool],
) -> dict[str, object] | None:
    """Make ``call(0)`` on all ranks, then ``call(1)`` without ``absent``. Return what each other
    rank sees; None on ``absent``."""
    for seconds in (60.0, SECONDS):  # the first round compiles, and may take its time
        me.barrier()
        tw.close()
        os.environ["TILEWEAVE_TIMEOUT"] = str(seconds)
        call(0)
        tw.synchronize()
    me.barrier()
    if me.rank == absent:
        time.sleep(SECONDS + 4.0)
        return None
    result = call(1)
    with pytest.raises(tw.PeerTimeout) as caught:
        tw.synchronize()
    found = {"op": caught.value.op, "peer": caught.value.peer, "poisoned": poisoned(result)}
    tw.close()
    return found
