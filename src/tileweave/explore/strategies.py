"""Strategies that choose the next task: at random, by priorities, with bounded delays, adversarial,
or from a record.

Sources: PCT (ASPLOS 2010), priorities with a few change points, finds a bug of depth d with a
bounded probability. Delay-bounded scheduling (POPL 2011) tries every schedule that departs from a
plain one in at most d places.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tileweave.explore.tasks import Decision, Task


def _carry_on(ready: list[Task], dirty: list[Task], current: Task | None) -> Decision:
    """The plain schedule: the current task until it waits, then the first ready one; stores arrive
    when no task is ready."""
    if current is not None and current.state == "ready":
        return Decision(current.component)
    if ready:
        return Decision(ready[0].component)
    return Decision(dirty[0].component, 0)


@dataclass
class Walk:
    """A random walk. How often tasks switch and how late stores arrive is drawn once per run, from
    never to always."""

    seed: int
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.turn = self.random.choice((0.05, 0.3, 1.0))
        self.arrival = self.random.choice((0.0, 0.02, 0.2, 0.6))

    def choose(
        self, ready: list[Task], dirty: list[Task], current: Task | None, step: int
    ) -> Decision:
        draw = self.random.random
        if dirty and (not ready or draw() < self.arrival):
            task = self.random.choice(dirty)
            return Decision(task.component, self.random.randrange(len(task.eligible())))
        if current is not None and current.state == "ready" and draw() >= self.turn:
            return Decision(current.component)
        return Decision(self.random.choice(ready).component)


@dataclass
class Priorities:
    """PCT: the ready task with the highest priority runs; at a few random steps it gets the lowest
    one."""

    seed: int
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.ranks: dict[int, float] = {}
        length = self.random.choice((60, 200, 600))
        self.changes = {self.random.randrange(length) for _ in range(self.random.randint(1, 5))}
        self.lowest = 0.0

    def _priority(self, key: int) -> float:
        return self.ranks.setdefault(key, self.random.random())

    def choose(
        self, ready: list[Task], dirty: list[Task], current: Task | None, step: int
    ) -> Decision:
        best = max(
            [2 * t.component for t in ready] + [2 * t.component + 1 for t in dirty],
            key=self._priority,
        )
        if step in self.changes:
            self.lowest -= 1.0
            self.ranks[best] = self.lowest
        if best % 2 == 0:
            return Decision(best // 2)
        task = next(t for t in dirty if t.component == best // 2)
        return Decision(task.component, self.random.randrange(len(task.eligible())))


@dataclass
class Delays:
    """Delay-bounded: the plain schedule, but at the given choices the task that would run is passed
    over once.

    A choice is a step at which more than one task may run. ``eager``: stores arrive at once;
    otherwise as late as possible, the newest first.
    """

    steps: frozenset[int]  # numbers of choices, from 1
    eager: bool
    first: int = 0  # the task to begin with
    choices: int = 0  # so far

    def choose(
        self, ready: list[Task], dirty: list[Task], current: Task | None, step: int
    ) -> Decision:
        if dirty and (self.eager or not ready):
            return Decision(dirty[0].component, 0 if self.eager else len(dirty[0].eligible()) - 1)
        ring = sorted(ready, key=lambda t: (t.component < self.first, t.component))
        at = next((i for i, t in enumerate(ring) if t is current), None)
        if at is None:
            at = next(
                (
                    i
                    for i, t in enumerate(ring)
                    if current is not None and t.component > current.component
                ),
                0,
            )
        self.choices += len(ring) > 1
        return Decision(
            ring[(at + (len(ring) > 1 and self.choices in self.steps)) % len(ring)].component
        )


@dataclass
class Malice:
    """Adversarial delays: the given tasks run, and stores arrive, only when nothing else can.

    ``late`` are components of tasks; ``late_stores`` components of writers whose stores arrive
    last, the newest first.
    """

    late: frozenset[int]
    late_stores: frozenset[int]
    turns: int  # scheduling points between turns of the others

    def choose(
        self, ready: list[Task], dirty: list[Task], current: Task | None, step: int
    ) -> Decision:
        prompt = [t for t in dirty if t.component not in self.late_stores]
        if prompt:
            return Decision(prompt[0].component, 0)
        early = [t for t in ready if t.component not in self.late]
        if early:
            stays = current in early and step % self.turns != 0
            return Decision(
                current.component
                if stays and current
                else early[step // self.turns % len(early)].component
            )
        if ready:
            return _carry_on(ready, dirty, current)
        return Decision(dirty[0].component, len(dirty[0].eligible()) - 1)


@dataclass
class Written:
    """The plain schedule with ``departures`` from it, by step; for replays and shrinking."""

    departures: dict[int, Decision]

    def choose(
        self, ready: list[Task], dirty: list[Task], current: Task | None, step: int
    ) -> Decision:
        wanted = self.departures.get(step)
        if wanted is not None:
            if wanted.store < 0 and any(t.component == wanted.task for t in ready):
                return wanted
            task = next((t for t in dirty if t.component == wanted.task), None)
            if task is not None and 0 <= wanted.store < len(task.eligible()):
                return wanted
        return _carry_on(ready, dirty, current)


@dataclass
class Noting:
    """Another strategy, whose departures from the plain schedule are recorded."""

    inner: Walk | Priorities | Delays | Malice | Written
    departures: dict[int, Decision] = field(default_factory=dict)

    def choose(
        self, ready: list[Task], dirty: list[Task], current: Task | None, step: int
    ) -> Decision:
        decision = self.inner.choose(ready, dirty, current, step)
        # the plain schedule, most often; see _carry_on
        if current is not None and current.state == "ready":
            departs = decision.store >= 0 or decision.task != current.component
        else:
            departs = decision != _carry_on(ready, dirty, current)
        if departs:
            self.departures[step] = decision
        return decision
