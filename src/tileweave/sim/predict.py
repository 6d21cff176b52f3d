"""What the model says of a measured cell; ``None`` where it has no model for it, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tileweave.sim.cells import Cell
from tileweave.sim.collectives import Group
from tileweave.sim.costs import Calibration
from tileweave.sim.machine import Cluster, make_cluster
from tileweave.sim.network import Flow, inside_hops, view
from tileweave.sim.operators import Operators
from tileweave.sim.transformer import Layer, Model

_SCATTERS = {"matmul_reduce_scatter": "reduce_scatter", "matmul_all_reduce": "all_reduce"}


class Predictor:
    """Predictions for cells measured on nodes of ``device``; operators are kept by world size and launch mode."""

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
        ops = self.operators(cell.world_size, cell.graph)
        if cell.op in _MODELS:
            return _MODELS[cell.op](ops, cell)
        return None


def _gather(ops: Operators, cell: Cell) -> float | None:
    m, n, k = cell.shape
    world, local = cell.world_size, n // cell.world_size
    if cell.quantity == "compute":
        return ops.costs.matmul(m, local, k, cell.itemsize)
    if cell.quantity == "comm":
        return _alone(ops, cell, "all_gather", m * k * cell.itemsize)
    if cell.quantity == "library":
        return ops.beside_the_library("all_gather", world, m, local, k, cell.itemsize)
    if cell.quantity == "fused":
        return ops.fused_all_gather_matmul(world, m, local, k, cell.itemsize, cell.tables and cell.tables.of(cell.op))
    return _together(ops, cell, ops.costs.matmul(m, local, k, cell.itemsize), "all_gather", m * k)


def _scatter(ops: Operators, cell: Cell) -> float | None:
    m, n, k = cell.shape
    if cell.quantity == "prototype":  # another kernel than the library's
        return None
    world, local = cell.world_size, k // cell.world_size
    kind = _SCATTERS[cell.op]
    if cell.quantity == "compute":
        return ops.costs.matmul(m, n, local, cell.itemsize)
    if cell.quantity == "comm":
        return _alone(ops, cell, kind, m * n * cell.itemsize)
    if cell.quantity == "library":
        return ops.beside_the_library(kind, world, m, n, local, cell.itemsize)
    if cell.quantity == "fused":
        return ops.fused_matmul_scatter(kind, world, m, n, local, cell.itemsize, cell.tables and cell.tables.of(cell.op))
    return _together(ops, cell, ops.costs.matmul(m, n, local, cell.itemsize), kind, m * n)


def _together(ops: Operators, cell: Cell, compute: float, kind: str, elements: int) -> float | None:
    group, nbytes = Group(cell.world_size), float(elements * cell.itemsize)
    comm = ops.collective(kind, nbytes, group)
    if cell.quantity == "unfused":
        return ops.in_turn(compute, comm)
    times = 2.0 if kind == "all_reduce" else 1.0
    return ops.at_best(compute, _copies(ops, times * nbytes / group.size, group.size))


def _copies(ops: Operators, nbytes: float, world: int) -> float:
    """What the bench's bound has beside the matmul: ``nbytes`` to each peer by copy engine, one copy behind the other."""
    seen = view(ops.cluster, ops.c.copy_fraction)
    loads = seen.loads(inside_hops(ops.cluster, 1))
    return (world - 1) * (ops.c.copy_queued + nbytes / min(seen.capacities[link] / load for link, load in loads.items()))


def _exchange(ops: Operators, cell: Cell) -> float | None:
    """M rows in all, M / R of each rank times the whole weight [N, K]; exchanged with columns permuted, behind or before it.

    The fused kernels are not modelled: their tiles come in the order of :class:`Exchange`, which ``tiles.py`` does not know."""
    m, n, k = cell.shape
    rows = m // cell.world_size
    compute, nbytes = ops.costs.matmul(rows, n, k, cell.itemsize), float(rows * cell.itemsize)
    nbytes *= n if cell.op == "matmul_all_to_all" else k
    if cell.quantity == "compute":
        return compute
    if cell.quantity == "bound":
        return ops.at_best(compute, _copies(ops, nbytes / cell.world_size, cell.world_size))
    if cell.quantity == "unfused":
        permuted = ops.costs.stream(2.0 * nbytes)
        return ops.in_turn(compute + permuted, ops.collective("all_to_all", nbytes, Group(cell.world_size)))
    return None


def _alone(ops: Operators, cell: Cell, kind: str, nbytes: float) -> float:
    """A collective by itself, again and again."""
    return ops.c.nccl_repeat + ops.collective(kind, nbytes, Group(cell.world_size))


def _embedding(ops: Operators, cell: Cell) -> float | None:
    batch, tables, dim, pooling, itemsize = cell.shape
    bags, row = batch * tables // cell.world_size, float(dim * itemsize)
    if cell.quantity == "concat":
        return ops.costs.stream(2.0 * bags * row)
    time = ops.embedding_all_to_all(Group(cell.world_size), bags, pooling, row)
    whole = {"compute": time.compute, "comm": _alone(ops, cell, "all_to_all", bags * row)}
    return whole.get(cell.quantity) or {"unfused": time.unfused, "fused": time.fused, "bound": time.bound}.get(cell.quantity)


def _combine(ops: Operators, cell: Cell) -> float | None:
    tokens, hidden, inter, experts, top_k = cell.shape
    world, rows = cell.world_size, cell.shape[0] * top_k
    if cell.quantity == "compute":
        local = experts // world
        return ops.costs.grouped_matmul(local, rows // local, hidden, inter)
    if cell.quantity == "comm":
        return _alone(ops, cell, "all_to_all", rows * hidden * 2)
    if cell.quantity == "reduce":
        return ops.reduce_top_k(tokens, top_k, hidden)
    return ops.grouped_combine(Group(world), tokens, top_k, experts, hidden, inter).of(cell.quantity)


def _collective(ops: Operators, cell: Cell) -> float | None:
    nbytes = cell.shape[0] if len(cell.shape) == 1 else cell.shape[0] * cell.shape[1] * cell.itemsize
    return _alone(ops, cell, cell.op, nbytes)


def _push(ops: Operators, cell: Cell) -> float | None:
    """Every rank to all peers at once; the measurement had one barrier (3.5 us) in each round."""
    c = ops.c
    engine = cell.op == "push_copy_engine"
    seen = view(ops.cluster, c.copy_fraction if engine else c.push_fraction)
    load = seen.loads(inside_hops(ops.cluster, 1), cell.world_size - 1.0)
    flow = Flow(cell.shape[0] / cell.world_size, load)
    rate = min(seen.capacities[link] / times for link, times in flow.loads.items())
    return (c.copy_latency if engine else c.push_latency) + flow.nbytes / rate + 3.5e-6


def _layer(ops: Operators, cell: Cell) -> float | None:
    """One decoder layer forward, sequence parallel: rows, hidden, ffn, heads, kv_heads, tokens of a sequence."""
    m, hidden, ffn, heads, kv_heads, seq = cell.shape
    model = Model("measured", 1, hidden, ffn, heads, kv_heads, 1, True, seq, "")
    mode = "fused" if cell.quantity == "fused" else "unfused"
    return sum(part.seconds for part in Layer(model, ops, cell.world_size, mode).forward(m, min(m, seq)))


_MODELS: dict[str, Callable[[Operators, Cell], float | None]] = {
    "all_gather_matmul": _gather,
    **dict.fromkeys(_SCATTERS, _scatter),
    **dict.fromkeys(("matmul_all_to_all", "all_to_all_matmul"), _exchange),
    "embedding_bag_all_to_all": _embedding,
    "grouped_matmul_combine": _combine,
    "layer": _layer,
    **dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce", "all_to_all"), _collective),
    **dict.fromkeys(("push_sm", "push_copy_engine"), _push),
}
