"""Plots: step time and exposed communication against nodes, time by phase, errors of cells."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tileweave.sim.step import Result
from tileweave.sim.trust import Judged

_COLOURS = {"unfused": "#999999", "fused": "#0072B2", "bound": "#000000"}
_PHASES = ("#0072B2", "#56B4E9", "#009E73", "#F0E442", "#CC79A7", "#8c6bb1", "#bdbdbd", "#a6761d")
_EXPOSED, _IDLE = "#D55E00", "#eeeeee"
_DPI = 130
_WIDE = 5.6  # inches: text of 9 points is legible where a phone shows the picture


def _clean(axes: Axes) -> None:
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _unit(seconds: float) -> tuple[float, str]:
    """The unit that suits a time, as its number per second and its name."""
    return (1.0, "s") if seconds >= 1.0 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "us")


def plot_sweep(results: Sequence[tuple[int, Result]], path: Path) -> Path:
    """Step time and exposed communication against nodes."""
    figure = Figure(figsize=(_WIDE, 6.4), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    numbers = [number for number, _ in results]
    scale, unit = _unit(max(r.seconds(mode) for _, r in results for mode in r.timelines))
    for mode, colour in _COLOURS.items():
        style = "--" if mode == "bound" else "-"
        upper.plot(
            numbers,
            [r.seconds(mode) * scale for _, r in results],
            style,
            marker="o",
            ms=4,
            color=colour,
            label=mode,
        )
        exposed = [
            100 * r.timelines[mode].phases().get("exposed communication", 0.0) / r.seconds(mode)
            for _, r in results
        ]
        lower.plot(numbers, exposed, style, marker="o", ms=4, color=colour, label=mode)
    for axes, label in ((upper, f"a step, {unit}"), (lower, "exposed communication, % of a step")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(numbers, [str(number) for number in numbers])
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        _clean(axes)
    lower.set_xlabel("nodes")
    upper.legend(frameon=False)
    grows = "batch and tables grow" if results[0][1].unit == "samples" else "the batch grows"
    figure.suptitle(
        f"{results[0][1].title}, up to {results[-1][1].cluster}\n{grows} with the nodes: simulated",
        fontsize=10,
    )
    figure.savefig(path, dpi=_DPI)
    return path


def plot_phases(result: Result, path: Path) -> Path:
    """One bar per mode, stacked by phase."""
    figure = Figure(figsize=(_WIDE, 0.6 * len(result.timelines) + 2.6), layout="constrained")
    axes = figure.subplots()
    phases = {mode: timeline.phases() for mode, timeline in result.timelines.items()}
    names = list(dict.fromkeys(name for found in phases.values() for name in found))
    names.sort(key=lambda name: (name == "idle", name == "exposed communication"))
    begin = dict.fromkeys(phases, 0.0)
    scale, unit = _unit(max(map(result.seconds, phases)))
    for index, name in enumerate(names):
        colour = {"exposed communication": _EXPOSED, "idle": _IDLE}.get(
            name, _PHASES[index % len(_PHASES)]
        )
        widths = [phases[mode].get(name, 0.0) * scale for mode in phases]
        axes.barh(
            list(phases),
            widths,
            left=[begin[mode] for mode in phases],
            color=colour,
            label=name,
            height=0.6,
        )
        for mode, width in zip(phases, widths, strict=True):
            begin[mode] += width
    for row, end in enumerate(begin.values()):
        axes.text(end, row, f" {end:.4g}", va="center", fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel(f"{unit} of the busiest rank")
    axes.set_xlim(right=1.16 * max(begin.values()))
    figure.legend(frameon=False, fontsize=9, ncols=3, loc="outside lower center")
    figure.suptitle(f"{result.title}\n{result.cluster}: simulated", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=_DPI)
    return path


def plot_trust(judged: Sequence[Judged], path: Path) -> Path:
    """Predicted over measured time of every cell; fitted ones hollow, held-out ones filled."""
    groups = sorted(
        {(one.cell.op, one.cell.quantity) for one in judged if one.side in ("fit", "held out")}
    )
    figure = Figure(figsize=(_WIDE, 0.21 * len(groups) + 1.4), layout="constrained")
    axes = figure.subplots()
    for row, (op, quantity) in enumerate(groups):
        for side, fill, shift in (("fit", "none", -0.2), ("held out", "#0072B2", 0.2)):
            members = [
                one
                for one in judged
                if (one.cell.op, one.cell.quantity, one.side) == (op, quantity, side)
            ]
            axes.scatter(
                [1.0 + one.error for one in members],
                [row + shift] * len(members),
                s=12,
                facecolors=fill,
                edgecolors="#0072B2",
                linewidths=0.7,
                label=side if row == 0 else None,
            )
    axes.axvspan(1 / 1.2, 1.2, color="#f2f2f2", zorder=0)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xticks([0.8, 0.9, 1.0, 1.1, 1.2, 1.4], ["0.8", "0.9", "1", "1.1", "1.2", "1.4"])
    axes.minorticks_off()
    axes.set_yticks(
        range(len(groups)), [f"{op}, {quantity}" for op, quantity in groups], fontsize=8
    )
    axes.set_ylim(len(groups) - 0.4, -0.6)
    axes.set_xlabel("time by the model / measured\n(the band is a factor of 1.2)")
    figure.legend(frameon=False, fontsize=9, ncols=2, loc="outside upper center")
    _clean(axes)
    figure.savefig(path, dpi=_DPI)
    return path
