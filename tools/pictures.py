"""Pictures of README and documents, from results in docs/results and from a recorded call.

    python tools/pictures.py           # all of them
    python tools/pictures.py bound     # time over the bound, of every measured case
    python tools/pictures.py llama     # a Llama end to end, from the table of performance.md
    python tools/pictures.py overlap   # a call on GPUs, as `tileweave trace` recorded it
    python tools/pictures.py timeline  # one interpreted call of all_gather_matmul
    python tools/pictures.py bytes     # what a token of an MoE layer sends, for random routers

They are as wide as a phone shows them with letters of 12 pixels.

Needs the extras cli, plot and demo.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from tileweave.bench.measured_page import runs_of
from tileweave.bench.rivals import CORUN, OURS, TORCHS, UNFUSED
from tileweave.bench.samples import samples_of
from tileweave.commands.demo import trace_of_case
from tileweave.launcher import end_with, launch
from tileweave.nn.routers import SigmoidTopK, SoftmaxTopK
from tileweave.planning.candidates import TUNABLE
from tileweave.profile.plot import draw_time_line, legend_of
from tileweave.profile.trace import Trace, from_chrome

ROOT = Path(__file__).parents[1]
RESULTS, PICTURES = ROOT / "docs" / "results", ROOT / "docs" / "pictures"
MACHINES = {"4xH200": "4 H200", "2xH100": "2 H100"}
COLOURS = {OURS: "#0072B2", UNFUSED: "#777777", "torch": "#E69F00"}
NAMES = {OURS: "tileweave", UNFUSED: "NCCL + cuBLAS", "torch": "torch's best fused operator"}
OFFSETS = (0.27, 0.0, -0.27)  # of the rivals in a row
EXPERT_RANKS = 8  # of the picture of bytes
LEAST, MOST = 0.5, 4.0  # of the axis; larger values are drawn at its end
WIDE, DPI = 5.4, 150  # inches
TITLE: dict[str, Any] = {
    "fontsize": 12,
    "fontweight": "bold",
    "va": "bottom",
    "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1.5},
}
TRACES = sorted(RESULTS.rglob("trace-matmul_reduce_scatter-*.json"))


def over_the_bound(op: str, machine: str) -> dict[str, list[float]]:
    """Times of all cases over the bound, by rival. Cases without a bound are left out."""
    found: dict[str, list[float]] = {name: [] for name in COLOURS}
    for _, _, cases in runs_of(op, RESULTS, machine):
        for case in cases:
            times = {key: timing["median_us"] for key, timing in case["times"].items()}
            fused = [times[key] for key in TORCHS if times.get(key)]
            shown = {**times, **({"torch": min(fused)} if fused else {})}
            for key in found:
                if shown.get(key) and times.get(CORUN):
                    found[key].append(shown[key] / times[CORUN])
    return found


def draw_bound(path: Path) -> None:
    """A row per operator and machine, a dot per case and rival."""
    rows = [(op, machine) for op in TUNABLE for machine in MACHINES]
    figure = Figure(figsize=(WIDE, 8.6), layout="constrained")
    axes = figure.subplots()
    places = []
    for number, (op, machine) in enumerate(rows):
        y = -number - 0.6 * (number // len(MACHINES))
        places.append(y)
        for offset, (key, values) in zip(OFFSETS, over_the_bound(op, machine).items(), strict=True):
            if not values:
                continue
            shown = [min(max(value, LEAST), MOST) for value in values]
            axes.plot(
                shown, [y + offset] * len(shown), "o", color=COLOURS[key], markersize=5, alpha=0.45
            )
            mean = statistics.geometric_mean(values)
            axes.plot(
                [mean, mean], [y + offset - 0.15, y + offset + 0.15], color="black", linewidth=2.4
            )
        if not number % len(MACHINES):
            axes.text(LEAST, y + 0.45, op, **TITLE)
    axes.set_xscale("log")
    axes.set_xlim(LEAST * 0.96, MOST * 1.06)
    axes.set_ylim(y - 0.7, 1.2)
    axes.set_xticks([1, 1.5, 2, 3, 4], ["1", "1.5", "2", "3", "4+"], fontsize=12)
    axes.minorticks_off()
    axes.set_yticks(places, [MACHINES[machine] for _, machine in rows], fontsize=12)
    axes.tick_params(axis="y", length=0)
    axes.axvline(1.0, color="black", linewidth=1, linestyle="--", zorder=0)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_xlabel(
        "time / bound; lower is better\n(matmul with copies of the same size)", fontsize=12
    )
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    handles = [
        Line2D([], [], color=COLOURS[key], marker="o", linestyle="", markersize=8, label=NAMES[key])
        for key in COLOURS
    ]
    mean = Line2D([], [], color="black", linewidth=2.6, label="geometric mean")
    figure.legend(
        handles=[*handles, mean],
        loc="outside upper center",
        ncols=2,
        frameon=False,
        fontsize=11,
        columnspacing=0.8,
        handletextpad=0.3,
    )
    figure.savefig(path, dpi=DPI)


def llama_rows() -> tuple[list[str], list[tuple[str, list[float]]]]:
    """Columns and rows of the table of a Llama in docs/performance.md: speed-ups."""
    text = (ROOT / "docs" / "performance.md").read_text("utf-8")
    table = re.split(r"^A Llama, eager and in a CUDA graph.*\n", text, flags=re.MULTILINE)[1]
    lines = table.lstrip().split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rows = [
        (name, [float(re.findall(r"[\d.]+", cell)[0]) for cell in values])
        for name, *values in cells[2:]
    ]
    return cells[0][1:], rows


def draw_llama(path: Path) -> None:
    """A bar per case, from 1 on: to the right tileweave is faster."""
    columns, rows = llama_rows()
    figure = Figure(figsize=(WIDE, 0.42 * len(columns) * len(rows) + 1.6), layout="constrained")
    axes = figure.subplots()
    places, names = [], []
    for number, (model, values) in enumerate(rows):
        first = -number * (len(columns) + 1.4)
        axes.text(0.62, first + 0.6, model, **TITLE)
        for index, (name, value) in enumerate(zip(columns, values, strict=True)):
            y = first - index
            colour = COLOURS[OURS] if value >= 1 else COLOURS[UNFUSED]
            axes.barh(y, value - 1, left=1, height=0.7, color=colour)
            axes.text(max(value, 1) + 0.01, y, f"{value:.2f}", va="center", fontsize=12)
            places.append(y)
            names.append(name if "tokens" in name else f"{name} tokens")
    axes.set_yticks(places, names, fontsize=12)
    axes.tick_params(axis="y", length=0)
    axes.axvline(1, color="black", linewidth=1, zorder=0)
    axes.set_xlim(0.6, 1.72)
    axes.set_ylim(min(places) - 0.7, 1.8)
    axes.set_xticks([0.75, 1, 1.25, 1.5], ["0.75", "1", "1.25", "1.5"], fontsize=12)
    axes.set_xlabel("speed-up over NCCL + cuBLAS, 2 H100\n(grey: slower)", fontsize=12)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=DPI)


def draw_overlap(path: Path) -> None:
    """The newest recorded call of matmul_reduce_scatter on GPUs."""
    trace = from_chrome(json.loads(TRACES[-1].read_text("utf-8")))
    ranks, machine = re.findall(r"-(\d+)x(\w+)-", TRACES[-1].name)[0]
    _draw_line(path, trace, f"{trace.title.partition(':')[0]} on {ranks} {machine}", 7.6)


def _draw_line(path: Path, trace: Trace, title: str, height: float) -> None:
    figure = Figure(figsize=(1.2 * WIDE, height), layout="constrained")
    axes = figure.subplots()
    draw_time_line(axes, trace)
    axes.set_title(title, fontsize=12, loc="left")
    axes.tick_params(labelsize=11)
    axes.set_xlabel(axes.get_xlabel().partition("   ")[0], fontsize=11)
    handles = legend_of([trace])
    ncols = 1 if trace.event_us else 2  # of GPUs: longer names
    where = "outside lower center"
    figure.legend(handles=handles, loc=where, ncols=ncols, frameon=False, fontsize=10)
    figure.savefig(path, dpi=DPI)


def draw_timeline(path: Path) -> None:
    """One call on four interpreted ranks, the last of which is late."""
    os.environ["TRITON_INTERPRET"] = "1"
    cases = samples_of("all_gather_matmul").demo(False, 4)
    case = next(each for each in cases if each.late_seconds)
    trace = launch(trace_of_case, case, world_size=4, device_type="cpu", seconds=300)
    _draw_line(path, trace, "4 interpreted ranks on the CPU; rank 3 starts late", 5.6)


def sent_per_token(router: torch.nn.Module, hidden: int) -> tuple[float, float]:
    """Rows that leave the GPU of a token: one for each choice, and one for each GPU."""
    ids = router(torch.randn(8192, hidden))[1] // (router.weight.shape[0] // EXPERT_RANKS)
    other = torch.nn.functional.one_hot(ids, EXPERT_RANKS)[..., 1:]  # tokens are on rank 0
    return float(other.sum()) / len(ids), float(other.amax(1).sum()) / len(ids)


def draw_bytes(path: Path) -> None:
    """Two bars for each model: a row per choice, and a row per GPU."""
    torch.manual_seed(0)
    routers = {
        "Mixtral 8x7B\n2 of 8 experts": (SoftmaxTopK(4096, 8, 2), 4096),
        "gpt-oss-120b\n4 of 128": (SoftmaxTopK(2880, 128, 4), 2880),
        "Qwen3-30B-A3B\n8 of 128": (SoftmaxTopK(2048, 128, 8), 2048),
        "DeepSeek-V3\n8 of 256, in 4 groups": (
            SigmoidTopK(7168, 256, 8, groups=8, top_groups=4),
            7168,
        ),
    }
    figure = Figure(figsize=(WIDE, 5), layout="constrained")
    axes = figure.subplots()
    for number, (router, hidden) in enumerate(routers.values()):
        rows = sent_per_token(router, hidden)
        for side, count, key in ((0.2, rows[0], UNFUSED), (-0.2, rows[1], OURS)):
            kib = count * hidden * 2 / 1024
            axes.barh(-number + side, kib, height=0.36, color=COLOURS[key])
            axes.text(kib, -number + side, f" {kib:.0f}", va="center", fontsize=12)
    axes.set_yticks([-n for n in range(len(routers))], list(routers), fontsize=12)
    axes.tick_params(axis="x", labelsize=12)
    axes.margins(x=0.1)
    axes.set_xlabel(
        f"KiB that a token sends to other GPUs\n(bf16, experts on {EXPERT_RANKS} GPUs)", fontsize=12
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    names = {UNFUSED: "a row for each choice (all-to-all)", OURS: "a row for each GPU (tileweave)"}
    handles = [Patch(color=COLOURS[key], label=name) for key, name in names.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=1, frameon=False, fontsize=12)
    figure.savefig(path, dpi=DPI)


DRAWN = {
    "bound": (draw_bound, "over-the-bound.png"),
    "llama": (draw_llama, "llama.png"),
    "overlap": (draw_overlap, "overlap.png"),
    "timeline": (draw_timeline, "timeline.png"),
    "bytes": (draw_bytes, "bytes.png"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("which", nargs="*", help=f"{', '.join(DRAWN)}; default: all")
    PICTURES.mkdir(exist_ok=True)
    for name in parser.parse_args().which or DRAWN:
        if name == "overlap" and not TRACES:
            print("no trace of GPUs in docs/results")
            continue
        draw, file = DRAWN[name]
        draw(PICTURES / file)
        print(f"wrote docs/pictures/{file}")
    return 0


if __name__ == "__main__":
    end_with(main)
