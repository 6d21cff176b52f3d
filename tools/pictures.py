"""Pictures of README and documents, from results in docs/results and from a recorded call.

    python tools/pictures.py           # all of them
    python tools/pictures.py bound     # time over the bound, of every measured case
    python tools/pictures.py timeline  # one interpreted call of all_gather_matmul
    python tools/pictures.py bytes     # what a token of an MoE layer sends, for random routers

Needs the extras cli, plot and demo.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path

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
EXPERT_RANKS = 8  # of the picture of bytes
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
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for number, (router, hidden) in enumerate(routers.values()):
        rows = sent_per_token(router, hidden)
        for side, count, key in ((0.2, rows[0], UNFUSED), (-0.2, rows[1], OURS)):
            kib = count * hidden * 2 / 1024
            axes.barh(-number + side, kib, height=0.36, color=COLOURS[key])
            axes.text(kib, -number + side, f" {kib:.0f}", va="center", fontsize=12)
    axes.set_yticks([-n for n in range(len(routers))], list(routers), fontsize=12)
    axes.tick_params(axis="x", labelsize=12)
    axes.margins(x=0.08)
    axes.set_xlabel(
        f"KiB that a token sends to other GPUs (bf16, experts on {EXPERT_RANKS} GPUs)", fontsize=12
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    names = {UNFUSED: "a row for each choice (all-to-all)", OURS: "a row for each GPU (tileweave)"}
    handles = [Patch(color=COLOURS[key], label=name) for key, name in names.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=2, frameon=False, fontsize=12)
    figure.savefig(path, dpi=110)


DRAWN = {
    "bound": (draw_bound, "over-the-bound.png"),
    "timeline": (draw_timeline, "timeline.png"),
    "bytes": (draw_bytes, "bytes.png"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("which", nargs="*", help=f"{', '.join(DRAWN)}; default: all")
    PICTURES.mkdir(exist_ok=True)
    for name in parser.parse_args().which or DRAWN:
        draw, file = DRAWN[name]
        draw(PICTURES / file)
        print(f"wrote docs/pictures/{file}")
    return 0


if __name__ == "__main__":
    end_with(main)
