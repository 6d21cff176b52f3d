"""Plots with matplotlib: which rank waited for which in a call, and how far each rival is from the
co-run bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from tileweave.profile.trace import (
    COPY_ENGINE,
    GPU_CLOCK,
    SEVERAL,
    Event,
    Trace,
    lane_name,
    summary,
)

# The colours of Okabe and Ito, which colour-blind readers can tell apart, for eight ranks.
RANK_COLOURS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#F0E442",
    "#7F7F7F",
)
_SEVERAL_COLOUR = "#444444"
_MOST_ROWS = 4  # of programs, per rank
_DPI = 130
_WAITS_ONLY = "waits only; the rest is not recorded"


def plot_traces(traces: Sequence[Trace], path: Path | str) -> None:
    """One row per trace: a time line of all ranks, and the matrix of how long each rank waited for
    each other."""
    heights = [max(2.2, 0.34 * len(_lanes(trace)) + 1.1) for trace in traces]
    figure = Figure(figsize=(14, sum(heights) + 1.2), layout="constrained")
    grid = figure.subplots(
        len(traces),
        2,
        squeeze=False,
        gridspec_kw={"width_ratios": [4.2, 1], "height_ratios": heights},
    )
    tables = [_waited(trace) for trace in traces]
    longest = max((value for _, cells in tables for row in cells for value in row), default=0.0)
    for (line, matrix), trace, table in zip(grid, traces, tables, strict=True):
        draw_time_line(line, trace)
        _draw_matrix(matrix, *table, longest)
    handles = legend_of(traces)
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=-(-len(handles) // 2),
        frameon=False,
        fontsize=9,
    )
    figure.suptitle(_heading(traces), fontsize=13, fontweight="bold")
    figure.savefig(path, dpi=_DPI)


def _kinds(traces: Sequence[Trace]) -> set[str]:
    return {event.kind for trace in traces for event in trace.events}


def _heading(traces: Sequence[Trace]) -> str:
    """A heading that names only what was recorded."""
    words = {
        "kernel": "kernels",
        "copy": "copies",
        "push": "pushes",
        "compute": "computations",
        "wait": "waits of each rank",
    }
    seen = _kinds(traces)
    text = (
        ", ".join(word for kind, word in words.items() if kind in seen).capitalize()
        or "Nothing was recorded"
    )
    return text + (f" ({_WAITS_ONLY})" if seen == {"wait"} else "")


def _lanes(trace: Trace) -> list[tuple[int, int]]:
    """(rank, program) of each row from top to bottom; only a few programs of each rank."""
    lanes = []
    for rank in range(trace.world_size):
        programs = sorted({event.program for event in trace.of_rank(rank)})
        computing = [program for program in programs if program > COPY_ENGINE]
        if len(computing) > _MOST_ROWS:
            step = (len(computing) - 1) / (_MOST_ROWS - 1)
            computing = [computing[round(i * step)] for i in range(_MOST_ROWS)]
        # kernels, then copies
        driver = sorted(
            (program for program in programs if program < 0), key=lambda p: (p == COPY_ENGINE, -p)
        )
        lanes += [(rank, program) for program in (driver + computing or [0])]
    return lanes


def draw_time_line(axes: Axes, trace: Trace) -> None:
    """The events of all ranks over time, of a few programs of each."""
    lanes = _lanes(trace)
    scale, unit = (1e6, "ms") if trace.end_ns > 2e6 else (1e3, "us")
    place = {lane: -number - 0.35 * lane[0] for number, lane in enumerate(lanes)}
    for event in trace.events:
        y = place.get((event.rank, event.program))
        if y is not None:
            _draw_event(axes, event, y, scale)
    axes.set_yticks(
        list(place.values()),
        [_lane_name(lane, lanes, trace.clock == GPU_CLOCK) for lane in lanes],
        fontsize=8,
    )
    axes.set_ylim(min(place.values()) - 0.6, 0.6)
    axes.set_xlim(0, trace.end_ns / scale or 1.0)
    axes.set_xlabel(f"time, {unit}   ({trace.clock})", fontsize=9)
    only = f"   ({_WAITS_ONLY})" if _kinds([trace]) == {"wait"} else ""
    axes.set_title(trace.title + only, fontsize=10, loc="left")
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _lane_name(lane: tuple[int, int], lanes: list[tuple[int, int]], on_gpu: bool) -> str:
    rank, program = lane
    alone = sum(other == rank and number >= 0 for other, number in lanes) == 1
    if program == COPY_ENGINE:
        what = "copies"
    elif program < 0 or on_gpu:
        what = lane_name(program, on_gpu).replace("multiprocessor", "SM")
    else:
        what = "kernel" if alone else f"program {program}"
    return f"rank {rank} {what}"


def _draw_event(axes: Axes, event: Event, y: float, scale: float) -> None:
    begin, width = event.begin_ns / scale, max(event.duration_ns / scale, 1e-9)
    source = event.rank if event.kind in ("push", "copy") else event.peer
    colour = _SEVERAL_COLOUR if source == SEVERAL else RANK_COLOURS[source % len(RANK_COLOURS)]
    if event.kind == "program":
        axes.broken_barh([(begin, width)], (y - 0.38, 0.76), facecolor=colour, alpha=0.3)
    elif event.kind in ("compute", "kernel"):
        axes.broken_barh(
            [(begin, width)], (y - 0.38, 0.76), facecolor=colour, edgecolor="white", linewidth=0.3
        )
    elif event.kind == "wait":
        axes.broken_barh(
            [(begin, width)],
            (y - 0.30, 0.60),
            facecolor="white",
            edgecolor=colour,
            hatch="/////",
            linewidth=0.8,
        )
    else:
        axes.broken_barh(
            [(begin, width)], (y - 0.20, 0.40), facecolor=colour, edgecolor="black", linewidth=0.6
        )


def legend_of(traces: Sequence[Trace]) -> list[Patch]:
    """The ranks, and the kinds of events that occur."""
    events = [event for trace in traces for event in trace.events]
    size = max((trace.world_size for trace in traces), default=0)
    entries = [
        Patch(facecolor=RANK_COLOURS[rank % len(RANK_COLOURS)], label=f"rank {rank}")
        for rank in range(size)
    ]
    if any(event.peer == SEVERAL and event.kind != "push" for event in events):
        entries.append(Patch(facecolor=_SEVERAL_COLOUR, label="several ranks"))
    pushers = {event.program == COPY_ENGINE for event in events if event.kind in ("push", "copy")}
    grey, kinds = "#bbbbbb", _kinds(traces)
    if False in pushers:
        entries.append(
            Patch(
                facecolor=grey,
                edgecolor="black",
                linewidth=0.6,
                label="push by the kernel, in the colour of the sender",
            )
        )
    if True in pushers:
        label = 'rows "copies": push by a copy engine, in the colour of the sender'
        entries.append(Patch(facecolor=grey, edgecolor="black", linewidth=0.6, label=label))
    if "kernel" in kinds:
        entries.append(Patch(facecolor=grey, edgecolor="white", label="kernel of that rank"))
    if "program" in kinds:
        entries.append(Patch(facecolor=grey, alpha=0.3, label="program of a kernel of that rank"))
    if "compute" in kinds:
        entries.append(
            Patch(facecolor=grey, edgecolor="white", label="compute on rows of that rank")
        )
    if "wait" in kinds:
        entries.append(
            Patch(facecolor="white", edgecolor="#777777", hatch="/////", label="wait for that rank")
        )
    return [
        *entries,
        Patch(facecolor="white", edgecolor="#cccccc", linewidth=0.6, label="blank: not recorded"),
    ]


def _waited(trace: Trace) -> tuple[list[int], list[list[float]]]:
    """The ranks of columns (waited for), and rows (ranks that waited) of nanoseconds, mean over
    programs."""
    figures = summary(trace)
    columns = [*range(trace.world_size)]
    if any(SEVERAL in rank.waited_ns for rank in figures):
        columns.append(SEVERAL)
    return columns, [
        [rank.waited_ns.get(c, 0) / max(rank.programs, 1) for c in columns] for rank in figures
    ]


def _draw_matrix(axes: Axes, columns: list[int], cells: list[list[float]], longest: float) -> None:
    """``longest`` is the longest wait in all matrices of the figure, so that greys compare."""
    axes.imshow(cells, cmap="Greys", vmin=0, vmax=longest * 1.6 or 1.0, aspect="auto")
    for row, values in enumerate(cells):
        for column, value in enumerate(values):
            text = "" if columns[column] == row else _duration(value)
            axes.text(column, row, text, ha="center", va="center", fontsize=8)
    axes.set_xticks(
        range(len(columns)), ["several" if c == SEVERAL else str(c) for c in columns], fontsize=8
    )
    axes.set_yticks(range(len(cells)), [str(rank) for rank in range(len(cells))], fontsize=8)
    axes.set_xlabel("for rank", fontsize=9)
    axes.set_ylabel("rank waited", fontsize=9)
    axes.set_title("waited, mean over programs", fontsize=9)
    axes.tick_params(length=0)


def _duration(ns: float) -> str:
    """A duration with up to three digits and its unit."""
    if ns == 0:
        return "0"
    value, unit = (ns / 1e6, "ms") if ns >= 1e6 else (ns / 1e3, "us")
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"


# --- Bench ---

# The rivals that plots of all benches show, from left to right: ours, unfused paths, fused ones of
# others, the bare matmul.
PEER_COLOURS = {
    "tileweave": "#0072B2",
    "nccl+cublas": "#999999",
    "unfused": "#999999",
    "lookup+a2a+cat": "#999999",
    "torch fused": "#E69F00",
    "torch one-shot": "#E69F00",
    "torch two-shot": "#F0C060",
    "torch": "#E69F00",
    "gathered": "#E69F00",
    "gemm": "#d8d8d8",
    "matmul": "#d8d8d8",
}
_BLOCKS = {False: "eager calls", True: "calls in a CUDA graph"}
_HIGHEST = 3.0


def plot_bench(report: dict[str, Any], path: Path | str) -> None:
    """Bars of time divided by the co-run bound, by case and rival; eager calls above captured ones.

    If the bound was not measured, times are divided by that of the bare matmul and labelled so.
    """
    blocks = [
        (title, [case for case in report["cases"] if _captured(case) == graph])
        for graph, title in _BLOCKS.items()
    ]
    blocks = [(title, cases) for title, cases in blocks if cases]
    if not blocks:
        return
    figure = Figure(figsize=(13, 3.9 * len(blocks) + 0.6), layout="constrained")
    panels = figure.subplots(len(blocks), 1, squeeze=False)[:, 0]
    for axes, (title, cases) in zip(panels, blocks, strict=True):
        _draw_block(axes, title, cases)
    figure.suptitle(_bench_heading(report), fontweight="bold")
    figure.savefig(path, dpi=_DPI)


def plot_over(
    report: dict[str, Any], path: Path | str, base: str, base_of: Callable[[dict[str, Any]], float]
) -> None:
    """Bars of time divided by ``base``, which ``base_of`` returns in microseconds, by case and
    rival."""
    cases = [case for case in report["cases"] if case["right"]]
    names = _drawn(cases)
    figure = Figure(figsize=(max(8.0, 1.1 * len(cases)), 4.4), layout="constrained")
    axes = figure.subplots()
    for index, name in enumerate(names):
        heights = [
            case["times"].get(name, {}).get("median_us", math.nan) / base_of(case) for case in cases
        ]
        places = [
            number + (index - (len(names) - 1) / 2) * 0.8 / len(names)
            for number in range(len(cases))
        ]
        bars = axes.bar(places, heights, 0.75 / len(names), label=name, color=PEER_COLOURS[name])
        axes.bar_label(bars, fmt="%.2g", fontsize=7, padding=1)
    axes.axhline(1.0, color="black", linewidth=0.9, linestyle="--")
    axes.set_xticks(
        range(len(cases)), [case["name"] for case in cases], rotation=35, ha="right", fontsize=8
    )
    axes.set_ylabel(f"time / {base}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_title(_bench_heading(report), loc="left", fontsize=10)
    axes.legend(
        ncols=len(names) or 1,
        frameon=False,
        fontsize=8,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.06),
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=_DPI)


def _bench_heading(report: dict[str, Any]) -> str:
    where = (
        f"{report['op']}, world {report['world_size']}, {report['environment'].get('device', '')}"
    )
    on_cpu = report.get("device_type") == "cpu"
    return f"{where}: {'interpreted: times mean nothing' if on_cpu else 'lower is better'}"


def _drawn(cases: list[dict[str, Any]]) -> list[str]:
    return [name for name in PEER_COLOURS if any(name in case["times"] for case in cases)]


def _captured(case: dict[str, Any]) -> bool:
    """Whether our calls were replayed from a graph; on the CPU none is, whatever the case says."""
    return bool(case["times"].get("tileweave", case).get("graph", case["graph"]))


def _draw_block(axes: Axes, title: str, cases: list[dict[str, Any]]) -> None:
    names = _drawn(cases)
    bar = 0.8 / max(len(names), 1)
    for index, name in enumerate(names):
        values = [_relative(case, name) for case in cases]
        at = [number + (index - (len(names) - 1) / 2) * bar for number in range(len(cases))]
        shown = [min(value, _HIGHEST) if math.isfinite(value) else 0.0 for value in values]
        axes.bar(at, shown, bar * 0.92, color=PEER_COLOURS[name], label=name)
        for x, value in zip(at, values, strict=True):
            if value > _HIGHEST:
                axes.text(x, _HIGHEST, f"{value:.1f}", ha="center", va="bottom", fontsize=6)
            if name == "tileweave" and math.isfinite(value):
                axes.text(
                    x,
                    0.05,
                    f"{value:.2f}",
                    ha="center",
                    va="bottom",
                    fontsize=7,
                    rotation=90,
                    color="white",
                )
    bounds = [_bound_of(case) for case in cases]
    base = bounds[0] if len(set(bounds)) == 1 else "co-run bound (*: matmul)"
    axes.axhline(1.0, color="black", linewidth=0.9, linestyle="--", label=base)
    stars = ["" if bound == base.split(" (")[0] else " *" for bound in bounds]
    labels = [_case_name(case) + star for case, star in zip(cases, stars, strict=True)]
    axes.set_xticks(range(len(cases)), labels, fontsize=7, rotation=25, ha="right")
    axes.set_xlim(-0.6, max(len(cases), 3) - 0.4)
    axes.set_ylabel(f"time / {base}")
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(ncols=5, frameon=False, fontsize=8, loc="upper right", bbox_to_anchor=(1.0, 1.12))
    axes.spines[["top", "right"]].set_visible(False)


def _bound_of(case: dict[str, Any]) -> str:
    """What the bars of a case are relative to."""
    return "co-run bound" if "co-run bound" in case["times"] else "matmul"


def _case_name(case: dict[str, Any]) -> str:
    layer = case["name"].rsplit("-m", 1)[0]
    return f"{layer}\nM {case['rows']}"


def _relative(case: dict[str, Any], name: str) -> float:
    times = {key: timing["median_us"] for key, timing in case["times"].items()}
    bound = times.get("co-run bound" if _bound_of(case) == "co-run bound" else "gemm", math.nan)
    return times.get(name, math.nan) / bound if bound and math.isfinite(bound) else math.nan
