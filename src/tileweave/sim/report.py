"""Results as tables, for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import MARKDOWN, SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from tileweave.sim.advise import Advice
from tileweave.sim.cells import Cell
from tileweave.sim.crosscheck import Comparison
from tileweave.sim.flux import Row as FluxRow
from tileweave.sim.machine import Device
from tileweave.sim.measurements import UNSTEADY, unsteadiness
from tileweave.sim.memory import Memory, usable
from tileweave.sim.sensitivity import Variant
from tileweave.sim.step import Result
from tileweave.sim.trust import Judged, Published, Summary


def time_text(seconds: float) -> str:
    """A duration with a suitable unit."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return (
                f"{seconds / scale:.3g} {unit}"
                if seconds < 100 * scale
                else f"{seconds / scale:.0f} {unit}"
            )
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-4 else f"{seconds * 1e6:.0f} us"


def _table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], markdown: bool = False
) -> Group:
    """A heading above a table. It is a line of its own, because a title would be folded to the
    width of the table."""
    table = Table(box=MARKDOWN if markdown else SIMPLE_HEAD, pad_edge=markdown)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    return Group(Text(title, style="bold"), table)


def result_table(result: Result) -> Group:
    """Time, rate and saving of unfused, fused and bound."""
    base = result.seconds("unfused") if "unfused" in result.timelines else None
    rows = []
    for mode, timeline in result.timelines.items():
        seconds = timeline.seconds
        saved = "" if base is None else f"{1 - seconds / base:.1%}"
        rows.append((mode, time_text(seconds), f"{result.samples / seconds:,.0f}", saved))
    return _table(
        f"{result.title} on {result.cluster}", ("", "a step", f"{result.unit}/s", "less time"), rows
    )


def phase_table(result: Result) -> Group:
    """Where the time of the busiest rank goes."""
    phases = {mode: timeline.phases() for mode, timeline in result.timelines.items()}
    names = list(dict.fromkeys(name for found in phases.values() for name in found))
    names.sort(key=lambda name: (name in ("exposed communication", "idle"), name))
    rows = [
        (name, *(time_text(phases[mode][name]) if name in phases[mode] else "0" for mode in phases))
        for name in names
    ]
    return _table("by phase, busiest rank", ("phase", *phases), rows)


def sensitivity_table(result: Result, found: Sequence[Variant]) -> Group:
    """The saving, and how it depends on the assumptions."""
    rows = [
        (
            "as above",
            time_text(result.seconds("unfused")),
            time_text(result.seconds("fused")),
            f"{result.saving:.1%}",
        )
    ]
    rows += [(v.name, time_text(v.unfused), time_text(v.fused), f"{v.saving:.1%}") for v in found]
    return _table("sensitivity", ("", "unfused", "fused", "less time"), rows)


def memory_line(memory: Memory, device: Device) -> str:
    """What fills the memory of a GPU, and whether that is possible."""
    room = f"{usable(device) / 1e9:.1f} GB of a {device.name} that tensors may take"
    if memory.fits(device):
        return f"fits: {memory.text()}; of the {room}"
    return (
        f"DOES NOT FIT, mostly because of {memory.largest}: {memory.text()}; more than the {room}. "
        "What follows cannot run"
    )


def advice_tables(advice: Advice) -> list[Group]:
    """Tables of the candidates, and of the operators one by one."""
    unit = "tokens or samples / s of a GPU"
    rows = [
        (
            one.name,
            f"{one.batch:,.0f}",
            time_text(one.unfused),
            time_text(one.fused),
            f"{one.per_second:,.1f}",
            f"{one.memory.total / 1e9:.0f} GB",
        )
        for one in advice.candidates
    ]
    columns = ("", "batch", "unfused", "fused", unit, "memory")
    found = [_table("degrees that fit, best first", columns, rows)]
    rows = [
        (op, time_text(saved) if saved > 0 else "0", "fuse" if saved > 0 else "leave")
        for op, saved in advice.savings.items()
    ]
    return [
        *found,
        _table(
            f"operators alone, with {advice.best.name}",
            ("operator", "saves a step", "advice"),
            rows,
        ),
    ]


def advice_lines(advice: Advice) -> Iterable[str]:
    """Best against best, and what does not fit."""
    fused, unfused = advice.best, advice.best_unfused
    yield (
        f"best fused ({fused.name}) against best unfused ({unfused.name}): "
        f"{advice.saving:.1%} less time for the same work"
    )
    yield f"memory of {fused.name}: {fused.memory.text()}"
    if advice.too_large:
        yield f"{advice.too_large} more do not fit into memory: {advice.smallest}"


def summary_table(title: str, rows: Sequence[Summary], markdown: bool = False) -> Group:
    """Errors by group."""
    texts = [
        (row.name, str(row.count), f"{row.mean:.1%}", f"{row.worst:.1%}", row.worst_cell)
        for row in rows
    ]
    return _table(title, ("cells", "number", "geometric mean", "worst", "which"), texts, markdown)


def cell_table(judged: Sequence[Judged], markdown: bool = False) -> Group:
    """The measured and predicted time and the error of every cell."""
    rows = [
        (
            str(one.cell),
            one.side,
            str(one.cell.runs),
            f"{one.cell.seconds * 1e6:.1f}",
            f"{one.predicted * 1e6:.1f}",
            f"{one.error:+.1%}",
        )
        for one in judged
    ]
    return _table(
        "cells",
        ("cell", "side", "runs", "measured us, median", "model us", "error"),
        rows,
        markdown,
    )


def unsteady_table(cells: Sequence[Cell]) -> Group:
    """The cells that were left out before any prediction, as Markdown."""
    rows = [
        (
            str(cell),
            cell.source,
            "held out" if cell.held_out else "fit",
            f"{cell.seconds * 1e6:.1f}",
            f"{unsteadiness(cell):.1%}",
        )
        for cell in cells
    ]
    return _table(UNSTEADY, ("cell", "file", "side", "measured us", "repeats apart"), rows, True)


def published_table(rows: Sequence[Published], markdown: bool = False) -> Group:
    """Published ranges and those of the model."""
    texts = [
        (
            row.what,
            f"{row.low:.0%} to {row.high:.0%}",
            f"{row.ours_mean:.0%}",
            f"{row.ours_low:.0%} to {row.ours_high:.0%}",
            "inside" if row.agrees else "outside",
            row.source,
        )
        for row in rows
    ]
    columns = ("what", "published", "model, mean", "model", "its mean is", "source")
    return _table("published, and the model", columns, texts, markdown)


def flux_table(rows: Sequence[FluxRow], markdown: bool = False) -> Group:
    """Gains of FLUX and ours, side by side."""
    texts = [
        (
            f"{row.what}, {row.device} ({row.model})",
            f"{row.published:.2f}",
            f"{row.ours:.2f}",
            f"{row.theirs:.2f}",
            f"{row.bound:.2f}",
            f"{row.free:.2f}",
            "close" if row.agrees else row.reason,
        )
        for row in rows
    ]
    columns = (
        "gain",
        "FLUX",
        "ours",
        "FLUX's overlap",
        "bound",
        "no communication",
        "reason of a difference over 0.08",
    )
    title = "FLUX's models (arXiv 2406.06858), 8 GPUs in a node, and the model's"
    return _table(title, columns, texts, markdown)


def crosscheck_table(rows: Sequence[Comparison]) -> Group:
    """Our network model compared with SimGrid."""
    texts = [
        (
            f"{row.kind}, {row.topology}, {row.nodes} nodes, {row.nbytes / 1e6:g} MB",
            time_text(row.ours),
            time_text(row.simgrid),
            f"{row.error:+.1%}",
            time_text(row.simgrid_default),
        )
        for row in rows
    ]
    columns = ("exchange", "ours", "SimGrid, max-min", "difference", "SimGrid, its TCP model")
    return _table("cross-check", columns, texts, False)
