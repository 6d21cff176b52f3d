"""Random cases of the benches: the same everywhere; and the summary of what they measured."""

from __future__ import annotations

import math
from typing import Any

import pytest

import tileweave as tw

pytest.importorskip("rich")

from tileweave.bench.samples import Benched, samples_of
from tileweave.bench.summary import lines_of, summary_of

# Others draw with seeds of their own: these cases may not depend on Python, machine or run.
FIRST = {
    "all_gather_matmul": "rnd-1514-10432-3072",
    "matmul_reduce_scatter": "rnd-556-21632-14848",
    "matmul_all_reduce": "rnd-36-26112-17600",
    "matmul_all_to_all": "rnd-10-27392-15296",
    "all_to_all_matmul": "rnd-82-3136-7360",
    "dispatch_grouped_matmul": "rnd-t642-h2432-w3776-e8-k3-z1.39",
    "grouped_matmul_combine": "rnd-t505-h4416-w1536-e304-k3-z0",
    "embedding_bag_all_to_all": "rnd-fp32-b3578-t28-r96189-d192-l4",
}


@pytest.mark.parametrize("op", tw.OPERATORS)
def test_cases_depend_on_operator_and_seed_alone(op: str) -> None:
    samples = samples_of(op)
    many = samples.random_cases(100, 1, False)
    assert many[0].name == FIRST[op]
    assert many[:40] == samples.random_cases(40, 1, False), "the first of a longer run"
    assert many != samples.random_cases(100, 2, False)
    assert len({case.name for case in many}) > 90


@pytest.mark.parametrize("op", [op for op in tw.OPERATORS if samples_of(op).shared])
def test_matmuls_have_sizes_of_the_stated_ranges(op: str) -> None:
    cases = samples_of(op).random_cases(1000, 7, False)
    most = 2**14 if op == "matmul_all_reduce" else 2**13.5
    assert most / 2 < max(case.rows for case in cases) <= most
    assert min(case.rows for case in cases) == (1 if op == "matmul_all_reduce" else 2)
    for case in cases:
        assert case.cols % 64 == case.depth % 64 == 0 and min(case.cols, case.depth) >= 256
        assert case.rows * case.cols * case.depth <= 2**42
        assert case.graph == (case.rows <= 1024)


def test_experts_and_tables_fit_into_memory() -> None:
    for op in ("dispatch_grouped_matmul", "grouped_matmul_combine"):
        for case in samples_of(op).random_cases(500, 3, False):
            assert case.topk <= case.experts and case.tokens >= 1
            assert 2 * case.experts * case.hidden * case.width <= 2**32
            assert case.tokens * case.topk * max(case.hidden, 2 * case.width) <= 2**30
    for case in samples_of("embedding_bag_all_to_all").random_cases(500, 3, False):
        width = 4 if case.dtype == "float32" else 2
        assert case.tables * case.rows * case.dim * width <= 2**34
        assert case.batch >= 64 and case.batch * case.tables * case.pooling <= 2**26


def entry(name: str, right: bool = True, **times: float) -> dict[str, Any]:
    return {
        "name": name,
        "right": right,
        "plan": f"plan of {name}",
        "graph": False,
        "times": {key: {"median_us": us} for key, us in times.items()},
    }


def test_summary_counts_losses_to_the_unfused_path_and_to_any_baseline() -> None:
    benched = Benched(lambda: {}, (), lambda *_: [], lambda *_: None, baselines=("plain", "other"))
    report = {
        "cases": [
            entry("ahead", tileweave=100.0, plain=121.0, other=150.0),
            entry("within", tileweave=100.0, plain=97.5, gemm=50.0),
            entry("behind", tileweave=100.0, plain=110.0, other=80.0),
            entry("lost", tileweave=100.0, plain=96.0),
            entry("wrong", right=False),
            entry("no time", tileweave=math.nan, plain=1.0),
        ],
        "skipped": ["late"],
    }
    found = summary_of(report, benched)
    assert (found["cases"], found["timed"]) == (7, 4)
    assert (found["wrong"], found["skipped"]) == (["wrong"], ["late"])
    assert (found["slower"], found["slower_than_unfused"]) == (2, 1)
    assert [row["name"] for row in found["worst"]] == ["behind", "lost", "within", "ahead"]
    assert found["over_best"] == pytest.approx((1.21 * 0.975 * 0.8 * 0.96) ** 0.25)
    assert found["over_unfused"] == pytest.approx((1.21 * 0.975 * 1.1 * 0.96) ** 0.25)
    text = "\n".join(lines_of("op", found))
    assert "4 of 7 cases timed, 1 wrong, 1 skipped" in text
    assert "worst 0.800, behind, plan of behind" in text and "skipped: late" in text


def test_summary_without_times_says_so() -> None:
    benched = Benched(lambda: {}, (), lambda *_: [], lambda *_: None, baselines=("plain",))
    found = summary_of({"cases": [], "skipped": ["a", "b"]}, benched)
    assert "no case was timed" in "\n".join(lines_of("op", found))
