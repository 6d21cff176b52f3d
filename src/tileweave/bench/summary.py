"""What many random cases say together: how far ahead, where slower, and the worst cases.

Rivals are the baselines of the bench (``Benched.baselines``): what computes the same without our
kernels; the first is the unfused path. A case is *slower* if a baseline takes less than 0.97 of our
time: differences below 3 % are within what one run can tell.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rich.table import Table

from tileweave.bench.report import median, new_table, number
from tileweave.bench.rivals import OURS
from tileweave.profile.metrics import geometric_mean, speed_up

if TYPE_CHECKING:
    from tileweave.bench.samples import Benched

SLOWER = 0.97
_SHOWN = 7


def summary_of(report: dict[str, Any], benched: Benched) -> dict[str, Any]:
    """The summary of a report, as plain data for its JSON.

    ``cases``, ``timed``, ``wrong``, ``skipped``: numbers of cases, and the names of the last two.
    ``over_best``, ``over_unfused``: geometric means of the time of the best baseline, or of the
    unfused path, over ours. ``slower``, ``slower_than_unfused``: cases by more than 3 %. ``worst``:
    all timed cases, the worst first, each with its ratios, plan and times.
    """
    unfused = benched.baselines[0]
    rows = []
    for case in report["cases"]:
        ours = median(case, OURS)
        times = {name: median(case, name) for name in case["times"]}
        known = [
            times[name] for name in benched.baselines if math.isfinite(times.get(name, math.nan))
        ]
        if not case["right"] or not math.isfinite(ours) or not known:
            continue
        rows.append(
            {
                "name": case["name"],
                "over_best": speed_up(min(known), ours),
                "over_unfused": speed_up(times.get(unfused, math.nan), ours),
                "plan": case["plan"],
                "path": case.get("path", case["plan"]),
                "graph": case["graph"],
                "times": times,
            }
        )
    rows.sort(key=lambda row: row["over_best"])
    return {
        "cases": len(report["cases"]) + len(report["skipped"]),
        "timed": len(rows),
        "wrong": [case["name"] for case in report["cases"] if not case["right"]],
        "skipped": list(report["skipped"]),
        "baselines": list(benched.baselines),
        "over_best": geometric_mean(row["over_best"] for row in rows),
        "over_unfused": geometric_mean(row["over_unfused"] for row in rows),
        "slower": sum(row["over_best"] < SLOWER for row in rows),
        "slower_than_unfused": sum(row["over_unfused"] < SLOWER for row in rows),
        "worst": rows,
    }


def lines_of(op: str, summary: dict[str, Any]) -> list[str]:
    """The summary in a few lines of text."""
    s, unfused = summary, summary["baselines"][0]
    worst = "no case was timed"
    if s["worst"]:
        first = s["worst"][0]
        worst = f"worst {number(first['over_best'], 3)}, {first['name']}, {first['plan']}"
    lines = [
        f"{op}: {s['timed']} of {s['cases']} cases timed, {len(s['wrong'])} wrong, "
        f"{len(s['skipped'])} skipped",
        f"  geometric mean: {number(s['over_best'], 3)} over the best rival, "
        f"{number(s['over_unfused'], 3)} over {unfused}",
        f"  slower by more than 3 %: {s['slower']} than the best rival, "
        f"{s['slower_than_unfused']} than {unfused}; {worst}",
    ]
    for what in ("wrong", "skipped"):
        if s[what]:
            lines.append(f"  {what}: {', '.join(s[what])}")
    return lines


def worst_table(op: str, summary: dict[str, Any]) -> Table:
    """The cases that are furthest behind, with their plans and times."""
    rows = summary["worst"][:_SHOWN]
    names = list(dict.fromkeys(name for row in rows for name in row["times"]))
    title = f"{op}: the {len(rows)} worst of {summary['timed']}; us; /best: of the best rival"
    table = new_table(
        title, ("case", "/best", "/unfused", "graph", *names, "plan"), {}, ("case", "graph", "plan")
    )
    for row in rows:
        table.add_row(
            row["name"],
            number(row["over_best"], 3),
            number(row["over_unfused"], 3),
            "yes" if row["graph"] else "no",
            *[number(row["times"].get(name), 1) for name in names],
            row["plan"],
        )
    return table
