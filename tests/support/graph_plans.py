"""Calls whose plan in a CUDA graph is another one than that of eager calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from tests.support.matmul_cases import AG, Case, prepare
from tests.support.worlds import Member

import tileweave as tw
from tileweave.ops.matmul import all_gather_matmul, matmul_reduce_scatter
from tileweave.planning.problem import MatmulConfig, Plan

EAGER = MatmulConfig("library", "sm", 16, 32, 64, 1, 4)
GRAPH = MatmulConfig("library", "copy_engine", 128, 256, 64, 4, 8)


@contextmanager
def two_plans(op: str) -> Iterator[list[str]]:
    """Calls of ``op`` have two plans. Yields the transports of the plans that ran, in order."""
    module: Any = all_gather_matmul if op == AG else matmul_reduce_scatter
    run, ran = module.run_fused, []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        ran.extend(one.config.transport for one in args if isinstance(one, Plan))
        return run(*args, **kwargs)

    plan = Plan("fused", "two plans", EAGER, captured=GRAPH)
    with (
        patch.object(module, "plan", lambda *_: plan),
        patch.object(module, "run_fused", recorded),
    ):
        yield ran


def eager_calls(me: Member, case: Case) -> list[str]:
    """Four calls; rank 0 has w in another memory layout in the last two, whose signature is new to
    it alone."""
    tw.close()
    op: Callable[..., torch.Tensor] = getattr(tw, case.op)
    with two_plans(case.op) as ran:
        for n in range(4):
            call = prepare(case, me.rank, me.world_size, me.device, n)
            w = call.w.t().contiguous().t() if n > 1 and me.rank == 0 else call.w
            call.verify(f"rank {me.rank}, call {n}", op(call.x, w))
    tw.close()
    return ran


def warmed(me: Member, op: str, rows: int | list[int]) -> list[str]:
    """Which plans a warmup runs."""
    tw.close()
    with two_plans(op) as ran:
        tw.warmup(op, rows, 24, 32, dtype=torch.float32, device=me.device)
    tw.close()
    return ran


def captured_calls(me: Member, case: Case, calls_before: int) -> list[str]:
    """A capture after so many eager calls, replayed and followed by an eager call."""
    tw.close()
    op: Callable[..., torch.Tensor] = getattr(tw, case.op)
    with two_plans(case.op) as ran:
        held = prepare(case, me.rank, me.world_size, me.device, 0)
        x, w = held.x, held.w
        for _ in range(calls_before):
            op(x, w)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        me.barrier()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y = op(x, w)
        for n in range(6):
            call = prepare(case, me.rank, me.world_size, me.device, 10 + n)
            x.copy_(call.x)
            w.copy_(call.w)
            graph.replay()
            call.verify(f"rank {me.rank}, replay {n}", y)
            call.verify(f"rank {me.rank}, eager call {n}", op(x, w))
        tw.synchronize()
        me.barrier()
        del graph
    tw.close()
    return ran
