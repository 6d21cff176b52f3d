"""``tw.warmup(..., tune=True)``: tune the sizes that are warmed up, inside a running program.

It measures in a workspace of its own. That of the program, and graphs that were captured with it,
stay as they are.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from tileweave.bench.cases import Case
from tileweave.bench.samples import samples_of
from tileweave.errors import require
from tileweave.launcher import Member
from tileweave.ops.core import tuned_choices
from tileweave.ops.core.nodes import topology_of
from tileweave.ops.core.registration import spec_of
from tileweave.ops.core.registry import group_of, name_of
from tileweave.ops.matmul.scaled import RECIPES
from tileweave.ops.matmul.warmup import Rows, as_sizes
from tileweave.planning import cache, choices
from tileweave.planning.candidates import TUNABLE
from tileweave.planning.problem import SCALES, Problem
from tileweave.planning.schedules.scatter import Exchange
from tileweave.transport.rendezvous import reopened
from tileweave.transport.workspace import REGISTRY
from tileweave.tune.measure import FP8
from tileweave.tune.run import compiled_cases, on_rank_0, tune_case

_LOG = logging.getLogger("tileweave")
_REPEATS = 5


@dataclass(frozen=True)
class _InGroup(Member):
    """The rank of a group that need not be the world."""

    of: Any = None

    @property
    def group(self) -> dist.ProcessGroup:
        return self.of

    def barrier(self) -> None:
        self.synchronize()
        dist.barrier(self.of, device_ids=[self.device.index] if self.on_gpu else None)
        self.synchronize()


def tune_call(op: str, *args: Any, **kwargs: Any) -> None:
    """Tune what ``tileweave.warmup`` warms up with these arguments. Collective."""
    require(
        op in TUNABLE,
        f"warmup({op!r}, tune=True)",
        f"tune=True for {', '.join(TUNABLE)}",
        "leave out tune=True: other operators have one plan for each shape",
    )
    _tune_sizes(op, *args, **kwargs)


def _tune_sizes(
    op: str,
    rows: Rows,
    cols: int,
    depth: int,
    *,
    scatter_dim: int = 0,
    gather_dim: int = 0,
    backward: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    scaling: str | None = None,
    device: torch.device | str | None = None,
    group: Any = None,
    **_: object,
) -> None:
    """Tune calls of ``op`` with x [rows, depth] and w [cols, depth], and with ``backward`` the
    operator that their input gradient runs, unless they were tuned before."""
    scales, out = scales_to_tune(scaling), "float16" if dtype == torch.float16 else "bfloat16"
    of, size = group_of(name_of(group)), dist.get_world_size(group_of(name_of(group)))
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    if topology_of(of, where).nodes > 1:
        return  # measured times are of ranks that share memory
    if tuned_choices.agree(of, where) or not tuned_choices.may_fuse(where, size):
        return  # every call runs unfused
    how = Exchange(scatter_dim, gather_dim)
    problems: list[tuple[str, Problem]] = []
    for each in as_sizes(rows):
        problem = problem_of_call(op, each, cols, depth, size, dtype, how, scales)
        problems.append((op, problem))
        dual = spec_of(op).dual
        if backward and dual in TUNABLE and op != dual:
            turned = replace(problem, cols=problem.depth, depth=problem.cols)
            problems.append((dual, turned))
    new = [
        (name, problem)
        for name, problem in dict.fromkeys(problems)
        if min(problem.rows, problem.cols, problem.depth) > 0
        and choices.find(name, problem) is None
    ]
    if new:
        _tune(new, of, where, out)


def scales_to_tune(scaling: str | None) -> str:
    """The scales of the problems of ``tileweave.warmup(scaling=...)``; recipes of training have
    scales of rows."""
    if scaling is None or scaling in RECIPES:
        return "" if scaling is None else "row"
    require(
        scaling in SCALES,
        f"warmup with scaling={scaling!r}",
        f"None, {', '.join(map(repr, (*SCALES, *RECIPES)))}",
        "pass one of these",
    )
    return scaling


def _tune(
    problems: list[tuple[str, Problem]], of: dist.ProcessGroup, device: torch.device, out: str
) -> None:
    size = dist.get_world_size(of)
    key = tuned_choices.key_of(device, size)
    member = _InGroup(dist.get_rank(of), size, device, of)
    had_workspace = REGISTRY.find(name_of(of), device) is not None
    with REGISTRY.set_aside(name_of(of)):
        on_rank_0(member, lambda: cache.require_writable(key))
        cases = [case_of(op, problem, out) for op, problem in problems]
        for number, tried in enumerate(compiled_cases(member, cases, lambda _: None)):
            measured, row = tune_case(member, tried, number, _REPEATS, lambda _: None)
            on_rank_0(member, lambda one=measured: cache.merge(key, [one]))
            _LOG.info(
                "tuned %s %s, %d of %d: %s, %.1f us; before: %s, %.1f us",
                *(row.op, row.name, number + 1, len(cases)),
                *(row.now, row.us, row.before, row.us_before),
            )
    if had_workspace:
        reopened(of)


def problem_of_call(
    op: str,
    rows: int,
    cols: int,
    depth: int,
    size: int,
    dtype: torch.dtype,
    how: Exchange,
    scales: str = "",
) -> Problem:
    """The problem that ``op`` plans for x [rows, depth] and w [cols, depth] of a rank, FP8 with
    ``scales``."""
    if op == "matmul_reduce_scatter":
        rows //= size
    elif op == "matmul_all_to_all":
        rows, cols = how.part(rows, cols, size)
    elif op == "all_to_all_matmul":
        rows, depth = how.part(rows, depth, size)
    if scales:
        return Problem(size, rows, cols, depth, 1, FP8, scales=scales)
    return Problem(size, rows, cols, depth, dtype.itemsize, str(dtype).removeprefix("torch."))


def case_of(op: str, p: Problem, out: str = "bfloat16") -> Case:
    """The case whose shard is ``p``. ``out``: the dtype of the result of FP8 operands."""
    shared = samples_of(op).shared
    m, n, k = (
        getattr(p, name) * (p.world_size if name in shared else 1)
        for name in ("rows", "cols", "depth")
    )
    dtype = out if p.scales else p.dtype
    return Case(op, f"{m}-{n}-{k}", m, n, k, m <= 1024, "large", dtype, scales=p.scales)
