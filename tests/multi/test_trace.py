"""Traces of compiled kernels: their times are those of CUDA events, and programs are seen."""

from __future__ import annotations

import pytest

from tileweave.bench.cases import Case
from tileweave.bench.samples import samples_of
from tileweave.commands.demo import trace_one
from tileweave.commands.options import STAMPS
from tileweave.launcher import launch

pytestmark = pytest.mark.multi
OPERATORS = (
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "grouped_matmul_combine",
    "embedding_bag_all_to_all",
)


@pytest.mark.own_gpu
@pytest.mark.parametrize("op", OPERATORS)
def test_times_of_a_trace_are_those_of_events(op: str) -> None:
    sizes = Case(op, "trace", *samples_of(op).traced[1], False, "smoke").shard(2)
    trace, plan = launch(
        trace_one,
        op,
        *sizes,
        "bfloat16",
        world_size=2,
        device_type="cuda",
        seconds=100,
        extra=STAMPS,
    )
    assert len(trace.event_us) == 2
    for rank, event_us in enumerate(trace.event_us):
        assert trace.span_ns(rank) / 1e3 == pytest.approx(event_us, rel=0.03)
        kinds = {event.kind for event in trace.events if event.rank == rank}
        assert "kernel" in kinds
        assert plan.path != "fused" or kinds & {"program", "compute"}
