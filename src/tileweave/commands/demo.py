"""``tileweave demo``: every fused operator end to end on this machine, checked, and drawn.

Without GPUs the real Triton kernels run in Triton's interpreter, one process per rank, over shared
host memory; with two GPUs or more the compiled kernels run. Each case makes several calls on new
data, so that slots and epochs wrap around; every result is compared with fp32 computed locally. The
last call of a case is recorded: what was sent, signaled and waited for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.box import SIMPLE_HEAD
from rich.table import Table

import tileweave as tw
from tileweave.bench.console import Steps
from tileweave.bench.run import short
from tileweave.bench.samples import DemoCase, samples_of
from tileweave.bench.subjects import TOLERANCE, Draw, Shape, poisoned, worst, worst_of
from tileweave.files import write_text
from tileweave.launcher import Member
from tileweave.planning.problem import Plan
from tileweave.profile.record import Recording, gather
from tileweave.profile.trace import Trace, chrome, merge_gpus, summary

CALLS = 4  # both slots twice


@dataclass(frozen=True)
class DemoRow:
    """The results of a case. Bytes, signals and waits are those of one rank and call, mean over
    ranks."""

    case: DemoCase
    path: str
    error: float
    sent_bytes: float
    signals: float
    waited_us: float
    right: bool


@dataclass(frozen=True)
class DemoResult:
    """All rows, and the traces that the picture shows."""

    world_size: int
    where: str
    rows: list[DemoRow]
    traces: list[Trace]

    @property
    def right(self) -> bool:
        return all(row.right for row in self.rows)


def demo(member: Member) -> DemoResult:
    """Every case of every operator, on every rank of the world; collective. Only rank 0 shows
    progress."""
    cases = [
        case
        for op in tw.OPERATORS
        for case in samples_of(op).demo(member.on_gpu, member.world_size)
    ]
    rows, traces = [], []
    with Steps("demo", len(cases), show=member.rank == 0) as steps:
        for number, case in enumerate(cases):
            steps.now(f"{case.op}: {case.name}")
            row, trace = _run_case(member, case, 1000 * number, steps)
            rows.append(row)
            if case.drawn:
                traces.append(trace)
            verdict = "" if row.right else "[bold red]WRONG[/] "
            steps.done(f"{verdict}error {row.error:.1e}, {row.path}")
    tw.close()
    where = (
        torch.cuda.get_device_name()
        if member.on_gpu
        else "CPU, interpreted kernels over shared host memory"
    )
    return DemoResult(member.world_size, where, rows, traces)


def _run_case(member: Member, case: DemoCase, seed: int, steps: Steps) -> tuple[DemoRow, Trace]:
    subject = samples_of(case.op).subject
    errors, recording = [0.0], None
    for call in range(CALLS):
        steps.detail(f"call {call + 1} of {CALLS}")
        draw = Draw(
            case.dtype, member.device, member.rank, member.world_size, seed + call, case.bias
        )
        operands = subject.draw(case.shape, draw)
        if call == CALLS - 1:
            member.barrier()  # so that the picture shows the call, not how fast ranks made inputs
            if member.rank == member.world_size - 1 and case.late_seconds:
                member.pause(case.late_seconds)
            recording = subject.record(operands, member.group)
            out, second = recording.out, None
        else:
            place = (
                poisoned(operands.out_shape, case.dtype, member.device)
                if call % 2 and not case.second
                else None
            )
            out, second = subject.call(operands, member.group, place, case.second)
        tw.synchronize(member.group)
        errors.append(subject.error(operands, out, second))
    assert recording is not None, "the last call is recorded"
    error = worst(worst_of(errors), member.device, member.group)
    title = f"{case.op}, {case.name}: {case.shape} per rank, {short(recording.plan)}"
    trace = gather(title, recording, member.group)
    figures = summary(trace)
    waited = (
        sum(rank.waited_total_ns / max(rank.programs, 1) for rank in figures) / len(figures) / 1e3
    )
    sent = _mean(recording.sent_bytes, member)
    signals = _mean(recording.signals, member)
    right = error <= TOLERANCE[case.dtype]
    return DemoRow(case, short(recording.plan), error, sent, signals, waited, right), trace


def _mean(value: float, member: Member) -> float:
    """The mean over ranks; collective."""
    total = torch.tensor([value], dtype=torch.float64, device=member.device)
    dist.all_reduce(total, group=member.group)
    return total.item() / member.world_size


_LEAST_WHAT = 27  # least width of column "what", which shrinks first
# columns that are dropped, in this order
_DISPENSABLE = ("allowed", "dtype", "m, n, K per rank", "signals", "sent", "waited", "path taken")


def table_of(result: DemoResult, width: int = 190) -> Table:
    """The result as a table of at most ``width`` columns, without less important columns if
    necessary."""
    rows = result.rows
    cells = {
        "operator": [row.case.op for row in rows],
        "verdict": ["ok" if row.right else "WRONG" for row in rows],
        "what": [row.case.name for row in rows],
        "error": [f"{row.error:.1e}" for row in rows],
        "path taken": [row.path for row in rows],
        "waited": [_time(row.waited_us) if row.waited_us > 0 else "-" for row in rows],
        "sent": [_bytes(row.sent_bytes) for row in rows],
        "signals": [f"{row.signals:.0f}" for row in rows],
        "m, n, K per rank": [str(row.case.shape) for row in rows],
        "dtype": [str(row.case.dtype).removeprefix("torch.") for row in rows],
        "allowed": [f"{TOLERANCE[row.case.dtype]:.0e}" for row in rows],
    }
    dropped = []
    for name in _DISPENSABLE:
        if _least_width(cells) <= width:
            break
        dropped.append(name)
        del cells[name]
    title = (
        f"{result.world_size} ranks on {result.where}; "
        "sent, signals, waited (-: not seen): one rank, one call"
    )
    # a semicolon, since names have commas
    caption = f"no room for: {'; '.join(dropped)}" if dropped else None
    table = Table(
        title=title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    spare = max(width - _least_width(cells), 0)
    for name in cells:
        most = _LEAST_WHAT + spare if name == "what" else None
        justify = "right" if name in ("error", "waited", "sent", "signals", "allowed") else "left"
        table.add_column(
            name,
            justify=justify,
            no_wrap=True,
            min_width=7 if name == "verdict" else None,
            max_width=most,
        )
    signs = {"ok": "[green]ok[/]", "WRONG": "[bold red]WRONG[/]"}
    for line in zip(*cells.values(), strict=True):
        table.add_row(*[signs.get(cell, cell) for cell in line])
    return table


def _least_width(cells: dict[str, list[str]]) -> int:
    """The smallest width of a table of ``cells``, with two characters between columns."""
    widths = {name: max(map(len, [name, *column])) for name, column in cells.items()}
    return sum(widths.values()) - max(widths["what"] - _LEAST_WHAT, 0) + 2 * len(widths)


def closing(result: DemoResult) -> str:
    """How many cases were right, and which were not."""
    wrong = [f"{row.case.op}: {row.case.name}" for row in result.rows if not row.right]
    said = f"{len(result.rows) - len(wrong)} of {len(result.rows)} right"
    return f"{said}; WRONG: {'; '.join(wrong)}" if wrong else said


def _bytes(count: float) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def _time(microseconds: float) -> str:
    return f"{microseconds / 1e3:.1f} ms" if microseconds >= 1e3 else f"{microseconds:.1f} us"


def write_traces(traces: Sequence[Trace], folder: Path) -> list[Path]:
    """Write a file of events per trace into ``folder``; return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for number, trace in enumerate(traces):
        written.append(folder / f"trace{number}.json")
        write_text(written[-1], json.dumps(chrome(trace)) + "\n")
    return written


def write_picture(traces: Sequence[Trace], folder: Path) -> Path:
    """Draw ``traces`` into ``folder``; return the path. Needs matplotlib."""
    from tileweave.profile.plot import plot_traces

    picture = folder / "timeline.png"
    plot_traces(traces, picture)
    return picture


def trace_one(
    member: Member, op: str, rows: int, cols: int, depth: int, dtype: str
) -> tuple[Trace, Plan]:
    """A call of an operator on random data, recorded once it has been made; sizes are those of one
    rank. Collective."""
    subject = samples_of(op).subject
    shape = Shape(rows, cols, depth)
    draw = Draw(getattr(torch, dtype), member.device, member.rank, member.world_size, 1)
    operands = subject.draw(shape, draw)
    plan = subject.explain(operands, member.group)
    title = f"{op}: {shape} per rank, {dtype}, {short(plan)}"
    subject.call(operands, member.group)
    if member.on_gpu:
        return _trace_on_gpu(member, title, subject, operands, plan), plan
    member.barrier()
    recording = subject.record(operands, member.group)
    tw.synchronize(member.group)
    return gather(title, recording, member.group), plan


def _trace_on_gpu(member: Member, title: str, subject: Any, operands: Any, plan: Plan) -> Trace:
    """What the driver saw of a call, and its programs."""
    from tileweave.profile.device import record_on_gpu

    def start() -> Callable[[], Recording]:
        config = plan.config
        if hasattr(subject, "start") and config is not None and config.kernel != "library":
            # its kernel stamps tiles; cuBLAS does not
            return subject.start(operands, member.group)
        out = subject.call(operands, member.group)[0]
        return lambda: Recording(plan, out)

    found = record_on_gpu(start, plan, member.device, member.group)
    tw.synchronize(member.group)
    by_rank: list[Any] = [None] * member.world_size
    dist.all_gather_object(by_rank, (found.recording.events, found.event_us), group=member.group)
    return merge_gpus(title, [events for events, _ in by_rank], [us for _, us in by_rank])


def trace_of_case(member: Member, case: DemoCase) -> Trace:
    """The trace of the last call of a case of the demo. Collective."""
    with Steps("trace", 1, show=False) as steps:
        return _run_case(member, case, 0, steps)[1]
