"""Functions for a worker of exploration: each operator once, numpy blocks against Triton's tensors,
and schedules that depend on the seed alone."""

from __future__ import annotations

import itertools
from unittest import mock


def triton_and_blocks_agree() -> list[str]:
    """In a worker: the same seeds with Triton's own tensors take the same steps to the same end.

    One seed of each scenario, since both ways run the same scheduler."""
    from tileweave.explore.interpreter import exploring
    from tileweave.explore.search import SCENARIOS, Seed, run

    seeds = [
        Seed(f"{s.op}/{s.name}", 2, strategy, 3)
        for s, strategy in zip(SCENARIOS, itertools.cycle(("walk", "pct")), strict=False)
        if s.name != "maps of tiles"  # it calls device functions itself, with whole numbers
    ]
    ends = []
    for blocks in (True, False):
        with exploring(blocks) as enter:
            ends.append([run(seed, enter) for seed in seeds])
    return [
        (
            f"{fast.seed}: {fast.steps} steps, {fast.failure}; Triton's tensors: {slow.steps} "
            f"steps, {slow.failure}"
        )
        for fast, slow in zip(*ends, strict=True)
        if (fast.steps, fast.schedule) != (slow.steps, slow.schedule)
        or fast.failure
        or slow.failure
    ]


def found_in_each_operator() -> tuple[list[str], list[str]]:
    """In a worker: the operators that have scenarios, and violations in one walk of the first
    scenario of each."""
    from tileweave.explore.interpreter import exploring
    from tileweave.explore.search import SCENARIOS, Seed, run, shrink, story

    first = {scenario.op: f"{scenario.op}/{scenario.name}" for scenario in reversed(SCENARIOS)}
    with exploring() as enter:
        ends = [run(Seed(name, 2, "walk", 1), enter) for name in first.values()]
        return sorted(first), [story(shrink(end, enter)) for end in ends if end.failure is not None]


def found_while_clocks_leap() -> list[str]:
    """In a worker: violations in a few runs in which each reading of the clock is days after the
    last, as on a machine that slept."""
    from tileweave.explore.interpreter import exploring
    from tileweave.explore.search import Seed, run

    with (
        exploring() as enter,
        mock.patch("time.perf_counter", side_effect=itertools.count(0, 10**6)),
    ):
        ends = [run(Seed("all_gather_matmul/sm", 3, "walk", number), enter) for number in range(3)]
    return [str(end.failure) for end in ends if end.failure is not None]


def report_of_irreproducible_failure() -> str:
    """In a worker: the report of a failure that a replay does not show."""
    from tileweave.explore.interpreter import exploring
    from tileweave.explore.memory import Violation
    from tileweave.explore.search import Found, Seed, shrink, story

    with exploring() as enter:
        return story(
            shrink(
                Found(Seed("all_gather_matmul/sm", 2, "walk", 1), 9, 9, Violation("error", "once")),
                enter,
            )
        )
