"""A timeline in the event format of Chrome, which ui.perfetto.dev opens: a process per
representative rank, a thread per stream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tileweave.files import writing
from tileweave.sim.step import Timeline


def timeline_events(timeline: Timeline) -> dict[str, Any]:
    """Tasks, and nested in them their operators in proportion to their times."""
    rows: list[dict[str, Any]] = []
    for rank, name in timeline.names.items():
        rows.append(
            {
                "ph": "M",
                "name": "process_name",
                "pid": rank,
                "args": {"name": f"{name} (x{timeline.replicas[rank]})"},
            }
        )
    streams = sorted({(task.rank, task.stream) for task in timeline.tasks})
    threads = {key: number for number, key in enumerate(streams)}
    for (rank, stream), thread in threads.items():
        rows.append(
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": stream}}
        )
    for task in timeline.tasks:
        thread, length = threads[task.rank, task.stream], task.end - task.begin
        if length <= 0.0:
            continue
        rows.append(_slice(task.name, task.kind, task.rank, thread, task.begin, length, {}))
        total, begin = sum(part.seconds for part in task.parts), task.begin
        for part in task.parts if total > 0.0 and len(task.parts) > 1 else ():
            span = part.seconds * length / total
            rows.append(
                _slice(
                    part.name,
                    part.phase,
                    task.rank,
                    thread,
                    begin,
                    span,
                    {"bytes": part.nbytes, "exposed us": part.exposed * 1e6},
                )
            )
            begin += span
    return {"displayTimeUnit": "ns", "otherData": {"title": timeline.title}, "traceEvents": rows}


def _slice(
    name: str,
    category: str,
    process: int,
    thread: int,
    begin: float,
    length: float,
    args: dict[str, Any],
) -> dict[str, Any]:
    row = {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": process,
        "tid": thread,
        "ts": begin * 1e6,
        "dur": length * 1e6,
    }
    return row | {"args": args}


def write(events: dict[str, Any], path: Path) -> Path:
    """Write a trace. Returns its path."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(events) + "\n", "utf-8")
    return path
