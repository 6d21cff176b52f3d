"""The picture of the public audit: every published figure, by group."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tileweave.sim.public import BARS, GROUPS, Judged, by_group

_COLUMNS = (("collectives", "matmuls"), ("training", *GROUPS[len(BARS) :], "experts", "serving"))
_HELD, _ASSUMED = "#0072B2", "#E69F00"
_LOW, _HIGH = 0.55, 1.8


def plot_public(judged: Sequence[Judged], path: Path) -> Path:
    """Predicted over published time of each figure, with the bars of each group."""
    groups = by_group(judged)
    heights = [[len(groups.get(name, ())) + 3 for name in names] for names in _COLUMNS]
    figure = Figure(figsize=(15.0, 0.125 * max(map(sum, heights)) + 1.2), layout="constrained")
    columns = figure.subfigures(1, len(_COLUMNS), squeeze=False)[0]
    for column, names, height in zip(columns, _COLUMNS, heights, strict=True):
        panels = column.subplots(len(names), 1, height_ratios=height)
        for axes, name in zip(panels, names, strict=True):
            _panel(axes, name, groups.get(name, []))
    marks = [
        Line2D([], [], marker="o", linestyle="", color=_HELD, label="held out"),
        Line2D(
            [], [], marker="o", linestyle="", color=_HELD, markerfacecolor="w", label="fit side"
        ),
        Line2D([], [], marker="o", linestyle="", color=_ASSUMED, label="set-up assumed in part"),
        Line2D([], [], color="#cccccc", linewidth=6, label="bars: mean and worst, held out"),
    ]
    figure.legend(handles=marks, loc="outside upper right", ncols=4, frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    return path


def _panel(axes: Axes, name: str, members: Sequence[Judged]) -> None:
    for bar, colour in zip(reversed(BARS.get(name, ())), ("#eeeeee", "#d5d5d5"), strict=False):
        axes.axvspan(1.0 / (1.0 + bar), 1.0 + bar, color=colour, zorder=0)
    axes.axvline(1.0, color="black", linewidth=0.6)
    for row, one in enumerate(members):
        ratio = min(max(1.0 + one.error, _LOW), _HIGH)
        colour = _HELD if one.figure.complete else _ASSUMED
        fill = colour if one.figure.held_out else "white"
        axes.plot([1.0, ratio], [row, row], color="#bbbbbb", linewidth=0.5, zorder=1)
        axes.plot(ratio, row, "o", color=colour, markerfacecolor=fill, markersize=3.5)
        if ratio in (_LOW, _HIGH):
            axes.text(ratio, row, f"  {1.0 + one.error:.1f}", fontsize=6, va="center")
    axes.set_yticks(range(len(members)), [one.figure.name for one in members], fontsize=5.5)
    axes.set_ylim(len(members) - 0.2, -0.8)
    axes.set_xscale("log")
    axes.set_xlim(_LOW * 0.97, _HIGH * 1.03)
    ticks = (0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=6)
    axes.minorticks_off()
    axes.tick_params(length=2)
    axes.set_title(f"{name}: time by the model / published", loc="left", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
