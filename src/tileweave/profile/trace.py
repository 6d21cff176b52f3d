"""Time stamps of kernels as events: which rank pushed, waited or computed, and when.

``device/triton/trace.py`` defines what a kernel stamps. :func:`decode` turns the stamps of one rank
into :class:`Event` objects with the help of the tile schedule, and :func:`merge` puts all ranks on
one time axis. :func:`summary` adds up waits; :func:`chrome` makes the JSON that Perfetto
(ui.perfetto.dev) and chrome://tracing open.

Interpreted ranks of one host share a clock. GPUs do not: each has its own ``%globaltimer``. Times
of :func:`merge_gpus` begin when a collective ends, on all ranks (``profile/device.py``); else every
rank starts at zero, and only durations and orders inside one rank can be compared. ``Trace.clock``
says which it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tileweave.planning.schedules.gather import TileSchedule, Unit

Kind = Literal["push", "wait", "compute", "kernel", "copy", "program"]
SEVERAL = -1
# in place of a program; kernels of further streams have smaller numbers
COPY_ENGINE, KERNELS = -1, -2
SHARED_CLOCK = "one clock for all ranks"
OWN_CLOCKS = (
    "a clock of its own for each rank, all start at 0: compare durations, not times between ranks"
)
GPU_CLOCK = "0: the end of a collective before the call, on all ranks within microseconds"


@dataclass(frozen=True, slots=True)
class Event:
    """What a program did between two times.

    Attributes
    ----------
    rank, program : the program; -1 is the copy engine, and less than that the kernels of a stream.
        Of compiled kernels: the multiprocessor.
    kind : ``push`` of own data, ``wait`` for the data of a peer while idle, or ``compute`` on one
        unit of work; a whole ``kernel`` or ``copy``, as the driver saw it; a ``program``, from when
        it read the epoch until it left the call.
    peer : the rank that is pushed to, waited for, or whose rows are computed; -1: several ranks.
    begin_ns, end_ns : nanoseconds.
    unit : index of the tile, or of the slice of a push.
    nbytes : bytes pushed.
    name : of a kernel or a copy.
    """

    rank: int
    program: int
    kind: Kind
    peer: int
    begin_ns: int
    end_ns: int
    unit: int = -1
    nbytes: int = 0
    name: str = ""

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.begin_ns


@dataclass(frozen=True)
class Trace:
    """The events of all ranks in one call; the earliest is at 0.

    ``event_us``: what CUDA events around the call measured on each rank.
    """

    title: str
    world_size: int
    clock: str
    events: list[Event]
    event_us: tuple[float, ...] = ()

    @property
    def shared(self) -> bool:
        """Whether times of different ranks can be compared."""
        return self.clock != OWN_CLOCKS

    def of_rank(self, rank: int) -> list[Event]:
        """The events of one rank."""
        return [event for event in self.events if event.rank == rank]

    def span_ns(self, rank: int) -> int:
        """From the begin of the first to the end of the last kernel or copy of a rank; from the
        first to the last event where kernels were not recorded."""
        events = self.of_rank(rank)
        whole = [event for event in events if event.kind in ("kernel", "copy")] or events
        ends = max((event.end_ns for event in whole), default=0)
        return ends - min((event.begin_ns for event in whole), default=0)

    @property
    def end_ns(self) -> int:
        return max((event.end_ns for event in self.events), default=0)


def decode(
    stamps: Sequence[Sequence[int]],
    schedule: TileSchedule,
    num_slices: int,
    num_producers: int,
    pushed_bytes: int = 0,
) -> list[Event]:
    """The events of one rank.

    Parameters
    ----------
    stamps : rows of four numbers, see ``device/triton/trace.py``: ``num_slices`` rows of pushes,
        then ``schedule.max_units()`` rows per program.
    num_producers : programs that push; slice i is pushed by program ``i % num_producers``.
    pushed_bytes : bytes of all stamped pushes to all peers.
    """
    rank = schedule.rank
    pushed = [(piece, row) for piece, row in enumerate(stamps[:num_slices]) if row[0] and row[1]]
    to = (rank + 1) % schedule.world_size if schedule.world_size == 2 else SEVERAL
    events = [
        Event(
            rank,
            piece % num_producers,
            "push",
            to,
            row[0],
            row[1],
            piece,
            pushed_bytes // len(pushed),
        )
        for piece, row in pushed
    ]
    per_program = schedule.max_units()
    for program in range(schedule.num_programs):
        first = num_slices + program * per_program
        idle_from = 0  # the end of the last unit: a wait before that was hidden by a computation
        for unit, row in zip(
            schedule.units(program), stamps[first : first + per_program], strict=False
        ):
            wait_begin, wait_end, end, label = row
            if label == 0 or end == 0:
                continue
            source = _source(schedule, unit)
            begin = max(wait_begin, idle_from)
            if source != rank and wait_end > begin:
                events.append(Event(rank, program, "wait", source, begin, wait_end, unit.tile))
            events.append(
                Event(rank, program, "compute", source, max(wait_end, idle_from), end, unit.tile)
            )
            idle_from = end
    return events


def _source(schedule: TileSchedule, unit: Unit) -> int:
    """The rank whose rows a unit needs: the own rank if it needs no other, -1 for several
    others."""
    others = [source for source in schedule.sources(unit) if source != schedule.rank]
    if not others:
        return schedule.rank
    return others[0] if len(others) == 1 else SEVERAL


def merge_gpus(title: str, by_rank: Sequence[Iterable[Event]], event_us: Sequence[float]) -> Trace:
    """The events of all ranks, which are on one clock already."""
    events = sorted(
        (event for events in by_rank for event in events),
        key=lambda event: (event.rank, event.program, event.begin_ns),
    )
    return Trace(title, len(by_rank), GPU_CLOCK, events, tuple(event_us))


def merge(title: str, by_rank: Sequence[Iterable[Event]], shared_clock: bool) -> Trace:
    """The events of all ranks on one time axis. The earliest event is at 0; with separate clocks
    the earliest of each rank."""
    ranks = [list(events) for events in by_rank]
    starts = [min((event.begin_ns for event in events), default=0) for events in ranks]
    if shared_clock:
        earliest = min(
            (start for start, events in zip(starts, ranks, strict=True) if events), default=0
        )
        starts = [earliest] * len(ranks)
    moved = [
        replace(event, begin_ns=event.begin_ns - start, end_ns=event.end_ns - start)
        for start, events in zip(starts, ranks, strict=True)
        for event in events
    ]
    moved.sort(key=lambda event: (event.rank, event.program, event.begin_ns))
    return Trace(title, len(ranks), SHARED_CLOCK if shared_clock else OWN_CLOCKS, moved)


@dataclass(frozen=True)
class RankSummary:
    """How long one rank waited for each source, summed over ``programs``; key -1 is a wait for
    several ranks."""

    waited_ns: dict[int, int]
    programs: int

    @property
    def waited_total_ns(self) -> int:
        return sum(self.waited_ns.values())


def summary(trace: Trace) -> list[RankSummary]:
    """The summaries of all ranks, in rank order."""
    found = []
    for rank in range(trace.world_size):
        events = trace.of_rank(rank)
        waited: dict[int, int] = defaultdict(int)
        for event in events:
            if event.kind == "wait":
                waited[event.peer] += event.duration_ns
        programs = {event.program for event in events if event.kind in ("compute", "program")}
        found.append(RankSummary(dict(waited), len(programs)))
    return found


def chrome(trace: Trace) -> dict[str, Any]:
    """The trace in the event format of Chrome, which Perfetto opens: a process per rank, a thread
    per program."""
    rows: list[dict[str, Any]] = []
    for rank in range(trace.world_size):
        rows.append(
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        )
    for rank, program in sorted({(event.rank, event.program) for event in trace.events}):
        rows.append(
            {
                "ph": "M",
                "name": "thread_name",
                "pid": rank,
                "tid": _thread(program),
                "args": {"name": lane_name(program, trace.clock == GPU_CLOCK)},
            }
        )
    for event in trace.events:
        rows.append(
            {
                "ph": "X",
                "name": describe(event),
                "cat": event.kind,
                "pid": event.rank,
                "tid": _thread(event.program),
                "ts": event.begin_ns / 1000.0,
                "dur": event.duration_ns / 1000.0,
                "args": {"unit": event.unit, "peer": event.peer, "bytes": event.nbytes},
            }
        )
    return {
        "displayTimeUnit": "ns",
        "otherData": {
            "title": trace.title,
            "clock": trace.clock,
            "event_us": list(trace.event_us),
        },
        "traceEvents": rows,
    }


def from_chrome(read: dict[str, Any]) -> Trace:
    """The trace in what :func:`chrome` made."""
    said, rows = read["otherData"], read["traceEvents"]
    events = [
        Event(
            row["pid"],
            row["tid"] - _FIRST_THREAD,
            row["cat"],
            row["args"]["peer"],
            round(row["ts"] * 1000),
            round((row["ts"] + row["dur"]) * 1000),
            row["args"]["unit"],
            row["args"]["bytes"],
            row["name"] if row["cat"] in ("kernel", "copy") else "",
        )
        for row in rows
        if row["ph"] == "X"
    ]
    size = sum(row["name"] == "process_name" for row in rows)
    return Trace(said["title"], size, said["clock"], events, tuple(said["event_us"]))


_FIRST_THREAD = 100


def _thread(program: int) -> int:
    """Numbers of threads are not negative. Kernels and copies come first."""
    return program + _FIRST_THREAD


def lane_name(program: int, on_gpu: bool = False) -> str:
    """What a row of a trace shows."""
    if program == COPY_ENGINE:
        return "copies" if on_gpu else "copy engine"
    if program <= KERNELS:
        return f"kernels {KERNELS - program}" if program < KERNELS else "kernels"
    return f"{'multiprocessor' if on_gpu else 'program'} {program}"


def describe(event: Event) -> str:
    """An event as text."""
    if event.kind in ("kernel", "copy"):
        return event.name
    if event.kind == "program":
        return f"program {event.unit}"
    if event.kind == "wait" and event.peer == event.rank:
        return "wait for own copies or programs"
    peer = "several ranks" if event.peer == SEVERAL else f"rank {event.peer}"
    texts = {"push": f"push to {peer}", "wait": f"wait for {peer}", "compute": f"rows of {peer}"}
    return texts[event.kind]


def in_words(trace: Trace) -> list[str]:
    """What a trace shows, in sentences: how much was waited for peers, the longest wait, the tail.

    What is not waited for was hidden. Times between ranks are compared only where ranks share a
    clock.
    """
    if not trace.events:
        return ["Nothing was recorded."]
    figures, said = summary(trace), _of_driver(trace)
    waits = [event for event in trace.events if event.kind == "wait"]
    per_program = [rank.waited_total_ns / max(rank.programs, 1) for rank in figures]
    spans = [trace.span_ns(rank) for rank in range(trace.world_size)]
    place = "multiprocessor" if trace.clock == GPU_CLOCK else "program"
    if said and not any(rank.programs for rank in figures):
        said.append("What programs did inside kernels was not recorded.")
    elif not waits:
        said.append("No program waited for a peer.")
    else:
        worst = max(range(trace.world_size), key=lambda rank: per_program[rank])
        whole = all(rank.programs for rank in figures)  # else only waits were recorded
        share = f", {per_program[worst] / max(spans[worst], 1):.1%} of the call" if whole else ""
        said.append(
            f"Exposed communication: a {place} of rank {worst} waited "
            f"{_duration(per_program[worst])} on average{share}; mean of all ranks "
            f"{_duration(sum(per_program) / len(per_program))}."
        )
        longest = max(waits, key=lambda event: event.duration_ns)
        where = (
            "the copy engine" if longest.program == COPY_ENGINE else f"{place} {longest.program}"
        )
        said.append(
            f"The longest wait: {where} of rank {longest.rank}, {_duration(longest.duration_ns)}, "
            f"{describe(longest).removeprefix('wait ')}, from {_duration(longest.begin_ns)} on."
        )
    if not any(event.kind in ("compute", "kernel") for event in trace.events):
        said.append("Computation was not recorded.")
    elif trace.shared:
        ends = [_end(trace, rank) for rank in range(trace.world_size)]
        last = max(range(trace.world_size), key=lambda rank: ends[rank])
        said.append(
            f"The tail: rank {last} ended last, {_duration(ends[last] - min(ends))} after the "
            "first rank."
        )
    else:
        last = max(range(trace.world_size), key=lambda rank: spans[rank])
        said.append(
            f"Rank {last} took longest, {_duration(spans[last])}; the shortest took "
            f"{_duration(min(spans))}."
        )
    return said


def _end(trace: Trace, rank: int) -> int:
    return max((event.end_ns for event in trace.of_rank(rank)), default=0)


def _of_driver(trace: Trace) -> list[str]:
    """Of each rank: kernels and copies, how much of them was concurrent, and what CUDA events
    say."""
    said = []
    for rank in range(trace.world_size):
        events = trace.of_rank(rank)
        kernels = _joined([event for event in events if event.kind == "kernel"])
        copies = _joined([event for event in events if event.kind == "copy"])
        if not kernels and not copies:
            continue
        span = trace.span_ns(rank)
        both = sum(
            max(min(end, other[1]) - max(begin, other[0]), 0)
            for begin, end in kernels
            for other in copies
        )
        copied = sum(end - begin for begin, end in copies)
        text = f"Rank {rank}: {_duration(span)} from its first to its last kernel or copy"
        if rank < len(trace.event_us):
            text += f", {trace.event_us[rank]:.4g} us by CUDA events"
        text += (
            f"; kernels ran {sum(end - begin for begin, end in kernels) / max(span, 1):.0%} of it"
        )
        if copied:
            text += (
                f", copies {_duration(copied)}, of which {both / copied:.0%} concurrently with "
                "kernels"
            )
        said.append(text + ".")
    return said


def _joined(events: Iterable[Event]) -> list[tuple[int, int]]:
    """The times in which at least one of the events was."""
    found: list[tuple[int, int]] = []
    for event in sorted(events, key=lambda event: event.begin_ns):
        if found and event.begin_ns <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], event.end_ns))
        else:
            found.append((event.begin_ns, event.end_ns))
    return found


def _duration(ns: float) -> str:
    return f"{three_digits(ns / 1e6)} ms" if ns >= 1e6 else f"{three_digits(ns / 1e3)} us"


def three_digits(value: float) -> str:
    """Three digits that count, without an exponent: 1.12e+03 is hard to read."""
    return f"{value:.0f}" if value >= 999.5 else f"{value:.3g}"
