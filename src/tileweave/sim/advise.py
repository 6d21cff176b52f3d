"""Which degree of parallelism, and which operators to fuse, on a given cluster: every candidate is
simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from tileweave.errors import InputError
from tileweave.planning.costs import Calibration
from tileweave.sim.modelled import operators_of
from tileweave.sim.moe import MoE
from tileweave.sim.serving import Serving
from tileweave.sim.training import Training
from tileweave.sim.workload import Scenario, simulate_all

# Bytes per parameter in training: bf16 weight and gradient; fp32 master and moments, which are
# sharded over data parallel ranks.
_WEIGHT, _OPTIMISER = 4.0, 12.0
_USABLE = 0.9


@dataclass(frozen=True, slots=True)
class Candidate:
    """One set of degrees of parallelism.

    per_second : tokens or samples per GPU and second.
    memory : bytes per GPU, estimated.
    """

    name: str
    scenario: Scenario
    unfused: float
    fused: float
    per_second: float
    memory: float
    fits: bool


@dataclass(frozen=True, slots=True)
class Advice:
    """Candidates, best first, and the seconds per step that each operator alone saves in the best
    one."""

    candidates: list[Candidate]
    rejected: list[str]
    savings: dict[str, float]

    @property
    def best(self) -> Candidate:
        return self.candidates[0]


def advise(
    scenario: Scenario,
    calibration: Calibration | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Advice:
    """Simulate every candidate, and order those that fit into memory by their fused throughput per
    GPU."""
    found, rejected = [], []
    for name, candidate in candidates(scenario):
        progress(name)
        try:
            result = simulate_all(candidate, calibration, ("unfused", "fused"))
        except InputError as error:
            rejected.append(f"{name}: {error}")
            continue
        memory, gpus = memory_of(candidate), candidate.cluster.world_size
        if isinstance(candidate.workload, Serving):
            gpus = candidate.workload.tp
        rate = result.samples / result.seconds("fused") / gpus
        fits = memory <= _USABLE * candidate.cluster.device.memory
        found.append(
            Candidate(
                name,
                candidate,
                result.seconds("unfused"),
                result.seconds("fused"),
                rate,
                memory,
                fits,
            )
        )
    found.sort(key=lambda one: (not one.fits, -one.per_second))
    if not found or not found[0].fits:
        device = scenario.cluster.device
        tried = ", ".join(one.name for one in found) or "; ".join(rejected)
        raise InputError(
            f"asked: {scenario.title} on {scenario.cluster.describe()}; "
            f"allowed: what fits {device.memory / 1e9:g} GB; "
            f"remedy: more GPUs, or smaller batches. Tried: {tried}"
        )
    best = found[0].scenario
    progress("operators one by one")
    none = simulate_all(best, calibration, ("fused",), fuse=()).seconds("fused")
    savings = {
        op: none - simulate_all(best, calibration, ("fused",), fuse=(op,)).seconds("fused")
        for op in operators_of(best.kind)
    }
    return Advice(found, rejected, savings)


def candidates(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    """Degrees of parallelism to try."""
    work, cluster = scenario.workload, scenario.cluster
    if isinstance(work, Training):
        for tp in _powers(cluster.gpus_per_node):
            for pp in _powers(min(cluster.world_size // tp, 32)):
                if work.model.layers >= pp and cluster.world_size % (tp * pp) == 0:
                    yield (
                        f"tp {tp}, pp {pp}, dp {cluster.world_size // tp // pp}",
                        replace(scenario, workload=replace(work, tp=tp, pp=pp, dp=0)),
                    )
    elif isinstance(work, Serving):
        for tp in _powers(cluster.gpus_per_node):
            yield f"tp {tp}", replace(scenario, workload=replace(work, tp=tp))
    elif isinstance(work, MoE):
        for ep in _powers(cluster.world_size):
            if work.model.experts % ep == 0:
                yield f"ep {ep}", replace(scenario, workload=replace(work, ep=ep))
    else:
        for slices in (1, 2, 4, 8, 16, 32):
            yield f"slices {slices}", replace(scenario, workload=replace(work, slices=slices))


def _powers(most: int) -> Iterable[int]:
    degree = 1
    while degree <= most:
        yield degree
        degree *= 2


def memory_of(scenario: Scenario) -> float:
    """An estimate of the bytes per GPU: parameters, gradients and moments, activations of
    micro-batches in flight, and caches."""
    work, cluster = scenario.workload, scenario.cluster
    if isinstance(work, Training):
        model, shards = work.model, work.tp * work.pp
        dp = max(cluster.world_size // shards, 1)
        weights = model.parameters / shards * (_WEIGHT + _OPTIMISER / dp)
        rows = work.micro_batch * work.tokens
        per_layer = (
            34.0 * rows * model.hidden / work.tp
            if work.recompute == "none"
            else 2.0 * rows * model.hidden / work.tp
        )
        # pp micro-batches of layers / pp in flight on the first stage
        return weights + per_layer * model.layers
    if isinstance(work, Serving):
        model = work.model
        cache = (
            2.0
            * 2.0
            * work.batch
            * work.seq
            * max(model.kv_heads / work.tp, 1.0)
            * model.head_dim
            * model.layers
        )
        return 2.0 * model.parameters / work.tp + cache
    if isinstance(work, MoE):
        experts = work.model.experts / (work.ep or cluster.world_size)
        attention = work.model.qkv + work.model.attended
        return (
            2.0 * work.model.layers * (experts * 3 * work.model.ffn + attention) * work.model.hidden
        )
    tables = (
        work.model.count(cluster.world_size)
        * work.model.rows
        * work.model.dim
        * work.model.itemsize
    )
    return tables / cluster.world_size
