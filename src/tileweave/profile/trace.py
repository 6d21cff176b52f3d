"""Time stamps of kernels as events: which rank pushed, waited or computed, and when.

``device/triton/trace.py`` defines what a kernel stamps. :func:`decode` turns the stamps of one rank
into :class:`Event` objects with the help of the tile schedule, and :func:`merge` puts all ranks on
one time axis. :func:`summary` adds up waits; :func:`chrome` makes the JSON that Perfetto
(ui.perfetto.dev) and chrome://tracing open.

Interpreted ranks of one host share a clock. GPUs do not: each has its own ``%globaltimer``. So in a
trace of GPUs every rank starts at zero, and only durations and orders inside one rank can be
compared. ``Trace.clock`` says which it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tileweave.planning.schedules.gather import TileSchedule, Unit

Kind = Literal["push", "wait", "compute"]
SEVERAL = -1
COPY_ENGINE = -1
SHARED_CLOCK = "one clock for all ranks"
OWN_CLOCKS = (
    "a clock of its own for each rank, all start at 0: compare durations, not times between ranks"
)


@dataclass(frozen=True, slots=True)
class Event:
    """What a program did between two times.

    Attributes
    ----------
    rank, program : the program; -1 is the copy engine.
    kind : ``push`` of own data, ``wait`` for the data of a peer while idle, or ``compute`` on one
        unit of work.
    peer : the rank that is pushed to, waited for, or whose rows are computed; -1: several ranks.
    begin_ns, end_ns : nanoseconds.
    unit : index of the tile, or of the slice of a push.
    nbytes : bytes pushed.
    """

    rank: int
    program: int
    kind: Kind
    peer: int
    begin_ns: int
    end_ns: int
    unit: int = -1
    nbytes: int = 0

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.begin_ns


@dataclass(frozen=True)
class Trace:
    """The events of all ranks in one call; the earliest is at 0."""

    title: str
    world_size: int
    clock: str
    events: list[Event]

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
        events = [event for event in trace.events if event.rank == rank]
        waited: dict[int, int] = defaultdict(int)
        for event in events:
            if event.kind == "wait":
                waited[event.peer] += event.duration_ns
        programs = {event.program for event in events if event.kind == "compute"}
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
        name = "copy engine" if program == COPY_ENGINE else f"program {program}"
        rows.append(
            {
                "ph": "M",
                "name": "thread_name",
                "pid": rank,
                "tid": program + 1,
                "args": {"name": name},
            }
        )
    for event in trace.events:
        rows.append(
            {
                "ph": "X",
                "name": describe(event),
                "cat": event.kind,
                "pid": event.rank,
                "tid": event.program + 1,
                "ts": event.begin_ns / 1000.0,
                "dur": event.duration_ns / 1000.0,
                "args": {"unit": event.unit, "peer": event.peer, "bytes": event.nbytes},
            }
        )
    return {
        "displayTimeUnit": "ns",
        "otherData": {"title": trace.title, "clock": trace.clock},
        "traceEvents": rows,
    }


def describe(event: Event) -> str:
    """An event as text."""
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
    figures, said = summary(trace), []
    waits = [event for event in trace.events if event.kind == "wait"]
    per_program = [rank.waited_total_ns / max(rank.programs, 1) for rank in figures]
    spans = [_span(trace, rank) for rank in range(trace.world_size)]
    if not waits:
        said.append("No program waited: all communication was hidden.")
    else:
        worst = max(range(trace.world_size), key=lambda rank: per_program[rank])
        whole = all(rank.programs for rank in figures)  # else only waits were recorded
        share = f", {per_program[worst] / max(spans[worst], 1):.1%} of the call" if whole else ""
        said.append(
            f"Exposed communication: a program of rank {worst} waited "
            f"{_duration(per_program[worst])} on average{share}; mean of all ranks "
            f"{_duration(sum(per_program) / len(per_program))}."
        )
        longest = max(waits, key=lambda event: event.duration_ns)
        where = (
            "the copy engine" if longest.program == COPY_ENGINE else f"program {longest.program}"
        )
        said.append(
            f"The longest wait: {where} of rank {longest.rank}, {_duration(longest.duration_ns)}, "
            f"{describe(longest).removeprefix('wait ')}, from {_duration(longest.begin_ns)} on."
        )
    if not any(event.kind == "compute" for event in trace.events):
        said.append("Computation was not recorded.")
    elif trace.clock == SHARED_CLOCK:
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


def _of(trace: Trace, rank: int) -> list[Event]:
    return [event for event in trace.events if event.rank == rank]


def _end(trace: Trace, rank: int) -> int:
    return max((event.end_ns for event in _of(trace, rank)), default=0)


def _span(trace: Trace, rank: int) -> int:
    """From the first to the last event of a rank."""
    begins = [event.begin_ns for event in _of(trace, rank)]
    return _end(trace, rank) - min(begins, default=0)


def _duration(ns: float) -> str:
    return f"{ns / 1e6:.3g} ms" if ns >= 1e6 else f"{ns / 1e3:.3g} us"
