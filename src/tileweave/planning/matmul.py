"""Which kernel, transport and tile shape a problem gets, as pure functions of sizes and machine
facts.

No torch, no triton. ``plan_OPERATOR`` is the single statement of what that fused operator can do
and when the unfused one is faster; ``tw.explain`` prints what it says.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

from tileweave.planning import choices
from tileweave.planning.candidates import PLANNED
from tileweave.planning.machine import Machine
from tileweave.planning.planner import planner_of
from tileweave.planning.problem import (
    FUSED_WORLD_SIZES,
    MOST_ELEMENTS,
    MatmulConfig,
    Plan,
    Predicted,
    Problem,
    TransportName,
    why_unfused,
)
from tileweave.planning.schedules.gather import Parts, TileSchedule, cdiv
from tileweave.planning.schedules.scatter import Exchange, ScatterSchedule

ONE_SHOT_ROWS = 16  # of interpreted calls


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
        problem.world_size // problem.nodes if config.transport == "nodes" else 0,
        cdiv(cdiv(problem.rows, config.tile_m), config.num_slices),
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
    """The plan of an all_gather_matmul. ``rows`` = m, the rows of a shard; ``cols`` = n, ``depth``
    = K."""
    return _plan("all_gather_matmul", problem, machine, interpreting)


def plan_matmul_reduce_scatter(
    problem: Problem, machine: Machine, interpreting: bool
) -> Plan[MatmulConfig]:
    """The plan of a matmul_reduce_scatter. ``rows`` = M/R, the rows of one rank's result; ``cols``
    = N; ``depth`` = K/R."""
    return _plan("matmul_reduce_scatter", problem, machine, interpreting)


def plan_matmul_all_to_all(
    problem: Problem, machine: Machine, interpreting: bool
) -> Plan[MatmulConfig]:
    """The plan of a matmul_all_to_all. ``rows``, ``cols``: of the part for one rank; ``depth`` =
    K."""
    return _plan("matmul_all_to_all", problem, machine, interpreting)


def plan_all_to_all_matmul(
    problem: Problem, machine: Machine, interpreting: bool
) -> Plan[MatmulConfig]:
    """The plan of an all_to_all_matmul. ``rows``, ``depth``: of the part of x for one rank;
    ``cols`` = N."""
    return _plan("all_to_all_matmul", problem, machine, interpreting)


def plan_matmul_all_reduce(
    problem: Problem, machine: Machine, interpreting: bool
) -> Plan[MatmulConfig]:
    """The plan of a matmul_all_reduce. ``rows`` = M, the rows of the whole result; ``cols`` = N;
    ``depth`` = K/R."""
    return _plan("matmul_all_reduce", problem, machine, interpreting)


def _plan(op: str, p: Problem, machine: Machine, interpreting: bool) -> Plan[MatmulConfig]:
    """What can run, then what is fastest: measured here, otherwise predicted."""
    if p.world_size == 1:
        return Plan("local", f"a group of one rank has nothing to {PLANNED[op].purpose}")
    near = max(p.world_size // p.nodes, 2)  # ranks that share memory
    reason = why_unfused(near, (p.rows, p.cols, p.depth), machine, interpreting)
    if reason is None and p.rows * p.depth > MOST_ELEMENTS:
        reason = f"more than {MOST_ELEMENTS} elements of x: kernels count them in 32 bits"
    if reason is not None:
        return Plan("unfused", reason)
    if p.nodes > 1:
        return _plan_nodes(op, p, machine)
    if choices.is_forced(op):
        return _planned(choices.forced_config(op), "forced")
    if machine.backend == "cpu":
        measured = choices.find(op, p)
        return _plan_cpu(op, p) if measured is None else _planned(measured.fastest(), "measured")
    reason = _why_not_on_gpu(p)
    if reason is not None:
        return Plan("unfused", reason)
    return _predicted(op, p, machine)


def _plan_nodes(op: str, p: Problem, machine: Machine) -> Plan[MatmulConfig]:
    """The plan of a call in a group whose ranks are on several nodes."""
    where = f"{p.nodes} nodes x {p.world_size // p.nodes}"
    if not PLANNED[op].over_nodes or p.fp8:
        what = f"{op} of FP8 operands" if p.fp8 else op
        return Plan("unfused", f"{where}: {what} has no path between nodes")
    each = p.world_size // p.nodes
    if op == "matmul_all_reduce" and p.rows < each:
        return Plan("unfused", f"{where}: {p.rows} rows, less than a node has ranks")
    if choices.is_forced(op):
        config = choices.forced_config(op)
        return _planned(config if config and config.transport == "nodes" else None, "forced")
    if machine.backend == "cpu":
        return _plan_nodes_cpu(op, p, where)
    if p.dtype == "float32":
        return Plan("unfused", f"{where}: float32 is not a tensor-core dtype")
    if each > 1 and p.depth * p.itemsize % 16:
        return Plan("unfused", f"{where}: {_why_not_on_gpu(p)}")
    rows = p.rows // each if op == "matmul_all_reduce" else p.rows  # that this rank sends
    width = p.depth if op == "all_gather_matmul" else p.cols
    sent = rows * width * p.itemsize
    if sent < _LEAST_BYTES or rows < _LEAST_ROWS:
        return Plan("unfused", f"{where}: {sent} bytes in {rows} rows are too little to hide")
    # of an all-gather the own shard's, while others come; otherwise those of the last rows
    hidden = rows * p.cols * p.depth // (p.nodes if op == "matmul_all_reduce" else 1)
    if each == 1 and hidden < _CHUNK_PRODUCTS:
        return Plan("unfused", f"{where}: {hidden} multiply-adds are too few to hide anything")
    return Plan(
        "fused", f"{where}; {sent} bytes cross per rank", _chunks_config(_chunks(op, p, rows))
    )


def _chunks(op: str, p: Problem, rows: int) -> int:
    """Chunks of a call between nodes, of which this rank sends ``rows``: one more, as long as that
    hides more of the matmul than it costs. They grow or shrink by a factor of two."""
    products, near = p.rows * p.cols * p.depth, p.world_size // p.nodes
    if op == "matmul_all_reduce":
        most = 1 if products < _CHUNK_PRODUCTS else 2 if products < 4 * _CHUNK_PRODUCTS else 4
        return min(most, max(rows // _LEAST_ROWS, 1))
    exposed = [(p.world_size - near) * products / (2**n - 1) for n in range(1, _MOST_CHUNKS + 1)]
    return 1 + sum(
        one - following > _CHUNK_PRODUCTS and rows >= (2 ** (n + 2) - 1) * _LEAST_ROWS
        for n, (one, following) in enumerate(pairwise(exposed))
    )


def _plan_nodes_cpu(op: str, p: Problem, where: str) -> Plan[MatmulConfig]:
    if op != "all_gather_matmul" or p.world_size > FUSED_WORLD_SIZES[-1]:
        return Plan("fused", f"{where}, interpreted; {p.rows} rows", _chunks_config(3))
    tile = 16 if min(p.rows * p.world_size, p.cols) < 64 else 32
    if p.rows < tile:
        return Plan("unfused", f"{where}: shards of {p.rows} rows are no tile of {tile}")
    config = MatmulConfig("triton", "nodes", tile, 2 * tile, 64, 1, 4, num_slices=4)
    return Plan("fused", f"{where}, interpreted; {p.rows} rows per rank", config)


@cache  # one object per config
def _chunks_config(chunks: int) -> MatmulConfig:
    return MatmulConfig("library", "nodes", 16, 32, 64, 1, 4, num_slices=chunks)


def _planned(
    config: MatmulConfig | None, reason: str, found: tuple[Predicted, ...] = ()
) -> Plan[MatmulConfig]:
    return Plan("unfused" if config is None else "fused", reason, config, candidates=found)


def _why_not_on_gpu(p: Problem) -> str | None:
    if p.dtype == "float32":
        return "float32 is not a tensor-core dtype"
    if p.fp8 and p.cols % 16:
        return f"{p.cols} columns are not a multiple of 16, which cuBLAS needs of FP8"
    if p.depth * p.itemsize % 16:
        return (
            f"rows of K = {p.depth} are not a multiple of 16 bytes, which the copy hardware needs"
        )
    return None


def _plan_cpu(op: str, p: Problem) -> Plan[MatmulConfig]:
    """Small tiles for the interpreter; by rows, so that every path is tried on the CPU."""
    fp8 = ", FP8" if p.fp8 else ""
    if op == "matmul_all_reduce":
        one_shot = p.rows <= ONE_SHOT_ROWS
        config = MatmulConfig("library", "sm", 16, 32, 64, 1, 4)
        if one_shot:
            config = MatmulConfig("triton", "sm", 16, 32, 128 if p.fp8 else 64, 1, 4, shots=1)
        shots = "one shot" if one_shot else "two shots"
        return Plan("fused", f"interpreted; {p.rows} rows{fp8}, {shots}", config)
    if p.fp8:
        config = MatmulConfig("library", "sm" if p.rows < 64 else "copy_engine", 16, 32, 64, 1, 4)
        return Plan("fused", f"interpreted; {p.rows} rows{fp8}", config)
    tile = 16 if min(p.rows * p.world_size, p.cols) < 64 else 32
    transport: TransportName = "copy_engine" if p.rows >= 64 else "sm"
    config = MatmulConfig(
        "triton", transport, tile, 2 * tile, 64, 1, 4, num_slices=4, num_producers=1
    )
    return Plan("fused", f"interpreted; {p.rows} rows per rank", config)


def _predicted(op: str, p: Problem, machine: Machine) -> Plan[MatmulConfig]:
    planner = planner_of(op, machine, p.fp8, p.scales)
    found = planner.predictions(p)
    best = found[0]
    unfused = next(one for one in found if one.config is None)
    if best is unfused and len(found) == 1:
        return Plan("unfused", f"no kernel that is known to be ahead on {machine.name} takes it")
    kind = "predicted" if best.measured_us is None else "measured here"
    if p.fp8 and best.measured_us is None and not planner.has_fp8:
        kind = "predicted for FP8, by the rates of 16-bit operands,"
    reason = f"{kind} {best.expected_us:.1f} us"
    if best is unfused:
        return _planned(None, f"{reason}; the next takes {found[1].expected_us:.1f}", found)
    config, change = best.config, ""
    odd = op == "all_gather_matmul" and p.depth * p.itemsize % 32 and not p.fp8
    if odd and config is not None and best.measured_us is None:
        config, change = _config_for_odd_rows(config, p)
    if config != best.config:
        reason = f"{reason}; {change}, {_ODD_ROWS}"
    plan = _planned(config, f"{reason}; unfused {unfused.expected_us:.1f}", found)
    fastest = min(found, key=lambda one: one.captured_us)
    if fastest.config in (None, config) or fastest.captured_us >= best.captured_us:
        return plan
    return replace(plan, captured=fastest.config)


# What is sent between nodes has at least: bytes that take 40 us at 400 Gb/s, more than NCCL takes
# to begin; rows, whose matmul is about one wave of tiles. One more chunk, or a call at all, costs
# about 200 us over sockets, in which an H100 has this many multiply-adds, and less over InfiniBand.
_LEAST_BYTES, _LEAST_ROWS, _CHUNK_PRODUCTS = 2 << 20, 256, 1 << 36
_MOST_CHUNKS = 4
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
    if p.rows * p.cols * p.depth >= _MIN_PRODUCTS_PER_SHARD and p.cols * p.itemsize % 16 == 0:
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
