"""Ranks that are absent from a call: the waits of the others time out, as on a GPU, and every call
ends.

Real kernels and operators run in the model of ``tileweave.explore``, with a clock that advances
when no task can go on. Each wait, and each poll of self-signaling data, has the limit that its
entry of ``control`` had when it began, and times out in order of the limits. Then the fault is set
and limits become zero, as in ``expire``, also for waits that have begun. The kernel goes on, as on
a GPU; the interpreter would raise.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from tileweave.device.interpreter import words as interpreted
from tileweave.device.triton import self_signaling as marked
from tileweave.explore.interpreter import exploring
from tileweave.explore.memory import Violation
from tileweave.explore.ranks import World
from tileweave.explore.scenarios import AllGatherMatmul, Drawn, MatmulReduce, OneShot, triton_config
from tileweave.explore.scenarios_embedding import DIM, EmbeddingBag, TableGradient
from tileweave.explore.search import SCENARIOS as EXPLORED
from tileweave.explore.strategies import Walk
from tileweave.explore.tasks import Task
from tileweave.kernels.all_reduce import collective as exchange
from tileweave.kernels.all_reduce import one_shot as matmul_all_reduce
from tileweave.kernels.embedding import bag_all_to_all as lookups
from tileweave.kernels.embedding import gradient as embedding_gradient
from tileweave.ops.embedding.bag_all_to_all_fused import BACKWARD
from tileweave.planning.sharding import EmbeddingConfig
from tileweave.transport.protocol import (
    FAULT,
    LEAVERS,
    MAX_SLICES,
    MEETING_US,
    PUSHED_US,
    TIMEOUT_US,
)
from tileweave.transport.workspace import COPIED

PATIENCE = 1000  # the limit of a meeting
# results that hold what a slot held: after a timeout they are only reported
KEPT = ("gathered", "exchanged", "token")
CALLS = 4  # absent ranks make the first of these
# between two ranks: the one that gives up first releases its copies, for which others then no
# longer wait
SKEW = 5
ENGINE = triton_config("copy_engine")
SCENARIOS = (
    AllGatherMatmul("gather", ENGINE, ((16, 16, 16),), (1, 2, 3)),
    AllGatherMatmul("gather, few tiles", ENGINE, ((16, 8, 16),), (1, 2, 3)),
    AllGatherMatmul("gather, captured", ENGINE, ((16, 16, 16),), (1, 2, 3), captured=True),
    MatmulReduce("scatter", "matmul_reduce_scatter", ENGINE, ((96, 16, 16),), (1, 2, 3)),
    MatmulReduce("scatter, chunks", "matmul_reduce_scatter", ENGINE, ((192, 16, 16),), (1, 2, 3)),
    EmbeddingBag("lookup", (9,), 1, EmbeddingConfig(4, 2, 1, 1, 1)),
)
GATHER = AllGatherMatmul(
    "library gather", triton_config("sm", kernel="library"), ((2, 16, 16),), (1,), gathered=True
)
# rank 1 is paused before it looks whether data of copy engines is there
COPIED_GATHERS = (
    AllGatherMatmul("copied gather", ENGINE, ((16, 16, 16),), (1,)),
    AllGatherMatmul("copied gather, captured", ENGINE, ((16, 16, 16),), (1,), captured=True),
)
# rank 1 is paused before it sums what others pushed
SUMS = TableGradient("groups", 1, 2, "sm")
PAUSING: dict[Any, Callable[[bool, int], bool]] = {
    **{scenario: lambda exact, limit: exact for scenario in COPIED_GATHERS},
    SUMS: lambda exact, limit: limit == PUSHED_US,
}
PAUSED = (
    *COPIED_GATHERS,
    SUMS,
    GATHER,
    OneShot("one shot", triton_config("sm", shots=1), ((3, 16, 16),), norm=False),
    MatmulReduce(
        "library",
        "matmul_reduce_scatter",
        triton_config("sm", kernel="library"),
        ((16, 16, 16),),
        (1,),
    ),
    TableGradient("alone by copy engines", 1, 2, "copy_engine", alone=True),
)
# fault -> where, which device function, what it does instead, scenarios that find that
FORGOTTEN: dict[str, tuple[Any, ...]] = {
    "refuse_gone": (embedding_gradient, "refuse_gone", lambda peers, n, *_: n, PAUSED[-1]),
    "or_gone": (embedding_gradient, "or_gone", lambda peers, n, *_: n, PAUSED[-1]),
    "shards after a fault": (exchange, "faulted", lambda peers: 0, GATHER),
    "gradients after a fault": (embedding_gradient, "faulted", lambda peers: 0, SUMS),
    "signals of later calls": (
        interpreted,
        "must_wait",
        lambda seen, expected, exact: interpreted.wrapped(seen - expected) < 0,
        *COPIED_GATHERS,
    ),
}
READY, DONE = lookups.READY.value, lookups.DONE.value


def _of_one_size(scenario: Any) -> Any:
    """No call grows the memory of the first one: growth is a step of all ranks."""
    sizes = (
        name
        for name in ("shapes", "tokens", "batches")
        if isinstance(getattr(scenario, name, None), tuple)
    )
    return replace(scenario, **{name: getattr(scenario, name)[-1:] for name in sizes})


EVERYTHING = tuple(map(_of_one_size, EXPLORED))
# (world size, ranks that make one call only)
ABSENT = ((2, {0}), (2, {1}), (3, {0}), (3, {2}), (3, {0, 1}), (3, {1, 2}))


class Clock:
    """Replaces ``wait``, ``refuse_later``, and the time and reports of self-signaling data.
    ``ran_out``: (task, index of the signal, time), in order."""

    def __init__(self, world: World) -> None:
        self.tasks, self.now = world.tasks, 0
        # per waiting task: when its time is up, its control block, its entry there
        self.due: dict[Task, tuple[int, int, int]] = {}
        # per task that polls self-signaling data: when its time is up
        self.polls: dict[Task, int] = {}
        self.late: set[Task] = set()
        interpreted.MEMORY.seconds = lambda: self.now * 1e-6
        self.start, self.tasks.start = self.tasks.start, self.begin
        self.ran_out: list[tuple[str, int, int]] = []
        # called before each wait: whether it refuses signals of later calls, and its limit
        self.on_wait: Callable[[bool, int], None] = lambda exact, limit: None
        self.stuck, self.tasks._stuck = self.tasks._stuck, self.no_task_can_go_on

    def begin(self, task: Task, body: Callable[[], None]) -> None:
        self.polls.pop(task, None)  # of its last kernel
        self.start(task, body)

    def no_task_can_go_on(self) -> bool:
        waiting = {task: due for task, (due, _, _) in self.due.items() if task.state == "parked"}
        polling = {task: due for task, due in self.polls.items() if task.state == "parked"}
        if not waiting and not polling:
            final = self.stuck()
            for task in self.tasks.tasks:
                # a task that gave up in an earlier call polls each part in vain, and never asks for
                # the time
                task.patience *= 10
            return final
        self.now = max(self.now, min((waiting | polling).values()))
        for task in (task for task, due in waiting.items() if due <= self.now):
            self.give_up(task)
        for task in (task for task, due in polling.items() if due <= self.now):
            del self.polls[task]  # it asks for the time again, or does not poll again
            task.state, task.patience, task.patient = "ready", 30, True
        return False

    def give_up(self, task: Task) -> None:
        self.late.add(task)
        if task.state == "parked":
            task.state = "ready"

    def expire(self, block: int, index: int) -> None:
        self.ran_out.append((self.tasks.current.name, index, self.now))
        words = {
            word: ctypes.c_int32.from_address(block + 4 * word)
            for word in (LEAVERS, FAULT, TIMEOUT_US, MEETING_US)
        }
        words[LEAVERS].value += 0 if words[FAULT].value else interpreted.protocol.LATE
        words[FAULT].value, words[TIMEOUT_US].value, words[MEETING_US].value = 1, 0, 0
        for task, (_, its, limit) in self.due.items():
            # waits that have begun read their limit again
            if its == block and limit in (TIMEOUT_US, MEETING_US):
                self.give_up(task)

    def is_overdue(self, started, limit):
        due, me = (
            (interpreted._value(started) + interpreted._value(limit)) // 1000,
            self.tasks.current,
        )
        if due > self.now:
            self.polls[me] = due
        else:
            self.polls.pop(me, None)
            me.patience = 30  # reading what has arrived, once more, is no poll
        return interpreted._scalar(int(due <= self.now))

    def report(self, control, report, signal, unit, expected, seen):
        self.expire(interpreted._value(control), interpreted._value(signal))

    def wait(
        self, signals, count, epoch, first, unit, control, report, LIMIT=TIMEOUT_US, EXACT=False
    ):
        words, number, expected, begin, block, limit = map(
            interpreted._value, (signals, count, epoch, first, control, LIMIT)
        )
        me = self.tasks.current
        self.on_wait(bool(interpreted._value(EXACT)), limit)
        for index in range(begin, begin + number):
            time = ctypes.c_int32.from_address(block + 4 * limit).value
            self.due[me] = self.now + time, block, limit
            while interpreted.must_wait(
                interpreted.MEMORY.acquire(words + 4 * index), expected, EXACT
            ):
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


def found_with_absent_ranks(how: str) -> list[str]:
    """Return what is wrong; nothing is expected. Needs its own process, since it replaces device
    functions in kernels.

    ``how`` is "named": check which rank reports what; "everywhere": with every operator, but check
    only that all calls end, that a rank reports why and that results are NaN; "moments": with every
    operator, and absent ranks arrive while the others give up.
    """
    latest: list[Clock] = []
    _go_by(latest)
    found = []
    with exploring() as enter:
        cases = product(SCENARIOS, (1, 2, 3), ABSENT, range(4))
        if how != "named":
            cases = (
                case
                for s in EVERYTHING
                for case in product((s,), s.programs, ABSENT[1::2], range(1))
            )
        run = (
            _run_to_a_moment if how == "moments" else partial(_run, everywhere=how == "everywhere")
        )
        for scenario, programs, (size, absent), seed in cases:
            world = _world(size, programs, seed, enter, latest)
            wrong = run(world, scenario, programs, absent, latest[-1])
            enter(None)
            world.close()
            found += [
                f"{scenario.name}@{size} without {absent}, {programs} programs, seed {seed}: {text}"
                for text in wrong
            ]
    return found


def found_with_a_paused_rank(forgets: str = "") -> list[str]:
    """Rank 1 is paused in its first call, after its pushes, until rank 0 has given up the second
    call and ended the third, which has the slot of the first one. The first result of rank 1 is
    right, or NaN, or reported.

    Needs its own process. ``forgets``: one of :data:`FORGOTTEN`, a fault to be found.
    """
    latest: list[Clock] = []
    _go_by(latest)
    held: list[Task] = []

    def pause_rank_1() -> None:
        tasks = latest[-1].tasks
        if not held and tasks.current.rank == 1:
            held.append(tasks.current)
            tasks.block()

    def then_pause(word: Callable[..., Any]) -> Callable[..., None]:
        def both(*words: Any) -> None:
            word(*words)
            pause_rank_1()

        return both

    for module in (exchange, matmul_all_reduce):
        module.leave_early = then_pause(module.leave_early)
    embedding_gradient.Push.launch_alone = then_pause(embedding_gradient.Push.launch_alone)
    scenarios: tuple[Any, ...] = PAUSED
    if forgets:
        module, name, instead, *scenarios = FORGOTTEN[forgets]
        setattr(module, name, instead)
    found = []
    with exploring() as enter:
        for scenario, seed in product(scenarios, range(4)):
            world, results = _world(2, 1, seed, enter, latest), []
            held.clear()
            pausing = PAUSING.get(scenario)
            if pausing is not None:
                latest[-1].on_wait = lambda *wait, pausing=pausing: (
                    pause_rank_1() if pausing(*wait) else None
                )

            def body(
                rank: int,
                world: World = world,
                scenario: Any = scenario,
                results: list[str] = results,
            ) -> None:
                drawn = Drawn(1, None, 1, 3, 0)
                _begin(world, scenario, rank, drawn)
                for number in range(3 if rank == 0 else 1):
                    wrong = list(_wrong_in_call(world, scenario, rank, number, drawn))
                    results.extend(wrong if rank == 1 else [])
                if rank == 0:
                    world.tasks.unblock(held[0])

            world.run(body)
            enter(None)
            world.close()
            found += [f"{scenario.name}, seed {seed}: {text}" for text in results] + (
                [] if held else ["no rank was paused"]
            )
    return found


def _go_by(latest: list[Clock]) -> None:
    """Make waits, and polls of self-signaling data, use the latest clock."""
    for name in ("wait", "refuse_later"):
        word = getattr(interpreted, name)
        for module in list(sys.modules.values()):
            if getattr(module, name, None) is word and module.__name__.startswith("tileweave"):
                setattr(module, name, lambda *a, name=name, **k: getattr(latest[-1], name)(*a, **k))
    marked._is_overdue = lambda *a: latest[-1].is_overdue(*a)
    marked.expire = lambda *a: latest[-1].report(*a)


def _world(size: int, programs: int, seed: int, enter: Any, latest: list[Clock]) -> World:
    world = World(size, programs, Walk(seed))
    enter(world)
    # after a fault data is NaN or late, which is reported
    for check in ("check_read", "check_write", "observe"):
        setattr(world.memory, check, lambda *a, **k: None)
    latest.append(Clock(world))
    return world


def _begin(world: World, scenario: Any, rank: int, drawn: Drawn) -> None:
    scenario.begin(world, rank, drawn)
    patience = PATIENCE + rank * SKEW  # as if it had begun later by that much
    for instance in world.workspace(rank).instances.values():
        world.know(rank, "signal table", instance.signal_table)
        for word, limit in (
            (TIMEOUT_US, patience + PATIENCE // 8),
            (MEETING_US, patience),
            (PUSHED_US, 2 * PATIENCE),
        ):
            instance.control[word] = limit


def _run(
    world: World, scenario: Any, programs: int, absent: set[int], clock: Clock, everywhere: bool
) -> list[str]:
    """Make four calls, of which ``absent`` make the first only."""
    drawn = Drawn(programs, None, 1, 3, 0)
    results: dict[int, list[list[torch.Tensor]]] = {rank: [] for rank in range(world.size)}

    def body(rank: int) -> None:
        _begin(world, scenario, rank, drawn)
        for number in range(1 if rank in absent else CALLS):
            results[rank].append([got for _, got, _ in scenario.call(world, rank, number, drawn)])

    try:
        world.run(body)
    except Violation as error:  # a task waits forever
        return [str(error)]
    wrong, first = _wrong_of_late_ones(world, scenario, drawn, absent) if everywhere else [], {}
    for name, word, _ in clock.ran_out:
        first.setdefault(name.split(" program")[0], word)  # a rank reports its first
    if not first:
        wrong.append("no rank reports")
    for rank in sorted(set(range(world.size)) - absent):
        for number, found in enumerate(results[rank][1:]):
            sums = [got for got in found if got.is_floating_point()]
            if sums and not any(got.isnan().any() for got in sums):
                wrong.append(f"rank {rank}'s result {number + 1} passes for right")
    return wrong + (
        [] if everywhere else _wrong_in_detail(world, scenario, absent, clock, first, results)
    )


def _wrong_of_late_ones(world: World, scenario: Any, drawn: Drawn, absent: set[int]) -> list[str]:
    """Absent ranks arrive after all, when the others have long given up and are calls ahead. Their
    results are right, or NaN. If they are rows of a slot or whole numbers, these ranks may have
    timed out themselves instead."""
    wrong = []

    def body(rank: int) -> None:
        for number in range(1, CALLS if rank in absent else 0):
            wrong.extend(_wrong_in_call(world, scenario, rank, number, drawn))

    try:
        world.run(body)
    except Violation as error:
        return [f"with ranks that come late: {error}"]
    return wrong


def scenario_keeps(scenario: Any) -> tuple[str, ...]:
    """Tables that took steps in place of gradients that copy engines brought: these steps cannot be
    undone."""
    return ("table",) if getattr(scenario, "carrier", "sm") == "copy_engine" else ()


def _wrong_in_call(
    world: World, scenario: Any, rank: int, number: int, drawn: Drawn
) -> Iterator[str]:
    for name, got, want in scenario.call(world, rank, number, drawn):
        said = got.is_floating_point() and got.isnan().any()
        if not got.is_floating_point() or name.startswith(KEPT + scenario_keeps(scenario)):
            said = said or any(
                int(i.control[FAULT]) for i in world.workspace(rank).instances.values()
            )
        if not said and not torch.equal(got, want):
            yield f"rank {rank} in call {number}: {name} passes for right"


def _run_to_a_moment(
    world: World, scenario: Any, programs: int, absent: set[int], clock: Clock
) -> list[str]:
    """Make four calls on every rank. In the second, ``absent`` arrive when a random number of waits
    of the others have timed out.

    All results are right, or NaN, or (rows that stay, and whole numbers) their rank has timed out.
    Where copy engines send what a rank that gave up still has to send, check only that every call
    ends: see decision 0007, open questions.
    """
    drawn, wrong, waiting, ended = Drawn(programs, None, 1, 3, 0), [], [], set(absent)
    moment = random.Random(f"{scenario.name} {programs} {sorted(absent)}").choice(
        (1, 1, 2, 3, 5, 8)
    )
    expire = clock.expire

    def come() -> None:
        while waiting and (len(clock.ran_out) >= moment or len(ended) == world.size):
            world.tasks.unblock(waiting.pop())

    def expire_and_come(block: int, index: int) -> None:
        expire(block, index)
        come()

    def body(rank: int) -> None:
        _begin(world, scenario, rank, drawn)
        for number in range(CALLS):
            if number == 1 and rank in absent and len(clock.ran_out) < moment:
                waiting.append(world.ranks[rank].host)
                world.tasks.block()
            wrong.extend(_wrong_in_call(world, scenario, rank, number, drawn))
        ended.add(rank)
        come()

    clock.expire = expire_and_come
    try:
        world.run(body)
    except Violation as error:
        return [str(error)]
    kinds = (
        kind
        for rank in range(world.size)
        for op, kind in world.workspace(rank).instances
        if op != BACKWARD
    )
    copied = any(kind in COPIED for kind in kinds)
    return [] if copied else wrong


def _wrong_in_detail(world, scenario, absent, clock, first, results) -> list[str]:
    """Where no rank waits for a waiting rank: all report in time and name an absent rank. Also
    check what remains."""
    wrong, begin = [], world.size * MAX_SLICES  # index of the first signal of a meeting
    if len(first) != world.size - len(absent):
        wrong.append(f"reports of {sorted(first)}")
    if clock.now > PATIENCE + PATIENCE // 8 + world.size * SKEW:
        wrong.append(f"all have ended after {clock.now / PATIENCE} time-outs")
    copied = scenario.op != EmbeddingBag.op
    words = (
        {begin + rank for rank in absent}
        if copied
        else {rank * MAX_SLICES + n for rank in absent for n in (READY, DONE)}
    )
    if not set(first.values()) <= words:
        wrong.append(f"reports name words {first}")
    for rank in range(world.size):
        instance = world.workspace(rank).instance(scenario.op, "copy_engine" if copied else "sm")
        if copied and instance.counters.count_nonzero():
            wrong.append(f"rank {rank} leaves counters {instance.counters.tolist()}")
        if int(instance.signals.max()) > CALLS:
            wrong.append(
                f"rank {rank} has a signal of call {int(instance.signals.max())}, and there "
                f"were {CALLS}"
            )
        for number, found in enumerate(() if copied else results[rank][1:]):
            late = [
                found[0][:, DIM * r : DIM * (r + 1)] for r in absent | {rank}
            ]  # others may store, though no rank waits for them
            if not all(columns.isnan().all() for columns in late):
                wrong.append(
                    f"rank {rank}'s result {number + 1} has right columns: {found[0].tolist()}"
                )
    return wrong
