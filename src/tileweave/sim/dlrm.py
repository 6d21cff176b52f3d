"""One training step of a deep-learning recommendation model: tables sharded over ranks, all else
data parallel.

    comm     indices (all-to-all) | gradients of vectors | all-reduce of dense gradients
    compute  bottom MLP | lookup + all-to-all | interaction, top MLP, backward | update of tables

One rank is simulated, the busiest one (``imbalance``), for which the others wait. Fused:
embedding_bag_all_to_all in forward; in backward gradients of vectors travel in groups of tables,
and the update of a group runs while the next ones travel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tileweave.errors import require
from tileweave.sim.collectives import Kind, bulk, group_of, phases
from tileweave.sim.document import (
    checked,
    choice,
    fields_of,
    flag,
    integer,
    items,
    number,
    text,
)
from tileweave.sim.machine import Cluster
from tileweave.sim.network import view
from tileweave.sim.operators import Lookups, Mode, Operators
from tileweave.sim.step import Part, Step, Timeline, on_links
from tileweave.sim.transformer import models_of

GROUPS = 8  # of tables, whose gradients travel one after the other (kernels/embedding/gradient.py)
UPDATES = ("tileweave", "torch")


@dataclass(frozen=True, slots=True)
class Tables:
    """A model.

    tables, tables_per_gpu : number of tables, in all or per rank.
    pooling : rows per bag.
    batch, batch_per_gpu : samples in all or per rank; one of both.
    dense : dense features.
    bottom, top : widths of the MLPs.
    compress : number of vectors that interact, to which tables are mixed down; 0: all of them.
    itemsize : bytes of an element of tables and of what is sent.
    cross_layers, cross_rank : layers of a cross network of low rank (DCN v2) instead of inner
        products of pairs; 0: none.
    """

    name: str
    rows: int
    dim: int
    pooling: float
    dense: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    source: str = "own"
    tables: int = 0
    tables_per_gpu: int = 0
    compress: int = 0
    itemsize: int = 2
    batch: int = 0
    batch_per_gpu: int = 0
    cross_layers: int = 0
    cross_rank: int = 0

    def __post_init__(self) -> None:
        require(
            (self.batch > 0) != (self.batch_per_gpu > 0),
            f"batch {self.batch} and batch_per_gpu {self.batch_per_gpu}",
            "one of both",
            "give samples in all, or per GPU",
        )
        require(
            (self.cross_layers > 0) == (self.cross_rank > 0),
            f"cross_layers {self.cross_layers} of rank {self.cross_rank}",
            "both above 0, or none",
            "give both",
        )
        require(
            len(self.bottom) > 0,
            "bottom []",
            "the width of each layer, one at least",
            "write them, such as [128]",
        )

    def count(self, world: int) -> int:
        return self.tables or self.tables_per_gpu * world

    def samples(self, world: int) -> int:
        """Samples of one rank."""
        require(
            self.batch % world == 0,
            f"a batch of {self.batch} on {world} GPUs",
            "a multiple of the GPUs",
            "another number of GPUs, or a model with batch_per_gpu",
        )
        return self.batch_per_gpu or self.batch // world


_SIZE = integer(1, 1 << 40)
_SHAPE = fields_of(
    Tables,
    tables=integer(0, 1_000_000),
    tables_per_gpu=integer(0, 10_000),
    rows=_SIZE,
    dim=integer(1, 65536),
    pooling=number(1, 10_000, "rows a bag"),
    batch=integer(0, 1 << 30),
    batch_per_gpu=integer(0, 1 << 24),
    dense=integer(1, 1 << 20),
    bottom=items(_SIZE),
    top=items(_SIZE),
    compress=integer(0, 65536),
    itemsize=integer(1, 8, "bytes"),
    cross_layers=integer(0, 64),
    cross_rank=integer(0, 65536),
    source=text,
)


tables_reader, known_tables = models_of("dlrm", _SHAPE, Tables)


@dataclass(frozen=True, slots=True)
class Dlrm:
    """A training step.

    imbalance : by how much the load of the busiest rank is above the average.
    slices : messages into which the fused operator cuts its result.
    prefetch : the indices of a step are sent during the step before.
    update : whose update of tables, in every mode. tileweave: one pass over gradients and rows.
        torch: sparse gradients, as two lookups by torch.
    """

    model: Tables
    imbalance: float = 0.0
    slices: int = 8
    prefetch: bool = False
    update: str = "tileweave"


FIELDS = fields_of(
    Dlrm,
    model=tables_reader,
    imbalance=number(0.0, 10.0),
    slices=integer(1, 64),
    prefetch=flag,
    update=choice(UPDATES),
)


def by_name(model: str, **fields: Any) -> Dlrm:
    """A training step of a known model."""
    return Dlrm(known_tables(model), **checked(fields, FIELDS))


def simulate(
    dlrm: Dlrm, cluster: Cluster, ops: Operators, mode: Mode, fuse: Any = None
) -> Timeline:
    """One step on the busiest rank. Fused: gradients in groups, or at once if that is faster."""
    fused = mode != "unfused" and (fuse is None or "embedding_bag_all_to_all" in fuse)
    made = [
        _Builder(dlrm, cluster, ops, mode, fuse).build(groups)
        for groups in ((GROUPS, 1) if fused else (1,))
    ]
    return min(made, key=lambda timeline: timeline.seconds)


class _Builder:
    def __init__(self, dlrm: Dlrm, cluster: Cluster, ops: Operators, mode: Mode, fuse: Any) -> None:
        self.d, self.model, self.cluster, self.ops, self.mode = dlrm, dlrm.model, cluster, ops, mode
        self.fuse = fuse is None or "embedding_bag_all_to_all" in fuse
        self.world = cluster.world_size
        self.batch = dlrm.model.samples(self.world)
        self.tables = dlrm.model.count(self.world)
        require(
            self.tables > 0,
            "a model of no tables",
            "tables, or tables_per_gpu, over 0",
            "say how many",
        )
        # tables are cut by columns if there are fewer than ranks
        self.parts = math.ceil(self.world / self.tables)
        require(
            self.parts <= dlrm.model.dim,
            f"{self.tables} tables of {dlrm.model.dim} columns on {self.world} ranks",
            f"at most {self.tables * dlrm.model.dim} ranks, one for each column",
            "fewer GPUs",
        )
        self.group = group_of(cluster, self.world)
        self.protocol = bulk(ops.c)
        self.seen = view(cluster, self.protocol.fraction)
        self.skew = 1.0 + dlrm.imbalance
        self.step = Step(f"{dlrm.model.name} on {self.world} GPUs, {self.tables} tables: {mode}")

    def build(self, groups: int) -> Timeline:
        model, ops = self.model, self.ops
        self.step.representative(
            0, self.world, f"ranks 0 to {self.world - 1}", self.seen.capacities
        )
        bags, row = self._bags()
        in_l2 = ops.rows_in_l2(self.batch * self.world * model.pooling, model.rows, row)
        lookups = Lookups(bags, model.pooling, row, model.itemsize, self.skew, in_l2)
        time = ops.embedding_all_to_all(self.group, lookups, self.d.slices)
        vectors = self._interacting()
        pairs = vectors * (vectors + 1) // 2 + model.bottom[-1]
        wide = vectors * model.dim if model.cross_layers else pairs
        bottom, top = (model.dense, *model.bottom), (wide, *model.top)
        # every part of a table needs all indices of the table
        sent = self.batch * self.tables * self.parts * model.pooling * 8.0
        indices = [] if self.d.prefetch else [self._comm("indices", sent, [])]
        forward = self._compute("bottom MLP", [self._mlp("bottom MLP", bottom)], [])
        seconds = time.of(self.mode, self.fuse)
        lookup = Part(
            "embedding_bag_all_to_all",
            "lookup",
            seconds,
            max(seconds - time.compute, 0.0),
            "all_to_all",
            bags * row,
            self.world,
            "world",
            time.compute,
        )
        looked = self._compute("lookup and all-to-all", [lookup], [*indices, forward])
        inner = [*self._interaction(1.0), self._mlp("top MLP", top)]
        outer = [self._mlp("top MLP, back", top, 2.0), *self._interaction(2.0)]
        back = self._compute("interaction and top MLP", inner + outer, [looked])
        gradients = [
            self._comm("gradients of vectors", bags * row / groups, [back]) for _ in range(groups)
        ]
        top_reduced = self._comm(
            "dense gradients, top", 4.0 * self._parameters(top), [back], "all_reduce"
        )
        bottom_back = self._compute(
            "bottom MLP, back", [self._mlp("bottom MLP, back", bottom, 2.0)], [back]
        )
        bottom_reduced = self._comm(
            "dense gradients, bottom", 4.0 * self._parameters(bottom), [bottom_back], "all_reduce"
        )
        update = self._update(bags, row, time.compute)
        slower = 1.0 + ops.c.corun if groups > 1 else 1.0
        for group, sent in enumerate(gradients):
            seconds = update / groups * (slower if group < groups - 1 else 1.0)
            part = Part("update of tables", "update", seconds, compute=seconds)
            self._compute("update of tables", [part], [sent])
        dense = ops.costs.stream(12.0 * (self._parameters(top) + self._parameters(bottom)))
        self._compute(
            "optimiser",
            [Part("optimiser", "update", dense, compute=dense)],
            [top_reduced, bottom_reduced],
        )
        return self.step.run()

    def _bags(self) -> tuple[int, float]:
        """The number of pooled vectors, or parts of them, on the rank that has most, and the bytes
        of one."""
        row = float(self.model.dim * self.model.itemsize) / self.parts
        return self.batch * self.world * math.ceil(self.tables * self.parts / self.world), row

    def _update(self, bags: int, row: float, lookup: float) -> float:
        """Seconds of the update of the busiest rank's tables, by gradients of ``bags`` vectors of
        ``row`` bytes that are there."""
        costs = self.ops.costs
        if self.d.update == "torch":  # gradients are regrouped, then rows are read and written
            return costs.stream(2.0 * bags * row) + 2.0 * lookup
        # for each position of a bag its gradient is read, and its row is read and written
        rows = bags * self.model.pooling * self.skew
        rate = costs.c.own_memory * costs.device.memory_rate
        return costs.c.matmul_launch + 3.0 * rows * row / rate

    def _interacting(self) -> int:
        return (self.model.compress or self.tables) + 1

    def _interaction(self, factor: float) -> list[Part]:
        """Mix tables down to ``compress`` vectors, then all inner products of pairs, or a cross
        network."""
        model, costs, found = self.model, self.ops.costs, []
        if model.compress:
            seconds = factor * costs.matmul(self.batch * model.dim, model.compress, self.tables)
            found.append(Part("compress", "interaction", seconds, compute=seconds))
        width = self._interacting()
        if model.cross_layers:
            wide, rank = width * model.dim, model.cross_rank
            one = costs.matmul(self.batch, rank, wide) + costs.matmul(self.batch, wide, rank)
            # a product with the first layer's input, and a sum
            seconds = factor * model.cross_layers * (one + costs.stream(8.0 * self.batch * wide))
            return [*found, Part("cross network", "interaction", seconds, compute=seconds)]
        nbytes = self.batch * (width * model.dim + width * width) * 2.0
        seconds = factor * (
            costs.stream(2.0 * nbytes)
            + 2.0 * self.batch * width * width * model.dim / (0.5 * costs.flops)
        )
        return [*found, Part("pairs", "interaction", seconds, compute=seconds)]

    def _mlp(self, name: str, widths: tuple[int, ...], factor: float = 1.0) -> Part:
        pairs = list(pairwise(widths))
        one = sum(
            self.ops.costs.matmul(self.batch, n, k)
            + self.ops.costs.stream(2.0 * self.batch * n * 2.0)
            for k, n in pairs
        )
        return Part(name, "MLP", factor * one, compute=factor * one)

    def _parameters(self, widths: tuple[int, ...]) -> float:
        return float(sum(n * k for k, n in pairwise(widths)))

    def _compute(self, name: str, parts: list[Part], after: list[int]) -> int:
        return self.step.add(0, "compute", name, parts, after)

    def _comm(self, name: str, nbytes: float, after: list[int], kind: Kind = "all_to_all") -> int:
        part = Part(name, "exchange", 0.0, 0.0, kind, nbytes, self.world, "world")
        if self.world == 1:
            return self.step.add(0, "comm", name, [part], after, "comm")
        skewed = nbytes * (self.skew if kind == "all_to_all" else 1.0)
        make: Callable[[], Any] = lambda: on_links(  # noqa: E731
            phases(kind, skewed, self.group, self.seen, self.protocol), 0
        )
        return self.step.add(0, "comm", name, [part], after, "comm", make)
