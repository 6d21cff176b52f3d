"""Traces of GPUs, from what the driver and the kernels write: plain data."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("triton")

from tileweave.profile.device import activities, programs
from tileweave.profile.trace import (
    COPY_ENGINE,
    GPU_CLOCK,
    KERNELS,
    SEVERAL,
    Event,
    chrome,
    from_chrome,
    in_words,
    merge_gpus,
)
from tileweave.transport.protocol import ANY, BEGAN, HERE, LEFT, MAX_SLICES, WAITED, SignalLayout


def entry(kind: int, program: int, begin: int, end: int, **more: int) -> list[int]:
    """What ``device/triton/record.py`` writes."""
    place = more.get("place", program) | more.get("warp", 0) << 16 | kind << 24
    what = (more.get("signal", 0) & 0xFFFFFFFF) | (more.get("unit", 0) & 0xFFFFFFFF) << 32
    what -= 1 << 64 if what >= 1 << 63 else 0  # int64
    return [program | place << 32, what, begin, end]


def test_programs_of_a_record() -> None:
    rows = [
        entry(BEGAN, 0, 1, 100, place=7),
        entry(WAITED, 0, 120, 150, signal=2 * MAX_SLICES + 3, unit=5, place=7),
        entry(WAITED, 0, 125, 160, signal=2 * MAX_SLICES + 3, unit=5, place=7, warp=1),
        entry(WAITED, 0, 170, 180, signal=HERE, unit=-1, place=7),
        entry(LEFT, 0, 1, 200, place=7),
        entry(BEGAN, 1, 1, 90, place=3),  # that does not leave
        entry(WAITED, 1, 91, 92, signal=ANY, place=3),
    ]
    found = programs(rows, [], 0, 4)
    assert [(e.kind, e.program, e.peer, e.begin_ns, e.end_ns, e.unit) for e in found] == [
        ("program", 7, 0, 100, 200, 0),
        ("wait", 7, 2, 120, 160, 5),
        ("wait", 7, 0, 170, 180, -1),
        ("wait", 3, SEVERAL, 91, 92, 0),
    ]


def test_of_two_ranks_the_other_is_waited_for() -> None:
    met = SignalLayout(2).met(0)
    for signal in (ANY, met, MAX_SLICES, 0):
        rows = [entry(WAITED, 0, 1, 2, signal=signal)]
        assert [event.peer for event in programs(rows, [], 1, 2)] == [0]
    rows = [entry(WAITED, 0, 1, 2, signal=SignalLayout(2).pushed)]
    assert [event.peer for event in programs(rows, [], 1, 2)] == [1]  # its own copy engine


def test_stamps_of_tiles_take_the_place_of_waits() -> None:
    rows = [entry(BEGAN, 4, 1, 100, place=9), entry(WAITED, 4, 100, 150, place=9)]
    stamped = [Event(0, 4, "compute", 1, 150, 190, 2)]
    assert programs(rows, stamped, 0, 2) == [Event(0, 9, "compute", 1, 150, 190, 2)]


def row(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


EXPORTED = [
    {"ph": "M", "name": "process_name"},
    row("kernel", "spin_kernel(long)", 10.0, 50.0, stream=7),
    row("kernel", "ncclDevKernel_AllReduce", 60.0, 9.0, stream=20),
    row("cuda_runtime", "cudaLaunchKernel", 61.0, 1.0),
    row("kernel", "clock_kernel", 70.0, 2.0, stream=7),
    row("kernel", "gemm", 74.0, 100.0, stream=7),
    row("gpu_memcpy", "Memcpy PtoP", 75.0, 40.5, stream=13, bytes=4096),
    row("kernel", "sum", 150.0, 30.0, stream=13),
]


def test_activities_are_counted_from_the_clock_on() -> None:
    found = activities(EXPORTED, 1)
    assert [(e.kind, e.program, e.begin_ns, e.end_ns, e.nbytes, e.name) for e in found] == [
        ("kernel", KERNELS, 2_000, 102_000, 0, "gemm"),
        ("copy", COPY_ENGINE, 3_000, 43_500, 4096, "Memcpy PtoP"),
        ("kernel", KERNELS - 1, 78_000, 108_000, 0, "sum"),
    ]
    assert activities(EXPORTED[:4], 1) == []


def test_words_and_file_of_a_trace_of_gpus() -> None:
    inside = [Event(0, 7, "program", 0, 3_000, 90_000), Event(0, 7, "wait", 1, 5_000, 26_200)]
    trace = merge_gpus(
        "t", [[*activities(EXPORTED, 0), *inside], [Event(1, 3, "program", 1, 4, 9)]], [108.0]
    )
    assert trace.shared and trace.clock == GPU_CLOCK and trace.span_ns(0) == 106_000
    driver, exposed, longest, *_ = in_words(trace)
    assert "106 us from its first to its last kernel or copy, 108 us by CUDA events" in driver
    assert "kernels ran 100% of it, copies 40.5 us, of which 100% concurrently" in driver
    assert "a multiprocessor of rank 0 waited 21.2 us on average, 20.0% of the call" in exposed
    assert "multiprocessor 7 of rank 0, 21.2 us, for rank 1" in longest
    rows = chrome(trace)["traceEvents"]
    names = [each["args"]["name"] for each in rows if each["ph"] == "M"]
    assert names == [
        "rank 0",
        "rank 1",
        "kernels 1",
        "kernels",
        "copies",
        "multiprocessor 7",
        "multiprocessor 3",
    ]
    assert all(each.get("tid", 0) >= 0 for each in rows)
    assert from_chrome(json.loads(json.dumps(chrome(trace)))) == trace


def test_a_trace_of_gpus_is_drawn(tmp_path: Any) -> None:
    plot = pytest.importorskip("tileweave.profile.plot")
    report_page = pytest.importorskip("tileweave.commands.report_page")
    inside = [Event(0, 7, "program", 0, 3_000, 90_000), Event(0, 7, "wait", 1, 5_000, 26_200)]
    trace = merge_gpus("t", [[*activities(EXPORTED, 0), *inside], activities(EXPORTED, 1)], [108.0])
    plot.plot_traces([trace], tmp_path / "x.png")
    drawn = report_page._time_line(trace)
    assert "rank 0 multiprocessor 7<" in drawn and 'fill-opacity="0.3"' in drawn and "gemm" in drawn
    labels = {patch.get_label() for patch in plot.legend_of([trace])}
    assert {"kernel of that rank", "program of a kernel of that rank"} <= labels
    assert (tmp_path / "x.png").stat().st_size > 10_000
