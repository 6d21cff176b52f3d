"""Judge plans by measured times, and add times to those that the package plans by.

    python tools/judge_plans.py left-out [--fp8]
    python tools/judge_plans.py new CACHE.json ...
    python tools/judge_plans.py new CACHE.json ... --add

``left-out`` plans each shape of ``planning/measured/`` by the times of all others: how good plans
of shapes are that were never measured. ``new`` plans the shapes of files that ``tileweave tune``
wrote, of which the package has no time; with ``--add`` it adds their times to the package's. Both
print how much longer the planned candidate takes than the fastest one: geometric mean, the worst,
how many are above 1.12, and how many are more than 3 % slower than the unfused path ("slower").
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tileweave.errors import InputError
from tileweave.planning import cache, measurements
from tileweave.planning.candidates import PLANNED, TUNABLE
from tileweave.planning.costs import DEVICES, device_of, is_aligned
from tileweave.planning.machine import H200
from tileweave.planning.measurements import Measurement, packaged, write_measurements
from tileweave.planning.planner import planner_by
from tileweave.planning.problem import MatmulConfig
from tileweave.profile.metrics import geometric_mean

FOLDER = Path(measurements.__file__).parent / "measured"
FAR_OFF, SLOWER = 1.12, 1.03
app = typer.Typer(no_args_is_help=True, add_completion=False)


@dataclass(frozen=True)
class Judged:
    """A shape, and the candidate that was planned for it."""

    measured: Measurement
    planned: MatmulConfig | None

    @property
    def ratio(self) -> float:
        """The time of what was planned over that of the fastest candidate."""
        return self.measured.us[self.planned] / min(self.measured.us.values())

    @property
    def is_slower(self) -> bool:
        """Whether it is slower than the unfused path."""
        us = self.measured.us
        return None in us and us[self.planned] > SLOWER * us[None]

    @property
    def group(self) -> tuple[str, str, int]:
        one = self.measured
        return one.op, one.device + ", FP8" * one.problem.fp8, one.problem.world_size


def judge(one: Measurement, known: Sequence[Measurement]) -> Judged:
    """Plan the shape of ``one`` on its device, among the candidates that have a time, by the times
    ``known``."""
    op, p = PLANNED[one.op], one.problem
    machine, scales = replace(H200, name=f"NVIDIA {one.device}"), p.scales if p.fp8 else None
    planner = planner_by(one.op, machine, tuple(known), scales=scales)
    planned = [config for config in one.us if config in (None, *(op.fp8 if p.fp8 else op.configs))]
    return Judged(one, min(planned, key=lambda config: planner.predict(p, config)))


def left_out(op: str, progress: bool = True, fp8: bool = False) -> list[Judged]:
    """Judge each packaged shape of 16 bits, or with FP8 operands, by the times of all others."""
    known = packaged(op)
    judged = [one for one in known if one.problem.fp8 == fp8]
    return [
        judge(one, [other for other in known if other is not one])
        for one in track(judged, op, disable=not progress, transient=True)
    ]


def read_caches(paths: Iterable[Path]) -> list[Measurement]:
    """The times in files of ``tileweave tune``, with the name of their device."""
    found = []
    for path in paths:
        key, measured = cache.parse(path.read_text("utf-8"), str(path))
        device = device_of(key.gpu)
        if device is None:
            raise InputError(
                f"asked: times of {key.gpu} in {path}; allowed: devices with a data sheet "
                f"({', '.join(DEVICES)}); remedy: add one in planning/costs.py"
            )
        found += [replace(one, device=device) for one in measured]
    return found


def new_shapes(found: Sequence[Measurement], progress: bool = True) -> list[Judged]:
    """Judge the shapes that the package has no times of."""
    judged = []
    for one in track(found, "new shapes", disable=not progress, transient=True):
        known = packaged(one.op)
        if (one.problem, one.device) not in [(other.problem, other.device) for other in known]:
            judged.append(judge(one, known))
    return judged


def says_something(one: Measurement) -> bool:
    """Whether plans of other shapes can be better by these times. Where rows of x, w or the result
    are no multiple of 16 bytes, cuBLAS is 2 to 3 times as slow, and few candidates are possible."""
    p = one.problem
    return is_aligned(p.cols, p.depth, p.itemsize) and len(one.us) > 1


def add(found: Sequence[Measurement], folder: Path) -> dict[str, int]:
    """Add times that :func:`says_something` to the files in ``folder``; a later time of the same
    candidate replaces the earlier one. Returns how many shapes each operator has."""
    found = [one for one in found if says_something(one)]
    counts = {}
    for op in dict.fromkeys(one.op for one in found):
        path = folder / f"{op}.json"
        known = measurements.read_measurements(path.read_text("utf-8"), str(path))
        merged = {(one.problem, one.device): one for one in known}
        for one in (each for each in found if each.op == op):
            place = one.problem, one.device
            earlier = merged[place].us if place in merged else {}
            merged[place] = replace(one, us={**earlier, **one.us})
        path.write_text(write_measurements(op, merged.values()), "utf-8")
        counts[op] = len(merged)
    return counts


def show(judged: Sequence[Judged], worst: int) -> None:
    """Print a row for each operator, device and number of ranks, and the ``worst`` shapes."""
    console = Console(highlight=False)
    if not judged:
        console.print("no shape to judge")
        return
    groups = defaultdict(list)
    for one in judged:
        groups[one.group].append(one)
    counts = f"above {FAR_OFF}", "slower"
    narrow: dict[str, Any] = {"box": box.SIMPLE_HEAD, "collapse_padding": True, "pad_edge": False}
    table = Table("operator", "device", "ranks", "shapes", "mean", "worst", *counts, **narrow)
    for (op, device, ranks), some in [*sorted(groups.items()), (("all", "", ""), judged)]:
        far = sum(one.ratio > FAR_OFF for one in some)
        mean = geometric_mean(one.ratio for one in some)
        slower = sum(one.is_slower for one in some)
        numbers = f"{mean:.4f}", f"{max(one.ratio for one in some):.2f}", str(far), str(slower)
        table.add_row(op, device, str(ranks), str(len(some)), *numbers)
    console.print(table)
    for one in sorted(judged, key=lambda one: -one.ratio)[:worst]:
        p, us, fastest = one.measured.problem, one.measured.us, one.measured.fastest()
        shape = f"{p.world_size} x {one.measured.device}, {p.rows} x {p.cols} x {p.depth}"
        planned, best = (f"{c or 'unfused'} {us[c]:.1f} us" for c in (one.planned, fastest))
        console.print(
            f"{one.ratio:.3f}  {one.measured.op} {shape}: {planned}; fastest: {best}",
            soft_wrap=True,
        )


Worst = Annotated[int, typer.Option(min=0, help="So many of the worst shapes.")]


@app.command("left-out")
def left_out_command(
    op: Annotated[str, typer.Option(help="One operator; all: each.")] = "all",
    fp8: Annotated[bool, typer.Option("--fp8", help="Shapes with FP8 operands.")] = False,
    worst: Worst = 10,
) -> None:
    """Plan each packaged shape by the times of all others."""
    if op not in ("all", *TUNABLE):
        raise typer.BadParameter(f"{op}: allowed are all, {', '.join(TUNABLE)}")
    names = [name for name in TUNABLE if op in ("all", name)]
    show([each for name in names for each in left_out(name, fp8=fp8)], worst)


@app.command("new")
def new_command(
    caches: Annotated[list[Path], typer.Argument(exists=True, help="Files of tileweave tune.")],
    add_times: Annotated[bool, typer.Option("--add", help="Add their times.")] = False,
    worst: Worst = 10,
) -> None:
    """Plan shapes that were tuned elsewhere, and add their times to those of the package."""
    found = read_caches(caches)
    show(new_shapes(found), worst)
    if add_times:
        for op, count in add(found, FOLDER).items():
            print(f"{op}: {count} shapes")


if __name__ == "__main__":
    app()
