"""Benching embedding_bag_all_to_all on every rank: what ``bench/run.py`` does for matmuls, with this operator's rivals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tileweave as tw
from tileweave.bench.embedding import PEERS, EmbeddingPeers, entry_of, headline, judge
from tileweave.bench.embedding_cases import OP, EmbeddingCase
from tileweave.bench.run import Options, forget_case, run_cases
from tileweave.bench.screen import Steps
from tileweave.bench.subjects import worst
from tileweave.launcher import Member
from tileweave.profile.timing import measure


def bench(member: Member, options: Options) -> dict[str, Any]:
    """Collective; the report is complete on rank 0 only."""
    return run_cases(
        member, options, "max over ranks, median of repeats, interleaved, three sets of uniform indices in turn",
        lambda case, seed, steps: _bench_case(member, case, options, seed, steps),
        headline,
    )  # fmt: skip


def _bench_case(member: Member, case: EmbeddingCase, options: Options, seed: int, steps: Steps) -> dict[str, Any]:
    steps.detail("draws tables")
    peers = EmbeddingPeers(case, member, options.peers or PEERS, seed)
    indices, offsets, _ = peers.sets[0]
    plan = tw.explain(OP, peers.tables, indices, offsets, group=member.group)
    steps.detail("compiles and checks")
    member.barrier()
    entry = entry_of(case, peers, worst(peers.error(), member.device, member.group), str(plan))
    if entry["right"]:
        timings = measure(
            peers.functions, member.group, member.device, repeats=options.repeats, graph=case.graph,
            on_capture_failure="eager", progress=steps.detail,
        )  # fmt: skip
        entry["times"] = {name: timing.as_dict() for name, timing in timings.items()}
    entry.update(judge(entry))
    del peers
    forget_case(member)
    return entry


def plot(report: dict[str, Any], path: Path) -> None:
    """Each case's times over the larger of its two floors, as bars. Needs matplotlib."""
    from tileweave.profile.plot import plot_over

    plot_over(report, path, "the larger floor", lambda case: max(case["floor_read_us"], case["floor_sent_us"]))
