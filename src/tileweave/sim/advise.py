"""Which degrees of parallelism, and which operators to fuse, on a given cluster.

Every candidate has the batch of what was asked. Candidates that do not fit into memory are counted
and left out. Training has hundreds: they are ordered by an estimate without a schedule (the work of
the busiest stage and the idle time of the pipeline), and the first ones are simulated, unfused and
fused. The best unfused and the best fused layout are each chosen for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from tileweave.errors import InputError
from tileweave.planning.costs import Calibration
from tileweave.sim import training
from tileweave.sim.machine import Cluster
from tileweave.sim.memory import Memory, memory_of, usable
from tileweave.sim.modelled import operators_of
from tileweave.sim.moe import MoE
from tileweave.sim.operators import Mode, Operators
from tileweave.sim.serving import Serving
from tileweave.sim.training import Training
from tileweave.sim.workload import Scenario, operators_for, simulate_with

MODES: tuple[Mode, ...] = ("unfused", "fused")
_SIMULATED = 5  # layouts for each mode, of those that the estimate puts first
_NEAR = 1.25  # layouts that are estimated slower than the best by more are not simulated
Say = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One set of degrees of parallelism.

    batch : per step: samples of training and recommendation, tokens of serving and experts.
    per_second : tokens or samples per GPU and second, fused.
    """

    name: str
    scenario: Scenario
    unfused: float
    fused: float
    per_second: float
    batch: float
    memory: Memory


@dataclass(frozen=True, slots=True)
class Advice:
    """Candidates that fit, best fused throughput first.

    rejected : why other degrees are not possible.
    too_large : the number of candidates that do not fit into memory.
    smallest : of those, the one that needs least.
    savings : seconds per step that each operator alone saves in the best candidate.
    """

    candidates: list[Candidate]
    rejected: list[str]
    too_large: int
    smallest: str
    savings: dict[str, float]

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    @property
    def best_unfused(self) -> Candidate:
        """The best layout without fusion. The best one with fusion is compared with it."""
        return max(self.candidates, key=lambda one: one.per_second * one.fused / one.unfused)

    @property
    def saving(self) -> float:
        """The fraction of the time of the best unfused candidate that the best fused one saves."""
        unfused = self.best_unfused
        return 1.0 - unfused.per_second * unfused.fused / unfused.unfused / self.best.per_second


@dataclass(slots=True)
class _Fitting:
    name: str
    scenario: Scenario
    memory: Memory
    estimates: dict[Mode, float]


def _quiet(text: str, done: int = 0, total: int = 0) -> None:
    """No progress."""


def advise(
    scenario: Scenario, calibration: Calibration | None = None, progress: Say = _quiet
) -> Advice:
    """Simulate the candidates that fit, and order them by their fused throughput per GPU."""
    ops: dict[Mode, Operators] = {
        mode: operators_for(scenario, calibration, mode == "fused") for mode in MODES
    }
    fitting, rejected, large = _fitting(scenario)
    if not fitting:
        raise _nothing_fits(scenario, rejected, large)
    chosen = _chosen(fitting, ops, progress)
    found = []
    for number, one in enumerate(chosen):
        progress(f"candidate {one.name}", number, len(chosen) + 1)
        try:
            unfused, fused = (
                simulate_with(ops[mode], one.scenario, mode).seconds for mode in MODES
            )
        except InputError as error:
            rejected.append(f"{one.name}: {error}")
            continue
        batch, gpus = one.scenario.samples, one.scenario.gpus
        rate = batch / fused / gpus
        work = one.scenario.workload
        if isinstance(work, Training):
            batch = training.samples(work, one.scenario.cluster)
        found.append(Candidate(one.name, one.scenario, unfused, fused, rate, batch, one.memory))
    if not found:
        raise _nothing_fits(scenario, rejected, large)
    found.sort(key=lambda one: -one.per_second)
    best = found[0].scenario
    progress("operators one by one", len(chosen), len(chosen) + 1)
    none = simulate_with(ops["fused"], best, "fused", ()).seconds
    savings = {
        op: none - simulate_with(ops["fused"], best, "fused", (op,)).seconds
        for op in operators_of(best.kind)
    }
    smallest = min(large, key=lambda one: one[1].total, default=None)
    said = f"{smallest[0]} needs {smallest[1].text()}" if smallest else ""
    return Advice(found, rejected, len(large), said, savings)


def _fitting(
    scenario: Scenario,
) -> tuple[list[_Fitting], list[str], list[tuple[str, Memory]]]:
    """Candidates that fit; why others are not possible; what others need."""
    found: list[_Fitting] = []
    rejected: list[str] = []
    large: list[tuple[str, Memory]] = []
    for name, candidate in candidates(scenario):
        try:
            memory = memory_of(candidate.workload, candidate.cluster)
        except InputError as error:
            rejected.append(f"{name}: {error}")
            continue
        if memory.fits(candidate.cluster.device):
            found.append(_Fitting(name, candidate, memory, {}))
        else:
            large.append((name, memory))
    return found, rejected, large


def _nothing_fits(
    scenario: Scenario, rejected: list[str], large: list[tuple[str, Memory]]
) -> InputError:
    room = usable(scenario.cluster.device) / 1e9
    remedy = (
        "a device with more memory, more GPUs of a node, or a smaller batch"
        if isinstance(scenario.workload, Serving)
        else "more GPUs, recompute: full, or a smaller micro-batch"
    )
    least = min(large, key=lambda one: one[1].total, default=None)
    tried = f"{least[0]} needs least, {least[1].text()}" if least else "; ".join(rejected)
    return InputError(
        f"asked: {scenario.title} on {scenario.cluster.describe()}; "
        f"allowed: what fits the {room:.0f} GB that a GPU has for it; remedy: {remedy}. "
        f"Tried: {tried}"
    )


def _chosen(fitting: list[_Fitting], ops: dict[Mode, Operators], progress: Say) -> list[_Fitting]:
    """All candidates; of training the layouts that the estimate puts first, for either mode. Fused
    ones take longer to estimate, hence only those that come near without fusion."""
    if not isinstance(fitting[0].scenario.workload, Training):
        return fitting
    for number, one in enumerate(fitting):
        progress(f"estimates {one.name}", number, len(fitting))
        one.estimates["unfused"] = _estimate(one, ops["unfused"], "unfused")
    layouts: dict[tuple[int, int, int], _Fitting] = {}
    for one in fitting:
        work = one.scenario.workload
        assert isinstance(work, Training), "only training is estimated"
        key = (work.tp, work.pp, work.context_parallel)
        if key not in layouts or one.estimates["unfused"] < layouts[key].estimates["unfused"]:
            layouts[key] = one
    near = sorted(layouts.values(), key=lambda one: one.estimates["unfused"])[: 2 * _SIMULATED]
    for number, one in enumerate(near):
        progress(f"estimates {one.name}, fused", number, len(near))
        one.estimates["fused"] = _estimate(one, ops["fused"], "fused")
    found: list[_Fitting] = []
    for mode in MODES:
        ordered = sorted(near, key=lambda one, mode=mode: one.estimates[mode])[:_SIMULATED]
        most = _NEAR * ordered[0].estimates[mode]
        found += [one for one in ordered if one not in found and one.estimates[mode] <= most]
    return found


def _estimate(one: _Fitting, ops: Operators, mode: Mode) -> float:
    work = one.scenario.workload
    assert isinstance(work, Training), "only training is estimated"
    try:
        return training.estimate(work, one.scenario.cluster, ops, mode)
    except InputError:  # such as heads that tp does not divide
        return float("inf")


def candidates(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    """Degrees of parallelism to try."""
    work, cluster = scenario.workload, scenario.cluster
    if isinstance(work, Training):
        for one in _layouts(work, cluster):
            yield _name(one, cluster), replace(scenario, workload=one)
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


def _layouts(work: Training, cluster: Cluster) -> Iterator[Training]:
    """Layouts of training with the batch of ``work``. What does not fit is tried with full
    recomputation too."""
    world = cluster.world_size
    batch = work.global_batch or training.usual_batch(work, cluster)
    stages = [
        pp
        for pp in range(1, min(world, work.model.layers, 64) + 1)
        if pp & (pp - 1) == 0 or work.model.layers % pp == 0
    ]
    shares = [cp for cp in (1, 2, 4, 8) if cp == 1 or work.tokens >= 4096 * cp // 2]
    for tp in _powers(cluster.gpus_per_node):
        for pp in stages:
            for cp in sorted({*shares, work.context_parallel}):
                dp, left = divmod(world, tp * pp * cp)
                if left or not dp or batch % (dp * work.micro_batch):
                    continue
                base = replace(work, tp=tp, pp=pp, context_parallel=cp, dp=0, global_batch=batch)
                if pp > 1:
                    base = replace(base, sharding=_of_pipeline(work.sharding))
                micro_batches = batch // dp // work.micro_batch
                for chunks in _chunks(work, pp, micro_batches):
                    one = replace(base, virtual_pipeline=chunks)
                    yield one
                    if work.recompute != "full" and not memory_fits(one, cluster):
                        yield replace(one, recompute="full")


def _of_pipeline(sharding: str) -> str:
    return sharding if sharding in ("none", "optimizer") else "optimizer"


def _chunks(work: Training, pp: int, micro_batches: int) -> list[int]:
    """Parts of each stage: equal divisions into up to 12 of two layers or more, where Megatron can
    interleave."""
    if pp == 1 or micro_batches % pp or work.schedule != "1f1b":
        return [1]
    layers, left = divmod(work.model.layers, pp)
    return (
        [1]
        if left
        else [v for v in range(1, 13) if layers % v == 0 and (v == 1 or layers // v > 1)]
    )


def memory_fits(work: Training, cluster: Cluster) -> bool:
    """Whether a layout fits; False if it is not possible."""
    try:
        return memory_of(work, cluster).fits(cluster.device)
    except InputError:
        return False


def _name(work: Training, cluster: Cluster) -> str:
    dp = cluster.world_size // (work.tp * work.pp * work.context_parallel)
    found = f"tp {work.tp}, pp {work.pp}"
    if work.context_parallel > 1:
        found += f", cp {work.context_parallel}"
    found += f", dp {dp}"
    if work.virtual_pipeline > 1:
        found += f", vp {work.virtual_pipeline}"
    return found + (", recompute full" if work.recompute == "full" else "")


def _powers(most: int) -> Iterable[int]:
    degree = 1
    while degree <= most:
        yield degree
        degree *= 2
