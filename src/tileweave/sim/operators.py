"""Times of tileweave's operators: unfused, fused, and the bound that no fusion can beat. Each shape
is simulated once.

unfused   the collective and the matmul (or lookup) one after the other, by NCCL and cuBLAS
fused     tileweave's kernel, tile by tile (``tiles.py``); unfused if that is faster, as tileweave
          does itself
bound     the longer of the two, with computation slowed down by the concurrent traffic
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec

from tileweave.planning.combine import plan_combine
from tileweave.planning.costs import Calibration, Costs, load_calibration
from tileweave.planning.machine import Machine
from tileweave.planning.matmul import (
    exchange_schedule_for,
    scatter_schedule_for,
    schedule_for,
)
from tileweave.planning.problem import FUSED_WORLD_SIZES, Problem
from tileweave.planning.schedules.gather import cdiv
from tileweave.planning.schedules.grouped import GroupedProblem, dispatch_config
from tileweave.planning.schedules.scatter import Exchange
from tileweave.sim import over_nodes
from tileweave.sim.collectives import Group, collective_time, protocol_of
from tileweave.sim.machine import Cluster
from tileweave.sim.network import inside_hops, view
from tileweave.sim.plans import (
    exchange_after,
    exchange_before,
    fused_config,
    gather_problem,
    machine_of,
    plan_of,
    scatter_problem,
)
from tileweave.sim.tables import Table
from tileweave.sim.tiles import Combine, gather_matmul, scatter_matmul
from tileweave.sim.tiles_exchange import exchange_matmul
from tileweave.sim.tiles_grouped import dispatch_matmul, matmul_combine

Mode = Literal["unfused", "fused", "bound"]
MODES: tuple[Mode, ...] = ("unfused", "fused", "bound")


@dataclass(frozen=True, slots=True)
class OpTime:
    """Seconds of one operator call; ``compute`` and ``comm`` are its two halves alone."""

    unfused: float
    fused: float
    bound: float
    compute: float
    comm: float

    def of(self, mode: str, fuse: bool = True) -> float:
        """Time in ``mode``; ``fuse=False``: this operator stays unfused."""
        if not fuse or mode == "unfused":
            return self.unfused
        return self.fused if mode == "fused" else self.bound


class Lookups(NamedTuple):
    """``bags`` pooled vectors of ``row_bytes`` on each rank, each of ``pooling`` rows. ``skew``:
    the load of the busiest rank relative to the average; ``in_l2``: :meth:`Operators.rows_in_l2`.
    """

    bags: float
    pooling: float
    row_bytes: float
    itemsize: int = 2
    skew: float = 1.0
    in_l2: float = 0.0

    @property
    def rows(self) -> float:
        """Rows that are read."""
        return self.bags * self.pooling

    @property
    def busiest(self) -> Lookups:
        """Those of the busiest rank."""
        return self._replace(bags=self.bags * self.skew, skew=1.0)


class ExpertMatmul(NamedTuple):
    """A matmul of an expert layer: each rank has ``tokens``, each with ``top_k`` of all
    ``experts``, whose weights are [cols, depth]. ``skew``: the load of the busiest rank relative to
    the average."""

    tokens: int
    top_k: int
    experts: int
    cols: int
    depth: int
    skew: float = 1.0

    @property
    def busiest_rows(self) -> int:
        """Rows of the busiest rank."""
        return int(self.tokens * self.top_k * self.skew)

    def problem(self, world: int, itemsize: int) -> GroupedProblem:
        """What tileweave plans for ``world`` ranks."""
        return GroupedProblem(
            world,
            self.tokens,
            self.top_k,
            self.experts // world,
            self.cols,
            self.depth,
            itemsize,
            "bfloat16",
        )

    def of_a_node(self, nodes: int) -> ExpertMatmul:
        """What the ranks of one of ``nodes`` compute: they have the tokens of their rails, with
        ``top_k / nodes`` experts each on average."""
        return self._replace(
            tokens=self.tokens * nodes,
            top_k=max(self.top_k // nodes, 1),
            experts=self.experts // nodes,
        )


P = ParamSpec("P")
Timed = Callable[Concatenate["Operators", P], OpTime]


def _kept(world_at: int | None = None) -> Callable[[Timed[P]], Timed[P]]:
    """Keep what a method returns, by its arguments.

    world_at : position of the argument that is a number of ranks; inside a node, results are kept
        for any number of nodes.
    """

    def keeping(method: Timed[P]) -> Timed[P]:
        @wraps(method)
        def call(self: Operators, *args: P.args, **kwargs: P.kwargs) -> OpTime:
            ranks: Any = math.inf if world_at is None else args[world_at]
            known = self._inside if ranks <= self.cluster.gpus_per_node else self._known
            key = (method.__name__, args, *kwargs.items())
            if key not in known:
                known[key] = method(self, *args, **kwargs)
            return known[key]

        return call

    return keeping


class Operators:
    """Times of operators on one cluster, in bf16, cached by shape.

    graph : whether calls are replayed from a CUDA graph (decode) or launched eagerly.
    sustained : whether matmuls are at the power limit (:class:`~tileweave.planning.costs.Costs`).
    kernels : False: without fused matmuls, which take longest to simulate.
    """

    def __init__(
        self,
        cluster: Cluster,
        calibration: Calibration | None = None,
        graph: bool = False,
        sustained: bool = False,
        kernels: bool = True,
    ) -> None:
        self.cluster, self.graph, self.kernels = cluster, graph, kernels
        self.calibration = calibration or load_calibration()
        self.costs = Costs(cluster.device, self.calibration.coefficients, sustained)
        self.c = self.costs.c
        self._known: dict[Any, OpTime] = {}
        self._inside: dict[Any, OpTime] = {}  # inside a node, for any number of nodes

    @property
    def machine(self) -> Machine:
        """What tileweave's planner sees."""
        return machine_of(self.cluster.device)

    def on_nodes(self, nodes: int) -> Operators:
        """The same operators with another number of nodes. Times inside a node are shared."""
        found = copy(self)
        found.cluster, found._known = replace(self.cluster, nodes=nodes), {}
        return found

    def collective(
        self, kind: Any, nbytes: float, group: Group, algorithm: Any = "auto", slices: int = 1
    ) -> float:
        return collective_time(
            kind, nbytes, group, self.cluster, self.c, algorithm, slices, self.graph
        )

    def _join(
        self,
        compute: float,
        comm: float,
        fused: float,
        nbytes: float,
        group: Group,
        kind: str,
        extra: float = 0.0,
    ) -> OpTime:
        unfused = self.in_turn(compute, comm) + extra
        bound = min(self.at_best(compute, self.wire(kind, nbytes, group, comm)), unfused)
        taken = min(fused, unfused)
        return OpTime(unfused, taken, min(bound, taken), compute, comm + extra)

    def in_turn(self, compute: float, comm: float) -> float:
        """The time of both, one after the other."""
        return compute + self.c.gap + comm

    def at_best(self, compute: float, comm: float) -> float:
        """The co-run bound: both run concurrently and independently on two streams that join."""
        return max(compute * (1.0 + self.c.corun), comm) + self.c.gap

    def wire(self, kind: Any, received: float, group: Group, comm: float) -> float:
        """The shortest time in which each rank receives ``received`` bytes: pushes at the rate of
        the links, without NCCL. Across nodes only the collective (``comm``) was measured."""
        if group.across > 1:
            return comm
        times = 2.0 if kind == "all_reduce" else 1.0
        each = received / times / (group.size - 1)
        fraction = max(self.c.push_fraction, self.c.copy_fraction)
        return times * (self.c.push_latency + self._sent_to_all(group.size, each, fraction))

    def _sent_to_all(self, world: int, nbytes: float, fraction: float) -> float:
        """The time in which each rank of a node sends ``nbytes`` to every other one, at a
        ``fraction`` of the rate of the links."""
        seen = view(self._node(world), fraction)
        loads = seen.loads(inside_hops(seen.cluster, 1), world - 1.0)
        if seen.cluster.device.inside == "mesh":
            loads["pair1"] /= world - 1.0
        return max(nbytes * load / seen.capacities[link] for link, load in loads.items())

    def matmul(self, m: int, n: int, k: int) -> OpTime:
        time = self.costs.matmul(m, n, k)
        return OpTime(time, time, time, time, 0.0)

    @_kept(world_at=0)
    def all_gather_matmul(self, world: int, m: int, n: int, k: int) -> OpTime:
        """Gather x [m / world, k], then multiply with w [n, k]: ``m`` rows of all ranks, ``n``
        local columns."""
        if world == 1:
            return self.matmul(m, n, k)
        nbytes = 2 * m * k
        compute, comm = (
            self.costs.matmul(m, n, k),
            self.collective("all_gather", nbytes, self._group(world)),
        )
        fused = math.inf
        if self._fuses(world):
            if self._is_fused("all_gather_matmul", gather_problem(world, m, n, k)):
                fused = self.fused_all_gather_matmul(world, m, n, k)
        elif self._fuses_over_nodes(world):
            fused = over_nodes.all_gather_matmul(self, self.machine, self._group(world), m, n, k)
        return self._join(
            compute, comm, fused, (world - 1) / world * nbytes, self._group(world), "all_gather"
        )

    def _fuses(self, world: int) -> bool:
        """Whether there are fused kernels for ``world`` ranks: of one node, up to eight."""
        few = world in FUSED_WORLD_SIZES and world <= self.cluster.gpus_per_node
        return few and self.kernels

    def _is_fused(self, op: str, problem: Problem) -> bool:
        """Whether tileweave's plan is a fused path."""
        return plan_of(op, problem, self.machine).path == "fused"

    def _fuses_over_nodes(self, world: int) -> bool:
        """Whether matmuls are fused over nodes, all of whose GPUs are in the group."""
        group = self._group(world)
        even = group.across > 1 and group.size == world
        return even and group.inside <= FUSED_WORLD_SIZES[-1] and self.kernels

    def fused_all_gather_matmul(
        self, world: int, m: int, n: int, k: int, itemsize: int = 2, entries: Table | None = None
    ) -> float:
        """Seconds of the fused operator, even if it is slower. The config is that of tileweave's
        plan, or by ``entries``."""
        problem = gather_problem(world, m, n, k, itemsize)
        config = fused_config("all_gather_matmul", problem, self.machine, entries)
        if config.kernel == "library":
            if config.transport == "copy_engine":
                return self.cublas_per_shard(world, m, n, k, itemsize)
            return self.cublas_and_exchange("all_gather", world, m, n, k, itemsize)
        schedule = schedule_for(problem, config, 0, self.machine)
        return gather_matmul(
            schedule, config, self.costs, self._node(world), self.graph, itemsize
        ).seconds

    def _group(self, world: int) -> Group:
        """A group of consecutive ranks: inside a node, or whole nodes."""
        per_node = self.cluster.gpus_per_node
        return Group(world) if world <= per_node else Group(per_node, world // per_node)

    def _node(self, world: int) -> Cluster:
        """The cluster that a group inside one node sees."""
        return replace(self.cluster, nodes=1, gpus_per_node=world)

    @_kept(world_at=1)
    def matmul_scatter(self, kind: str, world: int, m: int, n: int, k: int) -> OpTime:
        """x [m, k] @ w [n, k] (k local), then ``kind``: reduce_scatter, all_reduce or all_to_all
        over rows."""
        if world == 1:
            return self.matmul(m, n, k)
        nbytes, group = 2 * m * n, self._group(world)
        compute, comm = self.costs.matmul(m, n, k), self.collective(kind, nbytes, group)
        factor = 2 if kind == "all_reduce" else 1
        fused = math.inf
        if self._fuses(world) and self._is_fused(
            f"matmul_{kind}", scatter_problem(kind, world, m, n, k)
        ):
            fused = self.fused_matmul_scatter(kind, world, m, n, k)
        if kind == "reduce_scatter" and self._fuses_over_nodes(world):
            fused = over_nodes.matmul_reduce_scatter(self, self.machine, group, m, n, k)
        return self._join(compute, comm, fused, factor * (world - 1) / world * nbytes, group, kind)

    def cublas_and_exchange(
        self,
        kind: str,
        world: int,
        m: int,
        n: int,
        k: int,
        itemsize: int = 2,
        before: bool = False,
        shots: int = 2,
    ) -> float:
        """cuBLAS, and one launch of ours for the communication, after it, or ``before`` it (as an
        all-gather always is). Nothing overlaps. ``shots``: of an all-reduce; in one shot, whole
        partial sums go to all others."""
        c, one_shot = self.c, kind == "all_reduce" and shots == 1
        nbytes = m * (k if before or kind == "all_gather" else n) * itemsize
        nbytes /= 1 if one_shot else world
        one = c.exchange_latency + self._sent_to_all(world, nbytes, c.exchange_fraction)
        return (
            self.costs.matmul(m, n, k, itemsize)
            + c.gap
            + one * (2.0 if kind == "all_reduce" and not one_shot else 1.0)
            + self._queued()
        )

    def cublas_per_shard(
        self, world: int, m: int, n: int, k: int, itemsize: int = 2, sent: int = 0
    ) -> float:
        """cuBLAS on the rows of each rank as copy engines bring them, with launches between them
        and one after all. ``sent``: columns of what is copied; 0: k."""
        each = self._copied(world, m / world * (sent or k) * itemsize)
        product = self.costs.matmul(max(m // world, 1), n, k, itemsize) * (1.0 + self.c.corun)
        done = product
        for step in range(1, world):
            done = (
                max(done, self.c.copy_latency + step * each + self.c.signal) + self.c.gap + product
            )
        return done + self.c.gap + self._queued()

    def cublas_and_sends(self, world: int, m: int, n: int, k: int, itemsize: int = 2) -> float:
        """cuBLAS for the rows of each rank, the own ones last. Copy engines send each product while
        the next is computed, then one launch adds what all ranks sent."""
        c, elements = self.c, m / world * n
        each = self._copied(world, elements * itemsize)
        product = self.costs.matmul(max(m // world, 1), n, k, itemsize) * (1.0 + c.corun) + c.gap
        sent = 0.0
        for step in range(1, world):
            sent = max(sent, step * product + c.copy_latency) + each
        summed = self.costs.stream((world + 1) * elements * itemsize)
        return max(sent + c.signal, world * product) + summed + self._queued()

    def _copied(self, world: int, nbytes: float) -> float:
        """The time in which copy engines of all ranks of a node send ``nbytes`` to one other
        each."""
        seen = view(self._node(world), self.c.copy_fraction)
        loads = seen.loads(inside_hops(seen.cluster, 1), 1.0)
        return max(nbytes * load / seen.capacities[link] for link, load in loads.items())

    def _queued(self) -> float:
        """How much longer an eager call of cuBLAS and launches of ours takes than a captured
        one."""
        return 0.0 if self.graph else self.c.scatter_eager - self.c.one_shot_launch

    def fused_matmul_all_to_all(
        self,
        exchange: Exchange,
        world: int,
        m: int,
        n: int,
        k: int,
        itemsize: int = 2,
        entries: Table | None = None,
    ) -> float:
        """Seconds of the fused x [m, k] @ w [n, k].T, whose parts along ``exchange.scatter_dim`` go
        to their ranks."""
        planned = exchange_after(exchange, world, m, n, k, itemsize)
        config = fused_config("matmul_all_to_all", planned, self.machine, entries)
        if config.kernel == "library":
            return self.cublas_and_exchange("all_to_all", world, m, n, k, itemsize)
        problem = replace(planned, rows=cdiv(planned.rows, config.tile_m) * config.tile_m)
        schedule = scatter_schedule_for(problem, config, 0, self.machine)
        return scatter_matmul(
            schedule,
            "keep",
            self.costs,
            self._node(world),
            self.graph,
            itemsize,
            by_engine=config.transport == "copy_engine",
            by_columns=exchange.scatter_dim == 1,
        ).seconds

    def fused_all_to_all_matmul(
        self,
        exchange: Exchange,
        world: int,
        m: int,
        n: int,
        k: int,
        itemsize: int = 2,
        entries: Table | None = None,
    ) -> float:
        """Seconds of the fused exchange of x [m, k] and matmul with w of ``n`` rows."""
        planned = exchange_before(exchange, world, m, n, k, itemsize)
        config = fused_config("all_to_all_matmul", planned, self.machine, entries)
        if config.kernel == "library":
            rows, depth = exchange.result(m, k, world)
            return self.cublas_and_exchange("all_to_all", world, rows, n, depth, itemsize, True)
        problem = Problem(world, m, n, k, itemsize, "bfloat16")
        schedule, parts = exchange_schedule_for(problem, config, exchange, 0, self.machine)
        simulated = (self.costs, self._node(world), self.graph, itemsize)
        if parts.side_by_side:
            return exchange_matmul(schedule, parts, config, *simulated).seconds
        return gather_matmul(schedule, config, *simulated).seconds

    def fused_matmul_scatter(
        self,
        kind: str,
        world: int,
        m: int,
        n: int,
        k: int,
        itemsize: int = 2,
        entries: Table | None = None,
    ) -> float:
        """Seconds of the fused operator, even if it is slower, with the config of tileweave's plan
        or by ``entries``."""
        if kind == "all_to_all":
            return self.fused_matmul_all_to_all(Exchange(0, 0), world, m, n, k, itemsize)
        planned = scatter_problem(kind, world, m, n, k, itemsize)
        config = fused_config(f"matmul_{kind}", planned, self.machine, entries)
        if config.kernel == "library" and config.transport == "copy_engine":
            return self.cublas_and_sends(world, m, n, k, itemsize)
        if config.kernel == "library":
            shots = config.shots
            return self.cublas_and_exchange(kind, world, m, n, k, itemsize, shots=shots)
        problem = Problem(world, cdiv(m, world), n, k, itemsize, "bfloat16")
        schedule = scatter_schedule_for(problem, config, 0, self.machine)
        way: Combine = (
            "sum"
            if kind == "reduce_scatter"
            else "one_shot"
            if config.shots == 1
            else "sum_and_gather"
        )
        engine = config.transport == "copy_engine"
        return scatter_matmul(
            schedule, way, self.costs, self._node(world), self.graph, itemsize, by_engine=engine
        ).seconds

    @_kept()
    def embedding_all_to_all(self, group: Group, lookups: Lookups, slices: int = 8) -> OpTime:
        """``lookups`` on each rank, and the all-to-all of their vectors to the owners of the
        samples.

        Unfused: torch's lookup, the all-to-all, and a concatenation of columns. Fused inside a
        node: tileweave's kernel, whose lookup is faster. Across nodes: its lookup in ``slices``, as
        a pipeline, and a copy of what arrives.
        """
        costs, row_bytes, most = self.costs, lookups.row_bytes, lookups.busiest
        lookup = costs.lookup(most.bags, most.rows, row_bytes, lookups.itemsize)
        nbytes = most.bags * row_bytes
        if group.size == 1:
            return OpTime(lookup, lookup, lookup, lookup, 0.0)
        comm = self.collective("all_to_all", nbytes, group)
        concat = costs.stream(2.0 * lookups.bags * row_bytes)
        if group.across == 1 and group.size in FUSED_WORLD_SIZES:
            fused = self.fused_embedding(group.size, most)
        else:
            own = costs.own_lookup(most.bags, most.rows, row_bytes, lookups.in_l2)
            fused = self._sliced(own, nbytes, group, slices) + concat
        return self._join(
            lookup, comm, fused, nbytes * (group.size - 1) / group.size, group, "all_to_all", concat
        )

    def fused_embedding(self, world: int, lookups: Lookups) -> float:
        """Seconds of the fused kernel inside a node: rows are read while results go to peers."""
        bags, row_bytes = lookups.bags, lookups.row_bytes
        sent = self._sent_to_all(world, bags * row_bytes / world, self.c.push_fraction)
        return self.costs.pooled(bags, lookups.rows, row_bytes, sent, lookups.in_l2)

    def rows_in_l2(self, reads: float, rows: float, row_bytes: float) -> float:
        """Which part of ``reads`` rows of one table of ``rows`` were read before and are still in
        L2, if rows are drawn at random. tileweave's kernel reads a table after the other where
        rows are read again, so L2 keeps a table that is not larger than itself."""
        if rows * row_bytes > self.cluster.device.l2 or reads <= rows:
            return 0.0
        return 1.0 - rows * (1.0 - math.exp(-reads / rows)) / reads

    def reduce_top_k(self, tokens: int, top_k: int, hidden: int) -> float:
        """Seconds of the sum over the experts of each token."""
        return self.costs.reduce_rows(tokens, top_k, hidden)

    @_kept()
    def grouped_combine(self, group: Group, matmul: ExpertMatmul) -> OpTime:
        """The second matmul of an expert layer, the return of its rows to the ranks of the tokens,
        and the sum over experts.

        Fused inside a node: the kernel, tile by tile. Across nodes tokens cross once per node
        (``over_nodes.py``).
        """
        total = self.reduce_top_k(matmul.tokens, matmul.top_k, matmul.cols)
        fused = self.fused_grouped_combine, over_nodes.grouped_combine
        return self._of_experts(group, matmul, matmul.cols, *fused, total)

    @_kept()
    def dispatch_grouped(self, group: Group, matmul: ExpertMatmul) -> OpTime:
        """The dispatch and first matmul of an expert layer."""
        fused = self.fused_dispatch_grouped, over_nodes.dispatch_grouped
        return self._of_experts(group, matmul, matmul.depth, *fused)

    def _of_experts(
        self,
        group: Group,
        matmul: ExpertMatmul,
        width: int,
        inside: Callable[[int, ExpertMatmul], float],
        across: Callable[[Operators, Group, ExpertMatmul], float],
        extra: float = 0.0,
    ) -> OpTime:
        """A grouped matmul and an exchange of rows of ``width``. ``inside``, ``across``: the fused
        operator inside a node, and over nodes. ``extra``: what follows the unfused exchange."""
        experts = matmul.experts
        rows, local = matmul.busiest_rows, max(experts // group.size, 1)
        compute = self.costs.grouped_matmul(local, cdiv(rows, local), matmul.cols, matmul.depth)
        if group.size == 1:
            alone = compute + extra
            return OpTime(alone, alone, alone, alone, 0.0)
        nbytes = rows * width * 2.0
        comm = self.collective("all_to_all", nbytes, group)
        if _one_node(group, experts):
            fused = inside(group.size, matmul)
        elif _even_nodes(group, experts):
            fused = across(self, group, matmul)
        else:
            fused = math.inf
        received = nbytes * (group.size - 1) / group.size
        return self._join(compute, comm, fused, received, group, "all_to_all", extra)

    def fused_grouped_combine(self, world: int, matmul: ExpertMatmul, itemsize: int = 2) -> float:
        """Seconds of the fused second matmul and combine inside a node, as tileweave plans it."""
        problem = matmul.problem(world, itemsize)
        config = plan_combine(problem, self.machine, False).config
        assert config is not None, "a plan for CUDA"
        simulated = self.costs, self._node(world), self.graph, matmul.skew
        return matmul_combine(problem, config, *simulated)

    def fused_dispatch_grouped(self, world: int, matmul: ExpertMatmul, itemsize: int = 2) -> float:
        """Seconds of the fused dispatch and first matmul inside a node."""
        problem = matmul.problem(world, itemsize)
        simulated = self.costs, self._node(world), self.graph, matmul.skew
        return dispatch_matmul(problem, dispatch_config(problem), *simulated)

    def _sliced(self, compute: float, nbytes: float, group: Group, slices: int) -> float:
        """Computation in slices, each sent while the next is computed; across nodes only."""
        if group.across == 1:
            return math.inf
        one = self.collective("all_to_all", nbytes / slices, group)
        each = compute / slices
        late = protocol_of(
            self.c, "all_to_all", nbytes / slices, group.inside, device=self.cluster.device
        ).latency
        steady = max(each * (1.0 + self.c.corun), one - late)
        return self.c.fused_eager + each + (slices - 1) * steady + one + self.c.signal


def _one_node(group: Group, experts: int) -> bool:
    """Whether the fused expert kernels run: all ranks are in one node and have the same number of
    experts."""
    return group.across == 1 and group.size in FUSED_WORLD_SIZES and experts % group.size == 0


def _even_nodes(group: Group, experts: int) -> bool:
    """Whether the fused expert operators run over nodes."""
    return group.inside in FUSED_WORLD_SIZES and group.across > 1 and experts % group.size == 0
