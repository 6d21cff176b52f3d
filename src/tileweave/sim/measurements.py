"""One measured value for each quantity: the median of all runs that measured it, without those
whose repeats do not agree.

Two rules, the same for cells that are fitted and for those that are held out, and neither knows
what the model says:

*Unsteady.* A time whose own repeats, the smallest and the largest left out, are more than
``STEADY`` apart is none: the host was late, or the clock of the device changed. Only benches keep
repeats; components and sweeps have medians alone.

*Median.* What was measured in several runs counts once, with the median of the runs. The same
quantity is: the same operator, sizes, world, launch mode, and for fused kernels the same
configuration. A collective alone is the same whatever operator it was measured for, and so is the
matmul in front of a reduce-scatter and of an all-reduce.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import replace
from statistics import median

from tileweave.sim.cells import Cell, alone
from tileweave.sim.predict import planned

STEADY = 0.10
UNSTEADY = f"left out where the repeats of a measurement, the smallest and the largest aside, are over {STEADY:.0%} apart"


def unsteadiness(cell: Cell) -> float:
    """How far the repeats are apart, the smallest and the largest left out: 0.1 is 10 %; 0 where
    fewer than four are known."""
    inner = sorted(cell.repeats)[1:-1]
    return max(inner) / min(inner) - 1.0 if len(inner) >= 2 else 0.0


def merge_runs(cells: Iterable[Cell]) -> tuple[list[Cell], list[Cell]]:
    """Measured times as they are -> one cell a quantity, in the order of first measurement; and
    what was left out."""
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
    """Equal for cells that measured the same thing."""
    op = cell.op
    if cell.quantity == "compute" and op == "matmul_all_reduce":
        op = "matmul_reduce_scatter"
    config = planned(cell) if cell.quantity == "fused" else None
    again = cell.again and cell.quantity == "compute"
    return op, cell.quantity, cell.shape, cell.world_size, cell.graph, cell.itemsize, config, again
