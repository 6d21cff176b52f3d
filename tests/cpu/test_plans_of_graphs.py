"""Calls with a plan of their own in CUDA graphs: which plan runs, on all ranks the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.graph_plans import EAGER, GRAPH, eager_calls, warmed
from tests.support.matmul_cases import AG, RS, Case
from tests.support.worlds import Worlds

from tileweave.ops.matmul.inputs import Accepted, plan_now
from tileweave.planning.problem import Plan


@pytest.mark.parametrize("op", [AG, RS])
@pytest.mark.parametrize("size", [2, 4])
def test_the_first_eager_call_runs_the_plan_of_graphs(worlds: Worlds, op: str, size: int) -> None:
    """Also where a later call is the first of its signature on one rank."""
    case = Case(8, 24, 32, "float32", op=op)
    for ran in worlds("gloo", size).run(eager_calls, case):
        assert ran == ["copy_engine", "sm", "sm", "sm"]


@pytest.mark.parametrize("op", [AG, RS])
def test_a_warmup_runs_both_plans(worlds: Worlds, op: str) -> None:
    for ran in worlds("gloo", 2).run(warmed, op, 8):
        assert ran == ["copy_engine", "sm"]
    for ran in worlds("gloo", 2).run(warmed, op, [8, 16]):
        # first without peers, to compile
        assert ran == ["copy_engine", "sm"] * 4


def accepted(workspace: Any, checksum: int) -> Accepted:
    captured = Accepted("fused", "", GRAPH, checksum, 2, workspace=workspace)
    return Accepted("fused", "", EAGER, checksum, 2, workspace=workspace, captured_plan=captured)


def test_which_plan_a_call_has() -> None:
    capturing = False
    workspace = SimpleNamespace(
        ready_to_capture={}, transport=SimpleNamespace(capturing=lambda: capturing)
    )
    one, alike, other = (accepted(workspace, checksum) for checksum in (5, 5, 6))
    capturing = True
    assert plan_now(one) is one, "the plan of graphs has no memory yet"
    capturing = False
    assert plan_now(one) is one.captured_plan
    assert plan_now(one) is one
    assert plan_now(alike) is alike, "peers had no first call here"
    capturing = True
    assert plan_now(one) is one.captured_plan
    assert plan_now(alike) is alike.captured_plan
    assert plan_now(other) is other
    plain = Plan("fused", "", EAGER, captured=GRAPH)
    assert plan_now(plain) is plain, "of tests and the tuner"
