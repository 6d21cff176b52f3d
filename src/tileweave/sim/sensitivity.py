"""How much a result depends on its assumptions: link rates, latencies, imbalance, speed of
matmuls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tileweave.planning.costs import Calibration, load_calibration
from tileweave.sim.dlrm import Dlrm
from tileweave.sim.moe import MoE
from tileweave.sim.step import Result
from tileweave.sim.workload import Scenario, simulate_all

Change = Callable[[Scenario, Calibration], tuple[Scenario, Calibration]]
_LATENCIES = ("push_latency", "copy_latency", "signal")


@dataclass(frozen=True, slots=True)
class Variant:
    """One change and its result: seconds unfused and fused."""

    name: str
    unfused: float
    fused: float

    @property
    def saving(self) -> float:
        return 1.0 - self.fused / self.unfused


def variants(scenario: Scenario) -> list[tuple[str, Change]]:
    """The changes, one at a time."""
    found = [
        ("links inside nodes x 0.5", _rates(0.5, 1.0)),
        ("links inside nodes x 2", _rates(2.0, 1.0)),
        ("latencies x 0.5", _latency(0.5)),
        ("latencies x 2", _latency(2.0)),
        ("matmuls 10 % faster", _matmul(1.1)),
        ("matmuls 10 % slower", _matmul(1 / 1.1)),
    ]
    if scenario.cluster.nodes > 1:
        found[2:2] = [
            ("links between nodes x 0.5", _rates(1.0, 0.5)),
            ("links between nodes x 2", _rates(1.0, 2.0)),
        ]
    if isinstance(scenario.workload, (Dlrm, MoE)):
        found += [
            ("busiest rank 10 % above average", _imbalance(0.1)),
            ("busiest rank 30 % above average", _imbalance(0.3)),
        ]
    else:
        found.append(("slowest GPU 10 % slower", _slow(1.1)))
    return found


def sensitivity(
    scenario: Scenario,
    calibration: Calibration | None = None,
    progress: Callable[..., None] = lambda *_: None,
) -> list[Variant]:
    """Every variant of a scenario."""
    found = []
    changes = variants(scenario)
    for number, (name, change) in enumerate(changes):
        progress(name, number, len(changes))
        result: Result = simulate_all(
            *change(scenario, calibration or load_calibration()), modes=("unfused", "fused")
        )
        found.append(Variant(name, result.seconds("unfused"), result.seconds("fused")))
    return found


def _rates(inside: float, between: float) -> Change:
    def change(scenario: Scenario, calibration: Calibration) -> tuple[Scenario, Calibration]:
        cluster = scenario.cluster
        device = replace(
            cluster.device,
            link_rate=cluster.device.link_rate * inside,
            bridge_rate=cluster.device.bridge_rate * inside,
        )
        network = replace(cluster.network, nic_rate=cluster.network.nic_rate * between)
        changed = replace(cluster, device=device, network=network)
        return replace(scenario, cluster=changed), calibration

    return change


def _latency(factor: float) -> Change:
    def change(scenario: Scenario, calibration: Calibration) -> tuple[Scenario, Calibration]:
        cluster, network = scenario.cluster, scenario.cluster.network
        cluster = replace(cluster, network=replace(network, latency=network.latency * factor))
        c = calibration.coefficients
        curves = tuple(replace(curve, latency=curve.latency * factor) for curve in c.nccl)
        slower = replace(c, nccl=curves, **{name: getattr(c, name) * factor for name in _LATENCIES})
        return replace(scenario, cluster=cluster), replace(calibration, coefficients=slower)

    return change


def _matmul(factor: float) -> Change:
    def change(scenario: Scenario, calibration: Calibration) -> tuple[Scenario, Calibration]:
        c = calibration.coefficients
        names = ("matmul_flops", "matmul_feed", "fused_feed")
        faster = replace(c, **{name: getattr(c, name) * factor for name in names})
        return scenario, replace(calibration, coefficients=faster)

    return change


def _slow(factor: float) -> Change:
    def change(scenario: Scenario, calibration: Calibration) -> tuple[Scenario, Calibration]:
        """All ranks wait for the slowest one, so they are as slow as it."""
        device = scenario.cluster.device
        slower = replace(
            device, flops=device.flops / factor, memory_rate=device.memory_rate / factor
        )
        cluster = replace(scenario.cluster, device=slower)
        return replace(scenario, cluster=cluster), calibration

    return change


def _imbalance(extra: float) -> Change:
    def change(scenario: Scenario, calibration: Calibration) -> tuple[Scenario, Calibration]:
        work = scenario.workload
        if isinstance(work, (Dlrm, MoE)):
            work = replace(work, imbalance=(1.0 + work.imbalance) * (1.0 + extra) - 1.0)
        return replace(scenario, workload=work), calibration

    return change
