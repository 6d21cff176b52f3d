"""Shared by CPU and GPU tests: grouped_matmul_combine.

Cases are those of ``experts.py``: ``depth`` is I, ``cols`` is H. Every rank draws the data of all
ranks from seeds. The oracle goes token by token and choice by choice in fp64, and uses no plan.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache

import pytest
import torch
from tests.support import experts
from tests.support.experts import Case
from tests.support.parity import pause
from tests.support.tolerances import IN_RANK_ORDER, TO_ADD, TOLERANCE, assert_near
from tests.support.worlds import Member

import tileweave as tw
from tileweave.ops.core.registry import name_of, workspace_of
from tileweave.ops.experts.grouped_matmul_combine_fused import OP, run_fused
from tileweave.ops.experts.routing_plan import RoutingPlan, padded_ids, reference_plan
from tileweave.planning.combine import CombineConfig


@dataclass
class Drawn:
    """The inputs of one rank: values of its entries [T, k, I], experts, ids and weights [T, k]."""

    values: torch.Tensor
    experts: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


@lru_cache(maxsize=256)
def draw_all(case: Case, size: int, seed: int) -> list[Drawn]:
    """The inputs of all ranks, on the CPU. They are not written to."""
    found = []
    for rank, o in enumerate(experts.draw_all_ranks(case, size, seed)):
        generator = torch.Generator().manual_seed(77 * seed + rank)
        tokens = len(o.ids)
        values = torch.randn(tokens, case.topk, case.depth, generator=generator).to(
            case.torch_dtype
        )
        weights = torch.rand(tokens, case.topk, generator=generator) + 0.1
        found.append(Drawn(values, o.experts, o.ids, weights))
    return found


@dataclass
class Call:
    """The operands that one rank passes."""

    y: torch.Tensor
    experts: torch.Tensor
    plan: RoutingPlan
    weights: torch.Tensor


def prepare(
    case: Case, rank: int, size: int, device: torch.device, seed: int, depth_first: bool = False
) -> Call:
    """Operands of one rank. Undefined rows of y are NaN."""
    drawn = draw_all(case, size, seed)
    ids = torch.stack([padded_ids(d.ids, case.max_tokens) for d in drawn])
    plan = reference_plan(ids, rank, case.experts * size, case.tokens_of(rank), case.nodes)
    y = torch.full((plan.bound, case.depth), float("nan"), dtype=case.torch_dtype)
    rows = [row for mine in experts.expected_rows(case, rank, size, seed) for row in mine]
    for row, (source, token, j) in enumerate(rows):
        y[row] = drawn[source].values[token, j]
    weight = drawn[rank].experts.clone()
    if depth_first:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    plan = RoutingPlan(plan.table.to(device), *(getattr(plan, n) for n in SIZES))
    return Call(y.to(device), weight.to(device), plan, drawn[rank].weights.clone().to(device))


SIZES = ("tokens", "max_tokens", "topk", "local_experts", "rank", "world_size")


def all_experts(case: Case, size: int, seed: int) -> torch.Tensor:
    """The weights of all experts in rank order, fp64 [E, H, I]."""
    return torch.cat([d.experts.double() for d in draw_all(case, size, seed)])


def expected(case: Case, rank: int, size: int, seed: int, weighted: bool = True) -> torch.Tensor:
    """The expected z of one rank, fp64 [T, H]."""
    mine, weights = draw_all(case, size, seed)[rank], all_experts(case, size, seed)
    z = torch.zeros(len(mine.ids), case.cols, dtype=torch.float64)
    for token, choices in enumerate(mine.ids.tolist()):
        for j, expert in enumerate(choices):
            if expert >= 0:
                factor = mine.weights[token, j].double() if weighted else 1.0
                z[token] += factor * (weights[expert] @ mine.values[token, j].double())
    return z


def verify(got: torch.Tensor, want: torch.Tensor, case: Case, what: str) -> None:
    """Elementwise tolerances: up to k products, and one partial sum per rank, are rounded."""
    assert got.dtype == case.torch_dtype and got.shape == want.shape, (
        f"{what}: {got.dtype} {tuple(got.shape)}"
    )
    relative, absolute = (4 * t for t in TOLERANCE[case.dtype])
    assert_near(got.double().cpu(), want, relative, absolute, what)


def fused(me: Member, c: Call, config: CombineConfig, weighted: bool = True) -> torch.Tensor:
    """Run the kernel with this config instead of the planned one, into poisoned memory."""
    z = torch.full(
        (c.plan.tokens, c.experts.shape[1]), float("nan"), dtype=c.y.dtype, device=me.device
    )
    run_fused(c.y, c.experts, c.plan, c.weights if weighted else None, z, name_of(None), config)
    return z


# --- Bodies ---


def sums_in_rank_order(me: Member, config: CombineConfig) -> None:
    """Of three ranks, each with one expert, which has a row of every token."""
    size, tokens, cols = me.world_size, 3, 3
    ids = torch.arange(size).expand(size, tokens, size).contiguous()
    plan = reference_plan(ids, me.rank, size, tokens)
    # a row of ones gives the partial sums of this rank, column by column
    weight = torch.diag(TO_ADD[me.rank])[None]
    call = Call(torch.ones(plan.bound, cols), weight, plan, torch.ones(tokens, size))
    for weighted in (True, False):
        z = fused(me, call, config, weighted)
        assert z.tolist() == [IN_RANK_ORDER] * tokens, f"rank {me.rank}: {z.tolist()}"


def parity(
    me: Member,
    cases: list[Case],
    config: CombineConfig,
    depth_first: bool = False,
    weighted: bool = True,
) -> None:
    """Run each case with poisoned slots."""
    for seed, case in enumerate(cases):
        c = prepare(case, me.rank, me.world_size, me.device, seed, depth_first)
        experts.poison(me, OP)
        z = fused(me, c, config, weighted)
        what = f"rank {me.rank}, call {seed}, {case}, {config!r}"
        verify(z, expected(case, me.rank, me.world_size, seed, weighted), case, what)


def many_calls(
    me: Member,
    cases: list[Case],
    config: CombineConfig,
    calls: int,
    seconds: float,
    stall: Callable | None = None,
) -> None:
    """Make calls of changing size, with a different rank late each time. Check all results at the
    end, so that no rank waits in between."""
    prepared = [
        prepare(cases[n % len(cases)], me.rank, me.world_size, me.device, n) for n in range(calls)
    ]
    kept = []
    for number, c in enumerate(prepared):
        if number % me.world_size == me.rank:
            pause(me.device, seconds)
        with nullcontext() if stall is None else stall(seconds, number):
            kept.append(fused(me, c, config, number % 3 != 0))
    for number, z in enumerate(kept):
        case = cases[number % len(cases)]
        want = expected(case, me.rank, me.world_size, number, number % 3 != 0)
        verify(z, want, case, f"rank {me.rank}, call {number}, {case}")


def public_calls(me: Member, cases: list[Case], path: str) -> None:
    """The public function: the path it takes, out=, no weights, the same bits each time."""
    for seed, case in enumerate(cases):
        c = prepare(case, me.rank, me.world_size, me.device, seed)
        # the unfused path reads this, and must be able to multiply it
        c.y = torch.where(torch.isnan(c.y), torch.zeros_like(c.y), c.y)
        assert tw.explain(OP, c.y, c.experts, c.plan).path == path
        what = f"rank {me.rank}, {case}"
        z = tw.grouped_matmul_combine(c.y, c.experts, c.plan, c.weights)
        verify(z, expected(case, me.rank, me.world_size, seed), case, what)
        out = torch.full_like(z, float("nan"))
        assert tw.grouped_matmul_combine(c.y, c.experts, c.plan, c.weights, out=out) is out
        assert torch.equal(out, z), f"{what}: out="
        plain = tw.grouped_matmul_combine(c.y, c.experts, c.plan)
        verify(
            plain, expected(case, me.rank, me.world_size, seed, False), case, f"{what}, no weights"
        )


def coefficients(case: Case, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(900 + rank)
    return torch.randn(case.tokens_of(rank), case.cols, generator=generator, dtype=torch.float64)


def expected_gradients(
    case: Case, rank: int, size: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Expected gradients of the rows of y in their order, of the experts of this rank and of its
    weights, by torch's autograd in fp64 on one device."""
    drawn = draw_all(case, size, seed)
    values = [d.values.double().requires_grad_() for d in drawn]
    weights = [d.weights.double().requires_grad_() for d in drawn]
    matrices = all_experts(case, size, seed).requires_grad_()
    loss = matrices.sum() * 0.0
    for source, d in enumerate(drawn):
        c = coefficients(case, source)
        for token, choices in enumerate(d.ids.tolist()):
            for j, expert in enumerate(choices):
                if expert >= 0:
                    loss = (
                        loss
                        + weights[source][token, j]
                        * (matrices[expert] @ values[source][token, j])
                        @ c[token]
                    )
    loss.backward()
    rows = [row for mine in experts.expected_rows(case, rank, size, seed) for row in mine]
    none = torch.zeros(0, case.depth, dtype=torch.float64)
    of_values = [torch.zeros_like(v) if v.grad is None else v.grad for v in values]
    gy = torch.stack([of_values[s][t, j] for s, t, j in rows]) if rows else none
    gw = weights[rank].grad
    mine = slice(rank * case.experts, (rank + 1) * case.experts)
    assert matrices.grad is not None
    return gy, matrices.grad[mine], torch.zeros_like(weights[rank]) if gw is None else gw


def verify_near(got: torch.Tensor | None, want: torch.Tensor, case: Case, what: str) -> None:
    assert got is not None and got.shape == want.shape, (
        f"{what}: {None if got is None else tuple(got.shape)}"
    )
    off = float((got.double().cpu() - want).norm())
    limit = {"float32": 1e-5, "float16": 4e-3}.get(case.dtype, 2e-2)
    assert off <= limit * float(want.norm()) + 1e-9, f"{what}: off by {off} of {float(want.norm())}"


def gradients(
    me: Member, cases: list[Case], weighted: bool = True, backend: str | None = None
) -> None:
    """Gradients of y, experts and weights, eager or compiled with fullgraph."""
    for seed, case in enumerate(cases):
        c = prepare(case, me.rank, me.world_size, me.device, seed)
        rows = int(c.plan.offsets[-1])
        c.y[rows:] = 0
        leaves = (c.y, c.experts, c.weights)
        for leaf in leaves:
            leaf.requires_grad_()

        def loss(by: torch.Tensor, c: Call = c) -> torch.Tensor:
            return (
                tw.grouped_matmul_combine(
                    c.y, c.experts, c.plan, c.weights if weighted else None
                ).float()
                * by
            ).sum()

        by = coefficients(case, me.rank).float().to(me.device)
        (loss if backend is None else torch.compile(loss, fullgraph=True, backend=backend))(
            by
        ).backward()
        what = f"rank {me.rank}, {case}"
        if not weighted:
            assert c.weights.grad is None and c.y.grad is not None and c.experts.grad is not None, (
                what
            )
            continue
        gy, ge, gw = expected_gradients(case, me.rank, me.world_size, seed)
        assert c.y.grad is not None, what
        verify_near(c.y.grad[:rows], gy, case, f"{what}: of y")
        verify_near(c.experts.grad, ge, case, f"{what}: of experts")
        verify_near(c.weights.grad, gw, case, f"{what}: of weights")


def bad_input(me: Member, case: Case) -> None:
    """Each mistake raises on its own rank and says what is allowed. A correct call works
    afterwards."""
    c = prepare(case, me.rank, me.world_size, me.device, 0)
    c.y = torch.nan_to_num(c.y)
    z = torch.empty(c.plan.tokens, case.cols, device=me.device)
    sizes = {n: getattr(c.plan, n) for n in SIZES}
    wrong: list[tuple[str, Callable[[], object]]] = [
        ("Linear weights", lambda: tw.grouped_matmul_combine(c.y, c.experts[0], c.plan, c.weights)),
        (
            "Linear weights",
            lambda: tw.grouped_matmul_combine(c.y[:, 1:], c.experts, c.plan, c.weights),
        ),
        ("same dispatch", lambda: tw.grouped_matmul_combine(c.y[1:], c.experts, c.plan, c.weights)),
        ("convert", lambda: tw.grouped_matmul_combine(c.y, c.experts.half(), c.plan, c.weights)),
        (
            "float16",
            lambda: tw.grouped_matmul_combine(c.y.double(), c.experts.double(), c.plan, c.weights),
        ),
        (
            "contiguous rows",
            lambda: tw.grouped_matmul_combine(
                c.y.t().contiguous().t(), c.experts, c.plan, c.weights
            ),
        ),
        (
            "contiguous",
            lambda: tw.grouped_matmul_combine(
                c.y, c.experts.repeat(1, 2, 1)[:, ::2], c.plan, c.weights
            ),
        ),
        (
            "each choice",
            lambda: tw.grouped_matmul_combine(c.y, c.experts, c.plan, c.weights[:, 1:]),
        ),
        ("float32", lambda: tw.grouped_matmul_combine(c.y, c.experts, c.plan, c.weights.double())),
        (
            "dispatch",
            lambda: tw.grouped_matmul_combine(
                c.y, c.experts, RoutingPlan(c.plan.table[1:], **sizes), c.weights
            ),
        ),
        ("out", lambda: tw.grouped_matmul_combine(c.y, c.experts, c.plan, c.weights, out=z[:, 1:])),
        (
            "storage",
            lambda: tw.grouped_matmul_combine(
                c.y, c.experts, c.plan, c.weights, out=c.y[: z.shape[0], : z.shape[1]]
            ),
        ),
        (
            "gradients",
            lambda: tw.grouped_matmul_combine(
                c.y.clone().requires_grad_(), c.experts, c.plan, c.weights, out=z
            ),
        ),
    ]
    for said, attempt in wrong:
        with pytest.raises(tw.InputError, match=said):
            attempt()
    verify(
        tw.grouped_matmul_combine(c.y, c.experts, c.plan, c.weights),
        expected(case, me.rank, me.world_size, 0),
        case,
        "after mistakes",
    )


def opcheck(me: Member, case: Case) -> None:
    c = prepare(case, me.rank, me.world_size, me.device, 0)
    c.y = torch.nan_to_num(c.y)
    numbers = (c.plan.tokens, c.plan.max_tokens, c.plan.topk, name_of(None))
    op = torch.ops.tileweave.grouped_matmul_combine
    for leaf in (c.y, c.experts, c.weights):
        leaf.requires_grad_()
    torch.library.opcheck(op.default, (c.y, c.experts, c.plan.table, c.weights, *numbers))
    out = torch.empty(c.plan.tokens, case.cols, device=me.device)
    held = (c.y.detach(), c.experts.detach(), c.plan.table, c.weights.detach())
    torch.library.opcheck(op.out, (*held, *numbers), {"out": out})


def calls_around_the_wrap(me: Member, case: Case, config: CombineConfig) -> None:
    """Epochs pass 2^31 - 1."""
    parity(me, [case], config)
    instance = workspace_of(name_of(None), me.device).instance(OP, "sm")
    instance.transport.synchronize()
    instance.transport.barrier()
    instance.control[0] = 2**31 - 3
    instance.signals.fill_(2**31 - 4)
    # after the jump, the set of the next parity may be as its last call left it
    instance.counters.zero_()
    instance.transport.synchronize()
    instance.transport.barrier()
    parity(me, [case] * 3, config)
    assert int(instance.control[0]) < 0
    tw.close()
