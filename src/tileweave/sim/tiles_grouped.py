"""Fused expert operators, tile by tile, with the schedules of ``planning/schedules/grouped.py`` and
``planning/combine.py``.

*dispatch*: a rank sends its tokens to all ranks that have an expert of theirs, in the order of the
receiver's experts, one block of experts at a time. Tiles are computed expert by expert and wait for
their block. *combine*: tiles are computed in one column chunk after the other. When a chunk is
done on a rank, its rows are summed per token and sent to the rank of the token, which adds what it
receives.

Routing is uniformly random: each token goes to ``topk`` of all experts. One rank is simulated, the
busiest one, by the expectation of the largest of R draws. Its rows are divided among
experts by the quantiles of what random routing gives.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from itertools import accumulate
from statistics import NormalDist
from typing import Any

import simpy

from tileweave.planning.combine import CombineConfig, CombineCut
from tileweave.planning.costs import Costs
from tileweave.planning.schedules.gather import cdiv
from tileweave.planning.schedules.grouped import (
    DispatchConfig,
    GroupedProblem,
    dispatch_counts,
    walk,
)
from tileweave.sim.machine import Cluster
from tileweave.sim.network import Flow, Links, inside_hops, view

_GOLDEN = 0.6180339887498949
_HELD, _VECTOR = 2, 8  # tokens that a thread of the combine sums at once, columns that it loads
MOST_SIGNALS = 32  # signals per source


@dataclass(frozen=True, slots=True)
class Routing:
    """The expectation of random routing. ``p.experts`` are those of one rank."""

    p: GroupedProblem
    skew: float = 1.0

    @property
    def all_experts(self) -> int:
        """Experts of all ranks."""
        return self.p.experts * self.p.world_size

    def rows(self) -> int:
        """Rows of the busiest rank: the mean plus the expected largest deviation of R draws, or
        ``skew`` times the mean if that is more."""
        p = self.p
        mean = float(p.max_tokens * p.topk)
        share = 1.0 / p.world_size
        drawn = (
            mean
            * p.world_size
            * share
            * (1.0 - share)
            * (1.0 - (p.topk - 1) / max(self.all_experts - 1, 1))
        )
        # Blom
        largest = (
            NormalDist().inv_cdf((p.world_size - 0.375) / (p.world_size + 0.25))
            if p.world_size > 1
            else 0.0
        )
        return max(round(max(mean + largest * drawn**0.5, mean * self.skew)), 1)

    def offsets(self) -> list[int]:
        """Where the rows of each expert begin, of the experts that have any: as many as the
        quantiles of random counts say, since a few rows more may be another row of tiles."""
        rows, experts = self.rows(), self.p.experts
        hit = min(max(round(experts * (1.0 - (1.0 - 1.0 / experts) ** rows)), 1), rows)
        mean = rows / hit
        counts = NormalDist(mean, max(mean * (1.0 - 1.0 / hit), 1e-9) ** 0.5)
        # the multiples of the golden ratio, so that large and small ones alternate
        found = [max(counts.inv_cdf((i * _GOLDEN + 0.5) % 1.0 or 0.5), 1.0) for i in range(hit)]
        ends = list(accumulate(found, initial=0.0))
        return [round(rows * end / ends[-1]) for end in ends]

    def reached(self, experts: int) -> float:
        """The fraction of tokens with a choice among ``experts`` given experts."""
        missed = 1.0
        for choice in range(self.p.topk):
            missed *= max(self.all_experts - experts - choice, 0) / (self.all_experts - choice)
        return 1.0 - missed


class _Grouped:
    """Programs, tiles and links of both operators. The main loop of a tile waits for memory as in
    the other fused kernels."""

    def __init__(
        self,
        p: GroupedProblem,
        config: DispatchConfig | CombineConfig,
        skew: float,
        programs: int,
        costs: Costs,
        cluster: Cluster,
    ) -> None:
        self.env = simpy.Environment()
        self.p, self.costs, self.c = p, costs, costs.c
        self.cluster, self.programs = cluster, programs
        self.routing = Routing(p, skew)
        self.offsets = self.routing.offsets()
        self.tile_m, self.tile_n = config.tile_m, config.tile_n
        self.tiles = list(walk(self.offsets, p.cols, config.tile_m, config.tile_n, config.group_m))
        rows, hit = self.offsets[-1], len(self.offsets) - 1
        nbytes = float(rows * p.depth + hit * p.cols * p.depth + rows * p.cols) * p.itemsize
        # read from memory; the rest of a tile's operands is in L2
        self.tile_bytes = nbytes / len(self.tiles)
        self.view = view(cluster, costs.c.push_fraction)
        self.links = Links(self.env, self.view.capacities)

    def tile(self, turn: int) -> simpy.Event:
        """Tile number ``turn`` of a program; programs that have one share the memory rate."""
        active = min(self.programs, len(self.tiles) - turn * self.programs)
        # what L2 gives one program; enough stages of weights are in flight for it
        most = self.costs.fused_feed / self.cluster.device.num_sms
        memory = self.tile_bytes / min(self.costs.memory_rate / active, most)
        one = self.costs.fused_block(
            self.tile_m,
            self.tile_n,
            self.p.depth,
            active,
            self.p.itemsize,
            memory,
            self.c.grouped_rate,
            self.c.grouped_overlap,
        )
        return self.env.timeout(one + self.c.fused_tile)

    def push(self, nbytes: float) -> simpy.Event:
        """Send ``nbytes`` to each peer."""
        distances = range(1, self.p.world_size)
        loads = [self.view.loads(inside_hops(self.cluster, distance)) for distance in distances]
        return self.links.send(
            [Flow(nbytes, load, self.c.push_latency + self.c.signal) for load in loads]
        )

    def moved(self, nbytes: float) -> simpy.Event:
        """Memory traffic of all programs together."""
        return self.env.timeout(nbytes / (self.c.stream * self.costs.device.memory_rate))

    def run(self, graph: bool, processes: list[simpy.Process]) -> float:
        self.env.run(self.env.all_of(processes))
        launch = self.c.fused_launch if graph else self.c.fused_eager
        inner = float(self.env.now)
        elements = len(self.tiles) * self.tile_m * self.tile_n
        multiply = 2.0 * elements * self.p.depth / (self.costs.flops * self.c.grouped_rate)
        return launch + self.costs.throttled(inner, min(multiply / inner, 1.0))


def dispatch_matmul(
    p: GroupedProblem,
    config: DispatchConfig,
    costs: Costs,
    cluster: Cluster,
    graph: bool,
    skew: float,
) -> float:
    """Seconds of dispatch_grouped_matmul on the busiest rank, with a routing plan that exists."""
    return _Dispatch(p, config, costs, cluster, skew).seconds(graph)


class _Dispatch(_Grouped):
    def __init__(
        self, p: GroupedProblem, config: DispatchConfig, costs: Costs, cluster: Cluster, skew: float
    ) -> None:
        bound = Routing(p, skew).rows()
        programs, _, self.per_block, _ = dispatch_counts(
            config, p.experts, p.cols, bound, cluster.device.num_sms, MOST_SIGNALS
        )
        super().__init__(p, config, skew, programs, costs, cluster)
        self.arrived = [self.env.event() for _ in range(cdiv(p.experts, self.per_block))]

    def seconds(self, graph: bool) -> float:
        programs = [self.env.process(self._program(program)) for program in range(self.programs)]
        return self.run(graph, [self.env.process(self._pushes()), *programs])

    def _pushes(self) -> Generator[simpy.Event, Any, None]:
        """Send tokens in the order of the lowest expert that they have there, with a signal after
        each block of experts."""
        p, sent = self.p, 0.0
        for block, event in enumerate(self.arrived):
            share = self.routing.reached(min((block + 1) * self.per_block, p.experts))
            yield self.push((share - sent) * p.max_tokens * p.depth * p.itemsize)
            sent = share
            event.succeed()

    def _program(self, program: int) -> Generator[simpy.Event, Any, None]:
        for turn, (expert, *_) in enumerate(self.tiles[program :: self.programs]):
            event = self.arrived[min(expert // self.per_block, len(self.arrived) - 1)]
            if not event.triggered:
                yield event
            yield self.tile(turn)


def matmul_combine(
    p: GroupedProblem,
    config: CombineConfig,
    costs: Costs,
    cluster: Cluster,
    graph: bool,
    skew: float,
) -> float:
    """Seconds of grouped_matmul_combine on the busiest rank."""
    return _Combine(p, config, costs, cluster, skew).seconds(graph)


class _Combine(_Grouped):
    def __init__(
        self, p: GroupedProblem, config: CombineConfig, costs: Costs, cluster: Cluster, skew: float
    ) -> None:
        super().__init__(
            p, config, skew, cluster.device.num_sms * config.programs_per_sm, costs, cluster
        )
        self.cut = CombineCut.of(p, config)
        # by chunk, and within a chunk expert by expert
        by_chunk = sorted(self.tiles, key=lambda tile: tile[3] // self.cut.chunk_cols)
        self.chunk_of = [tile[3] // self.cut.chunk_cols for tile in by_chunk]
        self.missing = [self.chunk_of.count(chunk) for chunk in range(self.cut.chunks)]
        sms, c = cluster.device.num_sms, config
        self.workers = (c.num_reduce, c.num_finish) if c.kernel == "triton" else (sms, sms)
        # the warps that multiply take a quarter of the time of those that reduce
        self.helpers = 0 if c.kernel == "triton" else 4
        # Blocks per rank and chunk. A ticket of the Hopper kernel has all columns of a chunk and
        # takes a step per 1024 columns, of which a thread of the two warps has 16.
        step_cols = c.block_cols if c.kernel == "triton" else 1024
        trips = c.block_tokens / _HELD * step_cols / (2 * 32 * _VECTOR)
        self.step = self.c.grouped_step if c.kernel == "triton" else self.c.grouped_trip * trips
        self.blocks = self.cut.blocks * cdiv(self.cut.chunk_cols * self.tile_n, step_cols)
        self.made = [self.env.event() for _ in range(self.cut.chunks)]

    def seconds(self, graph: bool) -> float:
        programs = [self.env.process(self._program(program)) for program in range(self.programs)]
        return self.run(graph, [*programs, self.env.process(self._sums())])

    def _program(self, program: int) -> Generator[simpy.Event, Any, None]:
        for turn, chunk in enumerate(self.chunk_of[program :: self.programs]):
            yield self.tile(turn)
            self.missing[chunk] -= 1
            if self.missing[chunk] == 0:
                self.made[chunk].succeed()

    def _steps(self, workers: int, ranks: int) -> Generator[simpy.Event, Any, None]:
        """The blocks of the tokens of several ranks, one after the other in each program that has
        some. In the Hopper kernel the warps that multiply help when they are out of tiles."""
        for _ in range(cdiv(self.blocks * ranks, workers)):
            helped = self.helpers and not any(self.missing)
            yield self.env.timeout(self.step / (1 + self.helpers * helped))

    def _sums(self) -> Generator[simpy.Event, Any, None]:
        """Chunk by chunk: the rows of each token are added, the partial sum is sent to the rank of
        the token, and there partial sums are added."""
        p = self.p
        # tokens of one rank that have an expert on another
        here = p.max_tokens * self.routing.reached(p.experts)
        for chunk, made in enumerate(self.made):
            yield made
            first = chunk * self.cut.chunk_cols * self.tile_n
            # per row
            nbytes = float(min(self.cut.chunk_cols * self.tile_n, p.cols - first) * p.itemsize)
            steps = self.env.process(self._steps(self.workers[0], p.world_size))
            yield self.env.all_of(
                [steps, self.push(here * nbytes), self.moved(self.offsets[-1] * nbytes)]
            )
            added = self.moved((2.0 * here * (p.world_size - 1) + p.max_tokens) * nbytes)
            yield self.env.all_of([self.env.process(self._steps(self.workers[1], 1)), added])
