"""all_to_all_matmul, tile by tile, if parts follow each other along K: every tile needs every
source.

The K loop of a tile goes over the sources in order of arrival, the own one first, and waits before
each. Copy engines send chunks of rows, each with a signal, to all peers in turn. Producers push
slices of a part to every peer while other warps multiply. If parts follow each other along rows,
the kernel is an all-gather with other addresses: ``tiles.gather_matmul``.
"""

from __future__ import annotations

from collections.abc import Generator
from itertools import product
from typing import Any

import simpy

from tileweave.planning.costs import Costs
from tileweave.planning.problem import MatmulConfig
from tileweave.planning.schedules.gather import Parts, TileSchedule, Unit, cdiv
from tileweave.sim.machine import Cluster
from tileweave.sim.tiles import SEVERAL, Kernel, KernelRun


def exchange_matmul(
    schedule: TileSchedule,
    parts: Parts,
    config: MatmulConfig,
    costs: Costs,
    cluster: Cluster,
    graph: bool,
    itemsize: int = 2,
    record: bool = False,
) -> KernelRun:
    """The kernel with ``parts.side_by_side``; ``schedule`` and ``parts`` are made by
    ``planning.matmul.exchange_schedule_for``."""
    kernel = _Exchange(schedule, parts, config, costs, cluster, itemsize, record)
    return kernel.run(costs.c.fused_launch if graph else costs.c.fused_eager, [])


class _Exchange(Kernel):
    def __init__(
        self,
        schedule: TileSchedule,
        parts: Parts,
        config: MatmulConfig,
        costs: Costs,
        cluster: Cluster,
        itemsize: int,
        record: bool,
    ) -> None:
        self.by_engine = config.transport == "copy_engine"
        m, n, k = schedule.rows, schedule.cols, schedule.depth
        fraction = costs.c.copy_fraction if self.by_engine else costs.c.push_fraction
        super().__init__(
            schedule, costs, cluster, fraction, itemsize, (m * k + n * k + m * n) * itemsize, record
        )
        self.config, self.sent = config, parts
        self.arrived = {
            (step, chunk): self.env.event()
            for step in range(1, parts.world_size)
            for chunk in range(parts.chunks)
        }
        self.slices_left = config.num_slices

    def run(self, launch: float, processes: list[simpy.Process]) -> KernelRun:
        if self.by_engine:
            processes.append(self.env.process(self._engine()))
        else:
            processes += [
                self.env.process(self._produce(program))
                for program in range(self.config.num_producers)
            ]
        processes += [
            self.env.process(self._program(program, units))
            for program, units in self.work.items()
            if units
        ]
        return super().run(launch, processes)

    def _engine(self) -> Generator[simpy.Event, Any, None]:
        """Send chunk after chunk to all peers in turn. When a chunk is sent to the rank ``step``
        further, one from the rank ``step`` before arrives."""
        rows, width = self.schedule.rows, self.sent.depth * self.itemsize
        for chunk, step in product(range(self.sent.chunks), self._steps()):
            begin, first = self.env.now, chunk * self.sent.chunk_rows
            nbytes = (min(first + self.sent.chunk_rows, rows) - first) * width
            late = self.c.copy_latency if (chunk, step) == (0, 1) else 0.0
            yield self.push(float(nbytes), [step], late + self.c.copy_queued)
            self.note(-1, "push", step, begin)
            self.arrived[step, chunk].succeed()

    def _produce(self, program: int) -> Generator[simpy.Event, Any, None]:
        part = float(self.schedule.rows * self.sent.depth * self.itemsize)
        for piece in range(program, self.config.num_slices, self.config.num_producers):
            begin = self.env.now
            yield self.push(part / self.config.num_slices, list(self._steps()), self.c.push_latency)
            self.note(program, "push", SEVERAL, begin, piece)
            self.slices_left -= 1
            if self.slices_left == 0:
                for event in self.arrived.values():
                    event.succeed()

    def _steps(self) -> range:
        return range(1, self.sent.world_size)

    def _program(self, program: int, units: list[Unit]) -> Generator[simpy.Event, Any, None]:
        per_source = cdiv(self.sent.depth, self.schedule.tile_k)
        for unit in units:
            started = self.env.now
            for step in range(unit.k_begin // per_source, cdiv(unit.k_end, per_source)):
                event = self.arrived.get((step, unit.first_row // self.sent.chunk_rows))
                if event is not None and not event.triggered:
                    begin = self.env.now
                    yield event
                    self.waited += self.env.now - begin
                    self.note(program, "wait", step, begin, unit.tile)
                first = max(unit.k_begin, step * per_source)
                yield self.blocks(min(unit.k_end, (step + 1) * per_source) - first)
            yield from self.finish(program, unit, SEVERAL, started)
