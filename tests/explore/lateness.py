"""Ranks that never come to a call: the others' waits run out, as on a GPU, and everything comes to its end.

Real kernels and operators in the model of ``tileweave.explore``, with a clock that moves when nobody can go on: each wait has
the time that its word of ``control`` gave it when it began, and what is due first runs out first. Then the fault is set and
limits go, as ``expire`` does it, those of waits that have begun, too. The kernel goes on, as on a GPU; the interpreter would
raise.
"""

from __future__ import annotations

import ctypes
import sys
from itertools import product
from typing import Any

import torch

from tileweave.explore.interpreter import exploring
from tileweave.explore.memory import Violation
from tileweave.explore.ranks import World
from tileweave.explore.scenarios import AllGatherMatmul, Drawn, MatmulReduce, triton_config
from tileweave.explore.scenarios_embedding import DIM, EmbeddingBag
from tileweave.explore.strategies import Walk
from tileweave.explore.tasks import Task
from tileweave.kernels import embedding_bag_all_to_all as lookups
from tileweave.language import interpreted
from tileweave.sharding import EmbeddingConfig
from tileweave.transport.base import FAULT, MEETING_US, PUSHED_US, TIMEOUT_US
from tileweave.transport.workspace import MAX_SLICES

PATIENCE = 1000  # the limit of a meeting
SKEW = 5  # of two ranks: who gives up first lets its copies go, which others then wait for no more
ENGINE = triton_config("copy_engine")
SCENARIOS = (
    AllGatherMatmul("gather", ENGINE, ((16, 16, 16),), (1, 2, 3)),
    AllGatherMatmul("gather, few tiles", ENGINE, ((16, 8, 16),), (1, 2, 3)),
    AllGatherMatmul("gather, captured", ENGINE, ((16, 16, 16),), (1, 2, 3), captured=True),
    MatmulReduce("scatter", "matmul_reduce_scatter", ENGINE, ((96, 16, 16),), (1, 2, 3)),
    MatmulReduce("scatter, chunks", "matmul_reduce_scatter", ENGINE, ((192, 16, 16),), (1, 2, 3)),
    EmbeddingBag("lookup", (9,), 1, EmbeddingConfig(4, 2, 1, 1, 1)),
)
READY, DONE = lookups.READY.value, lookups.DONE.value
ABSENT = ((2, {0}), (2, {1}), (3, {0}), (3, {2}), (3, {0, 1}), (3, {1, 2}))  # of how many ranks who comes to one call only


class Clock:
    """Stands for ``wait`` and ``refuse_later``. ``ran_out``: (who, word, when), in turn."""

    def __init__(self, world: World) -> None:
        self.tasks, self.now = world.tasks, 0
        self.due: dict[Task, tuple[int, int, int]] = {}  # of who waits: when its time is up, its control block, the word there
        self.late: set[Task] = set()
        self.ran_out: list[tuple[str, int, int]] = []
        self.stuck, self.tasks._stuck = self.tasks._stuck, self.nobody_can_go_on

    def nobody_can_go_on(self) -> bool:
        waiting = [task for task in self.due if task.state == "parked"]
        if not waiting:
            return self.stuck()
        self.now = max(self.now, min(self.due[task][0] for task in waiting))
        for task in waiting:
            if self.due[task][0] <= self.now:
                self.give_up(task)
        return False

    def give_up(self, task: Task) -> None:
        self.late.add(task)
        if task.state == "parked":
            task.state = "ready"

    def expire(self, block: int, index: int) -> None:
        self.ran_out.append((self.tasks.current.name, index, self.now))
        for word, value in ((FAULT, 1), (TIMEOUT_US, 0), (MEETING_US, 0)):
            ctypes.c_int32.from_address(block + 4 * word).value = value
        for task, (_, its, limit) in self.due.items():
            if its == block and limit in (TIMEOUT_US, MEETING_US):  # waits that have begun read their limit again
                self.give_up(task)

    def wait(self, signals, count, epoch, first, unit, control, report, LIMIT=TIMEOUT_US):
        words, number, expected, begin, block, limit = map(
            interpreted._value, (signals, count, epoch, first, control, LIMIT)
        )  # fmt: skip
        me = self.tasks.current
        for index in range(begin, begin + number):
            time = ctypes.c_int32.from_address(block + 4 * limit).value
            self.due[me] = self.now + time, block, limit
            while interpreted.wrapped(interpreted.MEMORY.acquire(words + 4 * index) - expected) < 0:
                if time == 0 or me in self.late:
                    self.expire(block, index)
                    break
                self.tasks.park((words + 4 * index, words + 4 * index + 4))
            self.due.pop(me)
            self.late.discard(me)
        return interpreted._scalar(0)

    def refuse_later(self, signals, epoch, index, unit, control, report):
        words, expected, number, block = map(interpreted._value, (signals, epoch, index, control))
        if interpreted.wrapped(interpreted.MEMORY.acquire(words + 4 * number) - expected) > 0:
            self.expire(block, number)


def found_where_ranks_never_come() -> list[str]:
    """What goes wrong: nothing. For a process of its own, since it puts other words into kernels."""
    latest: list[Clock] = []
    for name in ("wait", "refuse_later"):
        word = getattr(interpreted, name)
        for module in list(sys.modules.values()):
            if getattr(module, name, None) is word and module.__name__.startswith("tileweave"):
                setattr(module, name, lambda *a, name=name, **k: getattr(latest[-1], name)(*a, **k))
    found = []
    with exploring() as enter:
        for scenario, programs, (size, absent), seed in product(SCENARIOS, (1, 2, 3), ABSENT, range(4)):
            world = World(size, programs, Walk(seed))
            enter(world)
            for check in ("check_read", "check_write", "observe"):  # after a fault data is NaN or late, and said to be
                setattr(world.memory, check, lambda *a, **k: None)
            latest.append(Clock(world))
            wrong = _run(world, scenario, programs, absent, latest[-1])
            enter(None)
            world.close()
            found += [f"{scenario.name}@{size} without {absent}, {programs} programs, seed {seed}: {text}" for text in wrong]
    return found


def _run(world: World, scenario: Any, programs: int, absent: set[int], clock: Clock) -> list[str]:
    """Four calls, of which ``absent`` come to the first."""
    calls, drawn = 4, Drawn(programs, None, 1, 3, 0)
    copied = scenario.op != EmbeddingBag.op
    kind = "copy_engine" if copied else "sm"
    results: dict[int, list[torch.Tensor]] = {rank: [] for rank in range(world.size)}

    def body(rank: int) -> None:
        scenario.begin(world, rank, drawn)
        control = world.workspace(rank).instance(scenario.op, kind).control
        patience = PATIENCE + rank * SKEW  # as if it had begun so much later
        for word, limit in ((TIMEOUT_US, patience + PATIENCE // 8), (MEETING_US, patience), (PUSHED_US, 2 * PATIENCE)):
            control[word] = limit
        for number in range(1 if rank in absent else calls):
            results[rank].append(next(iter(scenario.call(world, rank, number, drawn)))[1])

    try:
        world.run(body)
    except Violation as error:  # somebody waits for ever
        return [str(error)]
    wrong, first = [], {}
    for name, word, _ in clock.ran_out:
        first.setdefault(name.split(" program")[0], word)  # that is what a rank reports
    begin = world.size * MAX_SLICES  # of the words of a meeting
    words = {begin + rank for rank in absent} if copied else {rank * MAX_SLICES + n for rank in absent for n in (READY, DONE)}
    if not set(first.values()) <= words or len(first) != world.size - len(absent):
        wrong.append(f"reports name words {first}")
    if clock.now > PATIENCE + PATIENCE // 8 + world.size * SKEW:
        wrong.append(f"all have ended after {clock.now / PATIENCE} time-outs")
    for rank in range(world.size):
        instance = world.workspace(rank).instance(scenario.op, kind)
        if copied and instance.counters.count_nonzero():
            wrong.append(f"rank {rank} leaves counters {instance.counters.tolist()}")
        if int(instance.signals.max()) > calls:
            wrong.append(f"rank {rank} has a signal of call {int(instance.signals.max())}, and there were {calls}")
        for number, got in enumerate(() if copied else results[rank][1:]):
            late = [got[:, DIM * r : DIM * (r + 1)] for r in absent | {rank}]  # others may store, though nobody waits for them
            if not all(columns.isnan().all() for columns in late):
                wrong.append(f"rank {rank}'s result {number + 1} passes for right: {got.tolist()}")
    return wrong
