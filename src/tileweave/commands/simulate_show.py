"""Showing a simulated scenario: progress, tables, and files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from tileweave.bench.console import console
from tileweave.bench.prerequisites import folder_for
from tileweave.errors import InputError
from tileweave.files import write_text
from tileweave.planning.costs import Calibration, Costs
from tileweave.sim import advise as advice
from tileweave.sim import astra, chakra, perfetto, report, training
from tileweave.sim.machine import with_gpus
from tileweave.sim.memory import memory_of
from tileweave.sim.sensitivity import sensitivity
from tileweave.sim.step import Result
from tileweave.sim.workload import Scenario, simulate_all


@contextmanager
def progress_on(screen: Console) -> Iterator[Callable[..., None]]:
    """Show what is being done, how many of it are done, and the time that is left, on a terminal;
    nothing elsewhere. Yields ``say(text, done=0, total=0)``."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task, counted = bar.add_task("simulates", total=None), 0

        def say(text: str, done: int = 0, total: int = 0) -> None:
            nonlocal counted
            if total != counted or done == 0:  # another stage, with an estimate of its own
                counted = total
                bar.reset(task, total=total or None)
            bar.update(task, description=text, completed=done)

        yield say


def show(
    scenario: Scenario,
    used: Calibration,
    sense: bool,
    advise: bool,
    out: Path | None,
    export: Path | None,
    detail: Any,
) -> None:
    """Simulate a scenario, print its tables, and write what was asked for."""
    screen = console()
    folder_for(out)
    folder_for(export)
    advised = None
    with progress_on(screen) as say:
        if advise:
            advised = advice.advise(scenario, used, say)
            scenario = _possible(scenario, advised, screen)
    memory = memory_of(scenario.workload, scenario.cluster)
    screen.print(
        report.memory_line(memory, scenario.cluster.device),
        style="" if memory.fits(scenario.cluster.device) else "bold red",
        markup=False,
    )
    with progress_on(screen) as say:
        result = simulate_all(scenario, used, progress=say)
        found = sensitivity(scenario, used, say) if sense else []
    screen.print(report.result_table(result), report.phase_table(result), sep="\n")
    if found:
        screen.print(report.sensitivity_table(result, found))
    if advised is not None:
        for table in report.advice_tables(advised):
            screen.print(table)
        for line in report.advice_lines(advised):
            screen.print(line, markup=False)
        for line in advised.rejected[:5]:
            screen.print(f"not possible: {line}", markup=False, style="dim")
    for note in result.notes:
        screen.print(f"note: {note}", markup=False, style="dim")
    screen.print(f"simulated in {result.wall:.2f} s", style="dim")
    if out is not None:
        for path in _write(result, scenario, used, out, screen):
            screen.print(f"wrote {path}", markup=False)
    if export is not None:
        with progress_on(screen) as say:
            say("writes traces")
            step = result.timelines["fused"]
            paths = chakra.export(step, export, detail=detail)
            # one replica of a served model may be part of a node
            traced = with_gpus(scenario.cluster, step.world_size)
            paths += astra.export(traced, Costs(traced.device, used.coefficients), export)
        screen.print(f"wrote {len(paths)} files to {export}", markup=False)


def _possible(scenario: Scenario, advised: advice.Advice, screen: Console) -> Scenario:
    """What was asked, or the best advice where its degrees are not possible."""
    try:
        memory_of(scenario.workload, scenario.cluster)
    except InputError as error:
        screen.print(f"not possible as asked: {error}", style="bold red", markup=False)
        screen.print(f"what follows is {advised.best.name}", markup=False)
        return advised.best.scenario
    return scenario


def _write(
    result: Result, scenario: Scenario, used: Calibration, out: Path, screen: Console
) -> Iterator[Path]:
    out.mkdir(parents=True, exist_ok=True)
    name, memory = scenario.file_name, memory_of(scenario.workload, scenario.cluster)
    numbers = {
        "title": result.title,
        "cluster": result.cluster,
        "notes": result.notes,
        "samples": result.samples,
        "unit": result.unit,
        "memory": memory.parts,
        "fits": memory.fits(scenario.cluster.device),
        "seconds": {mode: timeline.seconds for mode, timeline in result.timelines.items()},
        "phases": {mode: timeline.phases() for mode, timeline in result.timelines.items()},
    }
    path = out / f"{name}.json"
    write_text(path, json.dumps(numbers, indent=1) + "\n")
    yield path
    yield perfetto.write(
        perfetto.timeline_events(result.timelines["fused"]), out / f"{name}.trace.json"
    )
    try:
        from tileweave.sim import plots
    except ModuleNotFoundError as error:
        screen.print(
            f"no picture, since {error.name} is missing: pip install matplotlib", markup=False
        )
        return
    yield plots.plot_phases(result, out / f"{name}.png")
    if scenario.kind in ("dlrm", "train") and scenario.cluster.nodes > 1:
        yield plots.plot_sweep(sweep(scenario, used), out / f"{name}-nodes.png")


def sweep(scenario: Scenario, used: Calibration | None = None) -> list[tuple[int, Result]]:
    """The scenario on 1/8, 1/4, 1/2, 1 and 2 times as many nodes, if it fits.

    The batch grows with the nodes.
    """
    found = []
    for factor in (0.125, 0.25, 0.5, 1, 2):
        nodes = int(scenario.cluster.nodes * factor)
        work = scenario.workload
        batch = work.global_batch * nodes if isinstance(work, training.Training) else 0
        # the same number of samples per node at every point, or no point
        if nodes < 1 or batch % scenario.cluster.nodes:
            continue
        if isinstance(work, training.Training):
            work = replace(work, dp=0, global_batch=batch // scenario.cluster.nodes)
        try:
            cluster = replace(
                scenario.cluster, nodes=nodes, network=replace(scenario.cluster.network, dims=())
            )
            found.append(
                (nodes, simulate_all(replace(scenario, cluster=cluster, workload=work), used))
            )
        except InputError:
            continue
    return found
