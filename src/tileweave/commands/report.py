"""``tileweave report``: this machine as one HTML page: what it has, which paths calls take and why,
how fast the operators are, and what happens inside a call.

The page needs no network and no script: styles, pictures and traces are in it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer

from tileweave import OPERATORS
from tileweave.bench.console import console
from tileweave.bench.prerequisites import file_for, need_kernels
from tileweave.commands.options import STAMPS, Device, World, finite, place
from tileweave.errors import InputError, require
from tileweave.files import short, write_text
from tileweave.launcher import Member, is_main_process, launch
from tileweave.profile.trace import Trace
from tileweave.sim.results import read_report, why_not

_ALLOWED = "files that `tileweave bench OPERATOR --json FILE` wrote, or folders of them"


def report(
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
    results: Annotated[
        list[Path] | None,
        typer.Option(
            help="Results of `tileweave bench --json`, or folders of them, to show instead of a "
            "new bench. May be repeated."
        ),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            min=1, callback=finite, help="With GPUs: start no new case after that, per operator."
        ),
    ] = 30.0,
    traces: Annotated[
        bool, typer.Option("--traces/--no-traces", help="Record a call of each operator.")
    ] = True,
    world: World = None,
    device: Device = "auto",
) -> None:
    """Write one HTML page about this machine: what runs fused and why, a bench against the bound
    and all rivals (with GPUs, or from --results), and what happens inside calls.

    Needs no network to open.
    """
    from tileweave.bench.run import Options, bench_several
    from tileweave.commands.doctor import diagnose
    from tileweave.commands.report_page import Contents, page

    file_for(out)
    shown = _read(results or [])
    kind, size = place(device, world)
    if traces or (kind == "cuda" and not shown):
        need_kernels("tileweave report", kind)
    if kind == "cuda" and not shown:
        several = [Options(op, quick=True, seconds=seconds) for op in OPERATORS]
        limit = (2 * seconds + 300) * len(several)
        shown = (
            launch(bench_several, several, world_size=size, device_type=kind, seconds=limit) or []
        )
    recorded = (
        launch(
            traces_of,
            kind,
            world_size=size,
            device_type=kind,
            seconds=600,
            extra=STAMPS,
        )
        if traces
        else []
    )
    if not is_main_process():  # under torchrun rank 0 writes the page
        return
    contents = Contents(
        diagnose(),
        paths_here(size),
        [each for each in shown if each["cases"]],
        recorded or [],
        datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    write_text(out, page(contents))
    console().print(f"wrote {out}", markup=False, soft_wrap=True)


def paths_here(size: int) -> list[tuple[str, str]]:
    """Typical calls of every operator, and their plans on ``size`` ranks of this machine."""
    from tileweave.bench.samples import samples_of
    from tileweave.commands.doctor import machine_here

    machine = machine_here()
    return [
        (what, str(planned(size, machine)))
        for op in OPERATORS
        for what, planned in samples_of(op).typical
    ]


def traces_of(member: Member, kind: str) -> list[Trace]:
    """A recorded call of each operator of which something is seen. Collective."""
    import tileweave as tw
    from tileweave.bench.cases import Case
    from tileweave.bench.samples import samples_of
    from tileweave.commands.demo import trace_one

    dtype = "bfloat16" if kind == "cuda" else "float16"
    found = []
    for op in OPERATORS:
        shape = samples_of(op).traced[kind == "cuda"]
        case = Case(op, "report", *shape, False, "smoke", dtype)
        found.append(trace_one(member, op, *case.shard(member.world_size), dtype)[0])
    tw.close()
    return [trace for trace in found if trace.events]


def _read(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The results in files and folders."""
    shown = []
    for path in paths:
        if not os.path.isdir(path):
            shown.append(_report_in(path))
            continue
        found = sorted(path.rglob("*.json"))
        require(
            bool(found), f"results in {path}, which has no .json file", _ALLOWED, "name another"
        )
        for each in found:
            with suppress(InputError):  # a folder may have other files, too
                shown.append(_report_in(each))
    require(not paths or bool(shown), "results in folders without any", _ALLOWED, "name another")
    return shown


def _report_in(path: Path) -> dict[str, Any]:
    read = read_report(path)
    require(is_report(read), f"results in {short(path)}", _ALLOWED, "name another file")
    return read


def is_report(read: Any) -> bool:
    """Whether ``read`` has what the page shows of results of ``tileweave bench --json``."""
    return (
        not why_not(read)
        and read.get("op") in OPERATORS
        and all(
            {"name", "times"} <= set(case)
            and all("median_us" in timing for timing in case["times"].values())
            for case in read.get("cases", [{}])
        )
    )
