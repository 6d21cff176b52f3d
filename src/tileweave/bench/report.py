"""A bench report as a table, with losses marked, and geometric means below each block."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from tileweave.bench.environment import WITHOUT_GPUS
from tileweave.bench.rivals import CORUN, GEMM, ONE_SHOT, OURS, TORCHS, TWO_SHOT, UNFUSED
from tileweave.bench.samples import Bar, samples_of
from tileweave.profile.metrics import geometric_mean

BLOCKS = {
    "large": "large, eager",
    "odd": "odd sizes, eager",
    "gemv": "a few rows, cold weights, in a CUDA graph",
    "small": "small, in a CUDA graph",
    "fp8": "FP8 operands, eager",
    "fp8 small": "FP8 operands, small, in a CUDA graph",
    "smoke": "smoke: interpreted or tiny, times mean nothing",
}
# limit: t_corun / t_tileweave. /unfused, /torch, /best: time of a rival over that of tileweave;
# below 1 the rival is faster. -gemm: tileweave less the bare matmul, microseconds.
_RATIOS = {
    "limit": "limit_ratio",
    "/unfused": "over_unfused",
    "/torch": "over_torch",
    "/best": "over_best",
}
_FIGURES = {**_RATIOS, "-gemm": "over_gemm_us"}
_TEXTS = ("case", "M, N, K", "path")
_RIVALS = (UNFUSED, *TORCHS)
_TIMES = (OURS, *_RIVALS, GEMM, CORUN)
_COLUMNS = (*_TEXTS, *_TIMES, "E_overlap", *_FIGURES, "host us", "error")
_DISPENSABLE = ("M, N, K", "host us", "error", "/best")  # on a narrow screen
_WIDE = 170
_HEADINGS = {
    UNFUSED: "unfused",
    CORUN: "co-run",
    "E_overlap": "E_ov",
    ONE_SHOT: "one-shot",
    TWO_SHOT: "two-shot",
}
_PASS, _FAIL = "green", "bold red"


def tables_of(report: dict[str, Any], width: int) -> list[Table]:
    """One table per block of cases, in microseconds unless stated. ``width``: columns of the
    screen."""
    tables = []
    for block, title in BLOCKS.items():
        cases = [case for case in report["cases"] if case["block"] == block]
        if cases:
            device = report["environment"].get("device", "")
            heading = (
                f"{report['op']}, {title}; world {report['world_size']}, {device}; "
                "us, slowest rank, median of repeats"
            )
            columns = _columns(report["op"], width)
            table = new_table(heading, columns, _HEADINGS, _TEXTS)
            bars = samples_of(report["op"]).bars.get(block, {})
            for case in cases:
                cells = _cells(case, bars)
                table.add_row(*[cells.get(name, "") for name in columns])
            _add_summary(table, cases, columns, bars)
            tables.append(table)
    return tables


def new_table(
    title: str,
    columns: Sequence[str],
    headings: Mapping[str, str],
    texts: Sequence[str] = ("case",),
) -> Table:
    """A table without rows. ``headings``: of columns not headed by their name. ``texts``: columns
    of text."""
    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False
    )
    for name in columns:
        table.add_column(
            headings.get(name, name), justify="left" if name in texts else "right", no_wrap=True
        )
    return table


def _columns(op: str, width: int) -> list[str]:
    """Times of this operator's own rivals only; fewer columns on a narrow screen."""
    hidden = [name for name in TORCHS if name not in samples_of(op).rival.torchs]
    return [
        name
        for name in _COLUMNS
        if name not in hidden and (width >= _WIDE or name not in _DISPENSABLE)
    ]


def _cells(case: dict[str, Any], bars: dict[str, Bar]) -> dict[str, str]:
    """Column -> text of one case."""
    cells = {
        "case": case["name"],
        "M, N, K": f"{case['rows']}, {case['cols']}, {case['depth']}",
        "path": case["plan"],
    }
    cells["error"] = f"{case['error']:.1e}"
    if not case["right"]:
        return cells | {OURS: "[bold red]WRONG[/]"}
    ours = median(case, OURS)
    cells[OURS] = f"[bold]{_time(ours)}[/]"
    for name in (*_RIVALS, GEMM, CORUN):
        time = median(case, name)
        mark = "*" if case["times"].get(name, {}).get("note") and not math.isnan(time) else ""
        text = _time(time) + mark
        cells[name] = f"[bold red]{text}[/]" if name in _RIVALS and time < ours else text
    cells["E_overlap"] = number(case["e_overlap"], 2)
    for column, key in _RATIOS.items():
        worst = bars.get(key, Bar()).worst
        cells[column] = marked(
            case[key], worst if worst is not None else 0.0 if key == "limit_ratio" else 1.0, 3
        )
    most = bars.get("over_gemm_us", Bar()).most
    text = _time(case["over_gemm_us"])
    cells["-gemm"] = (
        f"[bold red]!{text}[/]" if most is not None and case["over_gemm_us"] > most else text
    )
    cells["host us"] = number(case["host_us"])
    return cells


def _add_summary(
    table: Table, cases: list[dict[str, Any]], columns: list[str], bars: dict[str, Bar]
) -> None:
    """Geometric mean and worst of the ratios, largest time over the bare matmul; and the bars, met
    or not."""
    mean, worst, bar = {"case": "geometric mean"}, {"case": "worst"}, {"case": "bar: mean, worst"}
    for column, key in _FIGURES.items():
        values = [case[key] for case in cases if math.isfinite(case[key])]
        extreme = max if key == "over_gemm_us" else min
        found = (
            math.nan if key == "over_gemm_us" else geometric_mean(values),
            extreme(values, default=math.nan),
        )
        mean[column], worst[column] = (
            _time(value) if key == "over_gemm_us" else number(value, 3) for value in found
        )
        bar[column] = _verdict(bars.get(key), *found)
    table.add_section()
    for cells in (mean, worst, bar) if bars else (mean, worst):
        table.add_row(*[cells.get(name, "") for name in columns], style="bold")


def _verdict(bar: Bar | None, mean: float, extreme: float) -> str:
    """The numbers of a bar, each green if it was reached."""
    if bar is None:
        return ""
    parts = []
    for asked, found, sign in (
        (bar.mean, mean, 1),
        (bar.worst, extreme, 1),
        (bar.most, extreme, -1),
    ):
        if asked is not None:
            parts.append(f"[{_PASS if sign * found >= sign * asked else _FAIL}]{asked:g}[/]")
    return " ".join(parts)


def notes_of(report: dict[str, Any]) -> list[str]:
    """What the marks of the table mean, what is missing, and whether times have a meaning."""
    timings = [
        (name, timing["note"]) for case in report["cases"] for name, timing in case["times"].items()
    ]
    notes = {f"* {name}: {note}" for name, note in timings if note}
    notes |= {
        f"{name} is missing: {why}"
        for case in report["cases"]
        for name, why in case["missing"].items()
    }
    wrong = [case["name"] for case in report["cases"] if not case["right"]]
    lines = [WITHOUT_GPUS] * (report.get("device_type") == "cpu") + sorted(notes)
    if wrong:
        lines.append(f"WRONG results, not timed: {', '.join(wrong)}")
    if report["skipped"]:
        lines.append(f"skipped, out of time: {', '.join(report['skipped'])}")
    return lines


def why_nothing(report: dict[str, Any]) -> str:
    """Why no time was taken; "" if one was, or if results were wrong (reported elsewhere)."""
    if not report["cases"]:
        return "no time for any case"
    timed = any(case["times"] for case in report["cases"]) or not is_right(report)
    return "" if timed else "none of the chosen rivals can run here"


def is_right(report: dict[str, Any]) -> bool:
    """Whether every case that ran was right."""
    return all(case["right"] for case in report["cases"])


def median(case: dict[str, Any], name: str) -> float:
    """Microseconds of a rival; NaN if there is no time."""
    return float(case["times"].get(name, {}).get("median_us", math.nan))


def number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def marked(ratio: float, least: float, digits: int = 2) -> str:
    """A ratio in a table, highlighted below ``least``."""
    text = number(ratio, digits)
    return f"[bold red]!{text}[/]" if ratio < least else text


def _time(value: float) -> str:
    return number(value, 0 if value >= 1000 else 1)
