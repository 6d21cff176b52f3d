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
from contextlib import ExitStack
from functools import lru_cache
from typing import Any

import torch

from tileweave.device.interpreter import words as interpreted
from tileweave.device.triton import meet as meeting
from tileweave.device.triton import self_signaling as marked
from tileweave.explore.absent_cases import PAUSING, Case, cases
from tileweave.explore.fuzz import explorer
from tileweave.explore.memory import Violation
from tileweave.explore.ranks import World
from tileweave.explore.results import written_outside
from tileweave.explore.scenarios import Drawn, same
from tileweave.explore.scenarios_embedding import DIM, EmbeddingBag
from tileweave.explore.scenarios_exchange import OUT
from tileweave.explore.strategies import Walk
from tileweave.explore.tasks import Task
from tileweave.kernels.all_reduce import collective as exchange
from tileweave.kernels.all_reduce import one_shot as matmul_all_reduce
from tileweave.kernels.embedding import bag_all_to_all as lookups
from tileweave.kernels.embedding import gradient as embedding_gradient
from tileweave.ops.embedding.call import BACKWARD
from tileweave.transport.protocol import (
    EPOCH,
    FAULT,
    GROUP,
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
# fault -> cases that find it, the device or host function, where it is replaced (None: wherever it
# is known), what it does instead
FORGOTTEN: dict[str, tuple[str, str, Any, Callable[..., Any]]] = {
    "refuse_gone": ("paused", "refuse_gone", embedding_gradient, lambda peers, n, *_: n),
    "or_gone": ("paused", "or_gone", embedding_gradient, lambda peers, n, *_: n),
    "shards after a fault": ("paused", "faulted", exchange, lambda peers: 0),
    "gradients after a fault": ("paused", "faulted", embedding_gradient, lambda peers: 0),
    "signals of later calls": (
        "paused",
        "must_wait",
        interpreted,
        lambda seen, expected, exact: interpreted.wrapped(seen - expected) < 0,
    ),
    "two slots of eager copies": ("reading", "copy_slot", None, lambda instance: 0),
    "ranks that are ahead in a meeting": ("reading", "refuse_later", meeting, lambda *_: None),
}
# by operator: numbers of the signals that a rank waits for; with other operators ranks meet first
AWAITED = {EmbeddingBag.op: (lookups.READY.value, lookups.DONE.value), OUT: range(MAX_SLICES)}


class Clock:
    """Replaces ``wait``, ``refuse_later``, and the time and reports of self-signaling data.
    ``ran_out``: (task, index of the signal, time), in order."""

    def __init__(self, world: World) -> None:
        self.tasks, self.now, self.size = world.tasks, 0, world.size
        self.odd: list[str] = []  # reports that cannot be
        # of ranks that are absent from the start; the first report of a run is of one of them
        self.absent: tuple[int, ...] = ()
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
        self.on_waited = self.on_wait  # and after it, of this signal
        self.last_signal = 0
        self.stuck, self.tasks._stuck = self.tasks._stuck, self.no_task_can_go_on

    def begin(self, task: Task, body: Callable[[], None]) -> None:
        self.polls.pop(task, None)  # of its last kernel
        self.start(task, body)

    def no_task_can_go_on(self) -> bool:
        waiting = {task: due for task, (due, _, _) in self.due.items() if task.state == "parked"}
        polling = {task: due for task, due in self.polls.items() if task.state == "parked"}
        in_vain = [
            task
            for task in self.tasks.tasks
            if task.state == "parked" and task.polled and not task.patient
            if task not in waiting
        ]
        # no time passes for one that gave up in an earlier call, or would find what has come
        for task in in_vain:
            task.state, task.patience, task.patient = "ready", 30, True
        if in_vain:
            return False
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
        self.ran_out.append((self.tasks.running().name, index, self.now))
        leavers, fault = (ctypes.c_int32.from_address(block + 4 * w) for w in (LEAVERS, FAULT))
        leavers.value += 0 if fault.value else interpreted.protocol.LATE
        fault.value = 1
        head = ctypes.c_int64.from_address(block + 4 * GROUP).value
        blocks = [*interpreted.blocks_after(head)]
        for each in blocks:
            for word in (TIMEOUT_US, MEETING_US):
                ctypes.c_int32.from_address(each + 4 * word).value = 0
        for task, (_, its, limit) in self.due.items():
            # waits that have begun read their limit again
            if its in blocks and limit in (TIMEOUT_US, MEETING_US):
                self.give_up(task)

    def is_overdue(self, started, limit):
        due = (interpreted._value(started) + interpreted._value(limit)) // 1000
        me = self.tasks.running()
        if due > self.now:
            self.polls[me] = due
        else:
            self.polls.pop(me, None)
            me.patience = 30  # reading what has arrived, once more, is no poll
        return interpreted._scalar(int(due <= self.now))

    def report(self, control, report, signal, unit, expected, seen):
        """The report of self-signaling data, which names a peer and this call."""
        block, number = interpreted._value(control), interpreted._value(signal)
        call, me = ctypes.c_int32.from_address(block + 4 * EPOCH).value, self.tasks.running()
        peer, rest = divmod(number, MAX_SLICES)
        told = (interpreted._value(expected) - call, interpreted._value(seen) - call)
        # kernels that announce their end first have moved the epoch by now
        right = told in ((0, -1), (-1, -2))
        own = peer == me.rank and not ctypes.c_int32.from_address(block + 4 * FAULT).value
        if rest or own or not 0 <= peer < self.size or not right:
            self.odd.append(f"{me.name} reports signal {number}, calls {told} from its own")
        self._must_be_absent(peer)
        self.expire(block, number)

    def _must_be_absent(self, peer: int) -> None:
        """All other ranks have done what they can without the absent ones when the first wait times
        out."""
        if self.absent and not self.ran_out and peer not in self.absent:
            self.odd.append(f"{self.tasks.running().name} is the first to report, rank {peer}")

    def _check_signal(self, words: int, index: int) -> None:
        """:meth:`_must_be_absent` of the rank that writes a signal of the instance."""
        region = self.tasks.memory.find(words, words + 4)
        if region is not None and " signals " in region.name:
            meeting = index - self.size * MAX_SLICES
            self._must_be_absent(index // MAX_SLICES if meeting < 0 else meeting)

    def wait(
        self, signals, count, epoch, first, unit, control, report, LIMIT=TIMEOUT_US, EXACT=False
    ):
        words, number, expected, begin, block, limit = map(
            interpreted._value, (signals, count, epoch, first, control, LIMIT)
        )
        me = self.tasks.running()
        self.on_wait(bool(interpreted._value(EXACT)), limit)
        for index in range(begin, begin + number):
            time = ctypes.c_int32.from_address(block + 4 * limit).value
            self.due[me] = self.now + time, block, limit
            while interpreted.must_wait(
                interpreted.MEMORY.acquire(words + 4 * index), expected, EXACT
            ):
                if time == 0 or me in self.late:
                    self._check_signal(words, index)
                    self.expire(block, index)
                    break
                self.tasks.park((words + 4 * index, words + 4 * index + 4))
            self.due.pop(me)
            self.late.discard(me)
        self.last_signal = begin + number - 1
        self.on_waited(bool(interpreted._value(EXACT)), limit)
        return interpreted._scalar(0)

    def refuse_later(self, signals, epoch, index, unit, control, report):
        words, expected, number, block = map(interpreted._value, (signals, epoch, index, control))
        if interpreted.wrapped(interpreted.MEMORY.acquire(words + 4 * number) - expected) > 0:
            self.expire(block, number)


class Absence:
    """Runs cases, in a process of its own or a fork: it replaces device functions in kernels.
    ``enter`` sets the world in which kernels run."""

    def __init__(self, enter: Callable[[World | None], None]) -> None:
        self.enter, self.clocks = enter, list[Clock]()
        self.held: list[Task] | None = None  # paused tasks, where rank 1 is to be paused
        _go_by(self.clocks)
        modules: tuple[Any, ...] = (exchange, matmul_all_reduce)
        for module in modules:
            module.leave_early = self._then_pause(module.leave_early)
        push: Any = embedding_gradient.Push
        push.launch_alone = self._then_pause(push.launch_alone)

    def found(self, case: Case) -> list[str]:
        """What is wrong; nothing is expected."""
        world = _world(case.size, case.programs, case.seed, self.enter, self.clocks)
        try:
            if case.how == "paused":
                wrong = self._paused(case, world)
            elif case.how == "reading":
                wrong = self._reading(case, world)
            else:
                wrong = (_run_to_a_moment if case.how == "moments" else _run)(
                    world, case, self.clocks[-1]
                )
            wrong += self.clocks[-1].odd
        finally:
            self.enter(None)
            world.close()
            self.clocks.clear()
        return [f"{case}: {text}" for text in wrong]

    def _pause_rank_1(self) -> None:
        tasks = self.clocks[-1].tasks
        if self.held is not None and not self.held and tasks.running().rank == 1:
            self.held.append(tasks.running())
            tasks.block()

    def _then_pause(self, word: Callable[..., Any]) -> Callable[..., None]:
        def both(*words: Any) -> None:
            word(*words)
            self._pause_rank_1()

        return both

    def _paused(self, case: Case, world: World) -> list[str]:
        scenario, halfway = case.scenario, bool(case.absent)
        held, results = list[Task](), list[str]()
        self.held = held
        made, ahead = [0], list[Task]()  # calls that rank 0 has made; it, when it waits for rank 1

        def has_waited(exact: bool, limit: int) -> None:
            me = world.tasks.running()
            pushed = self.clocks[-1].last_signal == world.size * (MAX_SLICES + 1)
            if halfway and held and me.rank == 0 and made[0] == 1 and pushed:
                world.tasks.unblock(held[0])
                ahead.append(me)
                world.tasks.block()

        self.clocks[-1].on_waited = has_waited
        pausing = PAUSING.get(scenario)
        if pausing is not None:
            self.clocks[-1].on_wait = lambda *wait: self._pause_rank_1() if pausing(*wait) else None

        def body(rank: int) -> None:
            drawn = Drawn(1, None, 1, 3, 0)
            _begin(world, scenario, rank, drawn)
            for number in range((2 if halfway else 3) if rank == 0 else 1):
                wrong = list(_wrong_in_call(world, scenario, rank, number, drawn))
                results.extend(wrong if rank == 1 else [])
                made[0] += int(rank == 0)
            if rank == 0 and held and not halfway:
                world.tasks.unblock(held[0])
            if rank == 1 and ahead:
                world.tasks.unblock(ahead[0])

        try:
            world.run(body)
        finally:
            self.held = None
        return results + ([] if held else ["no rank was paused"])

    def _reading(self, case: Case, world: World) -> list[str]:
        clock, results, drawn = self.clocks[-1], list[str](), Drawn(1, None, 1, 3, 0)
        late = bool(case.absent)
        number_of = [0, 0]  # of the call that each rank is in
        waiting: dict[str, Task] = {}
        told: set[str] = set()

        def until(moment: str) -> None:
            if moment not in told:
                waiting[moment] = world.tasks.running()
                world.tasks.block()

        def tell(moment: str) -> None:
            told.add(moment)
            if moment in waiting:
                world.tasks.unblock(waiting.pop(moment))

        def waits(exact: bool, limit: int) -> None:
            if world.tasks.running().rank == 0 and late and number_of[0] == 2:
                world.memory.drain(world.tasks.running())  # rank 1 sees the number it came with
                tell("rank 0 is a call ahead")
                until("rank 1 reads")

        def has_waited(exact: bool, limit: int) -> None:
            mine = world.tasks.running().rank == 1 and number_of[1] == int(late)
            if mine and limit == TIMEOUT_US and "rank 1 reads" not in told:
                tell("rank 1 reads")
                until("rank 0 has ended")

        clock.on_wait, clock.on_waited = waits, has_waited

        def body(rank: int) -> None:
            _begin(world, case.scenario, rank, drawn)
            for number in range(1 + late if rank == 1 else CALLS if late else 2):
                if rank == 1 and late and number == 1:
                    until("rank 0 is a call ahead")
                number_of[rank] = number
                wrong = list(_wrong_in_call(world, case.scenario, rank, number, drawn))
                results.extend(wrong if rank == 1 else [])
            tell("rank 1 reads" if rank == 1 else "rank 0 has ended")

        world.run(body)
        return results


@lru_cache(maxsize=1)
def absence_of_process() -> Absence:
    """One for a process, which then runs nothing else."""
    return Absence(explorer())


def found_in_cases(how: str, forgets: str = "") -> list[str]:
    """In a process for such cases: what is wrong in those of this kind. ``forgets``: one of
    :data:`FORGOTTEN`, a fault to be found: the first case that finds it ends the run."""
    absence, found = absence_of_process(), list[str]()
    with ExitStack() as stack:
        if forgets:
            _, name, where, instead = FORGOTTEN[forgets]
            for module in _holding(name) if where is None else [where]:
                stack.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, instead)
        for case in cases(how):
            found += absence.found(case)
            if forgets and found:
                break
    return found


def _holding(name: str) -> list[Any]:
    """The modules of this package that have ``name``."""
    ours = [module for key, module in sys.modules.items() if key.startswith("tileweave.")]
    return [module for module in ours if hasattr(module, name)]


def _go_by(latest: list[Clock]) -> None:
    """Make waits, and polls of self-signaling data, use the latest clock."""
    for name in ("wait", "refuse_later"):
        word = getattr(interpreted, name)
        for module in _holding(name):
            if getattr(module, name) is word:
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


def _run(world: World, case: Case, clock: Clock) -> list[str]:
    """Make four calls, of which absent ranks make the first only."""
    _, scenario, programs, _, absent, _ = case
    everywhere = case.how == "everywhere"
    drawn = Drawn(programs, None, 1, 3, 0)
    results: dict[int, list[list[torch.Tensor]]] = {rank: [] for rank in range(world.size)}
    passes: list[str] = []
    # of a combine, a rank that waits for an absent one's weights sends nothing, and may be named
    if everywhere and scenario.op != "grouped_matmul_combine":
        clock.absent = absent

    def body(rank: int) -> None:
        _begin(world, scenario, rank, drawn)
        for number in range(1 if rank in absent else CALLS):
            results[rank].append([])
            for name, got, want in scenario.call(world, rank, number, drawn):
                if not torch.equal(got, want):  # else no data of an absent rank was missing
                    results[rank][-1].append(got)
                passes.extend(_wrong_parts(scenario, rank, number, name, got, want))

    try:
        world.run(body)
    except Violation as error:  # a task waits forever
        return [str(error)]
    times: dict[str, int] = {}  # of the first report of each rank that is not late
    for name, _, now in clock.ran_out:
        times.setdefault(name.split(" program")[0], now)
    copied = world.size * (MAX_SLICES + 1)  # own copies, which end whether peers come or not
    if scenario.op == "matmul_all_to_all" and any(word == copied for _, word, _ in clock.ran_out):
        passes.append("a wait for own copies times out")
    wrong, first = _wrong_of_late_ones(world, scenario, drawn, absent) if everywhere else [], {}
    for name, word, _ in clock.ran_out:
        first.setdefault(name.split(" program")[0], word)  # a rank reports its first
    if not first:
        wrong.append("no rank reports")
    if everywhere and scenario.op in (
        EmbeddingBag.op,
        BACKWARD,
    ):  # all ranks meet, whatever they send
        wrong += [
            f"{name} reports after {now}"
            for name, now in times.items()
            if now > PATIENCE + 4 * SKEW
        ]
    for rank in sorted(set(range(world.size)) - set(absent)):
        for number, found in enumerate(results[rank][1:]):
            sums = [got for got in found if got.is_floating_point() and got.numel()]
            if sums and not any(got.isnan().any() for got in sums):
                wrong.append(f"rank {rank}'s result {number + 1} passes for right")
    return (
        wrong
        + passes
        + ([] if everywhere else _wrong_in_detail(world, scenario, absent, clock, first, results))
    )


def _wrong_of_late_ones(
    world: World, scenario: Any, drawn: Drawn, absent: tuple[int, ...]
) -> list[str]:
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


def _wrong_parts(
    scenario: Any, rank: int, number: int, name: str, got: torch.Tensor, want: torch.Tensor
) -> list[str]:
    """Each element of a result is right or NaN, and nothing is stored after it. Rows of a slot are
    only reported."""
    wrong = []
    if got.is_floating_point() and not name.startswith(KEPT + scenario_keeps(scenario)):
        if not (same(got, want) | got.isnan()).all():
            wrong.append(f"rank {rank} in call {number}: a part of {name} passes for right")
        if written_outside(got):
            wrong.append(f"rank {rank} in call {number}: stores next to {name}")
    return wrong


def _wrong_in_call(
    world: World, scenario: Any, rank: int, number: int, drawn: Drawn
) -> Iterator[str]:
    for name, got, want in scenario.call(world, rank, number, drawn):
        said = got.is_floating_point() and got.isnan().any()
        by_shards = name == "gathered" and scenario.name.startswith("by shards")
        if not got.is_floating_point() or (
            name.startswith(KEPT + scenario_keeps(scenario)) and not by_shards
        ):
            said = said or any(
                int(i.control[FAULT]) for i in world.workspace(rank).instances.values()
            )
        if not said and not torch.equal(got, want):
            yield f"rank {rank} in call {number}: {name} passes for right"
        if scenario.op != EmbeddingBag.op:  # ranks that come late store to regions after the NaN
            yield from _wrong_parts(scenario, rank, number, name, got, want)


def _run_to_a_moment(world: World, case: Case, clock: Clock) -> list[str]:
    """Make four calls on every rank. In the second, absent ranks arrive when a random number of
    waits of the others have timed out.

    All results are right, or NaN, or (rows that stay, and whole numbers) their rank has timed out.
    Where copy engines send what a rank that gave up still has to send, check only that every call
    ends: see "Open" in decision 0007.
    """
    _, scenario, programs, _, absent, _ = case
    drawn, wrong, waiting, ended = Drawn(programs, None, 1, 3, 0), [], [], set(absent)
    moment = random.Random(f"{scenario.name} {programs} {list(absent)}").choice((1, 1, 2, 3, 5, 8))
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
    words = {begin + rank for rank in absent}
    if scenario.op in AWAITED:
        words = {rank * MAX_SLICES + n for rank in absent for n in AWAITED[scenario.op]}
    if not set(first.values()) <= words:
        wrong.append(f"reports name words {first}")
    for rank in range(world.size):
        instance = scenario.instance(world, rank)
        if copied and instance.counters.count_nonzero():
            wrong.append(f"rank {rank} leaves counters {instance.counters.tolist()}")
        if int(instance.signals.max()) > CALLS:
            wrong.append(
                f"rank {rank} has a signal of call {int(instance.signals.max())}, and there "
                f"were {CALLS}"
            )
        for number, found in enumerate(() if copied else results[rank][1:]):
            late = [
                found[0][:, DIM * r : DIM * (r + 1)] for r in {*absent, rank}
            ]  # others may store, though no rank waits for them
            if not all(columns.isnan().all() for columns in late):
                wrong.append(
                    f"rank {rank}'s result {number + 1} has right columns: {found[0].tolist()}"
                )
    return wrong
