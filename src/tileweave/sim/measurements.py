"""One measured value per quantity: the median of all runs that measured it, without unsteady ones.

Two rules are the same for fitted and for held-out cells, and do not depend on the model:

*Unsteady.* A time is left out if its repeats, without the smallest and the largest, are more than
``STEADY`` apart: the host was late, or the clock rate of the device changed. Only benches have
repeats; components and sweeps have medians only.

*Median.* A quantity that was measured in several runs counts once, with the median of the runs. It
is the same quantity if operator, sizes, world size, launch mode and, for fused kernels, the config
that is known to have run are
equal. A collective alone is the same whatever operator it was measured for, and so is the matmul
before a reduce-scatter or an all-reduce.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import replace
from statistics import median

from tileweave.sim.cells import Cell, alone
from tileweave.sim.predict import measured_config

STEADY = 0.10
UNSTEADY = (
    "left out where the repeats of a measurement, the smallest and the largest aside, "
    f"are over {STEADY:.0%} apart"
)


def unsteadiness(cell: Cell) -> float:
    """How far the repeats are apart, without the smallest and the largest: 0.1 is 10 %. 0 for fewer
    than four repeats."""
    inner = sorted(cell.repeats)[1:-1]
    return max(inner) / min(inner) - 1.0 if len(inner) >= 2 else 0.0


def merge_runs(cells: Iterable[Cell]) -> tuple[list[Cell], list[Cell]]:
    """Measured times -> one cell per quantity, in the order of the first measurement; and the cells
    that were left out."""
    runs: dict[Hashable, list[Cell]] = defaultdict(list)
    unsteady = []
    for cell in map(alone, cells):
        if unsteadiness(cell) > STEADY:
            unsteady.append(cell)
        else:
            runs[quantity_of(cell)].append(cell)
    merged = [
        replace(same[0], seconds=median(one.seconds for one in same), repeats=(), runs=len(same))
        for same in runs.values()
    ]
    return merged, unsteady


def quantity_of(cell: Cell) -> Hashable:
    """A key that is equal for cells of the same quantity."""
    op = cell.op
    if cell.quantity == "compute" and op == "matmul_all_reduce":
        op = "matmul_reduce_scatter"
    config = measured_config(cell) if cell.quantity == "fused" else None
    again = cell.again and cell.quantity == "compute"
    return op, cell.quantity, cell.shape, cell.world_size, cell.graph, cell.itemsize, config, again
