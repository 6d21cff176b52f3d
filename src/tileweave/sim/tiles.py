"""Fused kernels, tile by tile, on SimPy: programs, tiles, pushes and signals, with the schedules of
the kernels (``planning/schedules/gather.py`` and ``scatter.py``).

One rank is simulated. All ranks do the same at the same time. So when this rank sends data to the
rank ``d`` further, the data of the rank ``d`` before it arrives here. That is how arrivals are
known without simulating peers.

There are two kinds of kernels. *gather*: the collective is before the matmul, and tiles wait for
shards. *scatter*: it is after the matmul, tiles are pushed to their owners, those of peers first,
and what arrives is summed or kept.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, Literal

import simpy

from tileweave.planning.costs import Costs
from tileweave.planning.problem import MatmulConfig
from tileweave.planning.schedules.gather import TileSchedule, Unit, push_order
from tileweave.planning.schedules.scatter import ScatterSchedule
from tileweave.sim.machine import Cluster
from tileweave.sim.network import Flow, Links, inside_hops, view

_TILE_AREA = 128 * 128  # the tile that fused_part and scatter_tile were measured for
_PIECE = 64  # columns that an epilogue handles at once
SEVERAL = RESULT = -1
Combine = Literal["sum", "sum_and_gather", "one_shot", "keep"]


@dataclass(frozen=True, slots=True)
class TileEvent:
    """A ``push``, ``pull``, ``wait``, ``compute`` or ``sum`` of a program; times in seconds.
    Program -1 is the copy engine."""

    program: int
    kind: str
    peer: int
    begin: float
    end: float
    tile: int = -1


@dataclass(slots=True)
class KernelRun:
    """A simulated kernel: seconds from launch to end, the same without the launch, and the events
    if they were recorded."""

    seconds: float
    inner: float
    waited: float = 0.0
    events: list[TileEvent] = field(default_factory=list)


class Kernel:
    """The common part of both kinds: the clock, the links, the units of a schedule, the events."""

    def __init__(
        self,
        schedule: TileSchedule,
        costs: Costs,
        cluster: Cluster,
        push_fraction: float,
        itemsize: int,
        nbytes: float,
        record: bool,
    ) -> None:
        self.env = simpy.Environment()
        self.schedule, self.costs, self.cluster, self.c, self.itemsize = (
            schedule,
            costs,
            cluster,
            costs.c,
            itemsize,
        )
        self.view = view(cluster, push_fraction)
        self.links = Links(self.env, self.view.capacities)
        self.tile = costs.c.fused_tile
        self.events: list[TileEvent] = []
        self.recording = record
        self.travelling = 0
        self.waited = 0.0
        self.parts: dict[tuple[int, int], simpy.Event] = {}
        self.work = {p: list(schedule.units(p)) for p in range(schedule.num_programs)}
        self.active = max(sum(1 for units in self.work.values() if units), 1)
        self.area = schedule.tile_m * schedule.tile_n / _TILE_AREA
        blocks = max(schedule.num_tiles * schedule.k_blocks, 1)
        # bytes/s from memory while all programs read
        self.reads = min(costs.memory_rate, self.active * costs.c.matmul_stream)
        # seconds per K block to read bytes that are not in L2
        self.memory = nbytes / self.reads / blocks * self.active

    def note(self, program: int, kind: str, peer: int, begin: float, tile: int = -1) -> None:
        if self.recording and self.env.now > begin:
            self.events.append(TileEvent(program, kind, peer, begin, self.env.now, tile))

    def push(self, nbytes: float, distances: list[int], latency: float) -> simpy.Event:
        """Send ``nbytes`` to the ranks at all ``distances`` at once. The event is the time when a
        program there sees the signal."""
        self.travelling += 1
        delay = latency + self.c.signal
        sent = self.links.send(
            [Flow(nbytes, self.view.loads(inside_hops(self.cluster, d)), delay) for d in distances]
        )
        sent.callbacks.append(self._arrived)
        return sent

    def _arrived(self, _: simpy.Event) -> None:
        self.travelling -= 1

    def blocks(self, count: int) -> simpy.Event:
        """The main loop over ``count`` K blocks. It takes longer if it begins while links are busy,
        because of power and memory."""
        one = self.block_time(count)
        return self.env.timeout(one * (1.0 + self.c.corun) if self.travelling else one)

    def block_time(self, count: int, memory: float = 0.0) -> float:
        """Seconds of ``count`` K blocks; ``memory``: of further bytes that the ring of operands
        brings meanwhile."""
        schedule = self.schedule
        return self.costs.fused_block(
            schedule.tile_m,
            schedule.tile_n,
            min(count * schedule.tile_k, schedule.depth),
            self.active,
            self.itemsize,
            self.memory * count + memory,
        )

    def unit(self, program: int, unit: Unit, peer: int) -> Generator[simpy.Event, Any, bool]:
        """Compute one unit. Returns whether that completes its tile."""
        begin = self.env.now
        yield self.blocks(unit.k_end - unit.k_begin)
        return (yield from self.finish(program, unit, peer, begin))

    def finish(
        self, program: int, unit: Unit, peer: int, begin: float
    ) -> Generator[simpy.Event, Any, bool]:
        """The end of a unit: pass a partial tile on, or collect partial tiles and end the tile."""
        schedule, c, owns = self.schedule, self.c, unit.owner == program
        yield self.env.timeout(self.tile if owns else c.fused_part * self.area)
        self.note(program, "compute", peer, begin, unit.tile)
        if not owns:
            self._part(unit.tile, program).succeed()
        elif unit.helpers:
            begin = self.env.now
            team = schedule.cut(schedule.segment(unit.segment)[1])[1]
            yield self.env.all_of(
                [self._part(unit.tile, program - team * i) for i in range(1, unit.helpers + 1)]
            )
            yield self.env.timeout(c.fused_part * self.area * unit.helpers)
            self.note(program, "sum", peer, begin, unit.tile)
        return owns

    def _part(self, tile: int, program: int) -> simpy.Event:
        return self.parts.setdefault((tile, program), self.env.event())

    def run(self, launch: float, processes: list[simpy.Process]) -> KernelRun:
        self.env.run(self.env.all_of(processes))
        inner = float(self.env.now)
        schedule, rate = self.schedule, self.costs.flops * self.c.fused_rate
        elements = schedule.num_tiles * schedule.tile_m * schedule.tile_n
        # Tensor cores draw the power, and they also wait: for shards, for tiles to end. In a step
        # of training the clock is that of the whole step.
        multiply = inner if self.costs.sustained else 2.0 * elements * schedule.depth / rate
        busy = min(multiply / inner, 1.0)
        seconds = launch + self.costs.throttled(inner, busy)
        return KernelRun(seconds, inner, self.waited, self.events)


def gather_matmul(
    schedule: TileSchedule,
    config: MatmulConfig,
    costs: Costs,
    cluster: Cluster,
    graph: bool,
    itemsize: int = 2,
    record: bool = False,
) -> KernelRun:
    """all_gather_matmul: pushes by copy engines or producers, and tiles that wait for their
    sources."""
    return _Gather(schedule, config, costs, cluster, itemsize, record).run(
        costs.c.fused_launch if graph else costs.c.fused_eager, []
    )


class _Gather(Kernel):
    def __init__(
        self,
        schedule: TileSchedule,
        config: MatmulConfig,
        costs: Costs,
        cluster: Cluster,
        itemsize: int,
        record: bool,
    ) -> None:
        self.by_engine = config.transport == "copy_engine"
        fraction = costs.c.copy_fraction if self.by_engine else costs.c.push_fraction
        size, k = schedule.world_size, schedule.depth
        m, n = schedule.rows * size, schedule.cols
        super().__init__(
            schedule, costs, cluster, fraction, itemsize, (m * k + n * k + m * n) * itemsize, record
        )
        self.config = config
        self.shard = schedule.rows * k * itemsize
        self.arrived = {source: self.env.event() for source in range(size)}
        # otherwise the own shard is pushed to the own slot, too
        if self.by_engine or not schedule.spans_shards:
            self.arrived[schedule.rank].succeed()
        self.slices_left = config.num_slices

    def run(self, launch: float, processes: list[simpy.Process]) -> KernelRun:
        if self.by_engine:
            processes.append(self.env.process(self._engine()))
        producers = 0 if self.by_engine else self.config.num_producers
        # in the Hopper kernel some warps of a program push while others multiply
        concurrent = self.config.kernel == "hopper"
        if concurrent:
            processes += [self.env.process(self._produce(program)) for program in range(producers)]
        for program, units in self.work.items():
            if units or program < producers:
                processes.append(
                    self.env.process(self._program(program, units, 0 if concurrent else producers))
                )
        return super().run(launch, processes)

    def _engine(self) -> Generator[simpy.Event, Any, None]:
        rank, size = self.schedule.rank, self.schedule.world_size
        for step, peer in enumerate(push_order(rank, size), 1):
            begin = self.env.now
            late = self.c.copy_latency if step == 1 else 0.0
            yield self.push(self.shard, [step], late + self.c.copy_queued)
            self.note(-1, "push", peer, begin)
            self.arrived[(rank - step) % size].succeed()

    def _program(
        self, program: int, units: list[Unit], producers: int
    ) -> Generator[simpy.Event, Any, None]:
        if program < producers:
            yield from self._produce(program)
        for unit in units:
            begin, sources = self.env.now, self.schedule.sources(unit)
            missing = [
                self.arrived[source] for source in sources if not self.arrived[source].triggered
            ]
            if missing:
                yield self.env.all_of(missing)
                self.waited += self.env.now - begin
                self.note(program, "wait", sources[-1], begin, unit.tile)
            yield from self.unit(program, unit, sources[-1])

    def _produce(self, program: int) -> Generator[simpy.Event, Any, None]:
        distances = list(range(1, self.schedule.world_size))
        for piece in range(program, self.config.num_slices, self.config.num_producers):
            begin = self.env.now
            yield self.push(self.shard / self.config.num_slices, distances, self.c.push_latency)
            self.note(program, "push", -1, begin, piece)
            self.slices_left -= 1
            if self.slices_left == 0:
                for event in self.arrived.values():
                    if not event.triggered:
                        event.succeed()


def _operands_read(schedule: ScatterSchedule, itemsize: int, l2: float, by_columns: bool) -> float:
    """Bytes of x and w that are read from memory. The rows of each owner need all of w
    (``by_columns``: the columns of each owner need all of x). What does not fit L2 is read again
    for every wave of tiles that needs it."""
    size, k = schedule.world_size, schedule.depth
    m, n = (
        (schedule.rows, schedule.cols * size)
        if by_columns
        else (schedule.rows * size, schedule.cols)
    )

    def operands(tile: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The rows of x and of w that a tile reads."""
        first, _, col = schedule.place(tile)
        owner, row = divmod(first, schedule.rows)
        return ((0, row), (owner, col)) if by_columns else ((owner, row), (0, col))

    read = 0.0
    for part, whole, width in ((0, m, schedule.tile_m), (1, n, schedule.tile_n)):
        nbytes = float(whole * k * itemsize)
        if nbytes > l2:
            tiles = range(schedule.num_tiles)
            waves = (
                tiles[at : at + schedule.num_programs]
                for at in range(0, schedule.num_tiles, schedule.num_programs)
            )
            touched = sum(len({operands(tile)[part] for tile in wave}) for wave in waves)
            nbytes = max(nbytes, float(touched * width * k * itemsize))
        read += nbytes
    return read


def scatter_matmul(
    schedule: ScatterSchedule,
    combine: Combine,
    costs: Costs,
    cluster: Cluster,
    graph: bool,
    itemsize: int = 2,
    record: bool = False,
    by_engine: bool = False,
    by_columns: bool = False,
) -> KernelRun:
    """A matmul whose tiles are pushed to their owners when they are computed, those of peers first.

    by_engine : copy engines copy whole chunks, one by one, when all tiles of a chunk are there;
        otherwise the kernel stores each tile to its owner. Of an all-reduce the kernel stores own
        tiles at all peers (decision 0045).

    by_columns : owners have columns of the result, and not rows (an all-to-all that scatters
        columns).

    combine : what an owner does with what arrives: ``sum`` (reduce-scatter), ``sum_and_gather``
        (all-reduce in two shots), ``one_shot`` (all-reduce: all ranks get all partial sums and add
        them), ``keep`` (all-to-all: copies them out of the slot; copy engines write to the result
        directly).
    """
    kernel = _Scatter(schedule, combine, costs, cluster, itemsize, record, by_engine, by_columns)
    # one shot has a kernel of its own
    late = costs.c.one_shot_launch if combine == "one_shot" else costs.c.fused_launch
    return kernel.run(late if graph else costs.c.scatter_eager, [])


class _Scatter(Kernel):
    def __init__(
        self,
        schedule: ScatterSchedule,
        combine: Combine,
        costs: Costs,
        cluster: Cluster,
        itemsize: int,
        record: bool,
        by_engine: bool,
        by_columns: bool,
    ) -> None:
        fraction = costs.c.copy_fraction if by_engine else costs.c.push_fraction
        nbytes = _operands_read(schedule, itemsize, cluster.device.l2, by_columns)
        super().__init__(schedule, costs, cluster, fraction, itemsize, nbytes, record)
        self.by_engine = by_engine
        if not by_engine:
            self.tile = 0.0  # warps that multiply store tiles themselves: scatter_tile is all of it
        # tiles of each chunk of peers that are not computed yet, by distance of the owner less one
        self.missing = {
            (step, chunk): (end - first) * schedule.tile_cols
            for step in range(schedule.world_size - 1)
            for chunk in range(schedule.chunks)
            for first, end in [schedule.chunk_bounds(chunk)]
        }
        # the end of the last copy of each lane; the pulls of an all-to-all have one per owner
        self.lanes: dict[int, simpy.Event] = {}
        self.owners: ScatterSchedule = schedule
        self.combine: Combine = combine
        self.got: dict[tuple[int, int], simpy.Event] = {}
        self.gathered: dict[int, simpy.Event] = {}  # by chunk
        self.queue: simpy.Store = simpy.Store(self.env)
        loads = self.view.loads(inside_hops(cluster, 1))
        self.rate = min(
            self.view.capacities[link] / load
            for link, load in loads.items()
            if not link.startswith("pair")
        )
        # how much longer programs take to send what copy engines are timed for
        self.by_program = costs.c.copy_fraction / costs.c.push_fraction
        m = schedule.rows * schedule.world_size
        self.tile_bytes = float(
            min(schedule.tile_m, m) * min(schedule.tile_n, schedule.cols) * itemsize
        )
        # whether every tile has rows for all ranks
        self.shares = combine == "one_shot" or schedule.spans_shards

    def run(self, launch: float, processes: list[simpy.Process]) -> KernelRun:
        size, tiles = self.owners.world_size, self.owners.num_tiles
        per_tile = {"one_shot": 1, "sum_and_gather": 2, "sum": 1, "keep": 1}[self.combine]
        if not self.shares:
            per_owner = self.owners.per_source
            tiles, per_tile = (
                per_owner * (size - 1) + (per_owner if self.combine == "sum_and_gather" else 0),
                1,
            )
        processes += [
            self.env.process(self._program(p, units)) for p, units in self.work.items() if units
        ]
        if not self.by_engine:
            processes.append(self.env.process(self._egress(tiles * per_tile)))
        elif self.combine == "sum_and_gather":
            processes.append(self.env.process(self._egress(self.owners.per_source)))
        elif self.combine == "keep":
            processes.append(self.env.process(self._all_pulled()))
        return super().run(launch, processes)

    def _egress(self, count: int) -> Generator[simpy.Event, Any, None]:
        """Send what is queued, one after the other: (peer, bytes in all, event to succeed)."""
        last: simpy.Event = self.env.timeout(0.0)
        for _ in range(count):
            peer, nbytes, arrived = yield self.queue.get()
            begin = self.env.now
            yield self.env.timeout(nbytes / self.rate)
            self.note(-1, "push", peer, begin)
            # self-signaling data needs no fence and no signal after it
            last = self.env.timeout(self.c.signal)
            last.callbacks.append(lambda _, arrived=arrived: arrived.succeed())
        yield last

    def _all_pulled(self) -> Generator[simpy.Event, Any, None]:
        """The end of a call whose programs do not read what copy engines pull."""
        yield self.env.all_of([self._event(step + 1, chunk) for step, chunk in self.missing])

    def _store(self, peer: int, tiles: float, arrived: simpy.Event) -> simpy.Event:
        """Store ``tiles`` tiles. The program is blocked while links take them."""
        self.queue.put((peer, self.tile_bytes * tiles, arrived))
        return self.env.timeout(self.c.scatter_tile * self.area * tiles)

    def _within(self, tile: int) -> tuple[int, int, int]:
        """(distance of the owner from rank + 1, chunk of that owner, index among all tiles of that
        owner)"""
        step, chunk, rest = self.owners.turn(tile)
        return step, chunk, self.owners.chunk_bounds(chunk)[0] * self.owners.tile_cols + rest

    def _count(self, step: int, chunk: int) -> None:
        """Count a computed tile of a chunk of a peer; the last one starts the copy."""
        self.missing[step, chunk] -= 1
        if self.missing[step, chunk] == 0:
            lane = step if self.combine == "keep" else 0
            self.lanes[lane] = self.env.process(self._copy(step, chunk, self.lanes.get(lane)))

    def _copy(
        self, step: int, chunk: int, before: simpy.Event | None
    ) -> Generator[simpy.Event, Any, None]:
        late = self._waits(before)
        if before is not None:
            yield before
        begin = self.env.now
        yield self.push(self._chunk_bytes(chunk), [step + 1], late)
        self.note(-1, "push", (self.owners.rank + 1 + step) % self.owners.world_size, begin)
        self._event(step + 1, chunk).succeed()

    def _chunk_bytes(self, chunk: int) -> float:
        schedule = self.owners
        first, end = schedule.chunk_bounds(chunk)
        rows = min(end * schedule.tile_m, schedule.rows) - first * schedule.tile_m
        return float(rows * schedule.cols * self.itemsize)

    def _gather(self) -> Generator[simpy.Event, Any, None]:
        """The end of a program: copy this program's share of the peers' rows into the result, each
        chunk when all its tiles are there. By symmetry they come when own ones do at peers."""
        size, cols = self.owners.world_size, self.owners.tile_cols
        for chunk in range(self.owners.chunks):
            if chunk not in self.gathered:  # one for all programs, as it is of many tiles
                first, end = self.owners.chunk_bounds(chunk)
                tiles = [self._event(RESULT, i) for i in range(first * cols, end * cols)]
                self.gathered[chunk] = self.env.all_of(tiles)
            yield self.gathered[chunk]
            moved = 2.0 * (size - 1) * self._chunk_bytes(chunk)
            yield self.env.timeout(moved / (self.c.stream * self.costs.device.memory_rate))

    def _waits(self, before: simpy.Event | None) -> float:
        """Seconds until a copy engine begins a chunk that is there: its wait, and a queued copy. An
        engine that has waited for the chunk looks again only after a while."""
        idle = before is None or before.triggered
        c = self.c
        return c.copy_wait + c.copy_queued + (c.copy_look if idle else 0.0)

    def _event(self, step: int, index: int) -> simpy.Event:
        if (step, index) not in self.got:
            self.got[step, index] = self.env.event()
        return self.got[step, index]

    def _program(self, program: int, units: list[Unit]) -> Generator[simpy.Event, Any, None]:
        size, mine, made = self.owners.world_size, [], []
        for unit in units:
            if not self.by_engine:
                self.travelling = len(self.queue.items)
            owner = SEVERAL if self.shares else unit.first_row // self.owners.rows
            done = yield from self.unit(program, unit, owner)
            if not done:
                continue
            step, chunk, index = self._within(unit.tile)
            if self.shares:
                copies = (size - 1) if self.combine == "one_shot" else (size - 1) / size
                yield self._store(SEVERAL, copies, self._event(0, unit.tile))
                mine.append(unit.tile)
                made.append(unit.tile)
            elif owner != self.owners.rank and self.by_engine:
                self._count(step, chunk)
            elif owner != self.owners.rank:
                yield self._store(owner, 1.0, self._event(step + 1, index))
                made.append(unit.tile)
            elif self.combine != "keep" or not self.by_engine:
                parts = [self._event(s, chunk if self.by_engine else index) for s in range(1, size)]
                if self.by_engine:
                    yield from self._add(program, parts, unit)
                    if self.combine == "sum_and_gather":
                        nbytes = (size - 1) * self.tile_bytes * self.by_program
                        self.queue.put((SEVERAL, nbytes, self._event(RESULT, index)))
                    continue
                # a sum reads the tiles of all peers at once
                takes = size - 1 if self.combine == "keep" else 1
                yield from self._sum(program, parts, index, takes)
                if self.combine == "sum_and_gather":
                    yield from self._pass_on(index, size - 1.0)
        if self.by_engine and self.combine == "sum_and_gather":
            yield from self._gather()
            return
        for tile in mine:  # by symmetry rows of peers are here when own rows are there
            yield from self._sum(
                program,
                [self._event(0, tile)],
                tile,
                self.combine == "one_shot" or self._owners(tile)[0],
            )
            if self.combine == "sum_and_gather":
                yield from self._pass_on(tile, (size - 1) / size)
        # likewise rows of other owners
        for tile in made if self.combine == "sum_and_gather" else ():
            yield self._event(RESULT, tile if self.shares else self._within(tile)[2])
            yield self._takes(self._owners(tile)[1])

    def _pass_on(self, index: int, copies: float) -> Generator[simpy.Event, Any, None]:
        """Store a finished tile, or its own rows, to all peers."""
        yield self._store(SEVERAL, copies, self._event(RESULT, index))

    def _sum(
        self, program: int, parts: list[simpy.Event], index: int, takes: int
    ) -> Generator[simpy.Event, Any, None]:
        begin = self.env.now
        yield self.env.all_of(parts)
        self.waited += self.env.now - begin
        share = (
            1.0 / self.owners.world_size
            if self.owners.spans_shards and self.combine != "one_shot"
            else 1.0
        )
        # the slot is read and cleared; "keep" also writes the result
        passes = 3 if self.combine == "keep" else 2
        moved = passes * self.tile_bytes * share * (self.owners.world_size - 1) * self.active
        yield self.env.timeout(moved / (self.c.stream * self.costs.device.memory_rate))
        yield self._takes(takes)
        self.note(program, "sum", 0, begin, index)

    def _add(
        self, program: int, parts: list[simpy.Event], unit: Unit
    ) -> Generator[simpy.Event, Any, None]:
        """Add what copy engines brought for an own tile. It comes through the ring of operands, so
        it is read while the tile is multiplied, unless it came too late for that."""
        begin, late = self.env.now, any(not part.triggered for part in parts)
        yield self.env.all_of(parts)
        self.waited += self.env.now - begin
        read = self.tile_bytes * (self.owners.world_size - 1) * self.active / self.reads
        count = unit.k_end - unit.k_begin
        hidden = self.block_time(count, read) - self.block_time(count)
        yield self.env.timeout(read if late else hidden)
        self.note(program, "sum", 0, begin, unit.tile)

    def _takes(self, sources: int) -> simpy.Event:
        """Read a tile from the slot, one source after the other, in pieces. For each piece a
        program polls, clears and reads the fault flag: memory latencies one after the other,
        however few the bytes."""
        return self.env.timeout(self.c.take * sources * max(self.owners.tile_n // _PIECE, 1))

    def _owners(self, tile: int) -> tuple[int, int]:
        """How many owners of a tile are this rank (0 or 1), and how many are others."""
        first, limit, _ = self.owners.place(tile)
        last = min(first + self.owners.tile_m, limit) - 1
        owners = range(first // self.owners.rows, last // self.owners.rows + 1)
        mine = int(self.owners.rank in owners)
        return mine, len(owners) - mine
