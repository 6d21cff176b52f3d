"""The bench: for each case correctness, then time, all rivals interleaved; a table, JSON and a
plot.

    tileweave bench all_gather_matmul --json out.json --plot out.png

runs on every rank (the launcher calls :func:`bench`); rank 0 shows progress and keeps the report. A
report is a plain dict, written after each case, so that an interrupted run is not lost.
"""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tileweave as tw
from tileweave.bench.cases import Case, select
from tileweave.bench.console import Steps
from tileweave.bench.environment import environment
from tileweave.bench.report import tables_of
from tileweave.bench.rivals import CORUN, GEMM, OURS, RIVALS, TORCHS, UNFUSED
from tileweave.bench.samples import Benched, samples_of
from tileweave.bench.subjects import TOLERANCE, worst
from tileweave.bench.summary import summary_of
from tileweave.files import write_text
from tileweave.launcher import Member
from tileweave.ops.core.registry import name_of
from tileweave.ops.matmul.warmup import compile_calls, has_kernel
from tileweave.planning.problem import MatmulConfig, Plan
from tileweave.profile.metrics import e_overlap, limit_ratio, speed_up
from tileweave.profile.timing import measure

_HOST_CALLS = 50
# how times of every operator were measured, for reports
METHOD = "max over ranks, median of repeats, interleaved, long calls after 40 ms of the same"


@dataclass(frozen=True)
class Options:
    """What to bench.

    ``rivals``: None for all; ``seconds``: no new case starts after that; ``smoke``: tiny cases,
    also without a GPU. ``random``: so many random cases, drawn with ``seed``, instead of named
    ones.
    """

    op: str = "all_gather_matmul"
    pattern: str | None = None
    quick: bool = False
    rivals: tuple[str, ...] | None = None
    repeats: int = 7
    seconds: float = 900.0
    json_path: str | None = None
    smoke: bool = False
    random: int = 0
    seed: int = 0

    def cases(self) -> list[Any]:
        """Eager cases first: after a captured call, eager calls of an instance have one more
        barrier."""
        if self.random:
            found = samples_of(self.op).random_cases(self.random, self.seed, self.smoke)
        elif self.smoke:
            found = samples_of(self.op).smoke
        else:
            found = select(self.op, self.pattern, self.quick)
        return sorted(found, key=lambda case: case.graph)


def bench(member: Member, options: Options) -> dict[str, Any]:
    """Bench on every rank of the world. Collective; the report is complete on rank 0 only."""
    _compile_ahead(member, options)
    return run_cases(
        member,
        options,
        f"{METHOD}, weights rotated past the L2, random data",
        partial(_bench_case, uncapturable={}),
        lambda entry: f", {entry['plan']}",
    )


def _compile_ahead(member: Member, options: Options) -> None:
    """Compile what the cases launch, in parallel: one by one each takes seconds. Collective."""
    cases = options.cases()

    def calls() -> Iterator[Callable[[], object]]:
        for case in cases:
            made = samples_of(case.op).rival(case, member, (OURS,), 0)
            if has_kernel(made.plan().config):
                yield made.functions[OURS]

    with Steps(f"bench {options.op}", 1, show=member.rank == 0) as steps:
        steps.now("kernels of all cases")
        compile_calls(name_of(member.group), member.device, calls())
        steps.done("compiled")
    forget_case(member)


def bench_several(member: Member, several: list[Options]) -> list[dict[str, Any]]:
    """Bench several operators one after the other. Collective; rank 0 has the reports."""
    return [samples_of(options.op).bench.run(member, options) for options in several]


def run_cases(
    member: Member,
    options: Options,
    method: str,
    bench_case: Callable[[Member, Any, Options, int, Steps], dict[str, Any]],
    more: Callable[[dict[str, Any]], str] = lambda _: "",
) -> dict[str, Any]:
    """Run the cases of one operator while there is time, and write a report after each.

    ``bench_case(member, case, options, seed, steps)`` returns an entry of the report for one case.
    ``more``: text about the entry, shown after its times.
    """
    cases = options.cases()
    report: dict[str, Any] = {
        "op": options.op,
        "device_type": member.device.type,
        "world_size": member.world_size,
        "environment": environment() if member.rank == 0 else {},
        "method": method,
        "random": {"count": options.random, "seed": options.seed} if options.random else None,
        "cases": [],
        "skipped": [],
    }
    started = time.monotonic()
    with Steps(f"bench {options.op}", len(cases), show=member.rank == 0) as steps:
        for seed, case in enumerate(cases):
            steps.now(case.name)
            if not rank_0_says(member, time.monotonic() - started < options.seconds):
                report["skipped"].append(case.name)
                steps.done("skipped: out of time")
                continue
            entry = bench_case(member, case, options, seed, steps)
            forget_case(member)
            for name in (options.rivals or ()) if entry["right"] and not options.random else ():
                if name not in entry["times"]:
                    entry["missing"].setdefault(name, f"not a rival of {options.op}")
            report["cases"].append(entry)
            times = "  ".join(
                f"{name} {timing['median_us']:.1f}" for name, timing in entry["times"].items()
            )
            steps.done(
                f"{times} us{more(entry)}"
                if entry["right"]
                else f"[bold red]WRONG[/]: error {entry['error']:.1e}"
            )
            if member.rank == 0 and options.json_path:
                _write(report, options.json_path)
    report["seconds"] = round(time.monotonic() - started, 1)
    if options.random:
        report["summary"] = summary_of(report, samples_of(options.op).bench)
    if member.rank == 0 and options.json_path:
        _write(report, options.json_path)
    return report


def forget_case(member: Member) -> None:
    """Release what a case used, once nothing refers to its operands.

    Peers may read this rank's memory until all ranks are here.
    """
    member.barrier()
    tw.close(member.group)
    gc.collect()
    if member.on_gpu:
        torch.cuda.empty_cache()
    member.barrier()


def time_all(
    functions: dict[str, Callable[[], object]],
    member: Member,
    options: Options,
    graph: bool,
    steps: Steps,
    not_capturable: dict[str, str] | None = None,
) -> dict[str, dict[str, Any]]:
    """The :class:`Timing` of each rival for an entry of the report, all interleaved. Collective."""
    timings = measure(
        functions,
        member.group,
        member.device,
        repeats=options.repeats,
        graph=graph,
        on_capture_failure="eager",
        not_capturable=not_capturable,
        settle=True,
        progress=steps.detail,
    )
    return {name: timing.as_dict() for name, timing in timings.items()}


def _bench_case(
    member: Member,
    case: Case,
    options: Options,
    seed: int,
    steps: Steps,
    uncapturable: dict[str, str],
) -> dict[str, Any]:
    steps.detail("draws operands")
    rivals = samples_of(case.op).rival(case, member, options.rivals or RIVALS, seed)
    plan = rivals.plan()
    steps.detail("compiles and checks")
    member.barrier()
    errors = [worst(error, member.device, member.group) for error in rivals.errors()]
    right = all(error <= TOLERANCE[rivals.dtype] for error in errors)
    m, n, k = case.whole(member.world_size)
    entry: dict[str, Any] = {
        **asdict(case),
        "rows": m,
        "cols": n,
        "depth": k,
        "path": str(plan),
        "plan": short(plan, case.graph),
        "error": errors[0],
        "error_to_unfused": errors[1],
        "right": right,
        "host_us": math.nan,
        "times": {},
        "missing": dict(rivals.missing),
    }
    if right:
        entry["times"] = time_all(
            rivals.functions, member, options, case.graph, steps, uncapturable
        )
        for name, timing in entry["times"].items():
            # only once: a failed capture leaves side effects in a process
            if "cannot be captured: " in timing["note"]:
                uncapturable.setdefault(name, timing["note"].split("cannot be captured: ", 1)[1])
        entry["host_us"] = host_us(member, rivals.functions)
    return entry | judge(entry["times"])


def host_us(member: Member, functions: Mapping[str, Callable[[], object]]) -> float:
    """Microseconds that the slowest rank's host needs to queue one eager call of ours, while the
    device runs earlier ones; NaN without a GPU, or if ours is not among ``functions``.
    Collective."""
    if OURS not in functions or not member.on_gpu:
        return math.nan
    functions[OURS]()
    member.barrier()
    laps = []
    for _ in range(_HOST_CALLS):
        started = time.perf_counter()
        functions[OURS]()
        laps.append(time.perf_counter() - started)
    member.synchronize()
    return worst(1e6 * sorted(laps)[len(laps) // 2], member.device, member.group)


def judge(times: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The metrics of one case from its timings; NaN if one is missing.

    ``over_torch``: over the best operator of torch.
    """

    def of(name: str) -> float:
        return float(times.get(name, {}).get("median_us", math.nan))

    ours = of(OURS)
    torchs = [time for time in map(of, TORCHS) if math.isfinite(time)]
    rivals = [time for time in (of(UNFUSED), *torchs) if math.isfinite(time)]
    return {
        "e_overlap": e_overlap(ours, of(GEMM), of(UNFUSED)),
        "limit_ratio": limit_ratio(of(CORUN), ours),
        "over_unfused": speed_up(of(UNFUSED), ours),
        "over_torch": speed_up(min(torchs), ours) if torchs else math.nan,
        "over_best": speed_up(min(rivals), ours) if rivals else math.nan,
        "over_gemm_us": ours - of(GEMM),
    }


def short(plan: Plan, graph: bool = False) -> str:
    """A plan as a cell of a table. ``graph``: that of calls in CUDA graphs."""
    c = plan.graph_config if graph else plan.config
    if not isinstance(c, MatmulConfig):
        return plan.path
    return f"{c.kernel} {c.transport} {c.tile_m}x{c.tile_n}"


def rank_0_says(member: Member, mine: bool) -> bool:
    """The answer of rank 0, on every rank."""
    word = torch.tensor([int(mine)], dtype=torch.int32, device=member.device)
    dist.broadcast(word, 0)
    return bool(word.item())


def _write(report: dict[str, Any], path: str) -> None:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, json.dumps(_without_nan(report), indent=1, allow_nan=False) + "\n")


def _without_nan(value: Any) -> Any:
    """NaN and infinity as null: JSON does not have them."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plot(report: dict[str, Any], path: Path) -> None:
    from tileweave.profile.plot import plot_bench

    plot_bench(report, path)


BENCHED = Benched(
    bench,
    RIVALS,
    tables_of,
    _plot,
    baselines=(UNFUSED, *TORCHS),
    random_rivals=(OURS, UNFUSED, *TORCHS, GEMM),
)
