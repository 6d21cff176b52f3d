"""Fused kernels, tile by tile, on SimPy: programs, tiles, pushes, signals, driven by the maps of ``schedule.py``.

One rank is simulated. Its peers do the same at the same time with their rank in place of its own, so what it sends at some
time arrives, at that time, from who stands as far behind it: that is how arrivals are known without simulating peers.

Two shapes of kernel: *gather* (the collective comes before the matmul: tiles wait for shards) and *scatter* (it comes behind:
tiles are pushed to their owner, remote ones first, and what arrives is summed or kept).
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, Literal

import simpy

from tileweave.config import MatmulConfig
from tileweave.schedule import TileSchedule, Unit, push_order
from tileweave.sim.costs import Costs
from tileweave.sim.machine import Cluster
from tileweave.sim.network import Flow, Links, inside_hops, view

_TILE_AREA = 128 * 128  # what fused_tile and fused_part are for
Combine = Literal["sum", "sum_and_gather", "one_shot", "keep"]


@dataclass(frozen=True, slots=True)
class TileEvent:
    """Something the rank did: ``push``, ``wait``, ``compute`` or ``sum``; seconds; program -1 is the copy engine."""

    program: int
    kind: str
    peer: int
    begin: float
    end: float
    tile: int = -1


@dataclass(slots=True)
class KernelRun:
    """A simulated kernel: seconds from launch to end, the same without launch, and what happened, if it was recorded."""

    seconds: float
    inner: float
    waited: float = 0.0
    events: list[TileEvent] = field(default_factory=list)


class _Kernel:
    """What both shapes share: the clock, the links, the tile cost, the record."""

    def __init__(self, costs: Costs, cluster: Cluster, push_fraction: float, record: bool) -> None:
        self.env = simpy.Environment()
        self.costs, self.cluster, self.c = costs, cluster, costs.c
        self.view = view(cluster, push_fraction)
        self.links = Links(self.env, self.view.capacities)
        self.events: list[TileEvent] = []
        self.recording = record
        self.travelling = 0
        self.waited = 0.0
        self.last_arrival = 0.0

    def note(self, program: int, kind: str, peer: int, begin: float, tile: int = -1) -> None:
        if self.recording and self.env.now > begin:
            self.events.append(TileEvent(program, kind, peer, begin, self.env.now, tile))

    def push(self, nbytes: float, distances: list[int], latency: float, cap: float = float("inf")) -> simpy.Event:
        """``nbytes`` to the rank at each distance at once; the event is when a waiter there sees the signal."""
        self.travelling += 1
        delay = latency + self.c.signal
        flows = [Flow(nbytes, self.view.loads(inside_hops(self.cluster, d)), delay, cap) for d in distances]
        sent = self.links.send(flows)
        sent.callbacks.append(self._arrived)
        return sent

    def _arrived(self, _: simpy.Event) -> None:
        self.travelling -= 1
        self.last_arrival = self.env.now

    def slowed(self, seconds: float) -> float:
        """Work begun while links are busy takes longer: power and memory are shared."""
        return seconds * (1.0 + self.c.corun) if self.travelling else seconds

    def run(self, launch: float, processes: list[simpy.Process]) -> KernelRun:
        self.env.run(self.env.all_of(processes))
        inner = max(float(self.env.now), self.last_arrival)
        return KernelRun(launch + self.costs.throttled(inner), inner, self.waited, self.events)


def gather_matmul(
    schedule: TileSchedule,
    config: MatmulConfig,
    costs: Costs,
    cluster: Cluster,
    graph: bool,
    itemsize: int = 2,
    record: bool = False,
) -> KernelRun:
    """all_gather_matmul as its kernel runs it: pushes by copy engine or producers, tiles that wait for their sources."""
    return _Gather(schedule, config, costs, cluster, itemsize, record).run(
        costs.c.fused_launch if graph else costs.c.fused_eager, []
    )


class _Gather(_Kernel):
    def __init__(
        self, schedule: TileSchedule, config: MatmulConfig, costs: Costs, cluster: Cluster, itemsize: int, record: bool
    ) -> None:
        by_engine = config.transport == "copy_engine"
        super().__init__(costs, cluster, costs.c.copy_fraction if by_engine else costs.c.push_fraction, record)
        self.schedule, self.config, self.itemsize, self.by_engine = schedule, config, itemsize, by_engine
        size = schedule.world_size
        self.shard = schedule.rows * schedule.depth * itemsize
        self.arrived = {(schedule.rank - step) % size: self.env.event() for step in range(1, size)}
        self.arrived[schedule.rank] = self.env.event()
        if not (schedule.spans_shards and not by_engine):
            self.arrived[schedule.rank].succeed()
        self.slices_left = config.num_slices
        self.area = schedule.tile_m * schedule.tile_n / _TILE_AREA
        self.parts = {}
        total = schedule.num_tiles * schedule.k_blocks
        m, n, k = schedule.rows * size, schedule.cols, schedule.depth
        self.memory = (m * k + n * k + m * n) * itemsize / costs.memory_rate / max(total, 1)

    def run(self, launch: float, processes: list[simpy.Process]) -> KernelRun:
        work = {p: list(self.schedule.units(p)) for p in range(self.schedule.num_programs)}
        self.active = max(sum(1 for units in work.values() if units), 1)
        if self.by_engine:
            processes.append(self.env.process(self._engine()))
        producers = 0 if self.by_engine else self.config.num_producers
        for program, units in work.items():
            if units or program < producers:
                processes.append(self.env.process(self._program(program, units, producers)))
        return super().run(launch, processes)

    def _engine(self) -> Generator[simpy.Event, Any, None]:
        rank, size = self.schedule.rank, self.schedule.world_size
        for step, peer in enumerate(push_order(rank, size), 1):
            begin = self.env.now
            yield self.push(self.shard, [step], self.c.copy_latency if step == 1 else self.c.gap)  # the rest are queued
            self.note(-1, "push", peer, begin)
            self.arrived[(rank - step) % size].succeed()

    def _program(self, program: int, units: list[Unit], producers: int) -> Generator[simpy.Event, Any, None]:
        if program < producers:
            yield from self._produce(program)
        for unit in units:
            yield from self._unit(program, unit)

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

    def _unit(self, program: int, unit: Unit) -> Generator[simpy.Event, Any, None]:
        schedule, begin = self.schedule, self.env.now
        sources = schedule.sources(unit)
        missing = [self.arrived[source] for source in sources if not self.arrived[source].triggered]
        if missing:
            yield self.env.all_of(missing)
            self.waited += self.env.now - begin
            self.note(program, "wait", sources[-1], begin, unit.tile)
        begin = self.env.now
        blocks = unit.k_end - unit.k_begin
        memory = self.memory * blocks * self.active
        depth = min(blocks * schedule.tile_k, schedule.depth)
        c = self.c
        one = self.costs.fused_block(schedule.tile_m, schedule.tile_n, depth, self.active, self.itemsize, memory)
        ends = (c.fused_tile if unit.owner == program else c.fused_part) * self.area
        yield self.env.timeout(self.slowed(one) + ends)
        self.note(program, "compute", sources[-1], begin, unit.tile)
        if unit.owner != program:
            self._part(unit.tile, program).succeed()
        elif unit.helpers:
            begin = self.env.now
            team = self.schedule.cut(schedule.segment(unit.segment)[1])[1]
            yield self.env.all_of([self._part(unit.tile, program - team * i) for i in range(1, unit.helpers + 1)])
            yield self.env.timeout(c.fused_part * self.area * unit.helpers)
            self.note(program, "sum", sources[-1], begin, unit.tile)

    def _part(self, tile: int, program: int) -> simpy.Event:
        return self.parts.setdefault((tile, program), self.env.event())


@dataclass(frozen=True, slots=True)
class ScatterWork:
    """A kernel whose tiles belong to other ranks, ``per_owner`` to each.

    block : seconds of one tile on one program. area : of a tile, in tiles of 128 x 128. wire_bytes : of one tile.
    combine : what its owner does with what arrives: ``sum`` (reduce-scatter), ``sum_and_gather`` (all-reduce in two shots),
    ``one_shot`` (all-reduce: everybody gets all parts and sums them), ``keep`` (all-to-all).
    """

    world_size: int
    per_owner: int
    programs: int
    block: float
    wire_bytes: float
    combine: Combine
    area: float = 1.0
    remote_first: bool = True


def scatter(work: ScatterWork, costs: Costs, cluster: Cluster, graph: bool, record: bool = False) -> KernelRun:
    """A matmul (or lookup) whose tiles are pushed as they are made: owners by push order, the own ones last."""
    kernel = _Scatter(work, costs, cluster, record)
    return kernel.run(costs.c.fused_launch if graph else costs.c.fused_eager, kernel.start())


class _Scatter(_Kernel):
    def __init__(self, work: ScatterWork, costs: Costs, cluster: Cluster, record: bool) -> None:
        super().__init__(costs, cluster, costs.c.store_fraction, record)
        self.work = work
        self.got: dict[tuple[int, int], simpy.Event] = {}
        self.queue: simpy.Store = simpy.Store(self.env)
        loads = self.view.loads(inside_hops(cluster, 1))
        self.rate = min(self.view.capacities[link] / load for link, load in loads.items() if not link.startswith("pair"))

    def start(self) -> list[simpy.Process]:
        work, size = self.work, self.work.world_size
        owners = [*push_order(0, size), 0] if work.remote_first else list(range(size))
        tiles = [(owner, index) for owner in owners for index in range(work.per_owner)]
        self.active = min(work.programs, len(tiles))
        programs = [self.env.process(self._program(p, tiles[p :: work.programs])) for p in range(self.active)]
        pushes = {"one_shot": size, "sum_and_gather": size, "sum": size - 1, "keep": size - 1}[work.combine]
        return [*programs, self.env.process(self._egress(work.per_owner * pushes))]

    def _egress(self, count: int) -> Generator[simpy.Event, Any, None]:
        """What leaves the rank, one after another: (to how many, bytes, whom it tells)."""
        last: simpy.Event = self.env.timeout(0.0)
        for _ in range(count):
            copies, nbytes, told = yield self.queue.get()
            begin = self.env.now
            yield self.env.timeout(nbytes * copies / self.rate)
            self.note(-1, "push", copies, begin)
            last = self.env.timeout(self.c.push_latency + self.c.signal)
            last.callbacks.append(lambda _, told=told: told.succeed())
        yield last

    def _event(self, distance: int, index: int) -> simpy.Event:
        return self.got.setdefault((distance, index), self.env.event())

    def _program(self, program: int, tiles: list[tuple[int, int]]) -> Generator[simpy.Event, Any, None]:
        work, size = self.work, self.work.world_size
        for owner, index in tiles:
            begin = self.env.now
            busy = bool(self.queue.items)
            yield self.env.timeout(work.block * (1.0 + self.c.corun * busy) + self.c.fused_tile * work.area)
            self.note(program, "compute", owner, begin, index)
            if work.combine == "one_shot":
                self.queue.put((size - 1, work.wire_bytes, self._event(owner, index)))
            elif owner:
                self.queue.put((1, work.wire_bytes, self._event(owner, index)))
            elif work.combine != "keep":
                yield from self._sum(program, [self._event(step, index) for step in range(1, size)], index)
                if work.combine == "sum_and_gather":
                    self.queue.put((size - 1, work.wire_bytes, self.env.event()))
        if work.combine == "one_shot":  # by symmetry a peer's tile is here when mine is there
            for owner, index in tiles:
                yield from self._sum(program, [self._event(owner, index)], index)

    def _sum(self, program: int, parts: list[simpy.Event], index: int) -> Generator[simpy.Event, Any, None]:
        begin = self.env.now
        yield self.env.all_of(parts)
        self.waited += self.env.now - begin
        read = self.work.wire_bytes * (self.work.world_size - 1) * self.active
        yield self.env.timeout(read / (self.c.stream * self.costs.device.memory_rate))
        self.note(program, "sum", 0, begin, index)
