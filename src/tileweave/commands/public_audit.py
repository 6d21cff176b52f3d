"""``tileweave simulate trust --public``: the model against figures that others published."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from io import StringIO
from pathlib import Path

from rich.box import MARKDOWN, SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tileweave.files import write_text
from tileweave.planning.costs import Calibration
from tileweave.sim import public
from tileweave.sim.public import BARS, Errors, Judged

_RULE = (
    "A figure is held out, and nothing is fitted to it, if the SHA-256 of its name begins with an "
    "even byte."
)


def audit(
    screen: Console,
    calibration: Calibration,
    every: bool,
    out: Path | None,
    progress: Callable[..., None],
) -> list[Judged]:
    """Judge all figures of the package and show them; with ``out`` write a picture and all tables
    in Markdown. Returns the figures with their predictions."""
    judged = public.judge(public.figures(), calibration, progress)
    summaries = public.summarise(judged)
    screen.print(Text(f"{len(judged)} published figures. {_RULE}"), _summary_table(summaries))
    if every:
        screen.print(_figure_table(judged))
    if out is not None:
        from tileweave.sim.plot_public import plot_public

        lines = _markdown(judged, summaries)
        write_text(out / "simulator-public.md", "\n".join(lines) + "\n")
        picture = plot_public(judged, out / "simulator-public.png")
        screen.print(f"wrote {picture} and simulator-public.md", markup=False)
    return judged


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], markdown: bool) -> Table:
    table = Table(box=MARKDOWN if markdown else SIMPLE_HEAD, pad_edge=markdown)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _summary_table(rows: Sequence[Errors], markdown: bool = False) -> Table:
    columns = ("group", "side", "figures", "geometric mean", "worst", "bar", "which is worst")
    return _table(columns, [_summary(row) for row in rows], markdown)


def _summary(row: Errors) -> tuple[str, ...]:
    bar = ""
    if row.what == "held out" and row.group in BARS:
        mean, worst = BARS[row.group]
        bar = f"{mean:.0%}, {worst:.0%}: {'reached' if row.good else 'missed'}"
    figures = (str(row.count), f"{row.mean:.1%}", f"{row.worst:.1%}")
    return (row.group, row.what, *figures, bar, row.worst_name)


def _figure_table(judged: Sequence[Judged], markdown: bool = False) -> Table:
    columns = ("figure", "side", "published", "model", "unit", "error of the time", "notes")
    rows = []
    for one in judged:
        figure = one.figure
        notes = [figure.note, f"assumed: {figure.assumed}" if figure.assumed else ""]
        notes.append("" if figure.read else "not read again")
        rows.append(
            (
                figure.name,
                "held out" if figure.held_out else "fit",
                f"{figure.value:.4g}",
                f"{figure.in_unit(one.predicted):.4g}",
                figure.unit,
                f"{one.error:+.1%}",
                "; ".join(note for note in notes if note),
            )
        )
    return _table(columns, rows, markdown)


def _markdown(judged: Sequence[Judged], summaries: Sequence[Errors]) -> list[str]:
    text = StringIO()
    console = Console(file=text, width=400, highlight=False)
    console.print("# The simulator against published figures", "", sep="\n")
    console.print(Text(f"Made by `tileweave simulate trust --public --out DIR`. {_RULE}"), "")
    console.print(_summary_table(summaries, True), _figure_table(judged, True), "", sep="\n")
    sources = dict.fromkeys(source for one in judged for source in one.figure.sources)
    console.print("## Sources", "", sep="\n")
    for source, date in sources:
        console.print(Text(f"- {source} ({date})"))
    return [line.rstrip() for line in text.getvalue().splitlines()]
