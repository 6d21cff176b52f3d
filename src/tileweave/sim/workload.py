"""A workload file: what runs on which cluster. It is one YAML document with ``workload``, its
fields, and ``cluster``.

workload: train            # train, serve, moe or dlrm
model: llama2-70b          # a published one, or its sizes
tp: 8
pp: 4
cluster: {device: h200, nodes: 16, network: ib-400}
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import yaml

from tileweave.planning.costs import Calibration
from tileweave.planning.problem import FUSED_WORLD_SIZES
from tileweave.sim import dlrm, memory, moe, serving, training
from tileweave.sim.document import REQUIRED, Fields, Record, Spot, choice, fail, open_document
from tileweave.sim.machine import Cluster, cluster_reader, make_cluster
from tileweave.sim.operators import MODES, Mode, Operators
from tileweave.sim.step import Result, Timeline

Workload = training.Training | serving.Serving | moe.MoE | dlrm.Dlrm
KINDS = ("train", "serve", "moe", "dlrm")
_FIELDS: dict[str, tuple[Fields, Callable[..., Workload]]] = {
    "train": (training.FIELDS, training.Training),
    "serve": (serving.FIELDS, serving.Serving),
    "moe": (moe.FIELDS, moe.MoE),
    "dlrm": (dlrm.FIELDS, dlrm.Dlrm),
}


@dataclass(frozen=True, slots=True)
class Scenario:
    """A workload on a cluster."""

    kind: str
    workload: Workload
    cluster: Cluster

    @property
    def title(self) -> str:
        return f"{self.kind} {self.workload.model.name}"

    @property
    def samples(self) -> float:
        """Tokens or samples of one step, of all its GPUs."""
        return samples_of(self)[0]

    @property
    def gpus(self) -> int:
        """GPUs that a step takes: a served model's replica may be part of a node."""
        work = self.workload
        return work.gpus if isinstance(work, serving.Serving) else self.cluster.world_size

    @property
    def file_name(self) -> str:
        """For files about this scenario: the model, what is not usual, and the machines."""
        work, cluster = self.workload, self.cluster
        words = [self.kind, work.model.name]
        for one in fields(work):
            value = getattr(work, one.name)
            if one.name == "tp" or (one.name != "model" and value != one.default):
                short = "".join(part[0] for part in one.name.split("_"))
                name = one.name if "_" not in one.name else short
                words.append(f"{name}{value}")
        words.append(f"{cluster.world_size}x{cluster.device.name}")
        if cluster.nodes > 1:
            words.append(cluster.network.name)
        return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(words))


def read_scenario(path: Path) -> Scenario:
    """The scenario of a YAML file. Errors name line, field and what is allowed."""
    return scenario_of(open_document(path))


def scenario_of(spot: Spot) -> Scenario:
    """The same from an open document."""
    if not isinstance(spot.node, yaml.MappingNode):
        raise fail(
            spot,
            "no mapping",
            f"a mapping with `workload`: {', '.join(KINDS)}",
            "see docs/simulator.md",
        )
    kinds = [
        spot.inside("workload", node) for key, node in spot.node.value if key.value == "workload"
    ]
    if not kinds:
        raise fail(spot, "no field 'workload'", ", ".join(KINDS), "add `workload: ...`")
    kind = choice(KINDS)(kinds[0])
    fields, make = _FIELDS[kind]
    whole = {
        "workload": (choice(KINDS), REQUIRED),
        **fields,
        "cluster": (cluster_reader, make_cluster()),
    }
    values = Record(whole)(spot)
    cluster = values.pop("cluster")
    values.pop("workload")
    return Scenario(kind, make(**values), cluster)


def simulate(
    scenario: Scenario,
    mode: Mode,
    calibration: Calibration | None = None,
    fuse: Iterable[str] | None = None,
) -> Timeline:
    """One step of a scenario in one mode."""
    return simulate_with(operators_for(scenario, calibration), scenario, mode, fuse)


def simulate_all(
    scenario: Scenario,
    calibration: Calibration | None = None,
    modes: Iterable[Mode] = MODES,
    fuse: Iterable[str] | None = None,
    progress: Callable[..., None] = lambda *_: None,
) -> Result:
    """A scenario in all ``modes``: unfused, fused and its bound."""
    started = time.perf_counter()
    ops = operators_for(scenario, calibration)
    timelines = {}
    modes = tuple(modes)
    for number, mode in enumerate(modes):
        progress(mode, number, len(modes))
        timelines[mode] = simulate_with(ops, scenario, mode, fuse)
    per_step, unit = samples_of(scenario)
    result = Result(
        scenario.title,
        scenario.cluster.describe(),
        timelines,
        per_step,
        unit,
        wall=time.perf_counter() - started,
    )
    result.notes = tuple(_notes(scenario, ops))
    return result


def operators_for(
    scenario: Scenario, calibration: Calibration | None, kernels: bool = True
) -> Operators:
    """The operators of a scenario. Other scenarios of its kind on its cluster can share them, and
    what they have simulated already. ``kernels`` False: for unfused steps alone, of training and
    serving."""
    work = scenario.workload
    if isinstance(work, serving.Serving):
        return serving.operators(work, scenario.cluster, calibration, kernels)
    prefill = isinstance(work, moe.MoE) and work.phase == "prefill"
    sustained = isinstance(work, training.Training) or prefill
    return Operators(scenario.cluster, calibration, False, sustained, kernels)


def simulate_with(
    ops: Operators, scenario: Scenario, mode: Mode, fuse: Iterable[str] | None = None
) -> Timeline:
    """One step of a scenario in one mode, with operators that others may have used."""
    module = {"train": training, "serve": serving, "moe": moe, "dlrm": dlrm}[scenario.kind]
    return module.simulate(
        scenario.workload, scenario.cluster, ops, mode, None if fuse is None else set(fuse)
    )


def samples_of(scenario: Scenario) -> tuple[float, str]:
    """How many samples or tokens a step makes, and which of both."""
    work = scenario.workload
    if isinstance(work, training.Training):
        return training.samples(work, scenario.cluster) * work.tokens, "tokens"
    if isinstance(work, serving.Serving):
        each = {"prefill": work.seq, "decode": 1, "generate": work.output}
        return work.batch * each[work.phase], "tokens"
    if isinstance(work, moe.MoE):
        return work.tokens * scenario.cluster.world_size, "tokens"
    world = scenario.cluster.world_size
    return work.model.samples(world) * world, "samples"


def _ranks(scenario: Scenario) -> int:
    """The number of ranks in the groups of the operators of a workload."""
    work = scenario.workload
    if isinstance(work, moe.MoE):
        return work.ep or scenario.cluster.world_size
    return scenario.cluster.world_size if isinstance(work, dlrm.Dlrm) else work.tp


MEASURED_RANKS = 4  # of a node, the most that we have measured


def cluster_notes(cluster: Cluster) -> Iterable[str]:
    """Notes about what was not measured for a cluster."""
    device = cluster.device
    if device.name != "h200":
        yield f"{device.name}: fractions of peak of an H200 are assumed, not measured" + (
            f"; matmuls reach {device.matmul:.0%} of peak, as published" if device.matmul else ""
        )
    if cluster.gpus_per_node > MEASURED_RANKS:
        yield (
            f"{cluster.gpus_per_node} GPUs in a node: NCCL by curves that others published for 8 "
            f"(tileweave simulate machines), fused kernels as among {MEASURED_RANKS}; "
            "neither measured by us"
        )
    if cluster.nodes > 1:
        yield (
            "between nodes: rates and latency of data sheets, "
            "assumed or as given, not measured by us"
        )


def _notes(scenario: Scenario, ops: Operators) -> Iterable[str]:
    """Notes that readers of the results must know."""
    cluster = scenario.cluster
    work = scenario.workload
    if isinstance(work, serving.Serving) and cluster.nodes > 1:
        if work.gpus <= cluster.gpus_per_node:
            yield "one replica, inside one node: the other nodes change nothing"
            cluster = replace(cluster, nodes=1)
        elif work.gpus < cluster.world_size:
            yield f"one replica on {work.gpus} GPUs: the others change nothing"
    if isinstance(work, serving.Serving):
        most = memory.most_sequences(work, cluster)
        yield f"room for keys and values of {most:,} sequences of {work.longest:,} tokens"
        if work.pp > 1 and work.phase != "prefill":
            yield "idle: while a micro-batch decodes on one stage, the others work on other ones"
    yield from cluster_notes(cluster)
    most = FUSED_WORLD_SIZES[-1]
    if most < (ranks := _ranks(scenario)) <= cluster.gpus_per_node:
        yield f"{ranks} ranks inside a node: unfused, since fused kernels have at most {most}"
    missing = [name for name in ops.calibration.not_fitted if name not in ("attention",)]
    if missing:
        yield f"coefficients that are not fitted to cells: {', '.join(missing)}"
    if isinstance(scenario.workload, serving.Serving) or scenario.kind == "train":
        yield "attention: a published fraction of peak, not measured by us"
