"""``tileweave fuzz``: many interleavings of every operator, in worker processes, until the first
one that fails."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product
from math import ceil
from multiprocessing import get_context
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from tileweave.bench.console import Steps
from tileweave.bench.prerequisites import need
from tileweave.errors import require
from tileweave.launcher import changed_environment

STRATEGIES = ("walk", "pct", "delay", "malice")
# How many of fourteen interleavings have a world of 2, 3 or 4 ranks; a larger world takes longer.
SHARES = {2: 10, 3: 3, 4: 1}
# CPU time of one interleaving, relative to that of a usual scenario, where it is far from it. Each
# scenario gets as many interleavings as make their time about equal. Those of this process alone in
# which no task has a choice are cheaper, but have few schedules: they count as 2.
COSTS = {
    "grouped_matmul_combine/uneven": 8,
    "local/quantised": 8,
    "embedding_bag_all_to_all_backward/nine tables": 6,
    "local/table sums": 6,
    "local/transfers of a rail": 6,
    "all_gather_matmul/FP8, library": 5,
    "dispatch_grouped_matmul.routing/two slices": 5,
    "embedding_bag_all_to_all_backward/nine tables by copy engines": 5,
    "embedding_bag_all_to_all_backward/over nodes": 4,
    "local/rows of experts": 4,
    "local/sums of one rank": 4,
    "matmul_reduce_scatter/FP8, kernel": 4,
    "all_gather_matmul/FP8, kernel, blocks": 3,
    "dispatch_grouped_matmul/uneven": 3,
    "embedding_bag_all_to_all_backward/alone": 3,
    "embedding_bag_all_to_all_backward/groups": 3,
    "embedding_bag_all_to_all_backward/several tickets of a group": 3,
    "grouped_matmul_combine/fewer tokens": 3,
    "local/jagged": 3,
    "local/rows of FP8": 3,
    "matmul_reduce_scatter/FP8, kernel, blocks": 3,
    "matmul_reduce_scatter/sm, groups": 3,
    "all_gather_matmul/FP8, kernel": 2,
    "all_gather_matmul/sm, cut, gathered": 2,
    "all_to_all_matmul/copy engine": 2,
    "all_to_all_matmul/copy engine, kept": 2,
    "dispatch_grouped_matmul.routing/few": 2,
    "dispatch_grouped_matmul.routing/many experts": 2,
    "dispatch_grouped_matmul.routing/sorted": 2,
    "dispatch_grouped_matmul.routing/sorted, five experts": 2,
    "dispatch_grouped_matmul/producers": 2,
    "embedding_bag_all_to_all/held": 2,
    "embedding_bag_all_to_all/over nodes": 2,
    "embedding_bag_all_to_all_backward/alone by copy engines": 2,
    "embedding_bag_all_to_all_backward/groups by copy engines": 2,
    "embedding_bag_all_to_all_backward/of one rank": 2,
    "grouped_matmul_combine/FP8": 2,
    "grouped_matmul_combine/FP8, whole columns": 2,
    "grouped_matmul_combine/all rows": 2,
    "grouped_matmul_combine/roles": 2,
    "local/caches": 2,
    "local/calls": 2,
    "local/large sizes": 2,
    "local/launches of a rail": 2,
    "local/limits of waits": 2,
    "local/maps of tiles": 2,
    "local/memory grows": 2,
    "local/nothing to move": 2,
    "local/registry": 2,
    "local/tickets of pieces": 2,
    "local/variants of routing": 2,
    "local/waits": 2,
    "matmul_all_reduce/by tiles": 2,
    "matmul_all_reduce/one shot, tall": 2,
    "matmul_reduce_scatter/FP8, kernel, captured": 2,
    "matmul_reduce_scatter/copy engine": 2,
    "matmul_reduce_scatter/sm, cut": 2,
    "all_gather_matmul/nodes, gathered": 1.5,
    "all_gather_matmul/sm, groups": 1.5,
    "all_gather_matmul/sm, teams": 1.5,
    "all_to_all_matmul/sm": 1.5,
    "all_to_all_matmul/sm, cut": 1.5,
    "dispatch_grouped_matmul/one column": 1.5,
    "dispatch_grouped_matmul/one producer": 1.5,
    "dispatch_grouped_matmul/one way": 1.5,
    "dispatch_grouped_matmul/packed FP8": 1.5,
    "embedding_bag_all_to_all/ragged": 1.5,
    "embedding_bag_all_to_all_backward/rows in turn": 1.5,
    "grouped_matmul_combine/several": 1.5,
    "local/pushes of one rank": 1.5,
    "local/words": 1.5,
    "matmul_all_to_all/copy engine": 1.5,
    "matmul_all_to_all/copy engine, captured": 1.5,
    "matmul_all_to_all/sm": 1.5,
    "matmul_reduce_scatter/FP8, kernel, sm": 1.5,
    "matmul_reduce_scatter/copy engine, captured": 1.5,
    "matmul_reduce_scatter/sm": 1.5,
    "all_gather_matmul/FP8, by shards, captured": 0.7,
    "all_gather_matmul/copy engine": 0.7,
    "all_gather_matmul/library": 0.7,
    "all_gather_matmul/nodes": 0.7,
    "all_gather_matmul/sm, producers": 0.7,
    "embedding_bag_all_to_all/few samples": 0.7,
    "embedding_bag_all_to_all/tickets": 0.7,
    "matmul_all_reduce/library, one shot": 0.7,
    "matmul_all_to_all/library": 0.7,
    "matmul_reduce_scatter/by shards, captured": 0.7,
    "all_gather_matmul/FP8, by shards": 0.5,
    "all_gather_matmul/copy engine, captured": 0.5,
    "all_gather_matmul/sm, spans": 0.5,
    "all_to_all_matmul/library": 0.5,
    "dispatch_grouped_matmul/over nodes": 0.5,
    "grouped_matmul_combine/over nodes": 0.5,
    "matmul_reduce_scatter/by shards": 0.5,
    "all_gather_matmul/by shards": 0.35,
    "all_gather_matmul/by shards, captured": 0.35,
    "local/keys": 0.35,
    "matmul_all_reduce/over nodes": 0.35,
    "all_gather_matmul/concurrent gather": 0.25,
    "all_gather_matmul/concurrent gather, captured": 0.25,
    "all_gather_matmul/over nodes": 0.25,
    "all_gather_matmul/over nodes, gathered": 0.25,
    "matmul_reduce_scatter/over nodes": 0.25,
    "matmul_reduce_scatter/over nodes, whole": 0.25,
}
_CHUNK = 60  # seeds that a worker runs at once, of scenarios whose cost is 1
_KEPT = 5.0  # seconds after which what is done is kept again


@dataclass(frozen=True)
class Tried:
    """The result of one chunk of seeds: hashes of their schedules, (payload, multiprocessors) of
    each, steps in all, and the story of a failure ("": none)."""

    scenario: str
    world: int
    strategy: str
    schedules: tuple[int, ...]
    had: tuple[tuple[str, int], ...]
    steps: int
    seconds: float
    story: str = ""


@dataclass
class Report:
    """What was explored. ``distinct`` counts interleavings that differ; ``story`` is the first
    failure, shrunk ("": none)."""

    runs: Counter[tuple[str, int, str]] = field(default_factory=Counter)
    schedules: dict[str, set[int]] = field(default_factory=dict)
    payloads: Counter[str] = field(default_factory=Counter)
    multiprocessors: Counter[int] = field(default_factory=Counter)
    steps: int = 0
    cpu_seconds: float = 0.0
    seconds: float = 0.0
    story: str = ""

    def add(self, tried: Tried) -> None:
        self.runs[tried.scenario, tried.world, tried.strategy] += len(tried.schedules)
        self.schedules.setdefault(f"{tried.scenario}@{tried.world}", set()).update(tried.schedules)
        self.payloads.update(payload for payload, _ in tried.had)
        self.multiprocessors.update(count for _, count in tried.had)
        self.steps += tried.steps
        self.cpu_seconds += tried.seconds
        self.story = self.story or tried.story

    @property
    def interleavings(self) -> int:
        return sum(self.runs.values())

    @property
    def distinct(self) -> int:
        return sum(map(len, self.schedules.values()))

    def as_json(self) -> dict[str, object]:
        rows = [
            {"scenario": scenario, "world": world, "strategy": strategy, "interleavings": count}
            for (scenario, world, strategy), count in sorted(self.runs.items())
        ]
        return {
            "interleavings": self.interleavings,
            "distinct": self.distinct,
            "payloads": dict(self.payloads),
            "multiprocessors": dict(self.multiprocessors),
            "scheduling_points": self.steps,
            "seconds": round(self.seconds, 1),
            "cpu_seconds": round(self.cpu_seconds, 1),
            "failure": self.story or None,
            "runs": rows,
        }


def chunks(names: list[str], total: int, first: int) -> list[tuple[str, int, str, range]]:
    """Chunks of about ``total`` seeds over scenarios, worlds and strategies, with numbers from
    ``first`` on. Each scenario has each strategy at least once, in a world of two."""
    costs = {name: COSTS.get(name, 1.0) for name in names}
    parts = sum(1 / cost for cost in costs.values()) * len(STRATEGIES) * sum(SHARES.values())
    work, due = [], 0.0  # seeds that rounding has left for the next parts
    for name, cost in costs.items():
        size = ceil(_CHUNK / cost)
        for (world, share), strategy in product(SHARES.items(), STRATEGIES):
            due += total * share / cost / parts
            count = max(int(due), int(world == 2))
            due = max(due - count, 0.0)
            starts = range(first, first + count, size)
            work += [
                (name, world, strategy, range(start, min(start + size, first + count)))
                for start in starts
            ]
    # so that a run that ends early has seen a part of each
    work.sort(key=lambda item: item[3].start)
    return work


def _work(
    scenario: str, world: int, strategy: str, numbers: range, until: float | None = None
) -> Tried:
    """Run these seeds up to the first failure, in a worker; begin none after ``until``, a time of
    the monotonic clock."""
    from tileweave.explore.search import Seed, by_name, draw, run, shrink, story

    began, steps, told = time.process_time(), 0, ""
    schedules: list[int] = []
    had: list[tuple[str, int]] = []
    enter = explorer()
    for number in numbers:
        if until is not None and time.monotonic() > until:
            break
        seed = Seed(scenario, world, strategy, number)
        found = run(seed, enter)
        drawn = draw(by_name()[scenario], seed)
        steps += found.steps
        schedules.append(found.schedule)
        had.append((drawn.payload, drawn.multiprocessors))
        if found.failure is not None:
            told = story(shrink(found, enter))
            break
    seconds = time.process_time() - began
    return Tried(scenario, world, strategy, tuple(schedules), tuple(had), steps, seconds, told)


_OPEN = ExitStack()  # a worker takes over the interpreter once, until it ends
_ENTER: list = []


def explorer() -> Callable[[Any], None]:
    """The function that sets the world in which kernels of this process run."""
    if not _ENTER:
        import torch

        from tileweave.explore.interpreter import exploring

        torch.set_num_threads(1)
        _ENTER.append(_OPEN.enter_context(exploring()))
        gc.freeze()  # looking through what imports have made takes longer than all other garbage
    return _ENTER[0]


def _scenarios(pattern: str) -> list[str]:
    from tileweave.explore.search import by_name

    names = by_name()
    chosen = [name for name in names if pattern in name]
    require(
        bool(chosen),
        f"scenarios with {pattern!r}",
        ", ".join(map(repr, names)),  # quoted, since names have commas
        "pass a part of one of these",
    )
    return chosen


def require_packages(command: str = "tileweave fuzz") -> None:
    need(command, "greenlet", "numpy", "triton")


@contextmanager
def pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Processes whose kernels are interpreted, which must be set before triton is imported. They
    start with their first work."""
    require_packages()
    wanted = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with (
        changed_environment(wanted),
        ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as processes,
    ):
        yield processes


def fuzz(
    total: int,
    pattern: str = "",
    workers: int = 2,
    first: int = 0,
    seconds: float = 0.0,
    show: bool = True,
    keep: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Explore about ``total`` interleavings, for at most ``seconds`` (0: no limit). ``keep`` is
    called with what is done so far, every few seconds and at the end."""
    report, began = Report(), time.monotonic()
    until, kept = began + seconds if seconds else None, began
    with pool(workers) as processes:
        names = processes.submit(_scenarios, pattern).result()
        work, finished = chunks(names, total, first), 0
        part = max(len(work) // 20, 1)  # chunks per line of progress
        left = iter(work)
        with Steps("fuzz", len(work) // part, show) as steps:
            running: set[Future[Tried]] = set()
            while not report.story:
                late = until is not None and time.monotonic() > until
                while (
                    not late
                    and len(running) < 2 * workers
                    and (item := next(left, None)) is not None
                ):
                    running.add(processes.submit(_work, *item, until))
                if not running:
                    break
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    finished += 1
                    report.add(future.result())
                    if finished % part == 0:
                        rate = report.interleavings / (time.monotonic() - began)
                        steps.now(f"{report.interleavings} interleavings")
                        steps.done(
                            f"{report.distinct} distinct, {rate:.0f} a second, nothing wrong"
                            if not report.story
                            else ""
                        )
                report.seconds = time.monotonic() - began
                if time.monotonic() - kept > _KEPT:
                    keep(report)
                    kept = time.monotonic()
            for future in running:
                future.cancel()
    report.seconds = time.monotonic() - began
    keep(report)
    return report


def replay(seed: str) -> str:
    """Run one seed again. Returns the shrunk story, or "" if it does not fail."""
    with pool(1) as processes:
        return processes.submit(_replay, seed).result()


def _replay(text: str) -> str:
    from tileweave.explore.search import Seed, run, shrink, story

    enter = explorer()
    found = run(Seed.parse(text), enter)
    return story(shrink(found, enter)) if found.failure is not None else ""


def table_of(report: Report) -> Table:
    """Interleavings by scenario and strategy."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in ("scenario", *STRATEGIES, "interleavings", "distinct"):
        table.add_column(name, justify="left" if name == "scenario" else "right")
    for scenario in sorted({name for name, _, _ in report.runs}):
        counts = [
            sum(n for (s, _, t), n in report.runs.items() if (s, t) == (scenario, kind))
            for kind in STRATEGIES
        ]
        distinct = sum(
            len(found)
            for key, found in report.schedules.items()
            if key.rpartition("@")[0] == scenario
        )
        table.add_row(scenario, *map(str, counts), str(sum(counts)), str(distinct))
    return table
