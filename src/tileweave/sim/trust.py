"""How far the model can be trusted: error of every measured cell, fitted and held out apart, and trends of published tables."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tileweave.sim.cells import Cell
from tileweave.sim.collectives import Group
from tileweave.sim.costs import Calibration, load_calibration
from tileweave.sim.machine import make_cluster
from tileweave.sim.operators import Operators
from tileweave.sim.predict import Predictor

GOOD_MEAN, GOOD_WORST = 0.08, 0.20


@dataclass(frozen=True, slots=True)
class Judged:
    """A cell and its prediction, seconds. ``side``: fit, held out, input (links alone) or outside (not claimed)."""

    cell: Cell
    predicted: float
    side: str

    @property
    def error(self) -> float:
        """Relative: 0.05 is 5 % too slow."""
        return self.predicted / self.cell.seconds - 1.0


@dataclass(frozen=True, slots=True)
class Summary:
    """Errors of one group: geometric mean of the factor by which predictions are off, less one, and the worst."""

    name: str
    count: int
    mean: float
    worst: float
    worst_cell: str


def judge(cells: Iterable[Cell], calibration: Calibration | None = None) -> tuple[list[Judged], list[Cell]]:
    """Every cell that the model knows, judged; and those it has no model for."""
    predictor = Predictor(calibration or load_calibration())
    found, unknown = [], []
    for cell in cells:
        predicted = predictor.seconds(cell)
        if predicted is None:
            unknown.append(cell)
            continue
        side = "input" if cell.primitive else "outside" if not cell.in_domain else "held out" if cell.held_out else "fit"
        found.append(Judged(cell, predicted, side))
    return found, unknown


def summarise(judged: Sequence[Judged], side: str) -> list[Summary]:
    """By operator and quantity, then all of them."""
    groups: dict[str, list[Judged]] = defaultdict(list)
    for one in judged:
        if one.side == side:
            groups[f"{one.cell.op}: {one.cell.quantity}, world {one.cell.world_size}"].append(one)
    rows = [_summary(name, members) for name, members in sorted(groups.items())]
    everything = [one for members in groups.values() for one in members]
    return [*rows, _summary("all", everything)] if everything else rows


def _summary(name: str, members: Sequence[Judged]) -> Summary:
    worst = max(members, key=lambda one: abs(math.log(1.0 + one.error)))
    mean = math.exp(sum(abs(math.log(1.0 + one.error)) for one in members) / len(members)) - 1.0
    return Summary(name, len(members), mean, math.exp(abs(math.log(1.0 + worst.error))) - 1.0, str(worst.cell))


def repeatability(cells: Sequence[Cell]) -> tuple[int, float, float]:
    """The same quantity measured in more than one run: (pairs, geometric mean of their factor less one, worst)."""
    groups: dict[tuple[str, str, str, int, bool], list[float]] = defaultdict(list)
    for cell in cells:
        groups[cell.op, cell.quantity, cell.key, cell.world_size, cell.graph].append(cell.seconds)
    logs = [abs(math.log(a / b)) for times in groups.values() for i, a in enumerate(times) for b in times[:i]]
    if not logs:
        return 0, math.nan, math.nan
    return len(logs), math.exp(sum(logs) / len(logs)) - 1.0, math.exp(max(logs)) - 1.0


# --- Published tables ---


@dataclass(frozen=True, slots=True)
class Published:
    """A published range, and what the model says of the same set-up. ``agrees``: whether the two ranges overlap."""

    source: str
    what: str
    low: float
    high: float
    ours_low: float
    ours_high: float
    remark: str

    @property
    def agrees(self) -> bool:
        return self.ours_low <= self.high and self.low <= self.ours_high


_FLUX = "FLUX, arXiv 2406.06858, section 5.1: E_overlap, TP 8, GPT-3 shapes"


def published(calibration: Calibration | None = None) -> list[Published]:
    """FLUX's operator ranges and the averages of the SC24 paper, beside ours."""
    found = []
    ranges = {"a100-pcie": (0.41, 0.57), "a100": (0.36, 0.96), "h800": (0.37, 0.93)}
    for device, (low, high) in ranges.items():
        ops = Operators(make_cluster(device), calibration)
        values = [
            _overlap(time.unfused, time.fused, time.compute)
            for m in (1024, 2048, 4096, 8192)
            for time in (
                ops.all_gather_matmul(8, m, 49152 // 8, 12288),
                ops.matmul_scatter("reduce_scatter", 8, m, 12288, 49152 // 8),
            )
        ]
        found.append(Published(_FLUX, device, low, high, min(values), max(values), "efficiencies transferred from H200"))
    node = replace(make_cluster("mi210"), gpus_per_node=4)
    ops = Operators(node, calibration)
    source = "SC24 (arXiv 2305.06942): share of time saved, four GPUs; its shapes are not public, ours stand in"
    pooled = [ops.embedding_all_to_all(Group(4), 65536 * 8, pooling, 256.0) for pooling in (4, 8, 20, 40, 70)]
    found.append(_saved(source, "embedding + all-to-all", 0.20, 0.32, [(t.unfused, t.fused) for t in pooled]))
    ops = Operators(node, calibration, graph=True)
    vectors = [ops.matmul_scatter("all_reduce", 4, 1, n, k) for n in (4096, 8192) for k in (2048, 4096, 7168)]
    found.append(_saved(source, "GEMV + all-reduce", 0.13, 0.22, [(t.unfused, t.fused) for t in vectors]))
    combined = [
        ops.matmul_scatter("all_to_all", 4, m, n, k)
        for m, n, k in ((4096, 4096, 1536), (8192, 4096, 4096), (4096, 4096, 14336))
    ]
    found.append(_saved(source, "GEMM + all-to-all", 0.12, 0.20, [(t.unfused, t.fused) for t in combined]))
    return found


def _saved(source: str, what: str, average: float, most: float, times: list[tuple[float, float]]) -> Published:
    values = [1.0 - fused / unfused for unfused, fused in times]
    return Published(source, what, average, most, min(values), max(values), "published: average and largest")


def _overlap(unfused: float, fused: float, compute: float) -> float:
    return 1.0 - (fused - compute) / (unfused - compute)
