"""A bench report as a table: losing cells marked and kept, geometric means below each block."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from tileweave.bench.peers import CORUN, GEMM, OURS, TORCH, UNFUSED
from tileweave.profile.metrics import geometric_mean

BLOCKS = {
    "large": "large, eager",
    "odd": "odd sizes, eager",
    "small": "small, in a CUDA graph",
    "smoke": "smoke: interpreted or tiny, times mean nothing",
}
# limit: t_corun / t_tileweave. /unfused, /torch: their time over ours, below 1 we lose.
_RATIOS = {"limit": "limit_ratio", "/unfused": "over_unfused", "/torch": "over_torch"}
_TEXTS = ("case", "M, N, K", "path")
_COLUMNS = (*_TEXTS, OURS, UNFUSED, TORCH, GEMM, CORUN, "E_overlap", *_RATIOS, "host us", "error")
_DISPENSABLE = ("M, N, K", "host us", "error")  # on a narrow screen
_WIDE = 170
_HEADINGS = {UNFUSED: "unfused", CORUN: "co-run", "E_overlap": "E_ov"}


def tables_of(report: dict[str, Any], width: int) -> list[Table]:
    """One table for each block of cases; microseconds unless said. ``width``: columns of the screen."""
    tables = []
    for block, title in BLOCKS.items():
        cases = [case for case in report["cases"] if case["block"] == block]
        if cases:
            device = report["environment"].get("device", "")
            heading = f"{report['op']}, {title}; world {report['world_size']}, {device}; us, slowest rank, median of repeats"
            table = Table(title=heading, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
            columns = [name for name in _COLUMNS if width >= _WIDE or name not in _DISPENSABLE]
            for name in columns:
                table.add_column(_HEADINGS.get(name, name), justify="left" if name in _TEXTS else "right", no_wrap=True)
            for case in cases:
                cells = _cells(case)
                table.add_row(*[cells.get(name, "") for name in columns])
            _add_summary(table, cases, columns)
            tables.append(table)
    return tables


def _cells(case: dict[str, Any]) -> dict[str, str]:
    """Column -> text of one case."""
    cells = {"case": case["name"], "M, N, K": f"{case['rows']}, {case['cols']}, {case['depth']}", "path": case["plan"]}
    cells["error"] = f"{case['error']:.1e}"
    if not case["right"]:
        return cells | {OURS: "[bold red]WRONG[/]"}
    ours = _median(case, OURS)
    cells[OURS] = f"[bold]{_number(ours)}[/]"
    for name in (UNFUSED, TORCH, GEMM, CORUN):
        time = _median(case, name)
        mark = "*" if case["times"].get(name, {}).get("note") and not math.isnan(time) else ""
        text = _number(time) + mark
        cells[name] = f"[bold red]{text}[/]" if name in (UNFUSED, TORCH) and time < ours else text
    cells["E_overlap"] = _number(case["e_overlap"], 2)
    cells["limit"] = _ratio(case["limit_ratio"], 0.92)
    cells["/unfused"] = _ratio(case["over_unfused"], 1.0)
    cells["/torch"] = _ratio(case["over_torch"], 1.0)
    cells["host us"] = _number(case["host_us"], 0)
    return cells


def _add_summary(table: Table, cases: list[dict[str, Any]], columns: list[str]) -> None:
    """Two rows: geometric mean and worst of the ratios."""
    summaries: tuple[tuple[str, Callable[[list[float]], float]], ...] = (
        ("geometric mean", geometric_mean),
        ("worst", lambda values: min(values, default=math.nan)),
    )
    table.add_section()
    for title, summarise in summaries:
        cells = {"case": title}
        for column, key in _RATIOS.items():
            cells[column] = _number(summarise([case[key] for case in cases if math.isfinite(case[key])]), 3)
        table.add_row(*[cells.get(name, "") for name in columns], style="bold")


def notes_of(report: dict[str, Any]) -> list[str]:
    """What the table's marks stand for, and what is missing."""
    timings = [(name, timing["note"]) for case in report["cases"] for name, timing in case["times"].items()]
    notes = {f"* {name}: {note}" for name, note in timings if note}
    notes |= {f"{name} is missing: {why}" for case in report["cases"] for name, why in case["missing"].items()}
    wrong = [case["name"] for case in report["cases"] if not case["right"]]
    lines = sorted(notes)
    if wrong:
        lines.append(f"WRONG results, not timed: {', '.join(wrong)}")
    if report["skipped"]:
        lines.append(f"skipped, out of time: {', '.join(report['skipped'])}")
    return lines


def is_right(report: dict[str, Any]) -> bool:
    """Whether every case that ran was right."""
    return all(case["right"] for case in report["cases"])


def _median(case: dict[str, Any], name: str) -> float:
    return float(case["times"].get(name, {}).get("median_us", math.nan))


def _number(value: float, digits: int = 1) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:.0f}" if digits == 1 and value >= 1000 else f"{value:.{digits}f}"


def _ratio(value: float, bar: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"[bold red]!{value:.3f}[/]" if value < bar else f"{value:.3f}"
