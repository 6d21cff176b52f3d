"""The times of all candidates of one problem, interleaved, on all ranks.

Candidates are timed through the public operator in CUDA graphs, so that the device decides and the
host does not. The unfused path is always one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from tileweave.bench.cases import Case
from tileweave.bench.rivals import OURS
from tileweave.bench.run import forget_case
from tileweave.bench.samples import samples_of
from tileweave.bench.subjects import TOLERANCE, worst
from tileweave.launcher import Member
from tileweave.ops.core.registry import name_of
from tileweave.ops.matmul.warmup import compile_calls, has_kernel
from tileweave.planning.choices import forced
from tileweave.planning.measurements import Measurement
from tileweave.planning.problem import MatmulConfig, Problem
from tileweave.profile.timing import measure

FP8 = "float8_e4m3fn"
# Times the fastest candidate. One repeat is up to 1.15 times off, by the clock that others leave;
# of 14 portable candidates seven are as near, in the mean of 150 shapes of two H200.
_NEAR = 1.3


class Found(NamedTuple):
    """What was found for one case.

    measurement : the times of candidates whose result is right.
    wrong : the other candidates, with their errors.
    """

    measurement: Measurement
    wrong: dict[MatmulConfig | None, float]


def problem_of(case: Case, world_size: int) -> Problem:
    """The problem that the operator plans for ``case``."""
    sizes = (world_size, *case.shard(world_size))
    if case.scales:
        return Problem(*sizes, 1, FP8, scales=case.scales)
    return Problem(*sizes, getattr(torch, case.dtype).itemsize, case.dtype)


def compile_cases(
    member: Member, several: Sequence[tuple[Case, Sequence[MatmulConfig]]]
) -> list[tuple[MatmulConfig, ...]]:
    """Compile the kernels of candidates of several cases in parallel. Collective.

    Returns the candidates of each case whose kernel needs more shared memory than the GPU of some
    rank has.
    """
    from tileweave.kernels.runtime.launch import fits

    def calls() -> Iterator[Callable[[], object]]:
        for case, tried in several:
            ours = samples_of(case.op).rival(case, member, (OURS,), 0).functions[OURS]
            yield from (_forcing(case.op, config, ours) for config in tried if has_kernel(config))

    compiled = iter(compile_calls(name_of(member.group), member.device, calls()))
    forget_case(member)

    def unfit(config: MatmulConfig) -> bool:
        too_large = not all(map(fits, next(compiled)))
        return worst(float(too_large), member.device, member.group) > 0

    return [
        tuple(config for config in tried if has_kernel(config) and unfit(config))
        for _, tried in several
    ]


def measure_case(
    member: Member,
    case: Case,
    seed: int,
    tried: Sequence[MatmulConfig],
    repeats: int,
    progress: Callable[[str], object],
) -> Found:
    """Time the unfused path and the configs ``tried`` for ``case``, ``repeats`` times each, those
    that are far from the fastest once. Collective; all ranks get the same result. Kernels that are
    not yet compiled are compiled one by one."""
    made = samples_of(case.op).rival(case, member, (OURS,), seed)
    ours, device = made.functions[OURS], member.device
    configs = [None, *tried]
    wrong: dict[MatmulConfig | None, float] = {}
    functions: dict[str, Callable[[], object]] = {}
    by_name: dict[str, MatmulConfig | None] = {}
    for number, config in enumerate(configs):
        progress(f"checks candidate {number + 1} of {len(configs)}")
        with forced(case.op, config):
            error = max(worst(e, device, member.group) for e in made.errors())
        if error > TOLERANCE[made.dtype]:
            wrong[config] = error
            continue
        name = "unfused" if config is None else f"{number}: {config}"
        by_name[name] = config
        functions[name] = _forcing(case.op, config, ours)
    timings = measure(
        functions,
        member.group,
        device,
        repeats=repeats,
        graph=True,
        settle=True,
        within=_NEAR,
        progress=progress,
    )
    del functions, made, ours
    forget_case(member)
    us = {by_name[name]: timing.median_us for name, timing in timings.items()}
    return Found(Measurement(case.op, problem_of(case, member.world_size), us), wrong)


def _forcing(
    op: str, config: MatmulConfig | None, call: Callable[[], object]
) -> Callable[[], object]:
    def forcing() -> None:
        with forced(op, config):
            call()

    return forcing
