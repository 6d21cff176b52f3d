"""``tileweave fuzz`` and ``tileweave mutate``: exploration of the kernels, and of kernels with
faults."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tileweave.bench.console import console
from tileweave.bench.prerequisites import file_for
from tileweave.commands.options import MOST_SEED, finite
from tileweave.files import write_text, writing


def fuzz(
    runs: Annotated[
        int, typer.Option(min=1, help="Approximate number of interleavings to explore.")
    ] = 20_000,
    only: Annotated[
        str,
        typer.Option(
            help="Only scenarios whose name contains this; of a seed, what is before its @."
        ),
    ] = "",
    first: Annotated[
        int,
        typer.Option(
            min=0, max=MOST_SEED, help="First seed: other seeds explore other interleavings."
        ),
    ] = 0,
    seconds: Annotated[
        float,
        typer.Option(min=0, callback=finite, help="Stop after this long (0: when all is done)."),
    ] = 0.0,
    workers: Annotated[int, typer.Option(min=0, max=1024, help="Processes (0: one per core).")] = 0,
    replay: Annotated[
        str, typer.Option(help="Run this one seed again, and print what happens.")
    ] = "",
    json: Annotated[
        Path | None,
        typer.Option(help="Write the counts here: of what is done so far, every few seconds."),
    ] = None,
) -> None:
    """Explore interleavings of the kernels of every operator. Needs no GPU.

    All ranks run in one process, with memory as weakly ordered as the memory model allows.
    """
    from json import dumps
    from os import cpu_count

    from tileweave.bench.environment import environment
    from tileweave.explore import fuzz as explorer

    explorer.require_packages()
    file_for(json)
    screen = console()
    if replay:
        told = explorer.replay(replay)
        screen.print(told or "nothing goes wrong", markup=False)
        raise typer.Exit(1 if told else 0)
    said = {"environment": environment(), "first_seed": first} if json is not None else {}

    def keep(report: explorer.Report) -> None:
        if json is not None:
            text = dumps({**said, **report.as_json()}, indent=1) + "\n"
            if json.exists() and not json.is_file():  # a device must not be replaced by a file
                write_text(json, text)
                return
            new = json.with_name(f"{json.name}.new")
            with writing(json):
                new.write_text(text, "utf-8")
                new.replace(json)

    report = explorer.fuzz(
        runs, only.partition("@")[0], workers or cpu_count() or 1, first, seconds, keep=keep
    )
    if report.story:
        screen.print(report.story, markup=False)
        raise typer.Exit(1)
    if not report.interleavings:
        screen.print("[bold red]nothing was explored: time ran out before the first interleaving")
        raise typer.Exit(1)
    screen.print(explorer.table_of(report))
    screen.print(
        f"{report.interleavings} interleavings, {report.distinct} of them distinct, "
        f"{report.steps} scheduling points, {report.seconds:.0f} s: nothing wrong"
    )


def mutate(
    sample: Annotated[
        int, typer.Option(min=0, help="How many mutants, drawn with --seed (0: all).")
    ] = 100,
    only: Annotated[
        str, typer.Option(help="Only mutants whose name, FILE:FUNCTION: CHANGE, contains this.")
    ] = "",
    names: Annotated[
        Path | None,
        typer.Option(help="Only mutants whose name is a line of this file.", exists=True),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Draws the sample.")] = 0,
    seconds: Annotated[
        float, typer.Option(min=0.1, callback=finite, help="Most CPU time of one mutant.")
    ] = 3.0,
    most: Annotated[
        float,
        typer.Option(min=0, callback=finite, help="End after this long (0: when all are done)."),
    ] = 0.0,
    workers: Annotated[int, typer.Option(min=0, max=1024, help="Processes (0: one per core).")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write every result here.")] = None,
    log: Annotated[
        Path | None,
        typer.Option(help="Add each result to this file; mutants that it has are not run again."),
    ] = None,
) -> None:
    """Plant small faults in the kernels, one at a time, and see whether exploration finds them.

    Every signal, wait, slot, select and count gives some. Needs no GPU.
    """
    from json import dumps
    from os import cpu_count

    from tileweave.bench.environment import environment
    from tileweave.explore import mutate as mutation
    from tileweave.explore.fuzz import require_packages

    require_packages("tileweave mutate")
    file_for(json)
    file_for(log)
    screen = console()
    report = mutation.mutate(
        sample, only, seed, workers or cpu_count() or 1, seconds, most, log=log, names=names
    )
    if json is not None:
        write_text(json, dumps({"environment": environment(), **report.as_json()}, indent=1) + "\n")
    for one in report.judged:
        if one.outcome in ("survived", "unreached"):
            what = f"survives {one.tried} runs" if one.tried else one.how or "is reached by no run"
            screen.print(f"{what}: {one.key} (line {one.line})", markup=False)
    screen.print(
        f"{len(report.judged)} of {report.mutants} mutants: {report.count('found')} found, "
        f"{report.count('explained')} explained, {report.count('survived')} survive, "
        f"{report.count('unreached')} reached by no run; {report.seconds:.0f} s"
    )
    if report.unexplained:
        screen.print(
            f"[bold red]{report.unexplained} are neither found nor explained; "
            f"{report.share:.1%} found, of those that are not explained"
        )
        raise typer.Exit(1)
