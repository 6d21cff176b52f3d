"""Pictures of README and documents, from results in docs/results and from a recorded call.

    python tools/pictures.py           # all of them
    python tools/pictures.py bound     # time over the bound, of every measured case
    python tools/pictures.py timeline  # one interpreted call of all_gather_matmul

Needs the extras cli, plot and demo.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tileweave.bench.measured_page import runs_of
from tileweave.bench.rivals import CORUN, OURS, TORCHS, UNFUSED
from tileweave.bench.samples import samples_of
from tileweave.commands.demo import trace_of_case
from tileweave.launcher import end_with, launch
from tileweave.profile.plot import draw_time_line, legend_of

ROOT = Path(__file__).parents[1]
RESULTS, PICTURES = ROOT / "docs" / "results", ROOT / "docs" / "pictures"
OPERATORS = (
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "all_to_all_matmul",
)
MACHINES = {"4xH200": "4 H200", "2xH100": "2 H100"}
COLOURS = {OURS: "#0072B2", UNFUSED: "#777777", "torch": "#E69F00"}
NAMES = {OURS: "tileweave", UNFUSED: "NCCL + cuBLAS", "torch": "torch's best fused operator"}
OFFSETS = (0.27, 0.0, -0.27)  # of the rivals in a row
LEAST, MOST = 0.5, 4.0  # of the axis; larger values are drawn at its end


def over_the_bound(op: str, machine: str) -> dict[str, list[float]]:
    """Times of all cases over the bound, by rival. Cases without a bound are left out."""
    found: dict[str, list[float]] = {name: [] for name in COLOURS}
    for _, name, _, cases in runs_of(op, RESULTS, machine):
        for case in cases if name else []:
            times = {key: timing["median_us"] for key, timing in case["times"].items()}
            fused = [times[key] for key in TORCHS if times.get(key)]
            shown = {**times, **({"torch": min(fused)} if fused else {})}
            for key in found:
                if shown.get(key) and times.get(CORUN):
                    found[key].append(shown[key] / times[CORUN])
    return found


def draw_bound(path: Path) -> None:
    """A row per operator and machine, a dot per case and rival."""
    rows = [(op, machine) for op in OPERATORS for machine in MACHINES]
    figure = Figure(figsize=(8, 8.4), layout="constrained")
    axes = figure.subplots()
    for number, (op, machine) in enumerate(rows):
        y = -number - 0.45 * (number // len(MACHINES))
        for offset, (key, values) in zip(OFFSETS, over_the_bound(op, machine).items(), strict=True):
            if not values:
                continue
            shown = [min(value, MOST) for value in values]
            axes.plot(
                shown, [y + offset] * len(shown), "o", color=COLOURS[key], markersize=6, alpha=0.45
            )
            mean = statistics.geometric_mean(values)
            axes.plot(
                [mean, mean], [y + offset - 0.15, y + offset + 0.15], color="black", linewidth=2.6
            )
        axes.text(LEAST, y, MACHINES[machine], ha="left", va="center", fontsize=12)
        if not number % len(MACHINES):
            axes.text(LEAST, y + 0.42, op, ha="left", va="bottom", fontsize=12, fontweight="bold")
    axes.set_xscale("log")
    axes.set_xlim(LEAST * 0.98, MOST * 1.06)
    axes.set_ylim(y - 0.7, 1.2)
    axes.set_xticks([1, 1.5, 2, 3, 4], ["1", "1.5", "2", "3", "4 and more"], fontsize=12)
    axes.minorticks_off()
    axes.set_yticks([])
    axes.axvline(1.0, color="black", linewidth=1, linestyle="--")
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_xlabel(
        "time / bound (matmul with copies of the same size; lower is better)", fontsize=12
    )
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    handles = [
        Line2D([], [], color=COLOURS[key], marker="o", linestyle="", markersize=8, label=NAMES[key])
        for key in COLOURS
    ]
    mean = Line2D([], [], color="black", linewidth=2.6, label="geometric mean")
    figure.legend(
        handles=[*handles, mean], loc="outside upper center", ncols=2, frameon=False, fontsize=12
    )
    figure.savefig(path, dpi=110)


def draw_timeline(path: Path) -> None:
    """One call on four interpreted ranks, the last of which is late."""
    os.environ["TRITON_INTERPRET"] = "1"
    cases = samples_of("all_gather_matmul").demo(False, 4)
    case = next(each for each in cases if each.late_seconds)
    trace = launch(trace_of_case, case, world_size=4, device_type="cpu", seconds=300)
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    axes = figure.subplots()
    draw_time_line(axes, trace)
    axes.set_title(
        "all_gather_matmul on 4 ranks, interpreted on the CPU; rank 3 starts late",
        fontsize=13,
        loc="left",
    )
    axes.tick_params(labelsize=11)
    axes.set_xlabel(axes.get_xlabel(), fontsize=11)
    handles = legend_of([trace])
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=11)
    figure.savefig(path, dpi=110)


DRAWN = {
    "bound": (draw_bound, "over-the-bound.png"),
    "timeline": (draw_timeline, "timeline.png"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("which", nargs="*", help="bound, timeline; default: all")
    PICTURES.mkdir(exist_ok=True)
    for name in parser.parse_args().which or DRAWN:
        draw, file = DRAWN[name]
        draw(PICTURES / file)
        print(f"wrote docs/pictures/{file}")
    return 0


if __name__ == "__main__":
    end_with(main)
