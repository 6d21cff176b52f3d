"""Plots of benchmarks say what was timed and on which device, in readable labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from tileweave.bench import embedding, experts
from tileweave.profile import plot

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def drawn(
    monkeypatch: pytest.MonkeyPatch, draw: Any, report: dict[str, Any]
) -> tuple[list[str], set[str]]:
    """All texts of a plot, as shown, and the colours of its bars."""
    seen: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: seen.append(figure))
    draw(report, Path("x.png"))
    seen[0].draw_without_rendering()
    bars = [bar for axes in seen[0].axes for bar in axes.patches if isinstance(bar, Rectangle)]
    texts = [
        found for found in seen[0].findobj(Text) if isinstance(found, Text) and found.get_visible()
    ]
    return [found.get_text() for found in texts], {to_hex(bar.get_facecolor()) for bar in bars}


def timed(**medians: float) -> dict[str, Any]:
    return {
        name.replace("_", " "): {"median_us": us, "graph": False} for name, us in medians.items()
    }


def on_the_cpu(op: str, *cases: dict[str, Any]) -> dict[str, Any]:
    report = {
        "op": op,
        "world_size": 2,
        "device_type": "cpu",
        "environment": {"device": "x86_64", "devices": 0},
    }
    return {
        **report,
        "cases": [
            {"name": "smoke", "right": True, "graph": True, "rows": 1, **case} for case in cases
        ],
    }


SMOKE = {
    "matmul_all_reduce": (plot.plot_bench, {"times": timed(tileweave=10921.3, gemm=1.9)}),
    "embedding_bag_all_to_all": (
        embedding.plot,
        {
            "floor_read_us": 1e-3,
            "floor_sent_us": 2e-3,
            "times": timed(tileweave=16039.8, torch=34.0),
        },
    ),
    "grouped_matmul_combine": (
        experts.plot,
        {"times": timed(tileweave=900.0, unfused=63.0, gathered=390.0, matmul=0.2)},
    ),
}


@pytest.mark.parametrize("op", SMOKE)
def test_interpreted_times_are_labelled(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, case = SMOKE[op]
    texts, _ = drawn(monkeypatch, draw, on_the_cpu(op, case))
    title = next(text for text in texts if text.startswith(op))
    assert "world 2, x86_64" in title and "interpreted: times mean nothing" in title
    assert not any("CUDA graph" in text for text in texts), "nothing was captured"
    assert not any("1e" in text and "+" not in text for text in texts), "no offset next to the axis"
    assert all(len(text) <= 8 for text in texts if text.replace(".", "").isdecimal()), (
        "numbers of a few digits"
    )


MEASURED = {
    "all_gather_matmul-4xH200-2026-11-22-b.json": plot.plot_bench,
    "embedding_bag_all_to_all-4xH200-2026-11-22.json": embedding.plot,
    "grouped_matmul_combine-4xH200-2026-11-22-b.json": experts.plot,
}


@pytest.mark.parametrize("name", MEASURED)
def test_plots_of_runs_name_the_device_and_share_colours(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = json.loads((RESULTS / name).read_text("utf-8"))
    texts, colours = drawn(monkeypatch, MEASURED[name], report)
    assert any(text.startswith(report["op"]) and "world 4, NVIDIA H200" in text for text in texts)
    assert not any("interpreted" in text for text in texts)
    assert (
        {"#0072b2", "#999999"}
        <= colours
        <= {colour.lower() for colour in plot.PEER_COLOURS.values()}
    )
    ours = report["cases"][0]["times"]["tileweave"]["median_us"]
    if "unfused" in report["cases"][0]["times"]:
        assert f"{ours / report['cases'][0]['times']['unfused']['median_us']:.2g}" in texts, (
            "values are printed on bars"
        )


def test_captured_calls_are_labelled(monkeypatch: pytest.MonkeyPatch) -> None:
    report = json.loads((RESULTS / "all_gather_matmul-4xH200-2026-11-22-b.json").read_text("utf-8"))
    texts, _ = drawn(monkeypatch, plot.plot_bench, report)
    assert {"eager calls", "calls in a CUDA graph"} <= set(texts)
