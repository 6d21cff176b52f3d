"""Tune on every rank: measure each shape, keep the results in the user's cache, and plan by them.

Every rank measures the same candidates equally often, and all get the times of rank 0, which writes
the cache after each shape, so that an interrupted run is not lost.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist

from tileweave.bench.cases import Case
from tileweave.bench.console import Steps
from tileweave.bench.run import rank_0_says
from tileweave.errors import InputError, UnsupportedError
from tileweave.launcher import Member
from tileweave.ops.core import tuned_choices
from tileweave.ops.core.registry import interpreting, machine_of
from tileweave.planning import cache, matmul
from tileweave.planning.candidates import candidates
from tileweave.planning.measurements import Measurement
from tileweave.planning.problem import MatmulConfig, Plan, Problem
from tileweave.tune.measure import compile_cases, measure_case, problem_of
from tileweave.tune.shapes import without_repeats

AHEAD = 8  # shapes compiled at once: the candidates of one do not keep all processors busy


@dataclass(frozen=True)
class Options:
    """What to tune.

    ``repeats``: timed repeats of each candidate that is near the fastest; ``seconds``: no new shape
    starts after that.
    """

    cases: tuple[Case, ...]
    repeats: int = 5
    seconds: float = 1800.0


@dataclass(frozen=True)
class Row:
    """What was found for one shape. Times are in microseconds, ``sizes`` those of the whole
    problem. Never chosen: ``wrong``, candidates whose result was not right, and ``unfit``, those
    whose kernel needs more shared memory than the GPU has."""

    op: str
    name: str
    sizes: tuple[int, int, int]
    before: str
    now: str
    us_before: float
    us: float
    us_unfused: float
    candidates: int
    wrong: tuple[str, ...] = ()
    unfit: tuple[str, ...] = ()

    @property
    def gain(self) -> float:
        """How much faster than before; NaN if that was not timed."""
        return self.us_before / self.us


@dataclass(frozen=True)
class Outcome:
    """``skipped``: names of shapes that were not measured in time."""

    rows: list[Row]
    skipped: list[str]
    path: str
    seconds: float


def tune(member: Member, options: Options) -> Outcome:
    """Tune on every rank of the world. Collective; the outcome is complete on rank 0 only."""
    cases = without_repeats(list(options.cases), member.world_size)
    key = tuned_choices.key_of(member.device, member.world_size)
    on_rank_0(member, lambda: cache.require_writable(key))
    tuned_choices.agree(member.group, member.device)
    rows: list[Row] = []
    skipped: list[str] = []
    started = time.monotonic()
    with Steps("tune", len(cases), show=member.rank == 0) as steps:
        tried = compiled_cases(member, cases, steps.detail)
        for number, case in enumerate(cases):
            spent = time.monotonic() - started
            left = f", about {spent / number * (len(cases) - number):.0f} s left" if number else ""
            steps.now(f"{case.op} {case.name}{left}")
            if not rank_0_says(member, spent < options.seconds):
                skipped.append(f"{case.op} {case.name}")
                steps.done("skipped: out of time")
                continue
            measured, row = tune_case(member, next(tried), number, options.repeats, steps.detail)
            on_rank_0(member, lambda one=measured: cache.merge(key, [one]))
            rows.append(row)
            steps.done(f"{row.now}, {row.us:.1f} us, {row.gain:.2f} times as fast as {row.before}")
    return Outcome(rows, skipped, str(cache.path_of(key)), time.monotonic() - started)


class Tried(NamedTuple):
    """A case, and what is tried for it.

    before : the config that was planned before; None: unfused.
    configs : those to be timed.
    unfit : those whose kernel needs more shared memory than the GPU has.
    """

    case: Case
    before: MatmulConfig | None
    configs: tuple[MatmulConfig, ...]
    unfit: tuple[MatmulConfig, ...]


def compiled_cases(
    member: Member, cases: Sequence[Case], progress: Callable[[str], object]
) -> Iterator[Tried]:
    """Each case when its candidates are compiled, ``AHEAD`` cases at once. Collective."""
    for first in range(0, len(cases), AHEAD):
        some = [(case, *_candidates(case, member)) for case in cases[first : first + AHEAD]]
        progress(f"compiles the candidates of {len(some)} shapes")
        refused = compile_cases(member, [(case, configs) for case, _, configs in some])
        for (case, before, configs), unfit in zip(some, refused, strict=True):
            yield Tried(case, before, tuple(c for c in configs if c not in unfit), unfit)


def tune_case(
    member: Member, tried: Tried, seed: int, repeats: int, progress: Callable[[str], object]
) -> tuple[Measurement, Row]:
    """Measure one shape, and plan by it from now on. Collective."""
    case, before = tried.case, tried.before
    found = measure_case(member, case, seed, tried.configs, repeats, progress)
    measured = _as_on_rank_0(member, found.measurement)
    tuned_choices.add(member.device, member.world_size, [measured])
    fastest, us = measured.fastest(), measured.us
    row = Row(
        case.op,
        case.name,
        case.whole(member.world_size),
        _named(before),
        _named(fastest),
        us.get(before, math.nan),
        us[fastest],
        us[None],
        len(tried.configs) + len(tried.unfit) + 1,
        tuple(map(_named, found.wrong)),
        tuple(map(_named, tried.unfit)),
    )
    return measured, row


def _candidates(case: Case, member: Member) -> tuple[MatmulConfig | None, tuple[MatmulConfig, ...]]:
    """The config that is planned now, and all candidates, with it."""
    problem = problem_of(case, member.world_size)
    plan = _plan(case.op, problem, member)
    before = plan.graph_config  # candidates are timed in CUDA graphs
    known = (*candidates(case.op, problem, machine_of(member.device)), plan.config, before)
    return before, tuple(dict.fromkeys(config for config in known if config is not None))


def _plan(op: str, problem: Problem, member: Member) -> Plan[MatmulConfig]:
    """The plan of a call of these sizes."""
    planner = getattr(matmul, f"plan_{op}")
    return planner(problem, machine_of(member.device), interpreting())


def _of_rank_0(member: Member, mine: Any) -> Any:
    """What rank 0 has, on every rank. Collective."""
    told = [mine]
    device = member.device if member.on_gpu else None
    dist.broadcast_object_list(told, group_src=0, group=member.group, device=device)
    return told[0]


def _as_on_rank_0(member: Member, found: Measurement) -> Measurement:
    """The times of rank 0, on every rank, as a file keeps them."""
    measured = _of_rank_0(member, dict(found.us))
    times = {config: round(us, 2) for config, us in measured.items() if math.isfinite(us)}
    times = {config: us for config, us in times.items() if us > 0}
    if None not in times:
        raise UnsupportedError(
            f"asked: to tune {found.op} for {found.problem}; allowed: where the unfused path can "
            "be timed, which is always a candidate; remedy: leave out this shape"
        )
    return Measurement(found.op, found.problem, times)


def _named(config: MatmulConfig | None) -> str:
    """A config in a table."""
    if config is None:
        return "unfused"
    tile = f"{config.tile_m}x{config.tile_n}x{config.tile_k}"
    return f"{config.kernel} {config.transport} {tile}"


def on_rank_0(member: Member, act: Callable[[], object]) -> None:
    """Act on rank 0; an error of its input is raised on every rank."""
    said = ""
    if member.rank == 0:
        try:
            act()
        except InputError as error:
            said = str(error)
    said = _of_rank_0(member, said)
    if said:
        raise InputError(said)
