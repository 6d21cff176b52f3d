"""Which kernel, transport and tile shape a problem gets, as pure functions of sizes and machine
facts.

No torch, no triton. ``plan_OPERATOR`` is the single statement of what that fused operator can do
and when the unfused one is faster; ``tw.explain`` prints what it says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, replace
from dataclasses import fields as fields_of
from functools import cache
from importlib import resources
from typing import Any, Generic, Literal, TypeVar

from tileweave.errors import InputError, require
from tileweave.planning.machine import Machine
from tileweave.planning.schedules.gather import Parts, TileSchedule, cdiv
from tileweave.planning.schedules.scatter import Exchange, ScatterSchedule

TransportName = Literal["copy_engine", "sm"]
KernelName = Literal["triton", "hopper", "library"]
C = TypeVar("C")  # how an operator is cut up
FUSED_WORLD_SIZES = range(2, 9)
MOST_ELEMENTS = 2**31 - 2**22  # of a shard: programs take equal shares of it, rounded up to blocks
MEASURED_ALL_REDUCE_ROWS = 512
ONE_SHOT_ROWS = 16  # up to these the partials of all ranks are fewer bytes than weights by far
_POWERS = (16, 32, 64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class MatmulConfig:
    """How one fused matmul is cut up.

    kernel : whose main loop. "library": the vendor's matmul as launches of its own; ours send or
        gather before or behind it (``"sm"``), or copy engines bring the shards, each of which has a
        matmul of its own (``"copy_engine"``, all-gather).
    tile_m, tile_n, tile_k : the tile a program computes at once, elements.
    num_stages : tiles of K in flight. num_warps : warps that multiply. group_m : tile rows in an L2
        band.
    transport : who pushes.
    num_slices : pieces of a shard that are signalled one by one: what producers push (all-gather,
        ``"sm"``), what a copy engine takes at once (reduce-scatter, ``"copy_engine"``).
    num_producers : programs that push (``"sm"``); few, so that they are resident whatever else
        runs.
    split_tail : cut the tiles that do not fill a last wave along K.
    team : programs that share columns of w in the cut tiles.
    own_first : start with the own shard; without it the bands begin with it.
    shots : of an all-reduce: 1, every rank sums all partials; 2 ("library" alone), owners sum and
        pass the result on.
    band_sources, cut_bands : how many sources follow the own one together, and whether each such
        band fills its own waves; see ``schedule.TileSchedule``.
    """

    kernel: KernelName
    transport: TransportName
    tile_m: int
    tile_n: int
    tile_k: int
    num_stages: int
    num_warps: int
    group_m: int = 8
    num_slices: int = 32
    num_producers: int = 32
    split_tail: bool = True
    band_sources: int = 1
    cut_bands: bool = False
    team: int = 1
    own_first: bool = True
    shots: int = 2

    def takes(self, rows: int) -> bool:
        """Whether its transport takes shards of that many rows: copy engines need a tile of them or
        more."""
        return self.transport == "sm" or rows >= self.tile_m

    def __str__(self) -> str:
        """What a plan says of it; repr has all of it."""
        if self.kernel == "library" and self.transport == "copy_engine":
            return "library matmul of each shard as copy engines bring it"
        if self.kernel == "library":
            return f"library matmul, then one launch by tiles of {self.tile_m}x{self.tile_n}"
        tile = f"tile {self.tile_m}x{self.tile_n}x{self.tile_k}"
        return f"{self.kernel} kernel, {self.transport} transport, {tile}, {self.num_stages} stages"


@dataclass(frozen=True, slots=True)
class Problem:
    """Sizes of one call: ``rows`` of a shard, local ``cols`` of the output, ``depth`` = K, bytes of
    an element."""

    world_size: int
    rows: int
    cols: int
    depth: int
    itemsize: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Plan(Generic[C]):
    """What a call will do.

    path : "fused", "unfused" or "local". config : how the operator's own kernel is cut up, None
        where it does not run: :class:`MatmulConfig`, ``DispatchConfig``, ``CombineConfig`` or
        ``EmbeddingConfig``.
    Once the call was accepted, ``mark``: a checksum of what ranks must agree on; ``world_size``:
    how many they are.
    """

    path: Literal["fused", "unfused", "local"]
    reason: str
    config: C | None = None
    mark: int = field(default=0, compare=False, repr=False)
    world_size: int = field(default=0, compare=False, repr=False)

    def __str__(self) -> str:
        cut = "" if self.config is None else f", {self.config}"
        return f"{self.path}{cut}: {self.reason}"


def schedule_for(
    problem: Problem, config: MatmulConfig, rank: int, machine: Machine
) -> TileSchedule:
    """The tile schedule of a fused call: as many programs as the device holds at once, fewer if
    there is less work."""
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
    """The tile schedule of a matmul whose tiles go to owners; ``problem.rows`` are those of one
    owner."""
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
    problem: Problem, config: MatmulConfig, how: Exchange, rank: int, machine: Machine
) -> tuple[TileSchedule, Parts]:
    """The tile schedule of an exchange before a matmul, and where the parts of x stand.

    problem : ``rows`` and ``depth`` of a rank's x, ``cols`` of the result."""
    p, c, size = problem, config, problem.world_size
    rows, depth = how.part(p.rows, p.depth, size)
    step = rows * p.depth if how.scatter_dim == 0 else depth
    if how.gather_dim == 0:
        schedule = schedule_for(replace(p, rows=rows, depth=depth), c, rank, machine)
        return schedule, Parts(rank, size, depth, p.depth, step, True)
    blocks = size * cdiv(depth, c.tile_k)
    # all sources are one, in rows
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
    """The path of an all_gather_matmul: what can run, then what is fastest."""
    p = problem
    settled = _before_measured(p, machine, interpreting, "gather", "a shard")
    if settled is not None:
        return settled
    plan = _plan_gpu(
        "all_gather_matmul",
        p,
        machine,
        p.rows * p.world_size,
        lambda c: c.takes(p.rows) and _suits(c, p),
    )
    if plan.config is None or p.depth * p.itemsize % 32 == 0:
        return plan
    config, how = _for_rows_between_sectors(plan.config, p)
    return (
        plan
        if config == plan.config
        else replace(plan, config=config, reason=f"{plan.reason}; {how}, {_BETWEEN_SECTORS}")
    )


_BETWEEN_SECTORS = "for rows at odd multiples of 16 bytes"
_BY_SHARDS = MatmulConfig("library", "copy_engine", 128, 256, 64, 4, 8)
# products of a shard: some 100 us, which hide what the host does for each
_WORTH_A_LAUNCH = 1 << 35


def _for_rows_between_sectors(config: MatmulConfig, p: Problem) -> tuple[MatmulConfig, str]:
    """Where a block of 128 bytes begins between sectors of L2 it is five of them in two lines,
    which holds up our main loop and not the library's: that one multiplies shards that are large
    (decision 0016). Else wider tiles, which load a quarter less (decision 0017)."""
    if config.transport == "sm" or config.kernel != "hopper":
        return config, ""
    if p.rows * p.cols * p.depth >= _WORTH_A_LAUNCH and _suits(_BY_SHARDS, p):
        return _BY_SHARDS, "the library's matmul"
    return _widened(config), "wider tiles"


@cache  # calls are kept by the identity of their configuration
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


def why_unfused(
    world_size: int, sizes: tuple[int, ...], machine: Machine, interpreting: bool
) -> str | None:
    """Why no fused operator runs over more than one rank, on any device; None where one may."""
    if world_size not in FUSED_WORLD_SIZES:
        return f"world size {world_size} is above {FUSED_WORLD_SIZES[-1]}"
    if min(sizes) == 0:
        return "a dimension is zero"
    if machine.backend == "cpu" and not interpreting:
        return "on the CPU torch is faster than interpreted kernels (TRITON_INTERPRET=1 runs those)"
    return None


def why_no_kernel(dtype: str, machine: Machine) -> str | None:
    """Why no kernel on this GPU is known to be ahead; None where one is."""
    if dtype == "float32":
        return "float32 is not a tensor-core dtype"
    if machine.arch != 90:
        return f"no measurement shows the fused kernel ahead on {machine.name}"
    return None


def _without_fusion(
    p: Problem, machine: Machine, interpreting: bool, purpose: str
) -> Plan[MatmulConfig] | None:
    """The path of what no fused operator can do, or does slower; None where a fused one can."""
    if p.world_size == 1:
        return Plan("local", f"a group of one rank has nothing to {purpose}")
    reason = why_unfused(p.world_size, (p.rows, p.cols, p.depth), machine, interpreting)
    if reason is None and p.rows * p.depth > MOST_ELEMENTS:
        reason = f"more than {MOST_ELEMENTS} elements of x: kernels count them in 32 bits"
    return None if reason is None else Plan("unfused", reason)


def _before_measured(
    p: Problem, machine: Machine, interpreting: bool, purpose: str, of_what: str
) -> Plan[MatmulConfig] | None:
    """The path of what is not planned by measurement: no fusion, or the interpreter; else None."""
    refused = _without_fusion(p, machine, interpreting, purpose)
    if refused is not None or machine.backend != "cpu":
        return refused
    return _plan_cpu(p, of_what)


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
    """The measured configuration of ``op`` nearest to M = ``rows`` that ``can_run``.

    The fused kernel that pays is the Hopper one, so what it cannot run goes unfused: nobody should
    lose.
    """
    reason = why_no_kernel(p.dtype, machine)
    if reason is not None:
        return Plan("unfused", reason)
    if p.depth * p.itemsize % 16:
        return Plan(
            "unfused",
            f"rows of K = {p.depth} are no multiple of 16 bytes, which the copy hardware needs",
        )
    if not any(can_run(e.config) for e in tuned_entries(op)):
        return Plan(
            "unfused",
            f"K = {p.depth}, or so few rows: no measured configuration has tiles that fit",
        )
    entry = nearest(op, p.world_size, rows, p.cols, p.depth, can_run)
    where = (
        f"M={entry.rows}, {entry.cols} local columns, K={entry.depth} on {entry.world_size} GPUs"
    )
    return Plan("fused", f"as measured for {where}", entry.config)


def _suits(config: MatmulConfig, p: Problem) -> bool:
    """Not the library's matmul where rows of its result are no multiple of 16 bytes: it takes 2 to
    3 times as long there."""
    return config.kernel != "library" or p.cols * p.itemsize % 16 == 0


@dataclass(frozen=True, slots=True)
class Entry:
    """A measured shape: ``rows`` of all ranks, local ``cols``, ``depth``, in a world of
    ``world_size``; ``us`` is None where it was not timed itself."""

    rows: int
    cols: int
    depth: int
    us: float | None
    config: MatmulConfig
    world_size: int = 4

    def distance(self, rows: int, cols: int, depth: int, world_size: int) -> float:
        """How far this shape is from another: octaves of rows, columns, depth, ranks. Rows decide
        most: they count double."""
        sizes = ((cols, self.cols), (depth, self.depth), (world_size, self.world_size))
        return math.hypot(
            2 * math.log2(rows / self.rows), *(math.log2(there / here) for there, here in sizes)
        )


@cache
def tuned_entries(op: str) -> tuple[Entry, ...]:
    """The measured table of ``op``, a file of ``planning/tables/``."""
    require(
        op.isidentifier(),
        f"the table of {op!r}",
        "the name of an operator",
        "pass one of tileweave.OPERATORS",
    )
    return read_entries(
        (resources.files("tileweave") / "planning" / "tables" / f"{op}.json").read_text("utf-8"),
        f"tables/{op}.json",
    )


def read_entries(text: str, where: str) -> tuple[Entry, ...]:
    """A measured table from JSON ``text``: data, checked field by field, whoever wrote it.
    ``where``: for messages.

    Raises
    ------
    InputError for anything that is not what :class:`Entry` and :class:`MatmulConfig` say.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise InputError(
            f"asked: table {where}, which is no JSON ({error}); allowed: JSON; remedy: write it anew"
        ) from None
    entries: Any = data.get("entries") if isinstance(data, dict) else None
    require(
        isinstance(entries, list) and bool(entries),
        f"table {where} without entries",
        '{"entries": [...]}',
        "write it anew",
    )
    return tuple(_entry(raw, f"{where}, entry {number}") for number, raw in enumerate(entries))


def _entry(raw: object, where: str) -> Entry:
    fields = _checked(raw, Entry, where)
    fields["config"] = MatmulConfig(**_checked(fields["config"], MatmulConfig, where))
    return Entry(**fields)


_ALLOWED = {
    "kernel": ("triton", "hopper", "library"),
    "transport": ("copy_engine", "sm"),
    "tile_m": _POWERS,
    "tile_n": _POWERS,
    "tile_k": _POWERS,
    "num_stages": range(1, 17),
    "num_warps": (1, 2, 4, 8, 16),
    "group_m": range(1, 1025),
    "num_slices": (1, 2, 4, 8, 16, 32),
    "num_producers": range(1, 1025),
    "band_sources": range(1, 9),
    "team": range(1, 1025),
    "shots": (1, 2),
}
_SIZES = ("rows", "cols", "depth")


def _checked(raw: object, kind: type, where: str) -> dict[str, Any]:
    """``raw`` as arguments of ``kind``: no unknown field, none missing, each of the type and range
    it must have."""
    known = {field.name: field for field in fields_of(kind)}
    needed = {name for name, field in known.items() if field.default is MISSING}
    if not isinstance(raw, dict) or not needed <= set(raw) <= set(known):
        given = sorted(map(str, raw)) if isinstance(raw, dict) else type(raw).__name__
        raise InputError(
            f"asked: {given} in {where}; allowed: {', '.join(known)}; remedy: write the table anew"
        )
    for name, value in raw.items():
        if name in _ALLOWED:
            good = type(value) in (int, str) and value in _ALLOWED[name]
        elif name in _SIZES:
            good = type(value) is int and 0 < value < 2**31
        elif name == "world_size":
            good = type(value) is int and value in FUSED_WORLD_SIZES
        elif name == "us":
            good = value is None or (type(value) in (int, float) and 0 < value < math.inf)
        else:
            good = name == "config" or type(value) is bool
        require(
            good,
            f"{name} = {value!r} in {where}",
            "what config.MatmulConfig and config.Entry say",
            "write the table anew",
        )
    return dict(raw)


def nearest(
    op: str,
    world_size: int,
    rows: int,
    cols: int,
    depth: int,
    can_run: Callable[[MatmulConfig], bool] = lambda _: True,
    entries: tuple[Entry, ...] | None = None,
) -> Entry:
    """The measured entry of ``op`` nearest to a shape, of those whose configuration ``can_run``.
    ``entries``: another table."""
    known = tuned_entries(op) if entries is None else entries
    return min(
        (e for e in known if can_run(e.config)),
        key=lambda e: e.distance(rows, cols, depth, world_size),
    )


def plan_matmul_reduce_scatter(
    problem: Problem, machine: Machine, interpreting: bool
) -> Plan[MatmulConfig]:
    """The path of a matmul_reduce_scatter. ``rows`` = M/R, of one rank's result; ``cols`` = N;
    ``depth`` = K/R."""
    p = problem
    settled = _before_measured(p, machine, interpreting, "reduce", "a rank's result")
    if settled is not None:
        return settled
    return _plan_gpu(
        "matmul_reduce_scatter",
        p,
        machine,
        p.rows * p.world_size,
        lambda c: c.takes(p.rows) and _suits(c, p),
    )


def plan_matmul_all_to_all(
    problem: Problem, machine: Machine, interpreting: bool
) -> Plan[MatmulConfig]:
    """The path of a matmul_all_to_all. ``rows``, ``cols``: of the part for one rank; ``depth`` =
    K."""
    p = problem
    settled = _before_measured(p, machine, interpreting, "exchange", "a part")
    if settled is not None:
        return settled
    if p.cols * p.itemsize % 16:  # tiles leave by TMA
        return Plan(
            "unfused",
            f"parts of {p.cols} columns are no multiple of 16 bytes, which the copy hardware needs",
        )
    return _plan_gpu("matmul_all_to_all", p, machine, p.rows * p.world_size, lambda c: True)


def plan_all_to_all_matmul(
    problem: Problem, machine: Machine, interpreting: bool
) -> Plan[MatmulConfig]:
    """The path of an all_to_all_matmul. ``rows``, ``depth``: of the part of x for one rank;
    ``cols`` = N."""
    p = problem
    settled = _before_measured(p, machine, interpreting, "exchange", "a part")
    if settled is not None:
        return settled
    return _plan_gpu(
        "all_to_all_matmul",
        p,
        machine,
        p.rows * p.world_size,
        lambda c: c.takes(p.rows) and p.depth % c.tile_k == 0,
    )


def plan_matmul_all_reduce(
    problem: Problem, machine: Machine, interpreting: bool
) -> Plan[MatmulConfig]:
    """The path of a matmul_all_reduce. ``rows`` = M, of the whole result; ``cols`` = N; ``depth`` =
    K/R."""
    p = problem
    refused = _without_fusion(p, machine, interpreting, "reduce")
    if refused is not None:
        return refused
    if machine.backend != "cpu":
        if p.rows > MEASURED_ALL_REDUCE_ROWS:
            return Plan(
                "unfused",
                f"above {MEASURED_ALL_REDUCE_ROWS} rows no measurement shows the fused kernel ahead",
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
