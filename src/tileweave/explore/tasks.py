"""Tasks that run one at a time and switch only at scheduling points; a strategy chooses the next
one.

A task is a greenlet: a stack of its own in one thread, so that the deep calls of the interpreter
need no change. A task that waits for a word is *parked* until a store to that word arrives. If no
task can run and no store is pending, the world is deadlocked. That is known at once, without a
timeout.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import greenlet
import numpy as np

from tileweave.explore.memory import Memory, Violation, Writer

MAX_STEPS = 200_000


@dataclass(eq=False)
class Task(Writer):
    """A host, a program, or a copy engine. ``state``: "idle", "ready", "parked" (for words),
    "blocked" (for other tasks)."""

    rank: int = 0
    state: str = "idle"
    thread: greenlet.greenlet | None = None
    watched: tuple[tuple[int, int], ...] = ()  # bytes [low, high) whose change wakes a parked task
    grid_index: tuple[int, int, int] = (0, 0, 0)
    grid: tuple[int, int, int] = (1, 1, 1)
    # the bytes that it has polled since it last changed anything
    polled: dict[object, tuple[int, int]] = field(default_factory=dict)
    patience: int = 0  # further polls before it parks again; see Tasks._stuck
    patient: bool = False  # it got that, and nothing has changed since
    on_drained: Callable[[Task], None] | None = None


class Decision(NamedTuple):
    """What happens next: ``task`` runs, or one of its pending stores arrives (``store``: position
    among the eligible ones)."""

    task: int
    store: int = -1


class Strategy(Protocol):
    """``ready`` tasks may run; ``dirty`` ones have pending stores; one of the two lists is not
    empty."""

    def choose(
        self, ready: list[Task], dirty: list[Task], current: Task | None, step: int
    ) -> Decision: ...


@dataclass
class Event:
    """An entry of the trace: at ``step``, ``task`` did ``what`` to bytes [low, high)."""

    step: int
    task: str
    what: str
    low: int = 0
    high: int = 0
    detail: str = ""


@dataclass(eq=False)
class Tasks:
    """The tasks of a world, and its clock: ``step`` counts decisions."""

    memory: Memory
    strategy: Strategy
    recording: bool = False
    tasks: list[Task] = field(default_factory=list)
    current: Task | None = None
    step: int = 0
    decisions: list[Decision] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._hub = greenlet.getcurrent()
        # those that run, wait, or have stores on their way, in the order of ``tasks``
        self.active: list[Task] = []
        self.failure: Violation | None = None  # the first one, which ends all tasks
        self.on_enter: Callable[[Task], None] = lambda task: None
        self.memory.arrived, self.memory.fail = self._wake, self.fail

    def task(self, name: str, rank: int) -> Task:
        number = len(self.tasks)
        clock = np.zeros(self.memory.components, np.int32)
        clock[number] = 1
        self.memory.names[number] = name
        self.tasks.append(Task(name, number, clock, rank=rank))
        return self.tasks[-1]

    def start(self, task: Task, body: Callable[[], None]) -> None:
        """Make ``task`` ready to run ``body``, after all that the current task did."""
        assert task.state == "idle", f"{task.name} is running"
        if self.current is not None:
            task.learn(self.current.clock)
            self.current.tick()
        task.tick()
        task.polled.clear()
        task.patience, task.patient = 0, False
        task.thread = greenlet.greenlet(lambda: self._body(task, body), self._hub)
        task.state = "ready"
        if not task.pending:  # else it is among them
            bisect.insort(self.active, task, key=lambda other: other.component)

    def _body(self, task: Task, body: Callable[[], None]) -> None:
        body()
        task.state = "idle"
        if not task.pending:
            self._retire(task)

    def _retire(self, task: Task) -> None:
        """``task`` is idle, and so are its stores."""
        self.active.remove(task)
        if task.on_drained is not None:
            task.on_drained(task)

    def run(self) -> None:
        """Run until every task is idle. Raises the first failure of any task."""
        self._hub = greenlet.getcurrent()
        try:
            while self.failure is None and (task := self._next()) is not None:
                self._enter(task)
        except (Violation, greenlet.GreenletExit):
            pass
        finally:
            self.current, failure = None, self.failure
            self.failure = failure or Violation("ended", "the world is closed")
            unfinished = [
                t.thread for t in self.tasks if t.thread is not None and not t.thread.dead
            ]
            for thread in unfinished:
                thread.throw()
            self.failure = failure
        if self.failure is not None:
            raise self.failure

    def fail(self, kind: str, text: str, low: int = 0, high: int = 0) -> Violation:
        """End all tasks. The first failure counts: later ones are its consequences."""
        if self.failure is None:
            self.failure = Violation(kind, text, low, high)
        return self.failure

    # --- What tasks call ---

    def point(self) -> None:
        """A scheduling point of the current task: other tasks may run, and stores may arrive."""
        me = self.running()
        following = self._next()
        if following is not me:
            if following is None:
                self._hub.switch()
            else:
                self._enter(following)
            self._entered(me)

    def park(self, *watched: tuple[int, int]) -> None:
        """Suspend the current task until some of the bytes [low, high) have changed."""
        self._leave("parked", watched)

    def block(self) -> None:
        """Suspend the current task until :meth:`unblock`."""
        self._leave("blocked", ())

    def unblock(self, task: Task) -> None:
        if task.state == "blocked":
            task.state = "ready"

    def note(self, what: str, low: int = 0, high: int = 0, detail: str = "") -> None:
        if self.recording:
            assert self.current is not None, "events are those of a task"
            self.events.append(Event(self.step, self.current.name, what, low, high, detail))

    # --- Switching ---

    def _leave(self, state: str, watched: tuple[tuple[int, int], ...]) -> None:
        me = self.running()
        me.state, me.watched = state, watched
        following = self._next()
        if following is not None and following is not me:
            self._enter(following)
        elif following is None:
            self._hub.switch()
        self._entered(me)

    def running(self) -> Task:
        """The running task."""
        if self.failure is not None:  # called in a `finally` while the task is being ended
            raise greenlet.GreenletExit
        assert self.current is not None, "only tasks call this"
        return self.current

    def _enter(self, task: Task) -> None:
        self._entered(task)
        assert task.thread is not None, f"{task.name} has not been started"
        task.thread.switch()

    def _entered(self, task: Task) -> None:
        self.current = task
        self.on_enter(task)

    def _next(self) -> Task | None:
        """The task that the strategy chooses, after the stores that it lets arrive; None when all
        are idle."""
        while True:
            ready = [t for t in self.active if t.state == "ready"]
            dirty = [t for t in self.active if t.pending]
            if not ready and not dirty:
                if not self.active:
                    return None
                if not self._stuck():
                    continue
                raise self.fail("deadlock", self._waiting_tasks())
            self.step += 1
            if self.step > MAX_STEPS:
                raise self.fail("livelock", f"not done after {MAX_STEPS} steps")
            decision = self.strategy.choose(ready, dirty, self.current, self.step)
            self.decisions.append(decision)
            task = self.tasks[decision.task]
            if decision.store < 0:
                return task
            self._arrive(task, task.eligible()[decision.store])

    def _arrive(self, task: Task, at: int) -> None:
        store = self.memory.arrive(task, at)
        if self.recording:
            self.events.append(Event(self.step, task.name, "arrives", store.low, store.high))
        if task.state == "idle" and not task.pending:
            self._retire(task)

    def _wake(self, low: int, high: int) -> None:
        """Bytes [low, high) have changed."""
        for task in self.active:
            if not task.polled and task.state != "parked":  # most often
                continue
            if task.polled and any(
                first < high and low < last for first, last in task.polled.values()
            ):
                task.polled.clear()  # another poll may see something new
                task.patient = False
            if task.state == "parked" and any(
                first < high and low < last for first, last in task.watched
            ):
                task.state, task.patient = "ready", False

    def _stuck(self) -> bool:
        """Whether it is final that no task can run. A task that polled in vain gets one more chance
        to do something else: it polls all places again, since it may have stopped between them."""
        again = [t for t in self.tasks if t.state == "parked" and t.polled and not t.patient]
        for task in again:
            task.state, task.patient = "ready", True
            task.patience = 1 + 2 * len(task.polled)
        return not again

    def _waiting_tasks(self) -> str:
        parts = []
        for task in self.tasks:
            if task.state == "parked":
                places = sorted({self.describe(low, high) for low, high in task.watched})
                parts.append(f"{task.name} waits for {', '.join(places)}")
            elif task.state == "blocked":
                parts.append(f"{task.name} waits for other tasks")
        return "; ".join(parts)

    def describe(self, low: int, high: int) -> str:
        if not self.memory.has(low, high):
            return f"{high - low} bytes"
        return self.memory.region(low, high, "").where(low, high)
