"""The prediction of the model for a measured cell; ``None`` if it has no model for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tileweave.planning.costs import SHORT, Calibration
from tileweave.planning.problem import MatmulConfig, Problem
from tileweave.planning.schedules.scatter import Exchange
from tileweave.sim.cells import Cell, alone
from tileweave.sim.collectives import KINDS, Group
from tileweave.sim.machine import Cluster, make_cluster
from tileweave.sim.modelled import is_matmul
from tileweave.sim.network import Flow, inside_hops, view
from tileweave.sim.operators import (
    ExpertMatmul,
    Lookups,
    Operators,
)
from tileweave.sim.plans import exchange_after, exchange_before, gather_problem, scatter_problem
from tileweave.sim.tables import Table, nearest
from tileweave.sim.transformer import Layer, Model

# as in the benches: Ulysses, columns out and rows in, and back
_BEHIND, _BEFORE = Exchange(1, 0), Exchange(0, 1)
_SCATTERS = {"matmul_reduce_scatter": "reduce_scatter", "matmul_all_reduce": "all_reduce"}


_Model = Callable[[Operators, Cell], float | None]
_MODELS: dict[str, _Model] = {}


def _predicts(*ops: str) -> Callable[[_Model], _Model]:
    """The decorated function is the time of cells of ``ops``."""

    def add(model: _Model) -> _Model:
        _MODELS.update(dict.fromkeys(ops, model))
        return model

    return add


class Predictor:
    """Predictions for cells measured on ``device``. Operators are cached by world size and launch
    mode."""

    def __init__(self, calibration: Calibration, device: str = "h200") -> None:
        self.calibration = calibration
        self.cluster = make_cluster(device)
        self._operators: dict[tuple[int, bool], Operators] = {}

    def operators(self, world: int, graph: bool) -> Operators:
        key = (world, graph)
        if key not in self._operators:
            cluster: Cluster = replace(self.cluster, nodes=1, gpus_per_node=world)
            self._operators[key] = Operators(cluster, self.calibration, graph)
        return self._operators[key]

    def seconds(self, cell: Cell) -> float | None:
        """The prediction of one cell."""
        cell = alone(cell)
        ops = self.operators(cell.world_size, cell.graph)
        if cell.op in _MODELS:
            return _MODELS[cell.op](ops, cell)
        return None


def _entries(cell: Cell) -> Table | None:
    """The table that a cell was planned with, or that of its config."""
    return cell.tables and cell.tables.of(cell.op)


def problem_of(cell: Cell) -> Problem:
    """The problem of one rank of a cell of a matmul operator, as the planner counts it."""
    m, n, k = cell.shape
    world, itemsize = cell.world_size, cell.itemsize
    if cell.op == "matmul_all_to_all":
        return exchange_after(_BEHIND, world, m // world, n, k, itemsize)
    if cell.op == "all_to_all_matmul":
        return exchange_before(_BEFORE, world, m, n, k // world, itemsize)
    if cell.op == "all_gather_matmul":
        return gather_problem(world, m, n // world, k, itemsize)
    return scatter_problem(_SCATTERS[cell.op], world, m, n, k // world, itemsize)


def measured_config(cell: Cell) -> MatmulConfig | None:
    """The config with which a fused cell was measured; None where it is not known."""
    entries = _entries(cell) if is_matmul(cell.op) else None
    return None if entries is None else nearest(cell.op, problem_of(cell), entries).config


@_predicts("all_gather_matmul")
def _gather(ops: Operators, cell: Cell) -> float | None:
    m, n, k = cell.shape
    world, local = cell.world_size, n // cell.world_size
    if cell.quantity == "compute":
        return ops.costs.matmul(m, local, k, cell.itemsize, cell.again)
    if cell.quantity == "library":
        return ops.cublas_and_exchange("all_gather", world, m, local, k, cell.itemsize)
    if cell.quantity == "fused":
        return ops.fused_all_gather_matmul(world, m, local, k, cell.itemsize, _entries(cell))
    return _together(ops, cell, ops.costs.matmul(m, local, k, cell.itemsize), "all_gather", m * k)


@_predicts(*_SCATTERS)
def _scatter(ops: Operators, cell: Cell) -> float | None:
    m, n, k = cell.shape
    if cell.quantity == "prototype":  # a kernel that no longer exists
        return None
    world, local = cell.world_size, k // cell.world_size
    kind = _SCATTERS[cell.op]
    if cell.quantity == "compute":
        return ops.costs.matmul(m, n, local, cell.itemsize, cell.again)
    if cell.quantity == "library":
        return ops.cublas_and_exchange(kind, world, m, n, local, cell.itemsize)
    if cell.quantity == "fused":
        return ops.fused_matmul_scatter(kind, world, m, n, local, cell.itemsize, _entries(cell))
    return _together(ops, cell, ops.costs.matmul(m, n, local, cell.itemsize), kind, m * n)


def _together(ops: Operators, cell: Cell, compute: float, kind: str, elements: int) -> float | None:
    group, nbytes = Group(cell.world_size), float(elements * cell.itemsize)
    comm = ops.collective(kind, nbytes, group)
    if cell.quantity == "unfused":
        return ops.in_turn(compute, comm)
    times = 2.0 if kind == "all_reduce" else 1.0
    return ops.at_best(compute, _copies(ops, times * nbytes / group.size, group.size))


def _copies(ops: Operators, nbytes: float, world: int) -> float:
    """The copies of the co-run bound in the bench: ``nbytes`` to each peer by copy engines, one
    after the other."""
    seen = view(ops.cluster, ops.c.copy_fraction)
    loads = seen.loads(inside_hops(ops.cluster, 1))
    rate = min(
        ops.c.copy_one * ops.cluster.device.link_rate,
        *(seen.capacities[link] / load for link, load in loads.items()),
    )
    return (world - 1) * (ops.c.copy_queued + nbytes / rate)


@_predicts("matmul_all_to_all", "all_to_all_matmul")
def _exchange(ops: Operators, cell: Cell) -> float | None:
    """M rows in all; each rank multiplies M / R rows with the whole weight [N, K], with an exchange
    and a permutation of columns before or after."""
    m, n, k = cell.shape
    rows = m // cell.world_size
    compute, nbytes = ops.costs.matmul(rows, n, k, cell.itemsize), float(rows * cell.itemsize)
    nbytes *= n if cell.op == "matmul_all_to_all" else k
    if cell.quantity == "compute":
        return compute
    if cell.quantity == "bound":
        return ops.at_best(compute, _copies(ops, nbytes / cell.world_size, cell.world_size))
    if cell.quantity == "unfused":
        return ops.in_turn(
            compute + ops.costs.permuted(nbytes),
            ops.collective("all_to_all", nbytes, Group(cell.world_size)),
        )
    if cell.op == "matmul_all_to_all":
        return ops.fused_matmul_all_to_all(
            _BEHIND, cell.world_size, rows, n, k, cell.itemsize, _entries(cell)
        )
    return ops.fused_all_to_all_matmul(
        _BEFORE, cell.world_size, m, n, k // cell.world_size, cell.itemsize, _entries(cell)
    )


@_predicts("embedding_bag_all_to_all")
def _embedding(ops: Operators, cell: Cell) -> float | None:
    batch, tables, dim, pooling, itemsize = cell.shape
    bags, row = batch * tables // cell.world_size, float(dim * itemsize)
    if cell.quantity == "concat":
        return ops.costs.stream(2.0 * bags * row)
    in_l2 = ops.rows_in_l2(batch * pooling, cell.rows, row) if cell.rows else 0.0
    lookups = Lookups(bags, pooling, row, itemsize, in_l2=in_l2)
    if cell.quantity == "own":
        return ops.costs.own_lookup(bags, lookups.rows, row, in_l2)
    if cell.quantity == "fused":
        seconds = ops.fused_embedding(cell.world_size, lookups)
        # a call after the other; steps have a host of their own (sim/step.py)
        return seconds if cell.graph else max(seconds, ops.c.pooled_host)
    time = ops.embedding_all_to_all(Group(cell.world_size), lookups)
    return {"compute": time.compute, "unfused": time.unfused}.get(cell.quantity)


@_predicts("grouped_matmul_combine")
def _combine(ops: Operators, cell: Cell) -> float | None:
    tokens, hidden, inter, experts, top_k = cell.shape
    world, rows = cell.world_size, cell.shape[0] * top_k
    matmul = ExpertMatmul(tokens, top_k, experts, hidden, inter)
    if cell.quantity == "compute":
        local = experts // world
        return ops.costs.grouped_matmul(local, rows // local, hidden, inter)
    if cell.quantity == "reduce":
        return ops.reduce_top_k(tokens, top_k, hidden)
    if cell.quantity == "prototype":
        return None
    if cell.quantity == "fused":
        return ops.fused_grouped_combine(world, matmul, cell.itemsize)
    return ops.grouped_combine(Group(world), matmul).of(cell.quantity)


@_predicts("dispatch_grouped_matmul")
def _dispatch(ops: Operators, cell: Cell) -> float | None:
    """The first matmul of experts, whose weight has two projections."""
    tokens, hidden, inter, experts, top_k = cell.shape
    if cell.quantity != "fused":
        return None
    matmul = ExpertMatmul(tokens, top_k, experts, 2 * inter, hidden)
    return ops.fused_dispatch_grouped(cell.world_size, matmul, cell.itemsize)


@_predicts(*KINDS)
def _collective(ops: Operators, cell: Cell) -> float | None:
    """A collective alone, repeated."""
    nbytes = float(cell.shape[0])
    again = ops.c.nccl_repeat if nbytes <= SHORT else 0.0
    return again + ops.collective(cell.op, nbytes, Group(cell.world_size))


@_predicts("push_sm", "push_copy_engine")
def _push(ops: Operators, cell: Cell) -> float | None:
    """Every rank pushes to all peers at once. The measurement had one barrier (3.5 us) per
    round."""
    c = ops.c
    engine = cell.op == "push_copy_engine"
    seen = view(ops.cluster, c.copy_fraction if engine else c.push_fraction)
    load = seen.loads(inside_hops(ops.cluster, 1), cell.world_size - 1.0)
    flow = Flow(cell.shape[0] / cell.world_size, load)
    rate = min(seen.capacities[link] / times for link, times in flow.loads.items())
    late = c.copy_latency + (cell.world_size - 1) * c.copy_queued if engine else c.push_latency
    return late + flow.nbytes / rate + 3.5e-6


@_predicts("matmul")
def _matmul(ops: Operators, cell: Cell) -> float | None:
    """The matmul of one rank, with its local sizes."""
    m, n, k = cell.shape
    return ops.costs.matmul(m, n, k, cell.itemsize, cell.again)


@_predicts("layer")
def _layer(ops: Operators, cell: Cell) -> float | None:
    """The forward of one decoder layer, sequence parallel. ``shape``: rows, hidden, ffn, heads,
    kv_heads, tokens per sequence."""
    m, hidden, ffn, heads, kv_heads, seq = cell.shape
    model = Model("measured", 1, hidden, ffn, heads, kv_heads, 1, True, seq, "")
    mode = "fused" if cell.quantity == "fused" else "unfused"
    return sum(
        part.seconds for part in Layer(model, ops, cell.world_size, mode).forward(m, min(m, seq))
    )
