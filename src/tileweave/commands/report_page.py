"""The HTML page of ``tileweave report``."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

from tileweave import OPERATORS, __version__
from tileweave.bench.environment import WITHOUT_GPUS
from tileweave.bench.report import BLOCKS
from tileweave.bench.rivals import CORUN, OURS
from tileweave.bench.samples import samples_of
from tileweave.commands.doctor import Diagnosis, Fact
from tileweave.profile.metrics import geometric_mean
from tileweave.profile.trace import (
    COPY_ENGINE,
    GPU_CLOCK,
    SEVERAL,
    Trace,
    chrome,
    describe,
    in_words,
    lane_name,
    three_digits,
)

COLOURS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#B8A800",
    "#7F7F7F",
)
_OTHERS = "#444444"  # of several ranks
_PROGRAMS = 4  # of each rank in a time line
_WIDTH, _LANE, _LEFT = 900, 18, 130  # of a time line, in pixels
# Nothing is loaded: no script, no font, no picture but those in the page itself.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 0 auto; padding: 1rem; }
h1 { margin-bottom: 0; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #8888; }
nav a { margin-right: 1.2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.88rem; }
td, th { padding: 0.2rem 0.7rem 0.2rem 0; text-align: left; vertical-align: top; }
td:first-child { min-width: 9rem; }
@media (max-width: 40rem) {
  td:first-child, td:last-child { overflow-wrap: anywhere; min-width: 6rem; }
}
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr { border-bottom: 1px solid #8883; }
.yes { color: #087f5b; } .no, .lost { color: #c92a2a; font-weight: 600; }
.bar { background: #0072B2; height: 0.7rem; }
.scale { width: 12rem; background: #8883; position: relative; }
svg text { font: 12px system-ui, sans-serif; fill: currentColor; }
.note { opacity: 0.8; font-size: 0.9rem; }
"""


@dataclass(frozen=True)
class Contents:
    """What the page shows.

    ``paths``: typical calls, and their plans. ``reports``: of ``tileweave bench``. ``date``: of the
    page.
    """

    found: Diagnosis
    paths: list[tuple[str, str]]
    reports: list[dict[str, Any]]
    traces: list[Trace]
    date: str


def page(contents: Contents) -> str:
    """The whole page."""
    sections = (
        ("machine", "Machine", _machine(contents.found)),
        ("paths", "What runs fused, and why", _paths(contents)),
        ("bench", "Measured", _bench(contents.reports)),
        ("traces", "Inside a call", _traces(contents.traces)),
    )
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title, _ in sections)
    body = "\n".join(
        f'<section id="{name}"><h2>{title}</h2>\n{"".join(parts)}</section>'
        for name, title, parts in sections
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>tileweave report</title><style>{_STYLE}</style></head><body>\n"
        f"<h1>tileweave report</h1><p>tileweave {escape(__version__)}, {escape(contents.date)}</p>"
        f"<nav>{links}</nav>\n{body}\n</body></html>\n"
    )


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]], numbers: int = 10**6) -> str:
    """A table of cells in HTML. Columns from ``numbers`` on are numbers."""

    def line(cells: Iterable[str], tag: str) -> str:
        kinds = (' class="n"' if index >= numbers else "" for index in range(10**6))
        return "".join(
            f"<{tag}{kind}>{cell}</{tag}>" for kind, cell in zip(kinds, cells, strict=False)
        )

    head = line(heads, "th")
    lines = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    top = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f'<div class="wide"><table>{top}<tbody>{lines}</tbody></table></div>\n'


# --- Machine and paths ---


def _machine(found: Diagnosis) -> Iterator[str]:
    yield _table((), map(_fact, (*found.devices, *found.software)))
    if found.peer_access:
        yield "<h3>Peer access</h3>"
        signs = {True: '<span class="yes">yes</span>', False: '<span class="no">no</span>'}
        yield _table(
            ("from \\ to", *map(str, range(len(found.peer_access)))),
            (
                (
                    str(index),
                    *("" if index == other else signs[yes] for other, yes in enumerate(row)),
                )
                for index, row in enumerate(found.peer_access)
            ),
        )


def _fact(fact: Fact) -> tuple[str, str]:
    kind = {True: "yes", False: "no", None: ""}[fact.good]
    return escape(fact.name), f'<span class="{kind}">{escape(fact.value)}</span>'


def _paths(contents: Contents) -> Iterator[str]:
    yield _table((), map(_fact, contents.found.verdicts[:3]))
    yield "<p>Typical calls in bf16 (M, N, K of the whole problem), and the plan of each:</p>"
    yield _table(
        ("call", "path", "why"),
        ((escape(what), *map(escape, _path_and_reason(plan))) for what, plan in contents.paths),
    )
    named = {what.split(" ")[0].strip(",") for what, _ in contents.paths}
    others = [op for op in OPERATORS if op not in named]
    if others:
        yield (
            f'<p class="note">{escape(", ".join(others))}: the path depends on the routing; ask '
            "<code>tileweave.explain</code> with your tensors.</p>"
        )


def _path_and_reason(plan: str) -> tuple[str, str]:
    path, _, reason = plan.partition(": ") if ": " in plan else plan.partition(", ")
    first, _, rest = path.partition(", ")
    return first, f"{rest}: {reason}" if rest else reason


# --- Bench ---


def _bench(reports: list[dict[str, Any]]) -> Iterator[str]:
    if not reports:
        yield (
            f"<p>Nothing was timed: {escape(WITHOUT_GPUS)}. On a machine with two GPUs or more "
            "this section is a bench of every operator; or pass the files of "
            "<code>tileweave bench OPERATOR --json FILE</code> by <code>--results</code>.</p>"
        )
        return
    yield (
        "<p>Microseconds, slowest rank, median of repeats, all rivals of a case interleaved. "
        f"<em>{escape(CORUN)}</em>: the matmul while copies of the same size run; no overlap is "
        "faster. The bar is the bound over our time: full means that all communication is hidden. "
        'Ratios above 1: tileweave is faster; <span class="lost">below 0.995</span>: it is '
        "slower.</p>"
    )
    for report in reports:
        yield from _report(report)


def _report(report: dict[str, Any]) -> Iterator[str]:
    place = report.get("environment") or {}
    where = ", ".join(
        escape(str(said))
        for said in (
            f"{report.get('world_size', '?')} ranks",
            place.get("device"),
            place.get("date"),
            f"torch {place.get('torch')}",
            f"triton {place.get('triton')}",
        )
        if said
    )
    yield f'<h3>{escape(report["op"])}</h3><p class="note">{where}</p>'
    if report.get("device_type") == "cpu":
        yield f'<p class="no">{escape(WITHOUT_GPUS)}</p>'
    blocks = dict.fromkeys(case.get("block", "") for case in report["cases"])
    for block in blocks:
        cases = [case for case in report["cases"] if case.get("block", "") == block]
        yield f"<h4>{escape(BLOCKS.get(block, str(block)))}</h4>"
        yield _cases(cases, samples_of(report["op"]).bench.baselines)
        plans = [f"{case['name']}: {case['plan']}" for case in cases if case.get("plan")]
        if plans:
            items = "".join(f"<li>{escape(plan)}</li>" for plan in plans)
            yield f"<details><summary>plans</summary><ul>{items}</ul></details>"


def _time(case: dict[str, Any], name: str) -> float:
    """A time in microseconds, NaN if there is none."""
    value = case["times"].get(name, {}).get("median_us")
    return float(value) if isinstance(value, int | float) and value > 0 else math.nan


def _cases(cases: list[dict[str, Any]], baselines: tuple[str, ...]) -> str:
    """The times of all, and the ratios of ``baselines``: what else is timed, such as the matmul
    alone, is a part."""
    names = list(dict.fromkeys(name for case in cases for name in case["times"]))
    rivals = [name for name in names if name in baselines]
    bound = CORUN in names
    heads = ["case", *names, *(f"{name} / ours" for name in rivals), *(["bound / ours"] * bound)]
    rows, ratios = [], {name: [] for name in (*rivals, CORUN)}
    for case in cases:
        ours = _time(case, OURS)
        wrong = "" if case.get("right", True) else ' <span class="no">WRONG</span>'
        row = [escape(case["name"]) + wrong, *(_microseconds(_time(case, name)) for name in names)]
        for name in rivals:
            ratios[name].append(_time(case, name) / ours)
            row.append(_ratio(ratios[name][-1]))
        if bound:
            ratios[CORUN].append(_time(case, CORUN) / ours)
            row.append(_bar(ratios[CORUN][-1]))
        rows.append(row)
    means = [_ratio(geometric_mean(ratios[name])) for name in rivals]
    last = [_bar(geometric_mean(ratios[CORUN]))] if bound else []
    rows.append(["<strong>geometric mean</strong>", *[""] * len(names), *means, *last])
    return _table(map(escape, heads), rows, numbers=1)


def _microseconds(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _ratio(value: float) -> str:
    if not math.isfinite(value):
        return ""
    text = f"{value:.2f}"
    return f'<span class="lost">{text}</span>' if value < 0.995 else text


def _bar(value: float) -> str:
    if not math.isfinite(value):
        return ""
    width = 100 * min(max(value, 0.0), 1.0)
    return f'<div class="scale"><div class="bar" style="width:{width:.0f}%"></div></div>{value:.2f}'


# --- Traces ---


def _traces(traces: list[Trace]) -> Iterator[str]:
    if not traces:
        yield "<p>No call was recorded.</p>"
        return
    yield (
        "<p>A row is one program of a rank (on GPUs, one multiprocessor), its kernels, or its "
        "copies. Colours are ranks: full, a push of that rank or work on its rows; pale, a program "
        "that runs; hatched, a wait for that rank. Blank: not recorded. Point at a block to read "
        "what it is.</p>"
    )
    ranks = range(max(trace.world_size for trace in traces))
    hatches = "".join(map(_hatch, (SEVERAL, *ranks)))
    yield f'<svg width="0" height="0" aria-hidden="true"><defs>{hatches}</defs></svg>'
    for trace in traces:
        yield f'<h3>{escape(trace.title)}</h3><p class="note">{escape(trace.clock)}</p>'
        yield f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in in_words(trace))}</ul>"
        yield f'<div class="wide">{_time_line(trace)}</div>'
        held = base64.b64encode(json.dumps(chrome(trace)).encode()).decode()
        yield (
            f'<p><a download="trace.json" href="data:application/json;base64,{held}">'
            "The trace as a file</a> for ui.perfetto.dev.</p>"
        )


def _lanes(trace: Trace) -> list[tuple[int, int]]:
    lanes = []
    for rank in range(trace.world_size):
        programs = sorted({event.program for event in trace.of_rank(rank)})
        driver = [program for program in programs if program < 0]  # kernels, then copies
        computing = [program for program in programs if program >= 0]
        step = max(1, math.ceil(len(computing) / _PROGRAMS))
        lanes += [(rank, program) for program in (*driver, *computing[::step])]
    return lanes


def _time_line(trace: Trace) -> str:
    lanes = _lanes(trace)
    at = {lane: number * _LANE + 6 * lane[0] for number, lane in enumerate(lanes)}
    scale = (_WIDTH - _LEFT) / max(trace.end_ns, 1)
    height = (max(at.values(), default=0)) + 2 * _LANE + 10
    unit, ns = ("ms", 1e6) if trace.end_ns > 2e6 else ("us", 1e3)
    on_gpu = trace.clock == GPU_CLOCK
    marks = [
        f'<text x="0" y="{y + 12}">rank {rank} '
        f"{'copies' if program == COPY_ENGINE else lane_name(program, on_gpu)}</text>"
        for (rank, program), y in at.items()
    ]
    for event in trace.events:
        y = at.get((event.rank, event.program))
        if y is None:
            continue
        source = event.rank if event.kind in ("push", "copy") else event.peer
        fill = f"url(#wait{source})" if event.kind == "wait" else _colour(source)
        thin = 3 if event.kind in ("push", "copy") else 0
        pale = ' fill-opacity="0.3"' if event.kind == "program" else ""
        took = f"{three_digits(event.duration_ns / ns)} {unit}"
        label = f"rank {event.rank}: {describe(event)}, {took}"
        marks.append(
            f'<rect x="{_LEFT + event.begin_ns * scale:.1f}" y="{y + 1 + thin}" '
            f'width="{max(event.duration_ns * scale, 0.5):.1f}" height="{_LANE - 3 - 2 * thin}" '
            f'fill="{fill}"{pale}><title>{escape(label)}</title></rect>'
        )
    for part in range(5):
        x = _LEFT + (_WIDTH - _LEFT) * part / 4
        value = three_digits(trace.end_ns * part / 4 / ns)
        end = "end" if part == 4 else "middle" if part else "start"
        marks.append(
            f'<text x="{x:.0f}" y="{height - 4}" text-anchor="{end}">{value} {unit}</text>'
        )
    said = escape(f"Time line: {trace.title}")
    return (
        f'<svg width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{said}">{"".join(marks)}</svg>'
    )


def _hatch(rank: int) -> str:
    """The pattern of waits for a rank."""
    return (
        f'<pattern id="wait{rank}" width="6" height="6" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="2" height="6" fill="{_colour(rank)}"/>'
        "</pattern>"
    )


def _colour(rank: int) -> str:
    return _OTHERS if rank == SEVERAL else COLOURS[rank % len(COLOURS)]
