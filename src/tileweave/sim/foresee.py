"""Predictions for ranks that were never measured, written down before they are.

The cells are those of benches of fewer ranks: the same global sizes among more ranks, each operator
in the config that tileweave plans for them.

    python -m tileweave.sim.foresee 8 docs/results/simulator-eight.md RESULTS.json ...
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from tileweave.errors import TileweaveError, require
from tileweave.files import write_text
from tileweave.planning.costs import load_calibration
from tileweave.planning.problem import FUSED_WORLD_SIZES
from tileweave.sim.cells import Cell, read_cells
from tileweave.sim.machine import make_cluster
from tileweave.sim.modelled import is_matmul
from tileweave.sim.plans import machine_of, plan_of
from tileweave.sim.predict import Predictor, problem_of
from tileweave.sim.tables import with_config

DEVICES = ("h200", "h100")
_HEAD = """# {ranks} GPUs of a node, before they were measured

Written before any bench ran on {ranks} GPUs: the model's time for the cells of benches of fewer,
among {ranks} of each device, in microseconds. Global sizes are the same (embeddings: as many tables
on each rank). Each fused operator is in the config that tileweave plans for {ranks} ranks;
"unfused" in that column: what is planned. *Bound* is the co-run bound, as benches measure it.

No coefficient was fitted to these ranks. NCCL takes curves that others published, and kernels are
taken as among four. A slow host is not in the times.

Made by `python -m tileweave.sim.foresee {ranks} OUT RESULTS...` from:

{sources}

"""
_QUANTITIES = ("compute", "unfused", "fused", "bound")


def among(cell: Cell, ranks: int, device: str) -> Cell | None:
    """The same quantity among ``ranks`` GPUs, with the config that is planned there; None for a
    fused operator whose plan is unfused."""
    shape = cell.shape
    if cell.op == "embedding_bag_all_to_all":  # as many tables on each rank
        shape = (shape[0], shape[1] * ranks // cell.world_size, *shape[2:])
    cell = replace(cell, world_size=ranks, shape=shape, tables=None)
    if cell.quantity != "fused" or not is_matmul(cell.op):
        return cell
    plan = plan_of(cell.op, problem_of(cell), machine_of(make_cluster(device).device))
    return None if plan.config is None else replace(cell, tables=with_config(cell.op, plan.config))


def table(cells: Iterable[Cell], ranks: int) -> str:
    """A table in Markdown: a line for each operator and shape, us on each device."""
    require(
        ranks in FUSED_WORLD_SIZES,
        f"predictions for {ranks} ranks",
        f"{FUSED_WORLD_SIZES[0]} to {FUSED_WORLD_SIZES[-1]}",
        "pass one of these",
    )
    lines: dict[tuple[str, str, bool], dict[tuple[str, str], str]] = {}
    for device in DEVICES:
        predictor = Predictor(load_calibration(), device)
        for measured in cells:
            if measured.quantity not in _QUANTITIES:
                continue
            cell = among(measured, ranks, device)
            seconds = None if cell is None else predictor.seconds(cell)
            key = measured.op, measured.key if cell is None else cell.key, measured.graph
            text = "unfused" if seconds is None else f"{seconds * 1e6:.1f}"
            lines.setdefault(key, {})[device, measured.quantity] = text
    heads = [f"{device} {quantity}" for device in DEVICES for quantity in _QUANTITIES]
    rows = [
        "| operator | sizes | launch | " + " | ".join(heads) + " |",
        "|---" * (3 + len(heads)) + "|",
    ]
    for (op, sizes, graph), found in sorted(lines.items()):
        values = [found.get((device, one), "") for device in DEVICES for one in _QUANTITIES]
        rows.append(f"| {op} | {sizes} | {'graph' if graph else 'eager'} | {' | '.join(values)} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    """Entry point of ``python -m tileweave.sim.foresee``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("ranks", type=int, help="of one node")
    parser.add_argument("out", type=Path, help="the Markdown file to write")
    parser.add_argument("results", type=Path, nargs="+", help="results files of benches")
    given = parser.parse_args()
    sources = "\n".join(f"- {path.name}" for path in given.results)
    text = table(read_cells(given.results), given.ranks)
    write_text(given.out, _HEAD.format(ranks=given.ranks, sources=sources) + text)


if __name__ == "__main__":
    try:
        main()
    except TileweaveError as error:  # as launcher.end_with, which needs torch
        raise SystemExit(f"error: {error}") from None
