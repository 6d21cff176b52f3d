"""Which rank owns which embedding tables or columns of them, and how lookups are divided.

No torch, no triton. ``plan_sharding`` balances the bytes that a sample reads from tables and the
bytes that it sends; ``plan_embedding`` chooses the path of a call. ``ShardingPlan.explain`` and
``tw.explain`` print what they say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from numbers import Integral, Real
from operator import index

from tileweave.errors import InputError, require
from tileweave.planning import topology
from tileweave.planning.machine import Machine
from tileweave.planning.problem import FUSED_WORLD_SIZES, Plan

ALIGNMENT = 16  # bytes that one thread loads and stores at once
# Bytes of a row and of a table's part from which on copy engines are used.
NARROWEST_COPY, LEAST_COPY = 256, 1 << 20
_MOST_OF_L2 = 4  # a larger table gains little from L2, and alternates with others


@dataclass(frozen=True, slots=True)
class EmbeddingLayout:
    """Where the pooled vectors of each rank are in a row of the result.

    Attributes
    ----------
    columns : tuple of tuple of int
        ``columns[rank][i]`` is the first column of the i-th local table (or part) of ``rank``.
    dims : tuple of tuple of int
        ``dims[rank][i]`` is the number of its columns.
    """

    columns: tuple[tuple[int, ...], ...]
    dims: tuple[tuple[int, ...], ...]

    @classmethod
    def in_rank_order(cls, dims: Sequence[Sequence[int]]) -> EmbeddingLayout:
        """A row is the concatenation of the pooled vectors of all ranks, in rank order.

        Parameters
        ----------
        dims : sequence of sequence of int
            ``dims[rank][i]`` is the number of columns of the i-th local table of ``rank``.
        """
        try:
            dims = [tuple(map(index, mine)) for mine in dims]
        except TypeError as error:
            raise InputError(
                f"asked: a layout of {dims!r:.100}; allowed: for each rank, the whole numbers of "
                "columns of its tables; remedy: pass a list of lists"
            ) from error
        columns, at = [], 0
        for mine in dims:
            columns.append(tuple(at + sum(mine[:i]) for i in range(len(mine))))
            at += sum(mine)
        return cls(tuple(columns), tuple(dims))

    @property
    def width(self) -> int:
        """Columns of a row of the result."""
        pairs = zip(self.columns, self.dims, strict=True)
        return max((c + d for cs, ds in pairs for c, d in zip(cs, ds, strict=True)), default=0)

    def flat(self) -> list[int]:
        """The layout as a list of integers, as operators take it; :meth:`unflatten` reads it."""
        numbers = [len(self.dims)]
        for columns, dims in zip(self.columns, self.dims, strict=True):
            numbers += [len(dims), *columns, *dims]
        return numbers

    @classmethod
    def unflatten(cls, numbers: Sequence[int]) -> EmbeddingLayout:
        columns, dims, at = [], [], 1
        for _ in range(numbers[0]):
            count = numbers[at]
            columns.append(tuple(numbers[at + 1 : at + 1 + count]))
            dims.append(tuple(numbers[at + 1 + count : at + 1 + 2 * count]))
            at += 1 + 2 * count
        return cls(tuple(columns), tuple(dims))

    def invalid_reason(self) -> str:
        """Why the layout is invalid; empty if each column of a row is written exactly once."""
        spans = sorted(
            (c, c + d)
            for cs, ds in zip(self.columns, self.dims, strict=True)
            for c, d in zip(cs, ds, strict=True)
        )
        ends = [0, *(end for _, end in spans)]
        wrong = [begin for (begin, _), end in zip(spans, ends, strict=False) if begin != end]
        return f"columns overlap or leave a gap at {wrong[0]}" if wrong else ""


def rows_of(batch: int, world_size: int, rank: int) -> tuple[int, int]:
    """The samples [begin, end) of the global batch that ``rank`` owns: equal chunks, rounded
    up."""
    chunk = -(-batch // world_size)
    return min(rank * chunk, batch), min((rank + 1) * chunk, batch)


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """How lookups are divided.

    bags : bags that a program pools at once.
    unroll : rows of each bag in flight.
    num_warps : warps per program.
    programs_per_sm : programs of the fused kernel per multiprocessor.
    lag : rounds by which own bags follow those of the peers, so that the last stores to peers are
        hidden.
    run : how many blocks of bags of one table are done before the same number of the next table.
        0: all of them, one table after the other. 1: rows of the result are written whole.
    nodes : of the group. Vectors for other nodes are pooled before those for the own one.
    """

    bags: int = 16
    unroll: int = 2
    num_warps: int = 4
    programs_per_sm: int = 6
    lag: int = 8
    run: int = 0
    nodes: int = 1

    def run_of(self, blocks: int) -> int:
        """``run`` for tables of ``blocks`` blocks."""
        return max(min(self.run or blocks, blocks), 1)

    def __str__(self) -> str:
        """The summary that a plan shows; repr has every field."""
        return f"{self.bags} bags x {self.unroll} rows, {self.num_warps} warps"


def unroll_of(pooling: float) -> int:
    """Rows of each bag that are in flight, for bags of ``pooling`` rows on average."""
    return 1 if pooling < 2 else 2 if pooling < 4 else 4


def config_for(row_bytes: int, pooling: float, interpreting: bool = False) -> EmbeddingConfig:
    """As many bags as give each thread four 16-byte loads in flight if bags have one row, else up
    to 16 (measured).

    With more rows per bag programs are small, because all bags of a program take as long as its
    longest one.
    """
    if interpreting:
        return EmbeddingConfig(8, 2, 1, 2, 1)
    vectors, unroll = max(row_bytes // ALIGNMENT, 1), unroll_of(pooling)
    if unroll == 1:
        bags = min(max(4 * 128 // vectors, 4), 64)
        return EmbeddingConfig(1 << (bags.bit_length() - 1), 1, run=1)
    bags = min(max(16 * 64 // (vectors * unroll), 2), 8)
    return EmbeddingConfig(1 << (bags.bit_length() - 1), unroll, num_warps=2, programs_per_sm=12)


def plan_embedding(
    world_size: int,
    row_bytes: int,
    pooling: float,
    machine: Machine,
    interpreting: bool,
    nodes: int = 1,
) -> Plan[EmbeddingConfig]:
    """The plan of a call: what can run, then what is fastest.

    The path depends only on facts that all ranks share. ``row_bytes`` and ``pooling`` may differ;
    they choose the config. ``nodes``: into which the ranks are divided equally.
    """
    if nodes > 1:
        near = world_size // nodes
        inside = plan_embedding(near, row_bytes, pooling, machine, interpreting)
        where = f"{nodes} nodes x {near}"
        if near > 1 and machine.backend != "cpu" and not topology.TRY_ALL:
            return Plan("unfused", f"{where}: {topology.NOT_ON_GPUS}")
        if inside.config is None:
            return Plan("unfused", f"{where}: {inside.reason}")
        reason = f"{where}, vectors cross in slices; {row_bytes} bytes per row"
        return Plan("fused", reason, _over_nodes(inside.config, nodes))
    config = config_for(row_bytes, pooling, machine.backend == "cpu")
    if machine.backend == "cpu" and not interpreting:
        return Plan(
            "unfused",
            "on the CPU torch is faster than interpreted kernels (TRITON_INTERPRET=1 runs those)",
        )
    if world_size == 1:
        return Plan("local", "a group of one rank keeps what it pools", config)
    if world_size not in FUSED_WORLD_SIZES:
        return Plan("unfused", f"world size {world_size} is above {FUSED_WORLD_SIZES[-1]}")
    if machine.backend == "cuda" and machine.arch < 80:
        return Plan("unfused", f"{machine.name} is below sm_80")
    if machine.unreachable:
        return Plan("unfused", machine.unreachable)
    return Plan(
        "fused", f"stores to the samples' owners, {row_bytes} bytes per row", _interleaved(config)
    )


@cache
def _over_nodes(config: EmbeddingConfig, nodes: int) -> EmbeddingConfig:
    return replace(config, nodes=nodes)


@cache
def _interleaved(config: EmbeddingConfig) -> EmbeddingConfig:
    """``config`` with tables in turns. A table that reads much leaves the links idle, one that
    reads little leaves the memory idle."""
    return replace(config, run=config.run or 64)


def order_tables(
    config: EmbeddingConfig,
    batch: int,
    rows: Sequence[int],
    nbytes: Sequence[int],
    l2_bytes: int,
) -> EmbeddingConfig:
    """``config``, with one table after the other where most rows are then found in L2.

    So it is where L2 does not hold all tables together, but each of them, or a good part of it, and
    rows are read several times. Else tables alternate, which balances unequal bags.

    Parameters
    ----------
    batch : bags of each table.

    rows, nbytes : of each table.

    l2_bytes : the size of L2; 0 if it is not known.
    """
    if config.run <= 1 or sum(nbytes) <= l2_bytes or max(nbytes) > _MOST_OF_L2 * l2_bytes:
        return config
    if 2 * batch * config.unroll * len(rows) < sum(rows):  # bags have unroll rows or more
        return config
    return replace(config, run=0)


def gradient_carrier(layout: EmbeddingLayout, batch: int, itemsize: int) -> str:
    """The transport that takes gradients to the owners of the tables: "copy_engine" if rows and
    parts are large enough, else "sm"."""
    dims = [dim for mine in layout.dims for dim in mine]
    rows = batch // len(layout.dims)
    worth = (
        min(dims) * itemsize >= NARROWEST_COPY
        and sum(dims) * itemsize * rows >= LEAST_COPY * len(dims)
        if dims
        else False
    )
    return "copy_engine" if worth else "sm"


# --- The planner ---


@dataclass(frozen=True, slots=True)
class TableSpec:
    """One embedding table.

    Attributes
    ----------
    name : str
        name of the table, for messages.
    rows : int
        number of embeddings.
    dim : int
        number of columns.
    pooling : float
        rows that a feature of a sample reads from it, on average.
    features : int
        how many features of a sample are looked up in it. There is one copy of the table, and the
        gradients of all its features add up in it.
    """

    name: str
    rows: int
    dim: int
    pooling: float = 1.0
    features: int = 1

    def read(self, dim: int) -> float:
        """Elements that a sample reads from ``dim`` columns of it."""
        return self.features * self.pooling * dim


@dataclass(frozen=True, slots=True)
class Shard:
    """Columns [column, column + dim) of the table with index ``table``, on ``rank``."""

    table: int
    column: int
    dim: int
    rank: int


@dataclass(frozen=True, slots=True)
class ShardingPlan:
    """Which rank owns which shards of the tables.

    ``shards`` are in rank order, and within a rank by bytes read, most first. Gradients are sent
    and summed in that order, so tables with many lookups are summed while others still arrive.

    Attributes
    ----------
    tables : tuple of TableSpec
        as they were given.

    shards : tuple of Shard
        table, rank, first column and number of columns of each.

    world_size : int
        number of ranks.

    itemsize : int
        bytes of an element.
    """

    tables: tuple[TableSpec, ...]
    shards: tuple[Shard, ...]
    world_size: int
    itemsize: int

    def of_rank(self, rank: int) -> tuple[Shard, ...]:
        """The shards that ``rank`` owns."""
        return tuple(shard for shard in self.shards if shard.rank == rank)

    def layout(self) -> EmbeddingLayout:
        """The layout of result rows: tables in the order in which they were given, whichever rank
        owns them; of each table its features, one after the other."""
        first = list(accumulate((spec.features * spec.dim for spec in self.tables), initial=0))
        columns, dims = [], []
        for rank in range(self.world_size):
            mine = [(s, feature) for s in self.of_rank(rank) for feature in self._features_of(s)]
            columns.append(
                tuple(first[s.table] + i * self.tables[s.table].dim + s.column for s, i in mine)
            )
            dims.append(tuple(s.dim for s, _ in mine))
        return EmbeddingLayout(tuple(columns), tuple(dims))

    def features(self, rank: int) -> list[int]:
        """The feature of each lookup of ``rank``: features are counted table after table, and
        those of a shard follow each other."""
        first = list(accumulate((spec.features for spec in self.tables), initial=0))
        return [first[s.table] + i for s in self.of_rank(rank) for i in self._features_of(s)]

    def _features_of(self, shard: Shard) -> range:
        return range(self.tables[shard.table].features)

    def bytes_read(self, rank: int) -> float:
        """Bytes that one sample reads on ``rank``."""
        return sum(self.tables[s.table].read(s.dim) * self.itemsize for s in self.of_rank(rank))

    def bytes_sent(self, rank: int) -> int:
        """Bytes of pooled vectors that ``rank`` makes of one sample; the gradient has as many."""
        columns = sum(self.tables[s.table].features * s.dim for s in self.of_rank(rank))
        return columns * self.itemsize

    def memory(self, rank: int) -> int:
        """Bytes of the tables on ``rank``."""
        return sum(self.tables[s.table].rows * s.dim * self.itemsize for s in self.of_rank(rank))

    def explain(self) -> str:
        """The plan as text: tables and memory per rank, and bytes read and pooled per sample,
        relative to the mean of all ranks."""
        ranks = range(self.world_size)
        read = [self.bytes_read(rank) for rank in ranks]
        pooled = [self.bytes_sent(rank) for rank in ranks]
        lines = []
        for rank in ranks:
            names = [self._name(s) for s in self.of_rank(rank)]
            lines.append(
                f"rank {rank}: reads {read[rank]:.0f} bytes per sample "
                f"({_to_mean(read, rank):.2f} of the mean), "
                f"pools {pooled[rank]} ({_to_mean(pooled, rank):.2f}), "
                f"{self.memory(rank) / 2**20:.1f} MiB, "
                f"{len(names)} tables: {', '.join(names) or 'none'}"
            )
        split = sorted(
            {self.tables[s.table].name for s in self.shards if s.dim != self.tables[s.table].dim}
        )
        lines.append(f"cut by columns, too large for one rank: {', '.join(split) or 'none'}")
        return "\n".join(lines)

    def _name(self, shard: Shard) -> str:
        spec = self.tables[shard.table]
        whole = shard.dim == spec.dim
        return spec.name if whole else f"{spec.name}[:, {shard.column}:{shard.column + shard.dim}]"


def _to_mean(numbers: Sequence[float], rank: int) -> float:
    mean = sum(numbers) / len(numbers)
    return numbers[rank] / mean if mean else 1.0


def plan_sharding(
    tables: Sequence[TableSpec], world_size: int, itemsize: int = 4, memory: int | None = None
) -> ShardingPlan:
    """Assign tables to ranks so that all ranks read and send about as many bytes per sample.

    Tables are assigned in order of bytes read, most first. Each goes to the rank where the larger
    of two fractions stays smallest: of all bytes read (memory bandwidth), and of all columns (link
    bandwidth). Ties are decided by the other fraction, then memory, then the lowest rank. A table
    that reads more than the mean of the ranks, or that does not fit ``memory``, is cut by columns
    into equal parts of at least 16 bytes per row. All features of a table, or of a part, are looked
    up on the rank that has it.

    If that does not fit ``memory``, tables are assigned by size, largest first, to the rank that
    holds least; then both ways are tried with tables cut as finely as possible.

    Parameters
    ----------
    tables : sequence of TableSpec
        the tables, in the order of their columns in the result.
    world_size : int
        number of ranks.
    itemsize : int
        bytes of an element.
    memory : int, optional
        bytes that each rank has for tables; None: no limit.

    Returns
    -------
    ShardingPlan
        Which rank owns which tables, or which columns of them; the same on every rank.

    Raises
    ------
    InputError
        if sizes are invalid, or the tables do not fit ``memory`` in any of these ways.
    """
    _check_sizes(tables, world_size, itemsize)
    share = sum(t.read(t.dim) * itemsize for t in tables) / world_size
    refused: InputError | None = None
    for finely, largest_first in ((False, False), (False, True), (True, False), (True, True)):
        pieces: list[Piece] = []
        for number, table in enumerate(tables):
            parts = _parts(table, share, world_size, itemsize, memory, finely)
            dim = table.dim // parts
            cost, nbytes = -table.read(dim) * itemsize, table.rows * dim * itemsize
            pieces += [(cost, number, part * dim, dim, nbytes) for part in range(parts)]
        try:
            shards = _deal(tables, pieces, share, world_size, memory, largest_first)
        except InputError as error:
            refused = refused or error
        else:
            return ShardingPlan(tuple(tables), tuple(shards), world_size, itemsize)
    assert refused is not None, "the last way ended in an error, too"
    raise refused


_MOST_RANKS = 1 << 16  # each gets a list of its shards


def _check_sizes(tables: Sequence[TableSpec], world_size: int, itemsize: int) -> None:
    def counts(*numbers: object) -> bool:
        return all(isinstance(number, Integral) and int(number) >= 1 for number in numbers)

    fits = counts(world_size, itemsize) and world_size <= _MOST_RANKS
    require(
        fits,
        f"{world_size} ranks, {itemsize} bytes an element",
        f"integers, 1 at least, and at most {_MOST_RANKS} ranks",
        "pass such numbers",
    )
    for table in tables:
        fits = isinstance(table, TableSpec) and counts(table.rows, table.dim, table.features)
        fits = fits and isinstance(table.pooling, Real) and 0 <= table.pooling < math.inf
        allowed = (
            "TableSpec(name, rows, dim, pooling, features): integer rows, dim and features, "
            "1 at least; finite pooling, 0 at least"
        )
        require(fits, lambda table=table: f"{table}", allowed, "correct the table")


Piece = tuple[float, int, int, int, int]  # -bytes read, table, column, dim, memory


def _deal(
    tables: Sequence[TableSpec],
    pieces: list[Piece],
    share: float,
    world_size: int,
    memory: int | None,
    largest_first: bool,
) -> list[Shard]:
    """Assign the pieces to ranks one after the other; see :func:`plan_sharding`."""
    read, wide, held, shards = [0.0] * world_size, [0.0] * world_size, [0] * world_size, []
    all_read = max(share * world_size, 1e-9)
    all_wide = max(sum(t.features * t.dim for t in tables), 1)
    for cost, number, column, dim, nbytes in sorted(
        pieces, key=(lambda p: (-p[4], p)) if largest_first else None
    ):
        fitting = [
            rank for rank in range(world_size) if memory is None or held[rank] + nbytes <= memory
        ]
        if not fitting:
            raise InputError(
                f"asked: {tables[number].name} of {nbytes} bytes on a rank that has {min(held)} "
                f"bytes of other tables; allowed: {memory} bytes per rank; "
                "remedy: more ranks, a narrower dtype, or more memory"
            )
        reading, sending = -cost / all_read, tables[number].features * dim / all_wide

        def shares(r: int, reading: float = reading, sending: float = sending) -> tuple[float, ...]:
            both = read[r] + reading, wide[r] + sending
            return (
                (held[r], *sorted(both), r) if largest_first else (max(both), min(both), held[r], r)
            )

        rank = min(fitting, key=shares)
        read[rank] += reading
        wide[rank] += sending
        held[rank] += nbytes
        shards.append(Shard(number, column, dim, rank))
    shards.sort(key=lambda s: (s.rank, -tables[s.table].read(s.dim), s.table, s.column))
    return shards


def _parts(
    table: TableSpec, share: float, world_size: int, itemsize: int, memory: int | None, finely: bool
) -> int:
    """Into how many equal parts a table is cut: as few as keep each part below the ``share`` and
    ``memory`` of a rank; with ``finely`` as many as allowed."""
    grain = max(ALIGNMENT // itemsize, 1)
    allowed = [
        n
        for n in range(1, world_size + 1)
        if table.dim % n == 0 and (n == 1 or table.dim // n % grain == 0)
    ]
    for parts in () if finely else allowed:
        reads = table.read(table.dim) * itemsize / parts
        holds = table.rows * table.dim * itemsize / parts
        if reads <= share * (1 + 1e-9) and (memory is None or holds <= memory):
            return parts
    return allowed[-1]
