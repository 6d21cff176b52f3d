"""Record one call on GPUs: its kernels and copies as the driver saw them (CUPTI, by
``torch.profiler``), and what programs did inside kernels (``device/triton/record.py``), on one
clock.

Every path of every operator can be recorded, also cuBLAS and NCCL, which have no stamps of ours.
All ranks begin when a collective ends, which is the same moment on all of them to within
microseconds. A kernel that reads the device's clock runs there, so both kinds of times have the
same zero.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch.profiler import ProfilerActivity, profile

from tileweave.device.triton.signal import clock
from tileweave.ops.core.registry import name_of, workspace_of
from tileweave.planning.problem import Plan
from tileweave.profile.record import Recording
from tileweave.profile.trace import COPY_ENGINE, KERNELS, SEVERAL, Event
from tileweave.transport.protocol import (
    BEGAN,
    HERE,
    LEFT,
    RECORD,
    RECORD_HEAD,
    RECORD_WORDS,
    WAITED,
    SignalLayout,
)

# The host queues the whole call while the device sleeps, so that events measure the device
_SLEEP_CYCLES = 30_000_000
_MOST_ENTRIES = 1 << 19
_ZERO = "clock_kernel"


@triton.jit
def clock_kernel(target):
    """Where the times of a recording begin."""
    tl.store(target, clock())


@dataclass(frozen=True)
class OnDevice:
    """One recorded call of one rank.

    Attributes
    ----------
    recording : the plan, the result, and events with times from the common zero on.
    event_us : the time between CUDA events around the call.
    """

    recording: Recording
    event_us: float


def record_on_gpu(
    call: Callable[[], Callable[[], Recording]],
    plan: Plan,
    device: torch.device,
    group: dist.ProcessGroup,
) -> OnDevice:
    """Record one call. Collective; the call must have been made before, with these shapes.

    Parameters
    ----------
    call : callable
        Queues the call; returns a function that makes its :class:`Recording` once it is done. Its
        events, if it has any, are by the device's clock, of programs.

    plan : Plan
        The path that the call takes.

    device : torch.device
        A GPU.

    group : ProcessGroup
        The ranks of the call.
    """
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    ready = torch.zeros(1, device=device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)

    def once(entries: torch.Tensor | None) -> tuple[Recording, list[dict[str, Any]]]:
        torch.cuda.synchronize(device)
        if entries is not None:
            entries[0] = 0
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            torch.cuda._sleep(_SLEEP_CYCLES)
            dist.all_reduce(ready, group=group)
            clock_kernel[(1,)](zero)
            before.record()
            finish = call()
            after.record()
            torch.cuda.synchronize(device)
        return finish(), _exported(profiler)

    with _entries(plan, device, group) as entries:
        once(entries)  # loads kernels and the profiler
        made, exported = once(entries)
        rows = [] if entries is None else _rows(entries)
    begin, rank = int(zero.item()), dist.get_rank(group)
    inside = programs(rows, made.events, rank, dist.get_world_size(group))
    events = [
        replace(event, begin_ns=event.begin_ns - begin, end_ns=event.end_ns - begin)
        for event in inside
    ]
    events += activities(exported, rank)
    return OnDevice(replace(made, events=events), 1e3 * before.elapsed_time(after))


@contextmanager
def _entries(
    plan: Plan, device: torch.device, group: dist.ProcessGroup
) -> Iterator[torch.Tensor | None]:
    """Memory for what programs write, which control blocks point to inside; None for paths without
    kernels of ours."""
    if plan.path != "fused":
        yield None
        return
    made = torch.zeros(RECORD_HEAD + RECORD_WORDS * _MOST_ENTRIES, dtype=torch.int64, device=device)
    made[1] = _MOST_ENTRIES
    instances = workspace_of(name_of(group), device).instances.values()
    where = torch.tensor([made.data_ptr()], dtype=torch.int64).view(torch.int32).to(device)
    try:
        for instance in instances:
            instance.control[RECORD : RECORD + 2] = where
        yield made
    finally:
        torch.cuda.synchronize(device)
        for instance in instances:
            instance.control[RECORD : RECORD + 2] = 0


def _rows(entries: torch.Tensor) -> list[list[int]]:
    count = min(int(entries[0].item()), _MOST_ENTRIES)
    used = entries[RECORD_HEAD : RECORD_HEAD + RECORD_WORDS * count]
    return used.view(count, RECORD_WORDS).tolist()


def programs(
    rows: Iterable[list[int]], stamped: list[Event], rank: int, world_size: int
) -> list[Event]:
    """What programs did, by multiprocessor.

    Parameters
    ----------
    rows : entries of the record, four int64 each.

    stamped : events of programs from a kernel that stamps its tiles itself, which then say more
        than the waits among the entries.
    """
    began: dict[int, int] = {}
    left: dict[int, int] = {}
    places: dict[int, int] = {}
    waits: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for head, what, begin, end in rows:
        program, place, kind = head & 0xFFFFFFFF, (head >> 32) & 0xFFFF, (head >> 56) & 0xFF
        places[program] = place
        if kind == BEGAN:
            began[program] = min(began.get(program, end), end)
        elif kind == LEFT:
            left[program] = max(left.get(program, end), end)
        elif kind == WAITED:
            signal, unit = _signed(what), _signed(what >> 32)
            waits[program, _source(signal, rank, world_size)].append((begin, end, unit))
    events = [
        Event(rank, places[program], "program", rank, begin, left[program], program)
        for program, begin in began.items()
        if left.get(program, 0) > begin
    ]
    if stamped:
        return events + [
            replace(event, program=places.get(event.program, event.program)) for event in stamped
        ]
    for (program, source), intervals in waits.items():
        events += [
            Event(rank, places[program], "wait", source, begin, end, unit)
            for begin, end, unit in _joined(intervals)
        ]
    return events


def _signed(word: int) -> int:
    """The lower 32 bits as a number with a sign."""
    return ((word & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


def _source(signal: int, rank: int, world_size: int) -> int:
    """The rank that sets a signal. Of several: the other one of two, else SEVERAL."""
    layout = SignalLayout(world_size)
    if signal in (HERE, layout.pushed):
        return rank
    source = layout.source_of(signal)
    if 0 <= signal < layout.met(0) and source != rank:
        return source
    return 1 - rank if world_size == 2 else SEVERAL  # a meeting waits for all


def _joined(intervals: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Waits of the warps of a program; those that overlap are one."""
    found: list[tuple[int, int, int]] = []
    for begin, end, unit in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end), found[-1][2])
        else:
            found.append((begin, end, unit))
    return found


def _exported(profiler: Any) -> list[dict[str, Any]]:
    """What the driver recorded, in Chrome's format."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text("utf-8"))["traceEvents"]


def activities(exported: Iterable[dict[str, Any]], rank: int) -> list[Event]:
    """Kernels and copies after the kernel that reads the clock, from whose end on times are
    counted."""
    kinds = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "copy"}
    rows = sorted(
        (row for row in exported if row.get("cat") in kinds), key=lambda row: float(row["ts"])
    )
    zeros = [float(row["ts"]) + float(row["dur"]) for row in rows if _ZERO in row["name"]]
    if not zeros:
        return []
    zero, found = zeros[-1], []
    streams: dict[Any, int] = {}
    for row in rows:
        begin = float(row["ts"]) - zero
        if begin < 0 or _ZERO in row["name"]:
            continue
        given = row.get("args", {})
        copied = kinds[row["cat"]] == "copy"
        stream = given.get("stream")
        lane = COPY_ENGINE if copied else KERNELS - streams.setdefault(stream, len(streams))
        found.append(
            Event(
                rank,
                lane,
                "copy" if copied else "kernel",
                rank,
                round(1e3 * begin),
                round(1e3 * (begin + float(row["dur"]))),
                nbytes=int(given.get("bytes", 0)),
                name=str(row["name"]),
            )
        )
    return found
