"""Run the bench of embedding_bag_all_to_all on every rank: ``bench/run.py`` with this operator's
rivals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tileweave as tw
from tileweave.bench.console import Steps
from tileweave.bench.embedding import (
    OURS,
    RIVALS,
    TORCH,
    UNFUSED,
    EmbeddingRivals,
    entry_of,
    judge,
    tables_of,
)
from tileweave.bench.embedding_cases import OP, EmbeddingCase
from tileweave.bench.run import Options, run_cases, time_all
from tileweave.bench.samples import Benched
from tileweave.bench.subjects import worst
from tileweave.launcher import Member


def bench(member: Member, options: Options) -> dict[str, Any]:
    """Collective; the report is complete on rank 0 only."""
    method = "max over ranks, median of repeats, interleaved, three sets of uniform indices in turn"
    return run_cases(member, options, method, _bench_case)


def _bench_case(
    member: Member, case: EmbeddingCase, options: Options, seed: int, steps: Steps
) -> dict[str, Any]:
    steps.detail("draws tables")
    rivals = EmbeddingRivals(case, member, options.rivals or RIVALS, seed)
    indices, offsets, _ = rivals.sets[0]
    plan = tw.explain(OP, rivals.tables, indices, offsets, group=member.group)
    steps.detail("compiles and checks")
    member.barrier()
    entry = entry_of(case, rivals, worst(rivals.error(), member.device, member.group), str(plan))
    if entry["right"]:
        entry["times"] = time_all(rivals.functions, member, options, case.graph, steps)
    return entry | judge(entry)


def plot(report: dict[str, Any], path: Path) -> None:
    """Plot the times of each case over the larger of its two lower bounds, as bars. Needs
    matplotlib."""
    from tileweave.profile.plot import plot_over

    plot_over(
        report,
        path,
        "the larger floor",
        lambda case: max(case["floor_read_us"], case["floor_sent_us"]),
    )


BENCHED = Benched(
    bench,
    RIVALS,
    tables_of,
    plot,
    baselines=(UNFUSED, TORCH),
    random_rivals=(OURS, UNFUSED, TORCH),
)
