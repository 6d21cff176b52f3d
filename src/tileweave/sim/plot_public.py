"""The picture of the public audit: every published figure, by group."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tileweave.sim.public import BARS, Judged, by_group

_HELD, _ASSUMED = "#0072B2", "#E69F00"
_LOW, _HIGH = 0.55, 1.8
_STEP = 0.055  # between two figures of a group, of the height of a row


def plot_public(judged: Sequence[Judged], path: Path) -> Path:
    """Predicted over published time of each figure, with the bars of each group. A phone shows it
    legibly; the table has the names."""
    groups = {name: members for name, members in by_group(judged).items() if members}
    figure = Figure(figsize=(5.6, 1.2 + 0.9 * len(groups)), layout="constrained")
    axes = figure.subplots()
    for row, (name, members) in enumerate(groups.items()):
        for bar, colour in zip(reversed(BARS.get(name, ())), ("#eeeeee", "#d5d5d5"), strict=False):
            axes.fill_betweenx(
                [row - 0.4, row + 0.4], 1.0 / (1.0 + bar), 1.0 + bar, color=colour, zorder=0
            )
        _dots(axes, row, members)
    axes.axvline(1.0, color="black", linewidth=0.6)
    axes.set_yticks(
        range(len(groups)),
        [f"{name}\n{len(members)} figures" for name, members in groups.items()],
        fontsize=9,
    )
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.set_xscale("log")
    axes.set_xlim(_LOW * 0.97, _HIGH * 1.03)
    ticks = (0.6, 0.8, 1.0, 1.25, 1.5)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("time by the model / published")
    axes.spines[["top", "right"]].set_visible(False)
    marks = [
        Line2D([], [], marker="o", linestyle="", color=_HELD, label="held out"),
        Line2D(
            [], [], marker="o", linestyle="", color=_HELD, markerfacecolor="w", label="fit side"
        ),
        Line2D([], [], marker="o", linestyle="", color=_ASSUMED, label="set-up assumed in part"),
        Line2D([], [], color="#cccccc", linewidth=6, label="bars: mean and worst"),
    ]
    figure.legend(handles=marks, loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
    return path


def _dots(axes: Axes, row: int, members: Sequence[Judged]) -> None:
    """The figures of a group, spread over the height of its row; beyond the axis with a number."""
    step = min(_STEP, 0.7 / max(len(members) - 1, 1))
    for number, one in enumerate(members):
        ratio = min(max(1.0 + one.error, _LOW), _HIGH)
        colour = _HELD if one.figure.complete else _ASSUMED
        fill = colour if one.figure.held_out else "white"
        height = row + step * (number - (len(members) - 1) / 2)
        axes.plot(ratio, height, "o", color=colour, markerfacecolor=fill, markersize=4)
        if ratio in (_LOW, _HIGH):
            axes.text(ratio, height, f"{1.0 + one.error:.1f} ", fontsize=8, ha="right", va="center")
