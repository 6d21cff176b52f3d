"""From stamps of kernels to events that can be read: who pushed, who waited for whom, who computed
what.

``device/triton/trace.py`` says what a kernel stamps. :func:`decode` turns one rank's stamps into
:class:`Event` objects with the help of the tile schedule, :func:`merge` puts the ranks on one axis,
and what is left is plain data: :func:`summary` adds it up, :func:`chrome` makes the JSON that
Perfetto (ui.perfetto.dev) and chrome://tracing open.

Clocks: ranks of one host that run interpreted share a clock. GPUs do not: each has its own
``%globaltimer``, so a trace of GPUs starts every rank at zero, and only durations and orders inside
one rank can be compared. ``Trace.clock`` says which.
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
    """Something one rank did between two times.

    Attributes
    ----------
    rank, program : who; program -1 is the copy engine.
    kind : ``push`` of own data, ``wait`` for a peer's data with nothing else to do, ``compute`` on
        one unit of work.
    peer : push: to whom; wait: for whom; compute: whose rows. -1: several ranks.
    begin_ns, end_ns : nanoseconds. unit : tile, or slice of a push. nbytes : bytes pushed.
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
    """Events of all ranks in one call, the earliest at 0."""

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
    """Events of one rank.

    Parameters
    ----------
    stamps : rows of four, as ``device/triton/trace.py`` describes: ``num_slices`` of pushes, then
        for each program ``schedule.max_units()`` rows.
    num_producers : programs that push; slice i is pushed by program ``i % num_producers``.
    pushed_bytes : bytes that the stamped pushes sent together, to all peers.
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
        idle_from = 0  # this program's own last end: a wait before that hid behind a computation
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
    """The one rank whose rows a unit needs: the own one only if it needs no other; -1 for several
    others."""
    others = [source for source in schedule.sources(unit) if source != schedule.rank]
    if not others:
        return schedule.rank
    return others[0] if len(others) == 1 else SEVERAL


def merge(title: str, by_rank: Sequence[Iterable[Event]], shared_clock: bool) -> Trace:
    """All ranks on one axis that starts at 0: the earliest event of all, or of each rank where
    clocks differ."""
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
    """What one rank waited for: source -> time, summed over ``programs``; key -1 where one unit
    needed several ranks' rows."""

    waited_ns: dict[int, int]
    programs: int

    @property
    def waited_total_ns(self) -> int:
        return sum(self.waited_ns.values())


def summary(trace: Trace) -> list[RankSummary]:
    """Figures of each rank, by rank."""
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
    """The trace in Chrome's event format, which Perfetto opens: a process for each rank, a thread
    for each program."""
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
    """An event in words."""
    whom = "several ranks" if event.peer == SEVERAL else f"rank {event.peer}"
    return {"push": f"push to {whom}", "wait": f"wait for {whom}", "compute": f"rows of {whom}"}[
        event.kind
    ]
