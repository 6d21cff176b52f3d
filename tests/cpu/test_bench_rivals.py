"""Baselines of the benchmarks give correct results: they do the same work as the operators."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.support.matmul_cases import IN, OUT
from tests.support.worlds import Member, World, Worlds

from tileweave.bench import experts, rivals, scaled_rivals
from tileweave.bench.cases import Case
from tileweave.bench.expert_cases import COMBINE, DISPATCH, ExpertCase
from tileweave.bench.samples import samples_of
from tileweave.bench.subjects import worst_of
from tileweave.launcher import Member as Rank
from tileweave.ops import reference
from tileweave.ops.matmul.scaled import Scaled


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).float().norm() / want.float().norm())


# --- The exchanges of Ulysses ---


def of_an_exchange(me: Member, op: str, dtype: str) -> float:
    """How far the unfused rival is from the operator's specification, called twice."""
    made = rivals.ExchangeRivals(
        Case(
            op, "", 12 * me.world_size, 8 * me.world_size, 24 * me.world_size, False, "smoke", dtype
        ),
        Rank(me.rank, me.world_size, me.device),
        (rivals.UNFUSED,),
        3,
    )
    o = made.operands
    want = getattr(reference, op)(o.x, o.w, None, made.group, **made.subject.options)
    want = want[0] if isinstance(want, tuple) else want
    made.functions[rivals.UNFUSED]()
    got = made.functions[rivals.UNFUSED]()
    got = got[0] if isinstance(got, tuple) else got
    assert isinstance(got, torch.Tensor) and got.shape == want.shape
    return distance(got, want)


@pytest.mark.parametrize(("dtype", "allowed"), [("float32", 1e-6), ("float16", 1e-3)])
@pytest.mark.parametrize("op", [OUT, IN])
def test_exchange_baseline_keeps_order(world: World, op: str, dtype: str, allowed: float) -> None:
    assert worst_of(world.run(of_an_exchange, op, dtype)) < allowed


# --- FP8 operands ---


def errors_with_two_weights(me: Member, op: str) -> tuple[float, float, str]:
    """Functions take the next of several weights in each call; both results are of the same."""
    one = scaled_rivals.ScaledRivals._weights
    with mock.patch.object(
        scaled_rivals.ScaledRivals, "_weights", lambda self: [*one(self), *reversed_of(one(self))]
    ):
        size = me.world_size
        case = Case(
            op, "", 4 * size, 16 * size, 32 * size, False, "smoke", "bfloat16", scales="row"
        )
        made = samples_of(op).rival(
            case, Rank(me.rank, me.world_size, me.device), (rivals.OURS,), 3
        )
        assert len(made.weights) == 2
        return *made.errors(), made.plan().reason


def reversed_of(weights: list[Any]) -> list[Any]:
    return [Scaled(w.data.flip(0), w.scale.flip(0), w.kind) for w in weights]


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_errors_compare_results_of_one_weight(world: World, op: str) -> None:
    for against_fp32, against_unfused, reason in world.run(errors_with_two_weights, op):
        assert max(against_fp32, against_unfused) < 1e-2
        assert "FP8" in reason, "the plan is that of FP8 operands"


# --- torch's own ---


def test_torch_fused_matmul_returns_no_gathered_input() -> None:
    """By default torch copies the own shard into a gathered result, which our call does not return
    unless asked."""
    rival, symmetric = mock.Mock(), torch.zeros(4, 8)
    made = mock.Mock(
        operands=mock.Mock(x=torch.ones(4, 8)),
        weights=[torch.ones(6, 8)],
        symmetric=lambda *_: (symmetric, None),
        torch_operator=lambda *_: rival,
    )
    rivals.AllGatherMatmulRivals.torch_fused(made)()
    assert rival.call_args.kwargs == {"return_A": False}
    assert torch.equal(symmetric, torch.ones(4, 8))


def test_torch_fused_matmul_has_the_option() -> None:
    import torch.distributed._symmetric_memory  # registers it

    schema = str(torch.ops.symm_mem.fused_all_gather_matmul.default._schema)
    assert "return_A" in schema


# --- Experts by an all-gather and a reduce-scatter ---


def undefined_after_the_last_expert(
    rows: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """A grouped matmul whose rows after the last expert are NaN: on a GPU they are
    uninitialized."""
    out = torch.full((rows.shape[0], weights.shape[1]), math.nan)
    for expert, (begin, end) in enumerate(pairwise(offsets.tolist())):
        out[begin:end] = rows[begin:end] @ weights[expert].t()
    return out


def gathered(me: Member, case: ExpertCase) -> tuple[float, int]:
    """How far the baseline is from the specification of the operator, over every routing; and the
    number of routings."""
    case, group = replace(case, experts=case.experts * me.world_size), dist.group.WORLD
    made = experts.ExpertRivals(
        case, Rank(me.rank, me.world_size, me.device), (experts.GATHERED,), 5
    )
    assert list(made.functions) == [experts.GATHERED] and group is not None
    found = []
    with mock.patch.object(reference, "grouped_matmul", undefined_after_the_last_expert):
        for _ in made.sets:
            got = made.gathered()
            r = made.sets[made.turn]
            if case.op == COMBINE:
                want = reference.grouped_matmul_combine(
                    made.x, made.experts, r.plan, r.weights, group
                )
            else:
                got, want = (
                    got[: r.rows],
                    reference.dispatch_grouped_matmul(made.x, made.experts, r.plan, group)[
                        : r.rows
                    ],
                )
            assert got.shape == want.shape
            found.append(distance(got, want))
    return worst_of(found), len(found)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "bounds"])
@pytest.mark.parametrize(("cols", "zipf"), [(24, True), (512, False)])
@pytest.mark.parametrize("op", [DISPATCH, COMBINE])
def test_gathered_experts_baseline_is_correct(
    world: World, op: str, graph: bool, cols: int, zipf: bool
) -> None:
    width, hidden = (cols // 2, 16) if op == DISPATCH else (16, cols)
    case = ExpertCase(
        op, "", 5, hidden, width, 2, 3, 0.0, zipf=zipf, graph=graph, block="smoke", dtype="float32"
    )
    for error, routings in world.run(gathered, case):
        assert error < 1e-5 and routings == (3 if graph else 1)


def a_wrong_rival(me: Member, op: str) -> float:
    """What the check of a case finds where only the baseline is wrong, by a row of another
    token."""
    case = ExpertCase(op, "", 5, 16, 16, 2 * me.world_size, 2, 0.0, block="smoke", dtype="float32")
    made = experts.ExpertRivals(case, Rank(me.rank, me.world_size, me.device), experts.RIVALS, 5)
    with torch.no_grad():
        rows = made.sets[0].order.rows if op == COMBINE else made.sets[0].order.tokens
        rows.copy_(rows.roll(1))
    return made.error()


@pytest.mark.parametrize("op", [DISPATCH, COMBINE])
def test_case_is_wrong_where_a_baseline_is_wrong(worlds: Worlds, op: str) -> None:
    assert max(worlds("gloo", 2).run(a_wrong_rival, op)) > 0.1
