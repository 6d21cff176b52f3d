"""Metrics, trace decoding and bench cases: arithmetic and plain data."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise, permutations
from typing import Any

import pytest

import tileweave
from tileweave.planning.schedules.gather import TileSchedule
from tileweave.profile.metrics import e_overlap, geometric_mean, limit_ratio, speed_up
from tileweave.profile.timing import _first_line_of_cause, turn
from tileweave.profile.trace import (
    OWN_CLOCKS,
    SEVERAL,
    SHARED_CLOCK,
    Event,
    Trace,
    chrome,
    decode,
    merge,
    summary,
)


def schedule(rank: int = 0, rows: int = 32, programs: int = 2) -> TileSchedule:
    return TileSchedule(rank, 2, rows, 64, 128, 32, 64, 64, 8, programs, split_tail=False)


def test_overlap_metrics() -> None:
    assert e_overlap(100, 100, 150) == 1
    assert e_overlap(150, 100, 150) == 0
    assert e_overlap(175, 100, 150) == -0.5
    assert math.isnan(e_overlap(100, 100, 100))
    assert limit_ratio(90, 100) == 0.9
    assert speed_up(200, 100) == 2
    assert geometric_mean([1, 4, math.nan]) == pytest.approx(2)
    assert math.isnan(geometric_mean([]))


def test_a_failed_capture_is_told_by_its_first_error() -> None:
    """The end of a capture raises an error of its own, while the one that ended it is handled."""

    def capture() -> None:
        try:
            raise RuntimeError("out of memory\nby 2 GiB")
        finally:
            raise ValueError("the capture failed before")

    with pytest.raises(ValueError, match="failed before") as raised:
        capture()
    assert _first_line_of_cause(raised.value) == "out of memory"
    assert _first_line_of_cause(NotImplementedError()) == "NotImplementedError"


def test_decode_separates_pushes_waits_and_computation() -> None:
    plan = schedule(programs=1)
    stamps = [[10, 20, 0, 0], [20, 35, 0, 1]]  # two slices
    stamps += [[40, 40, 60, 1], [60, 90, 120, 2]] + [[0, 0, 0, 0]] * (plan.max_units() - 2)
    events = decode(stamps, plan, 2, 1, 1000)
    assert [(e.kind, e.peer, e.begin_ns, e.end_ns) for e in events] == [
        ("push", 1, 10, 20),
        ("push", 1, 20, 35),
        ("compute", 0, 40, 60),
        ("wait", 1, 60, 90),
        ("compute", 1, 90, 120),
    ]
    assert sum(e.nbytes for e in events) == 1000


def test_wait_that_ends_during_computation_is_no_wait() -> None:
    plan = schedule(programs=1)
    stamps = [[0, 0, 0, 0], [10, 10, 100, 1], [20, 80, 150, 2]] + [[0, 0, 0, 0]] * (
        plan.max_units() - 2
    )
    events = decode(stamps, plan, 1, 1)
    assert [e.kind for e in events] == ["compute", "compute"]
    assert events[1].begin_ns == 100


def test_units_over_several_shards() -> None:
    plan = TileSchedule(0, 4, 8, 64, 64, 32, 64, 64, 8, 1, split_tail=False)
    events = decode([[0, 0, 0, 0], [1, 5, 9, 1]] + [[0, 0, 0, 0]] * plan.max_units(), plan, 1, 1)
    assert [(e.kind, e.peer) for e in events] == [("wait", SEVERAL), ("compute", SEVERAL)]


@pytest.mark.parametrize("shared", [True, False])
def test_merge_puts_ranks_on_one_axis(shared: bool) -> None:
    events = [[Event(0, 0, "compute", 0, 100, 150)], [Event(1, 0, "wait", 0, 130, 190)]]
    trace = merge("t", events, shared)
    assert [e.begin_ns for e in trace.events] == ([0, 30] if shared else [0, 0])
    assert trace.clock == (SHARED_CLOCK if shared else OWN_CLOCKS)
    assert trace.end_ns == (90 if shared else 60)
    figures = summary(trace)
    assert figures[1].waited_ns == {0: 60}


def test_chrome_events() -> None:
    rows = chrome(merge("t", [[Event(0, -1, "push", 1, 0, 2000, 0, 64)]], True))["traceEvents"]
    names = {row["args"]["name"] for row in rows if row["ph"] == "M"}
    assert names == {"rank 0", "copy engine"}
    (push,) = [row for row in rows if row["ph"] == "X"]
    assert (push["dur"], push["args"]["bytes"]) == (2.0, 64)


def test_every_bench_case_is_found_by_its_name() -> None:
    cases = pytest.importorskip("tileweave.bench.cases")
    for op in tileweave.OPERATORS:
        names = [case.name for case in cases.samples_of(op).cases]
        assert len(set(names)) == len(names)
        assert len(cases.select(op)) == len(names)
        assert 0 < len(cases.select(op, quick=True)) < len(names)
        assert [case.name for case in cases.select(op, f"^{names[0]}$")] == [names[0]]


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_tiny_fp8_cases_suit_tensor_cores(world_size: int) -> None:
    """Operands of 8 bits need columns and depth that are multiples of 16, on each rank."""
    cases = pytest.importorskip("tileweave.bench.cases")
    tiny = [case for op in tileweave.OPERATORS for case in cases.samples_of(op).smoke]
    shards = [case.shard(world_size) for case in tiny if getattr(case, "scales", "")]
    assert len(shards) == 3
    assert all(cols % 16 == depth % 16 == 0 for _, cols, depth in shards)


@pytest.mark.parametrize("count", range(1, 9))
def test_interleaved_order_is_balanced(count: int) -> None:
    rows = [turn(count, number) for number in range(2 * count)]
    assert all(sorted(row) == list(range(count)) for row in rows)
    follows = Counter(pair for row in rows for pair in pairwise(row))
    assert follows == dict.fromkeys(permutations(range(count), 2), 2)


# --- Plots: everything they mention is there ---


def picture_of(
    monkeypatch: pytest.MonkeyPatch, *traces: Trace
) -> tuple[str, list[str], list[str], list[float]]:
    """Heading, legend, titles of timelines, and the largest value of each grey scale."""
    plot = pytest.importorskip("tileweave.profile.plot")
    drawn: list[Any] = []
    monkeypatch.setattr(
        plot.Figure, "savefig", lambda figure, *args, **kwargs: drawn.append(figure)
    )
    plot.plot_traces(traces, "nowhere.png")
    (figure,) = drawn
    (legend,) = figure.legends
    scales = [axes.images[0].get_clim()[1] for axes in figure.axes if axes.images]
    cells = [text.get_text() for axes in figure.axes if axes.images for text in axes.texts]
    titles = [axes.get_title(loc="left") for axes in figure.axes if not axes.images]
    return (
        figure.get_suptitle(),
        [text.get_text() for text in legend.get_texts()] + cells,
        titles,
        scales,
    )


WAITS = merge(
    "waits", [[Event(0, 0, "wait", 1, 0, 25_000)], [Event(1, 0, "wait", 0, 0, 494_000_000)]], True
)
ALL = [
    Event(0, -1, "push", 1, 0, 9),
    Event(0, 0, "compute", 0, 0, 9),
    Event(0, 0, "wait", 1, 9, 25_000),
]


def test_plot_of_waits_is_labelled(monkeypatch: pytest.MonkeyPatch) -> None:
    heading, words, titles, _ = picture_of(monkeypatch, WAITS)
    only = "waits only; the rest is not recorded"
    assert heading == f"Waits of each rank ({only})" and titles == [f"waits   ({only})"]
    assert not any("push" in word or "compute" in word for word in words)
    assert "wait for that rank" in words and "blank: not recorded" in words


def test_plot_labels_name_everything_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    heading, words, titles, scales = picture_of(
        monkeypatch, merge("all", [ALL, ALL[1:2]], True), WAITS
    )
    assert (
        heading == "Pushes, computations, waits of each rank"
        and titles[0] == "all"
        and "waits only" in titles[1]
    )
    assert any(
        "copies" in word and "colour of the sender" in word for word in words
    ) and "push by the kernel" not in str(words)
    assert "compute on rows of that rank" in words and "blank: not recorded" in words
    assert {"25.0 us", "494 ms"} <= set(words), "a matrix has values of both units"
    assert len(set(scales)) == 1, "one scale of grey"
