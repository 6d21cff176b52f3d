"""A rank that never comes to a call: the others' waits run out, as on a GPU, and everything comes to its end.

Real kernels and operators in the model of ``tileweave.explore``, which has no time: what runs out does so when nobody can go
on, meetings before waits for data, those before waits for own copies, as their limits are (``transport/base.py``). Then the
fault is set, later waits for data have no time at all, and the kernel goes on, as on a GPU; the interpreter would raise.
"""

from __future__ import annotations

import ctypes
import sys
from itertools import product
from typing import Any

from tileweave.explore.interpreter import exploring
from tileweave.explore.memory import Violation
from tileweave.explore.ranks import World
from tileweave.explore.scenarios import AllGatherMatmul, Drawn, MatmulReduce, triton_config
from tileweave.explore.strategies import Walk
from tileweave.language import interpreted
from tileweave.transport.base import FAULT, MEETING_US, PUSHED_US, TIMEOUT_US
from tileweave.transport.workspace import MAX_SLICES

ENGINE = triton_config("copy_engine")
SCENARIOS = (
    AllGatherMatmul("gather", ENGINE, ((16, 16, 16),), (1, 2, 3)),
    AllGatherMatmul("gather, captured", ENGINE, ((16, 16, 16),), (1, 2, 3), captured=True),
    MatmulReduce("scatter", "matmul_reduce_scatter", ENGINE, ((64, 16, 16),), (1, 2, 3)),
    MatmulReduce("scatter, chunks", "matmul_reduce_scatter", ENGINE, ((192, 16, 16),), (1, 2, 3)),
)


class Lateness:
    """Stands for ``wait``: who waits may run out of time. ``ran_out``: (who, word), in turn."""

    def __init__(self, world: World) -> None:
        self.tasks, self.ran_out, self.waiting = world.tasks, [], {}
        self.stuck, self.tasks._stuck = self.tasks._stuck, self.nobody_can_go_on

    def nobody_can_go_on(self) -> bool:
        for limit in (MEETING_US, TIMEOUT_US, PUSHED_US):
            late = [task for task, of in self.waiting.items() if of == limit and task.state == "parked"]
            for task in late:
                self.waiting[task], task.state = None, "ready"
            if late:
                return False
        return self.stuck()

    def wait(self, signals, count, epoch, first, unit, control, report, LIMIT=TIMEOUT_US):
        words, number, expected, begin, block, limit = map(
            interpreted._value, (signals, count, epoch, first, control, LIMIT)
        )  # fmt: skip
        me = self.tasks.current
        for index in range(begin, begin + number):
            word = words + 4 * index
            at_once = limit == TIMEOUT_US and ctypes.c_int32.from_address(block + 4 * FAULT).value
            while interpreted.wrapped(interpreted.MEMORY.acquire(word) - expected) < 0:
                if at_once or (me in self.waiting and self.waiting[me] is None):
                    self.waiting.pop(me, None)
                    self.ran_out.append((me.name, index))
                    ctypes.c_int32.from_address(block + 4 * FAULT).value = 1
                    return interpreted._scalar(0)
                self.waiting[me] = limit
                self.tasks.park((word, word + 4))
            self.waiting.pop(me, None)
        return interpreted._scalar(0)


def found_where_a_rank_never_comes() -> list[str]:
    """What goes wrong: nothing. For a process of its own, since it puts another ``wait`` into kernels."""
    latest: list[Lateness] = []
    words = interpreted.wait
    for module in list(sys.modules.values()):
        if getattr(module, "wait", None) is words and module.__name__.startswith("tileweave"):
            module.wait = lambda *args, **kwargs: latest[-1].wait(*args, **kwargs)  # type: ignore[attr-defined]
    found = []
    with exploring() as enter:
        for scenario, programs, size, seed in product(SCENARIOS, (1, 2, 3), (2, 3), range(12)):
            world = World(size, programs, Walk(seed))
            enter(world)
            for check in ("check_read", "check_write", "observe"):  # after a fault data is NaN or late, and said to be
                setattr(world.memory, check, lambda *a, **k: None)
            latest.append(Lateness(world))
            wrong = _run(world, scenario, programs, seed % size, latest[-1])
            enter(None)
            world.close()
            found += [f"{scenario.name}@{size}, {programs} programs, seed {seed}: {text}" for text in wrong]
    return found


def _run(world: World, scenario: Any, programs: int, absent: int, lateness: Lateness) -> list[str]:
    """Two calls, the second without ``absent``."""
    drawn = Drawn(programs, None, 1, 3, 0)

    def body(rank: int) -> None:
        scenario.begin(world, rank, drawn)
        for number in range(1 if rank == absent else 2):
            list(scenario.call(world, rank, number, drawn))

    try:
        world.run(body)
    except Violation as error:  # somebody waits for ever
        return [str(error)]
    wrong, first = [], {}
    for name, word in lateness.ran_out:
        first.setdefault(name.split(" program")[0], word)  # that is what a rank reports
    if set(first.values()) != {world.size * MAX_SLICES + absent} or len(first) != world.size - 1:
        wrong.append(f"rank {absent} is absent, and reports name words {first}")
    for rank in range(world.size):
        instance = world.workspace(rank).instance(scenario.op, "copy_engine")
        if instance.counters.count_nonzero():
            wrong.append(f"rank {rank} leaves counters {instance.counters.tolist()}")
        if int(instance.signals.max()) > 2:
            wrong.append(f"rank {rank} has a signal of call {int(instance.signals.max())}, and there were 2")
    return wrong
