"""A step as tasks on streams: dependences, shared links, and times by phase.

One *representative* is simulated for each kind of rank (a pipeline stage). Ranks that do the same
at the same time (tensor, data and expert parallel peers) are its replicas. Tasks of one stream run
in the order in which they were added, as on a GPU; tasks on different streams overlap.

A task takes a fixed time (a kernel, or a collective on links of its own), or as long as its flows
take on links that it shares with others.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import simpy

from tileweave.errors import require
from tileweave.sim.collectives import Phase, run_sliced
from tileweave.sim.network import Flow, Links

Kind = Literal["compute", "comm", "fused"]


@dataclass(frozen=True, slots=True)
class Part:
    """An operator in a task, for break-downs and exports.

    exposed : seconds in which only communication runs.
    collective : all_gather etc.; "" for none.
    nbytes : its size as in NCCL.
    ranks : group size.
    axis : the group (tp, dp, ep, world).
    """

    name: str
    phase: str
    seconds: float
    exposed: float = 0.0
    collective: str = ""
    nbytes: float = 0.0
    ranks: int = 1
    axis: str = ""
    compute: float = 0.0


@dataclass(slots=True)
class Task:
    """A task of one representative on one of its streams. Exactly one of ``seconds`` and ``flows``
    is used."""

    number: int
    rank: int
    stream: str
    name: str
    kind: Kind
    seconds: float
    after: tuple[int, ...]
    parts: tuple[Part, ...]
    flows: Callable[[], list[Phase]] | None = None
    peer: int = -1
    begin: float = 0.0
    end: float = 0.0


@dataclass(slots=True)
class Timeline:
    """The result: tasks with begin and end in seconds, and the number of replicas of each
    representative."""

    title: str
    tasks: list[Task]
    replicas: dict[int, int]
    names: dict[int, str]
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return max((task.end for task in self.tasks), default=0.0)

    @property
    def world_size(self) -> int:
        return sum(self.replicas.values())

    def busiest(self) -> int:
        """The representative that computes longest, which break-downs are about."""
        busy: dict[int, float] = defaultdict(float)
        for task in self.tasks:
            if task.kind != "comm":
                busy[task.rank] += task.end - task.begin
        return max(busy, key=lambda rank: busy[rank], default=0)

    def phases(self) -> dict[str, float]:
        """Seconds by phase on the busiest representative, including ``exposed communication`` and
        ``idle``; they add up to the whole."""
        rank, found = self.busiest(), defaultdict(float)
        mine = [task for task in self.tasks if task.rank == rank]
        sending = sorted((t.begin, t.end) for t in mine if t.kind == "comm")
        computing = sorted((t.begin, t.end) for t in mine if t.kind != "comm")
        for task in mine:
            if task.kind == "comm":
                continue
            total = sum(part.seconds for part in task.parts)
            scale = (task.end - task.begin) / total if total > 0.0 else 0.0
            for part in task.parts:
                found[part.phase] += (part.seconds - part.exposed) * scale
                found["exposed communication"] += part.exposed * scale
        busy = _covered(sorted(sending + computing))
        found["exposed communication"] += busy - _covered(computing)
        found["idle"] = self.seconds - busy
        return {phase: time for phase, time in found.items() if time > 1e-12}


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of sorted spans."""
    total, reach = 0.0, float("-inf")
    for begin, end in spans:
        total += max(0.0, end - max(begin, reach))
        reach = max(reach, end)
    return total


class Step:
    """Build a step task by task, then :meth:`run` it."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.tasks: list[Task] = []
        self.replicas: dict[int, int] = {}
        self.names: dict[int, str] = {}
        self.capacities: dict[str, float] = {}
        self.notes: list[str] = []

    def representative(
        self, rank: int, stands_for: int, name: str, capacities: dict[str, float]
    ) -> None:
        """Add a representative. Its links are its own and are named ``rank:link``."""
        self.replicas[rank], self.names[rank] = stands_for, name
        self.capacities |= {f"{rank}:{link}": capacity for link, capacity in capacities.items()}

    def add(
        self,
        rank: int,
        stream: str,
        name: str,
        parts: Iterable[Part],
        after: Iterable[int] = (),
        kind: Kind = "compute",
        flows: Callable[[], list[Phase]] | None = None,
        peer: int = -1,
    ) -> int:
        """Add a task, which takes the sum of its parts or as long as its flows. Returns its
        number."""
        parts, number = tuple(parts), len(self.tasks)
        require(
            rank in self.replicas,
            f"a task of rank {rank}",
            "declared representatives",
            "call representative() first",
        )
        seconds = sum(part.seconds for part in parts)
        self.tasks.append(
            Task(number, rank, stream, name, kind, seconds, tuple(after), parts, flows, peer)
        )
        return number

    def run(self) -> Timeline:
        """Run all tasks. Raises if a task waits for a later one of its own stream."""
        _Run(self.tasks, self.capacities).run()
        return Timeline(self.title, self.tasks, self.replicas, self.names, tuple(self.notes))


class _Run:
    """Tasks of a fixed time are events of a heap, since there are tens of thousands of them in a
    pipeline; only flows are SimPy's. The earlier of both comes first."""

    def __init__(self, tasks: list[Task], capacities: dict[str, float]) -> None:
        self.tasks = tasks
        self.env = simpy.Environment()
        self.links = Links(self.env, capacities)
        self.heap: list[tuple[float, int]] = []
        self.waits = [len(set(task.after)) for task in tasks]
        self.next: list[list[int]] = [[] for _ in tasks]
        self.done = 0
        for task in tasks:
            for number in set(task.after):
                self.next[number].append(task.number)
        last: dict[tuple[int, str], int] = {}
        for task in tasks:  # tasks of a stream follow each other
            stream = (task.rank, task.stream)
            if stream in last and last[stream] not in task.after:
                self.next[last[stream]].append(task.number)
                self.waits[task.number] += 1
            last[stream] = task.number

    def run(self) -> None:
        for task in self.tasks:
            if self.waits[task.number] == 0:
                self._start(task, 0.0)
        while True:
            soon = self.heap[0][0] if self.heap else float("inf")
            if self.env.peek() <= soon:
                if self.env.peek() == float("inf"):
                    break
                self.env.step()
            else:
                now, number = heapq.heappop(self.heap)
                self._end(self.tasks[number], now)
        stuck = [task.name for task in self.tasks if self.waits[task.number] > 0]
        require(
            not stuck and self.done == len(self.tasks),
            f"a step where {stuck[:3]} never end",
            "no cycles",
            "fix `after`",
        )

    def _start(self, task: Task, now: float) -> None:
        task.begin = now
        if task.flows is None:
            heapq.heappush(self.heap, (now + task.seconds, task.number))
            return
        if self.env.now < now:
            self.env.run(until=now)
        process = self.env.process(run_sliced(self.env, self.links, task.flows, 1))
        process.callbacks.append(lambda _: self._end(task, self.env.now))

    def _end(self, task: Task, now: float) -> None:
        task.end = now
        self.done += 1
        for number in self.next[task.number]:
            self.waits[number] -= 1
            if self.waits[number] == 0:
                self._start(self.tasks[number], now)


def on_links(phases: list[Phase], rank: int) -> list[Phase]:
    """Flows over the links of one representative."""
    for flows in phases:
        for flow in flows:
            flow.loads = {f"{rank}:{link}": load for link, load in flow.loads.items()}
    return phases


_RECEIVING = ("down", "nic_in", "leaf_down")


def between(flow: Flow, source: int, target: int) -> list[Phase]:
    """One message from ``source`` to ``target``: over the incoming links of the target and all
    other links of the source."""
    flow.loads = {
        f"{target if link in _RECEIVING else source}:{link}": load
        for link, load in flow.loads.items()
    }
    return [[flow]]


@dataclass(slots=True)
class Result:
    """A workload in the three modes, on one cluster."""

    title: str
    cluster: str
    timelines: dict[str, Timeline]
    samples: float
    unit: str
    notes: tuple[str, ...] = ()
    wall: float = 0.0

    def seconds(self, mode: str) -> float:
        return self.timelines[mode].seconds

    @property
    def saving(self) -> float:
        """The fraction of the unfused time that fusion saves."""
        return 1.0 - self.seconds("fused") / self.seconds("unfused")
