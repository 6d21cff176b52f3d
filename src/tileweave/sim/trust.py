"""How far the model can be trusted: the error of every measured cell, separately for fitted and
held-out ones, and comparisons with published tables."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from tileweave.planning.costs import Calibration, load_calibration
from tileweave.sim.cells import Cell
from tileweave.sim.collectives import Group
from tileweave.sim.machine import make_cluster
from tileweave.sim.operators import Lookups, Operators, OpTime
from tileweave.sim.predict import Predictor

GOOD_MEAN, GOOD_WORST = 0.08, 0.20


@dataclass(frozen=True, slots=True)
class Judged:
    """A cell and its prediction in seconds. ``side``: fit, held out, input (links alone) or outside
    (not covered by the model)."""

    cell: Cell
    predicted: float
    side: str

    @property
    def error(self) -> float:
        """The relative error: 0.05 is 5 % too slow."""
        return self.predicted / self.cell.seconds - 1.0


@dataclass(frozen=True, slots=True)
class Summary:
    """The errors of one group: the geometric mean of the factor by which predictions are off, minus
    one, and the worst."""

    name: str
    count: int
    mean: float
    worst: float
    worst_cell: str


def judge(
    cells: Iterable[Cell], calibration: Calibration | None = None, device: str = "h200"
) -> tuple[list[Judged], list[Cell]]:
    """The cells measured on ``device`` with their predictions, and the cells that have no model."""
    predictor = Predictor(calibration or load_calibration(), device)
    found, unknown = [], []
    for cell in cells:
        predicted = predictor.seconds(cell)
        if predicted is None:
            unknown.append(cell)
            continue
        side = (
            "input"
            if cell.primitive
            else "outside"
            if not cell.in_domain
            else "held out"
            if cell.held_out
            else "fit"
        )
        found.append(Judged(cell, predicted, side))
    return found, unknown


def summarise(judged: Sequence[Judged], side: str | None) -> list[Summary]:
    """Summaries by operator and quantity, then of all cells. ``side`` None: of what was fitted and
    what was held out, as in a blind test, for which nothing was fitted."""
    sides = ("fit", "held out") if side is None else (side,)
    groups: dict[str, list[Judged]] = defaultdict(list)
    for one in judged:
        if one.side in sides:
            groups[f"{one.cell.op}: {one.cell.quantity}, world {one.cell.world_size}"].append(one)
    rows = [_summary(name, members) for name, members in sorted(groups.items())]
    everything = [one for members in groups.values() for one in members]
    return [*rows, _summary("all", everything)] if everything else rows


def _summary(name: str, members: Sequence[Judged]) -> Summary:
    worst = max(members, key=lambda one: abs(math.log(1.0 + one.error)))
    off = factors_off(one.error for one in members)
    return Summary(name, len(members), *off, str(worst.cell))


def factors_off(errors: Iterable[float]) -> tuple[float, float]:
    """The factors by which relative errors (0.05: 5 % too large) are off, minus one: their
    geometric mean, and the worst."""
    logs = [abs(math.log(1.0 + error)) for error in errors]
    return math.exp(sum(logs) / len(logs)) - 1.0, math.exp(max(logs)) - 1.0


def repeatability(cells: Sequence[Cell]) -> tuple[int, float, float]:
    """Quantities that were measured in several runs: (pairs, geometric mean of their factors minus
    one, worst)."""
    groups: dict[tuple[str, str, str, int, bool], list[float]] = defaultdict(list)
    for cell in cells:
        groups[cell.op, cell.quantity, cell.key, cell.world_size, cell.graph].append(cell.seconds)
    apart = [a / b - 1.0 for times in groups.values() for a, b in combinations(times, 2)]
    return (len(apart), *factors_off(apart)) if apart else (0, math.nan, math.nan)


# --- Published tables ---


@dataclass(frozen=True, slots=True)
class Published:
    """A published range, and the lowest, mean and highest value of the model for the same set-up.

    ``agrees``: the mean of the model is in the published range.
    """

    source: str
    what: str
    low: float
    high: float
    ours_low: float
    ours_mean: float
    ours_high: float

    @property
    def agrees(self) -> bool:
        return self.low <= self.ours_mean <= self.high


_FLUX = "FLUX, arXiv 2406.06858, section 5.1: E_overlap, TP 8, GPT-3 shapes"
_SC24 = (
    "SC24 (arXiv 2305.06942): time saved, four GPUs, average and best; "
    "its shapes are not public, ours are used"
)
_FLUX_RANGES = {
    ("a100-pcie", True): (0.41, 0.57),
    ("a100", True): (0.36, 0.96),
    ("h800", True): (0.37, 0.93),
    ("a100-pcie", False): (-0.02, 0.41),
    ("a100", False): (0.14, 0.88),
    ("h800", False): (-1.65, -0.82),
}


def published(calibration: Calibration | None = None) -> list[Published]:
    """The ranges of FLUX and of the SC24 paper, and those of the model. Fused kernels are used even
    where they are slower."""
    found = []
    for (device, large), (low, high) in _FLUX_RANGES.items():
        rows = (1024, 2048, 4096, 8192) if large else (64, 512)
        ops = Operators(make_cluster(device), calibration)
        values = [value for m in rows for value in _overlaps(ops, m)]
        found.append(_published(_FLUX, f"{device}, m {rows[0]} to {rows[-1]}", low, high, values))
    node = replace(make_cluster("mi210"), gpus_per_node=4)
    ops, graphs = Operators(node, calibration), Operators(node, calibration, graph=True)
    pooled = [_pooled(ops, pooling) for pooling in (4, 8, 20, 40, 70)]
    vectors = [
        graphs.matmul_scatter("all_reduce", 4, 1, n, k)
        for n in (4096, 8192)
        for k in (2048, 4096, 7168)
    ]
    shapes = ((4096, 4096, 1536), (8192, 4096, 4096), (4096, 4096, 14336))
    exchanged = [ops.matmul_scatter("all_to_all", 4, m, n, k) for m, n, k in shapes]
    for what, low, high, times in (
        ("embedding + all-to-all", 0.20, 0.32, pooled),
        ("GEMV + all-reduce", 0.13, 0.22, vectors),
        ("GEMM + all-to-all", 0.12, 0.20, exchanged),
    ):
        found.append(_published(_SC24, what, low, high, [1.0 - t.fused / t.unfused for t in times]))
    return found


def _pooled(ops: Operators, pooling: int) -> OpTime:
    """With tileweave's lookup on both sides, so that a slower lookup of torch is not counted as a
    saving."""
    lookups = Lookups(65536 * 8, pooling, 256.0)
    time = ops.embedding_all_to_all(Group(4), lookups)
    own = ops.costs.own_lookup(lookups.bags, lookups.rows, lookups.row_bytes)
    return replace(time, unfused=time.unfused - time.compute + own, compute=own)


def _overlaps(ops: Operators, m: int) -> Iterable[float]:
    """E_overlap of both matmuls of a GPT-3 MLP on eight ranks."""
    gather = ops.all_gather_matmul(8, m, 6144, 12288)
    scatter = ops.matmul_scatter("reduce_scatter", 8, m, 12288, 6144)
    yield _overlap(gather, ops.fused_all_gather_matmul(8, m, 6144, 12288))
    yield _overlap(scatter, ops.fused_matmul_scatter("reduce_scatter", 8, m, 12288, 6144))


def _overlap(time: OpTime, fused: float) -> float:
    return 1.0 - (fused - time.compute) / (time.unfused - time.compute)


def _published(
    source: str, what: str, low: float, high: float, values: Sequence[float]
) -> Published:
    return Published(source, what, low, high, min(values), sum(values) / len(values), max(values))
