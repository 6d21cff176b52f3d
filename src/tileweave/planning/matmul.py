"""Which kernel, transport and tile shape a problem gets, as pure functions of sizes and machine
facts.

No torch, no triton. ``plan_OPERATOR`` is the single statement of what that fused operator can do
and when the unfused one is faster; ``tw.explain`` prints what it says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from tileweave.planning import choices
from tileweave.planning.machine import Machine
from tileweave.planning.problem import (
    MOST_ELEMENTS,
    MatmulConfig,
    Plan,
    Problem,
    TransportName,
    why_no_kernel,
    why_unfused,
)
from tileweave.planning.schedules.gather import Parts, TileSchedule, cdiv
from tileweave.planning.schedules.scatter import Exchange, ScatterSchedule
from tileweave.planning.table import nearest, tuned_entries

MEASURED_ALL_REDUCE_ROWS = 512
ONE_SHOT_ROWS = 16  # up to here all partial sums together are far fewer bytes than the weight


def schedule_for(
    problem: Problem, config: MatmulConfig, rank: int, machine: Machine
) -> TileSchedule:
    """The tile schedule of a fused all-gather: one program per multiprocessor."""
    return TileSchedule(
        rank,
        problem.world_size,
        problem.rows,
        problem.cols,
        problem.depth,
        config.tile_m,
        config.tile_n,
        config.tile_k,
        config.group_m,
        machine.num_sms,
        config.split_tail,
        max(min(config.band_sources, problem.world_size - config.own_first), 1),
        config.cut_bands,
        config.team,
        config.own_first,
    )


def scatter_schedule_for(
    problem: Problem, config: MatmulConfig, rank: int, machine: Machine
) -> ScatterSchedule:
    """The tile schedule of a matmul whose tiles go to their owners; ``problem.rows`` are the rows
    of one owner."""
    p, c = problem, config
    chunk_rows = (
        cdiv(cdiv(p.rows, c.tile_m), c.num_slices) if c.transport == "copy_engine" else 1 << 20
    )
    return ScatterSchedule(
        rank,
        p.world_size,
        p.rows,
        p.cols,
        p.depth,
        c.tile_m,
        c.tile_n,
        c.tile_k,
        c.group_m,
        machine.num_sms,
        c.split_tail,
        team=c.team,
        chunk_rows=chunk_rows,
    )


def exchange_schedule_for(
    problem: Problem, config: MatmulConfig, exchange: Exchange, rank: int, machine: Machine
) -> tuple[TileSchedule, Parts]:
    """The tile schedule of an all-to-all before a matmul, and where the parts of x are in memory.

    problem : ``rows`` and ``depth`` of a rank's x, ``cols`` of the result.
    """
    p, c, size = problem, config, problem.world_size
    rows, depth = exchange.part(p.rows, p.depth, size)
    step = rows * p.depth if exchange.scatter_dim == 0 else depth
    if exchange.gather_dim == 0:
        schedule = schedule_for(replace(p, rows=rows, depth=depth), c, rank, machine)
        return schedule, Parts(rank, size, depth, p.depth, step, True)
    blocks = size * cdiv(depth, c.tile_k)
    # parts follow each other along K, so all rows have one source
    whole = replace(p, world_size=1, rows=rows, depth=blocks * c.tile_k)
    schedule = schedule_for(whole, c, 0, machine)
    chunk_rows, chunks = 1 << 30, 1
    if c.transport == "copy_engine":
        chunk_rows = cdiv(schedule.tile_rows, c.num_slices) * c.tile_m
        chunks = cdiv(rows, chunk_rows)
    return schedule, Parts(rank, size, depth, p.depth, step, True, True, chunk_rows, chunks)


def plan_all_gather_matmul(
    problem: Problem, machine: Machine, interpreting: bool
) -> Plan[MatmulConfig]:
    """The plan of an all_gather_matmul: what can run, then what is fastest."""
    p = problem
    early = _unmeasured_plan("all_gather_matmul", p, machine, interpreting, "gather", "a shard")
    if early is not None:
        return early
    plan = _plan_gpu(
        "all_gather_matmul",
        p,
        machine,
        p.rows * p.world_size,
        lambda c: c.fits_rows(p.rows) and _aligned_for_cublas(c, p),
    )
    if plan.config is None or p.depth * p.itemsize % 32 == 0:
        return plan
    config, change = _config_for_odd_rows(plan.config, p)
    return (
        plan
        if config == plan.config
        else replace(plan, config=config, reason=f"{plan.reason}; {change}, {_ODD_ROWS}")
    )


_ODD_ROWS = "for rows at odd multiples of 16 bytes"
_CUBLAS_PER_SHARD = MatmulConfig("library", "copy_engine", 128, 256, 64, 4, 8)
# Multiply-adds of a shard that take about 100 us, enough to hide the host's work for its launch.
_MIN_PRODUCTS_PER_SHARD = 1 << 35


def _config_for_odd_rows(config: MatmulConfig, p: Problem) -> tuple[MatmulConfig, str]:
    """The config for rows at odd multiples of 16 bytes, and what it changes.

    128 bytes that begin inside a 32-byte sector of L2 touch five sectors in two cache lines. That
    slows our main loop but not cuBLAS, which therefore multiplies large shards (decision 0016).
    For small ones, wider tiles load a quarter less (decision 0017).
    """
    if config.transport == "sm" or config.kernel != "hopper":
        return config, ""
    if p.rows * p.cols * p.depth >= _MIN_PRODUCTS_PER_SHARD and _aligned_for_cublas(
        _CUBLAS_PER_SHARD, p
    ):
        return _CUBLAS_PER_SHARD, "cuBLAS"
    return _widened(config), "wider tiles"


@cache  # one object per config, so that lookups by config compare identities
def _widened(config: MatmulConfig) -> MatmulConfig:
    if config.tile_n != 128:
        return config
    return replace(
        config,
        tile_n=256,
        num_stages=4,
        group_m=8,
        band_sources=1,
        cut_bands=False,
        team=4,
        split_tail=True,
    )


def _without_fusion(
    p: Problem, machine: Machine, interpreting: bool, purpose: str
) -> Plan[MatmulConfig] | None:
    """The plan of a call that no fused operator can run or speed up; None if one may."""
    if p.world_size == 1:
        return Plan("local", f"a group of one rank has nothing to {purpose}")
    reason = why_unfused(p.world_size, (p.rows, p.cols, p.depth), machine, interpreting)
    if reason is None and p.rows * p.depth > MOST_ELEMENTS:
        reason = f"more than {MOST_ELEMENTS} elements of x: kernels count them in 32 bits"
    return None if reason is None else Plan("unfused", reason)


def _unmeasured_plan(
    op: str, p: Problem, machine: Machine, interpreting: bool, purpose: str, of_what: str
) -> Plan[MatmulConfig] | None:
    """The plan of a call that needs no prediction: it is not fused, it was measured or it is
    interpreted; else None."""
    early = _without_fusion(p, machine, interpreting, purpose) or _chosen_plan(op, p)
    if early is not None or machine.backend != "cpu":
        return early
    return _plan_cpu(p, of_what)


def _chosen_plan(op: str, p: Problem) -> Plan[MatmulConfig] | None:
    """The plan of a problem that was measured on this machine, or that is forced; else None."""
    choice = choices.find(op, p)
    if choice is None:
        return None
    reason = "forced" if choice.us is None else f"measured here: {choice.us:.1f} us"
    return Plan("unfused" if choice.config is None else "fused", reason, choice.config)


def _plan_cpu(p: Problem, of_what: str) -> Plan[MatmulConfig]:
    tile = 16 if min(p.rows * p.world_size, p.cols) < 64 else 32
    transport: TransportName = "copy_engine" if p.rows >= 64 else "sm"
    config = MatmulConfig(
        "triton", transport, tile, 2 * tile, 64, 1, 4, num_slices=4, num_producers=1
    )
    return Plan("fused", f"interpreted; {p.rows} rows of {of_what}", config)


def _plan_gpu(
    op: str, p: Problem, machine: Machine, rows: int, can_run: Callable[[MatmulConfig], bool]
) -> Plan[MatmulConfig]:
    """The plan with the measured config of ``op`` nearest to M = ``rows`` that ``can_run``.

    Only the Hopper kernel is faster than the unfused path, so what it cannot run is unfused.
    """
    reason = why_no_kernel(p.dtype, machine)
    if reason is not None:
        return Plan("unfused", reason)
    if p.depth * p.itemsize % 16:
        return Plan(
            "unfused",
            f"rows of K = {p.depth} are not a multiple of 16 bytes, which the copy hardware needs",
        )
    if not any(can_run(e.config) for e in tuned_entries(op)):
        return Plan(
            "unfused",
            f"no measured config has tiles that fit K = {p.depth} and {rows} rows",
        )
    entry = nearest(op, p.world_size, rows, p.cols, p.depth, can_run)
    where = (
        f"M={entry.rows}, {entry.cols} local columns, K={entry.depth} on {entry.world_size} GPUs"
    )
    return Plan("fused", f"as measured for {where}", entry.config)


def _aligned_for_cublas(config: MatmulConfig, p: Problem) -> bool:
    """False for cuBLAS if rows of the result are not a multiple of 16 bytes: it takes 2 to 3 times
    as long then."""
    return config.kernel != "library" or p.cols * p.itemsize % 16 == 0


def plan_matmul_reduce_scatter(
    problem: Problem, machine: Machine, interpreting: bool
) -> Plan[MatmulConfig]:
    """The plan of a matmul_reduce_scatter. ``rows`` = M/R, the rows of one rank's result; ``cols``
    = N; ``depth`` = K/R."""
    p = problem
    early = _unmeasured_plan(
        "matmul_reduce_scatter", p, machine, interpreting, "reduce", "a rank's result"
    )
    if early is not None:
        return early
    return _plan_gpu(
        "matmul_reduce_scatter",
        p,
        machine,
        p.rows * p.world_size,
        lambda c: c.fits_rows(p.rows) and _aligned_for_cublas(c, p),
    )


def plan_matmul_all_to_all(
    problem: Problem, machine: Machine, interpreting: bool
) -> Plan[MatmulConfig]:
    """The plan of a matmul_all_to_all. ``rows``, ``cols``: of the part for one rank; ``depth`` =
    K."""
    p = problem
    early = _unmeasured_plan("matmul_all_to_all", p, machine, interpreting, "exchange", "a part")
    if early is not None:
        return early
    if p.cols * p.itemsize % 16:  # tiles leave by TMA
        return Plan(
            "unfused",
            f"parts of {p.cols} columns are not a multiple of 16 bytes, "
            "which the copy hardware needs",
        )
    return _plan_gpu("matmul_all_to_all", p, machine, p.rows * p.world_size, lambda c: True)


def plan_all_to_all_matmul(
    problem: Problem, machine: Machine, interpreting: bool
) -> Plan[MatmulConfig]:
    """The plan of an all_to_all_matmul. ``rows``, ``depth``: of the part of x for one rank;
    ``cols`` = N."""
    p = problem
    early = _unmeasured_plan("all_to_all_matmul", p, machine, interpreting, "exchange", "a part")
    if early is not None:
        return early
    return _plan_gpu(
        "all_to_all_matmul",
        p,
        machine,
        p.rows * p.world_size,
        lambda c: c.fits_rows(p.rows) and _aligned_for_cublas(c, p),
    )


def plan_matmul_all_reduce(
    problem: Problem, machine: Machine, interpreting: bool
) -> Plan[MatmulConfig]:
    """The plan of a matmul_all_reduce. ``rows`` = M, the rows of the whole result; ``cols`` = N;
    ``depth`` = K/R."""
    p = problem
    early = _without_fusion(p, machine, interpreting, "reduce") or _chosen_plan(
        "matmul_all_reduce", p
    )
    if early is not None:
        return early
    if machine.backend != "cpu":
        if p.rows > MEASURED_ALL_REDUCE_ROWS:
            return Plan(
                "unfused",
                f"no measurement shows the kernel ahead above {MEASURED_ALL_REDUCE_ROWS} rows",
            )
        return _plan_gpu(
            "matmul_all_reduce",
            p,
            machine,
            p.rows,
            lambda c: c.kernel == "library" or p.rows <= c.tile_m,
        )
    if p.rows <= ONE_SHOT_ROWS:
        return Plan(
            "fused",
            f"interpreted; {p.rows} rows, one shot",
            MatmulConfig("triton", "sm", 16, 32, 64, 1, 4, shots=1),
        )
    return Plan(
        "fused",
        f"interpreted; {p.rows} rows, two shots",
        MatmulConfig("library", "sm", 16, 32, 64, 1, 4),
    )
